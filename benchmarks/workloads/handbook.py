"""Quality and training time of the fraud model on the data of the Fraud Detection Handbook.

    # one model for all four test weeks
    python -m benchmarks.workloads.handbook --source transactions.parquet
    python -m benchmarks.workloads.handbook --source transactions.parquet --prequential --json

`--source` is a file, folder or s3:// URI with the published transactions (2018-04-01 to 2018-09-04
or longer). The benchmark runs the whole pipeline of configs/handbook.yaml, without a release. The
test weeks are the four published weeks from 2018-08-08 on. By default a single model, trained on
the data of the handbook's first fold, is evaluated on all four weeks; `--prequential` trains a
model for each week, as the handbook does. The training time is measured for the model of the last
week.
"""

import json
import os
import subprocess
import sys
import tempfile
from statistics import fmean
from typing import Any

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.loop import free_port

# last days of the handbook's four test weeks
LAST_DAYS = ("2018-08-14", "2018-08-21", "2018-08-28", "2018-09-04")
BARS = {"ap": 0.700, "auc": 0.875, "cp100": 0.306}
TRAINING = 600.0  # maximum seconds of training on two cores
REKINDLE = [sys.executable, "-c", "import sys; from rekindle.cli import main; sys.exit(main())"]
NOT_RELEASED = 3
SET_HELP = "override a setting of the config, as in rekindle run"


def stop_services(home: str) -> None:
    """Stop the services that pipelines have started in this home."""
    environment = {**os.environ, "REKINDLE_HOME": home}
    subprocess.run([*REKINDLE, "down"], env=environment, stdout=subprocess.DEVNULL)


def pipeline(
    source: str, home: str, sets: list[str], config: str = "configs/handbook.yaml", **data: object
) -> dict[str, Any]:
    """Run the pipeline without a release; return the output of `rekindle run -o json`."""
    settings = [f"data.{key}={value}" for key, value in {"source": source, **data}.items()]
    # require ap 1, which no model reaches, so that the run evaluates the model but does not release
    # it
    settings += ["gate.minimum.ap=1", f"serve.port={free_port()}", *sets]

    command = [
        *REKINDLE,
        "run",
        config,
        "-o",
        "json",
        *(f"--set={setting}" for setting in settings),
    ]

    run = subprocess.run(
        command, env={**os.environ, "REKINDLE_HOME": home}, stdout=subprocess.PIPE, text=True
    )
    if run.returncode != NOT_RELEASED:
        raise SystemExit(f"{' '.join(command)} ended with exit code {run.returncode}")

    return json.loads(run.stdout)


def seconds(run: dict[str, Any], step: str) -> float:
    """Return the duration of a pipeline step in the run, in seconds."""
    return next(row["seconds"] for row in run["steps"] if row["name"] == step)


def measure(source: str, home: str, prequential: bool, sets: list[str]) -> list[Bar]:
    """Return the metrics of the models, and the training time of one model."""
    four = pipeline(source, home, sets, last_day=LAST_DAYS[-1], test_weeks=4)
    results = {"one model for all four weeks": four["metrics"]}
    days = LAST_DAYS if prequential else LAST_DAYS[-1:]
    folds = [pipeline(source, home, sets, last_day=day, test_weeks=1) for day in days]

    if prequential:
        results["one model per week"] = {
            name: fmean(fold["metrics"][name] for fold in folds) for name in BARS
        }

    bars = [
        bar(f"{name} ({title})", metrics[name], "", minimum, "more")
        for title, metrics in results.items()
        for name, minimum in BARS.items()
    ]

    took = seconds(folds[-1], "train")
    return [*bars, bar("training for the last week", took, "s", TRAINING)]


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--source", required=True, help="file, folder or s3:// URI of the published transactions"
    )
    command.add_argument(
        "--prequential", action="store_true", help="also train a model for each test week"
    )
    command.add_argument(
        "--set", action="append", default=[], dest="sets", metavar="A.B=C", help=SET_HELP
    )
    options = command.parse_args()

    with tempfile.TemporaryDirectory() as home:
        try:
            bars = measure(options.source, home, options.prequential, options.sets)
        finally:
            stop_services(home)

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
