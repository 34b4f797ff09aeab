"""Reproduce releases of this repository's configs from another clone, compare the weights, and
measure the time.

    python -m benchmarks.commands.reproduce
    python -m benchmarks.commands.reproduce configs/handbook.yaml --set data.source=FILE \\
      --set train.epochs=1

The model of each config is trained and released in one clone of this repository, which is then
deleted. `rekindle reproduce` trains the model again in another clone. All clones and configs share
one home (REKINDLE_HOME, the folder of the runs), which contains the released models, because
configs/refresh.yaml needs the demo's model and fine-tuning in configs/ needs the model of
configs/language.yaml. The clones contain only committed changes.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.commands import rekindle, stop_services
from benchmarks.loop import free_port

REPOSITORY_ROOT = Path(__file__).parents[2]
CONFIG_NAMES = (
    "demo",
    "refresh",
    "digits",
    "language",
    "finetuning",
    "sweep",
    "mpi",
    "trees",
    "nightly",
)
CONFIG_PATHS = [f"configs/{name}.yaml" for name in CONFIG_NAMES]
# data settings of configs/refresh.yaml, which refreshes the demo's model with newer data
SETTINGS_BY_CONFIG = {
    "configs/refresh.yaml": [
        "data.source=simulate://7?cards=700&terminals=1400&days=98&takeovers=2"
    ]
}


def measure_reproduction(base_folder: Path, config_path: str, set_options: list[str]) -> list[Bar]:
    """Release the model of a config, and reproduce it in another clone."""
    model_name = yaml.safe_load((REPOSITORY_ROOT / config_path).read_text())["name"]
    config_name = Path(config_path).stem
    home_folder = base_folder / "home"
    first_clone = base_folder / f"{config_name}-first"

    second_clone = base_folder / f"{config_name}-second"
    for clone_folder in (first_clone, second_clone):
        subprocess.run(["git", "clone", "-q", str(REPOSITORY_ROOT), str(clone_folder)], check=True)

    try:
        settings = [
            f"serve.port={free_port()}",
            *SETTINGS_BY_CONFIG.get(config_path, []),
            *set_options,
        ]
        start_seconds = time.monotonic()
        run_output = rekindle(
            first_clone,
            home_folder,
            "run",
            config_path,
            *(f"--set={setting}" for setting in settings),
        )
        release_end_seconds = time.monotonic()

        if not any(evaluation["verdict"] == "release" for evaluation in run_output["verdicts"]):
            raise SystemExit(f"{config_path}: nothing is released: {run_output['verdicts']}")

        shutil.rmtree(first_clone)
        reproduction_output = rekindle(second_clone, home_folder, "reproduce", model_name)
        reproduction_s = time.monotonic() - release_end_seconds
        run_s = release_end_seconds - start_seconds
    finally:
        stop_services(home_folder)

    remark_text = reproduction_output["difference"] or "; ".join(
        finding["text"] for finding in reproduction_output["findings"]
    )

    return [
        make_bar(
            f"{config_name}: 1 if the weights differ, else 0",
            int(not reproduction_output["equal"]),
            "",
            0,
            remark_text=remark_text,
        ),
        make_bar(
            f"{config_name}: time of the reproduction, relative to the run with its release",
            reproduction_s / run_s,
            "x",
        ),
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "configs", nargs="*", default=CONFIG_PATHS, help="configs in this repository"
    )

    argument_parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="A.B=C",
        help="setting of a config",
    )

    options = argument_parser.parse_args()

    with tempfile.TemporaryDirectory(dir=Path.home()) as temporary_folder:
        bars = [
            bar_record
            for config_path in options.configs
            for bar_record in measure_reproduction(
                Path(temporary_folder), config_path, options.sets
            )
        ]

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
