"""Quality and training time of the fraud model on the data of the Fraud Detection Handbook.

    # one model for all four test weeks
    python -m benchmarks.workloads.handbook --source transactions.parquet
    python -m benchmarks.workloads.handbook --source transactions.parquet --prequential --json

`--source` is a file, folder or s3:// URI with the published transactions (2018-04-01 to 2018-09-04
or longer). The benchmark runs the whole pipeline of configs/handbook.yaml, without a release. The
test weeks of the benchmark are the four published weeks from 2018-08-08 on. By default a single
model, trained on the data of the handbook's first fold, is evaluated on all four weeks;
`--prequential` trains a model for each week, as the handbook does. The training time is measured
for the model of the last week.
"""

import json
import os
import subprocess
import sys
import tempfile
from statistics import fmean
from typing import Any

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.loop import free_port

# last days of the handbook's four test weeks
LAST_DAYS = ("2018-08-14", "2018-08-21", "2018-08-28", "2018-09-04")
MIN_METRICS = {"ap": 0.700, "auc": 0.875, "cp100": 0.306}
# Training on two CPU cores may take at most this number of seconds.
MAX_TRAINING_SECONDS = 600.0
REKINDLE_COMMAND = [
    sys.executable,
    "-c",
    "import sys; from rekindle.cli import main; sys.exit(main())",
]
NOT_RELEASED_EXIT_CODE = 3
SET_HELP = "override a setting of the config, as in rekindle run"


def stop_services(home_folder: str) -> None:
    """Stop the services that pipelines have started in this home (REKINDLE_HOME)."""
    environment = {**os.environ, "REKINDLE_HOME": home_folder}
    subprocess.run([*REKINDLE_COMMAND, "down"], env=environment, stdout=subprocess.DEVNULL)


def pipeline(
    data_source: str,
    home_folder: str,
    set_options: list[str],
    config: str = "configs/handbook.yaml",
    **data_settings: object,
) -> dict[str, Any]:
    """Run the pipeline without a release, and return the output of `rekindle run -o json`."""
    settings = [
        f"data.{setting_name}={setting_value}"
        for setting_name, setting_value in {"source": data_source, **data_settings}.items()
    ]
    # require an average precision of 1, which no model reaches, so that the run evaluates the model
    # but does not release it
    settings += ["gate.minimum.ap=1", f"serve.port={free_port()}", *set_options]

    command = [
        *REKINDLE_COMMAND,
        "run",
        config,
        "-o",
        "json",
        *(f"--set={setting}" for setting in settings),
    ]

    completed_run = subprocess.run(
        command, env={**os.environ, "REKINDLE_HOME": home_folder}, stdout=subprocess.PIPE, text=True
    )
    if completed_run.returncode != NOT_RELEASED_EXIT_CODE:
        raise SystemExit(f"{' '.join(command)} ended with exit code {completed_run.returncode}")

    return json.loads(completed_run.stdout)


def read_step_seconds(run_output: dict[str, Any], step_name: str) -> float:
    """Return the duration of a pipeline step in the run, in seconds."""
    return next(
        step_row["seconds"] for step_row in run_output["steps"] if step_row["name"] == step_name
    )


def measure_handbook(
    data_source: str, home_folder: str, is_prequential: bool, set_options: list[str]
) -> list[Bar]:
    """Return the metrics of the models, and the training time of one model."""
    four_week_run = pipeline(
        data_source, home_folder, set_options, last_day=LAST_DAYS[-1], test_weeks=4
    )
    metrics_by_title = {"one model for all four weeks": four_week_run["metrics"]}
    last_days = LAST_DAYS if is_prequential else LAST_DAYS[-1:]
    weekly_runs = [
        pipeline(data_source, home_folder, set_options, last_day=last_day, test_weeks=1)
        for last_day in last_days
    ]

    if is_prequential:
        metrics_by_title["one model per week"] = {
            metric_name: fmean(weekly_run["metrics"][metric_name] for weekly_run in weekly_runs)
            for metric_name in MIN_METRICS
        }

    bars = [
        make_bar(f"{metric_name} ({model_title})", metrics[metric_name], "", min_metric, "more")
        for model_title, metrics in metrics_by_title.items()
        for metric_name, min_metric in MIN_METRICS.items()
    ]

    training_seconds = read_step_seconds(weekly_runs[-1], "train")
    return [
        *bars,
        make_bar("training for the last week", training_seconds, "s", MAX_TRAINING_SECONDS),
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--source", required=True, help="file, folder or s3:// URI of the published transactions"
    )
    argument_parser.add_argument(
        "--prequential", action="store_true", help="also train a model for each test week"
    )
    argument_parser.add_argument(
        "--set", action="append", default=[], dest="sets", metavar="A.B=C", help=SET_HELP
    )
    options = argument_parser.parse_args()

    with tempfile.TemporaryDirectory() as home_folder:
        try:
            bars = measure_handbook(options.source, home_folder, options.prequential, options.sets)
        finally:
            stop_services(home_folder)

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
