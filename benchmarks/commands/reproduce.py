"""Reproduce releases of this repository's configs from another clone, compare the weights, and
measure the time.

    python -m benchmarks.commands.reproduce
    python -m benchmarks.commands.reproduce configs/handbook.yaml --set data.source=FILE \\
      --set train.epochs=1

The model of each config is trained and released in one clone of this repository, which is then
deleted. `rekindle reproduce` trains the model again in another clone. All clones and configs share
one home, which contains the released models, because the refresh needs the demo's model and
fine-tuning needs the model of configs/language.yaml. The clones contain only committed changes.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.commands import down, rekindle
from benchmarks.loop import free_port

ROOT = Path(__file__).parents[2]
NAMES = ("demo", "refresh", "digits", "language", "finetuning", "sweep", "mpi", "trees", "nightly")
CONFIGS = [f"configs/{name}.yaml" for name in NAMES]
# newer data, with which configs/refresh.yaml refreshes the demo's model
SETTINGS = {
    "configs/refresh.yaml": [
        "data.source=simulate://7?cards=700&terminals=1400&days=98&takeovers=2"
    ]
}


def measure(base: Path, config: str, sets: list[str]) -> list[Bar]:
    """Release the model of a config, and reproduce it in another clone."""
    model = yaml.safe_load((ROOT / config).read_text())["name"]
    name = Path(config).stem
    home = base / "home"
    first = base / f"{name}-first"

    second = base / f"{name}-second"
    for clone in (first, second):
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)

    try:
        settings = [f"serve.port={free_port()}", *SETTINGS.get(config, []), *sets]
        start_time = time.monotonic()
        run = rekindle(first, home, "run", config, *(f"--set={setting}" for setting in settings))
        end_time = time.monotonic()

        if not any(evaluation["verdict"] == "release" for evaluation in run["verdicts"]):
            raise SystemExit(f"{config}: nothing is released: {run['verdicts']}")

        shutil.rmtree(first)
        result = rekindle(second, home, "reproduce", model)
        reproduction_s = time.monotonic() - end_time
        run_s = end_time - start_time
    finally:
        down(home)

    text = result["difference"] or "; ".join(finding["text"] for finding in result["findings"])

    return [
        bar(f"{name}: 1 if the weights differ, else 0", int(not result["equal"]), "", 0, text=text),
        bar(
            f"{name}: time of the reproduction, relative to the run with its release",
            reproduction_s / run_s,
            "x",
        ),
    ]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("configs", nargs="*", default=CONFIGS, help="configs in this repository")

    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="A.B=C",
        help="setting of a config",
    )

    options = command.parse_args()

    with tempfile.TemporaryDirectory(dir=Path.home()) as base:
        bars = [
            line for config in options.configs for line in measure(Path(base), config, options.sets)
        ]

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
