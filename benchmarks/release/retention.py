"""Measure the disk usage of many runs with `retention.keep_runs: 10`, and test that the required
releases survive.

    python -m benchmarks.release.retention [--runs 200] [--json]

All measured runs are runs of one new project on this machine. Three of the runs train and release a
model; the other runs execute a step that stores a table of 1 MB, and a curve in MLflow. At the end,
the benchmark measures the size of the home (REKINDLE_HOME, the folder of the runs), rolls back to
the previous release, returns to the champion, and trains the models of both releases again with
`rekindle reproduce`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.bars import make_bar, make_parser, report
from rekindle.project.template import create

KEEP_RUNS = 10
MAX_RUNS = 12
# folders of a home (REKINDLE_HOME) that contain data of runs
MEASURED_PATHS = ("runs", "s3", "mlflow.db")
PIPELINE_SOURCE = '''"""A run without a training."""

from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        blocks.step("steps.table", workflow="{{workflow.name}}", experiment=config.name)
    return workflow
'''
STEP_SOURCE = '''"""Store a table, and a curve in MLflow."""

import os

from rekindle import Artifact, StepInputs, StepOutputs, tracking


class Inputs(StepInputs):
    workflow: str
    experiment: str


class Outputs(StepOutputs):
    table: Artifact
    run_id: str


def run(inputs: Inputs) -> Outputs:
    table = inputs.workdir / "table"
    table.write_bytes(os.urandom(1 << 20))
    run_id = tracking.start_run(inputs.experiment, inputs.workflow)
    tracking.log_metrics(run_id, [("value", 1.0 * step, step) for step in range(500)])
    tracking.log_artifact(run_id, "table.txt", os.urandom(1 << 16))
    return Outputs(table=table, run_id=run_id)
'''


class TemporaryProject:
    """A project in a new folder, with its own home (REKINDLE_HOME)."""

    def __init__(self, base_folder: Path) -> None:
        self.folder = base_folder / "shop"
        self.home = base_folder / "home"
        create(self.folder)
        (self.folder / "pipelines/table.py").write_text(PIPELINE_SOURCE)
        (self.folder / "steps/table.py").write_text(STEP_SOURCE)
        project_config = yaml.safe_load((self.folder / "configs/shop.yaml").read_text())
        project_config["retention"] = {"keep_runs": KEEP_RUNS, "keep_releases": 1}
        project_config["gate"] = {"maximum": {"rmse": 1000}, "tolerance": 1000}
        project_config["serve"]["port"] = 8093
        project_config["serve"]["keep_releases"] = 1
        (self.folder / "configs/shop.yaml").write_text(yaml.safe_dump(project_config))
        (self.folder / "configs/table.yaml").write_text(
            yaml.safe_dump(project_config | {"pipeline": "pipelines.table"})
        )
        git_command = ("git", "-c", "user.name=a", "-c", "user.email=a@example.com")

        for git_arguments in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
            subprocess.run([*git_command, *git_arguments], cwd=self.folder, check=True)

    def rekindle(self, *command_arguments: str) -> dict[str, Any]:
        """Run a command of Rekindle, and return its JSON output."""
        command = [
            str(Path(sys.executable).with_name("rekindle")),
            *command_arguments,
            "-o",
            "json",
        ]
        environment = {**os.environ, "REKINDLE_HOME": str(self.home)}
        completed_process = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if completed_process.returncode:
            raise SystemExit(
                f"{' '.join(command_arguments)} ended with"
                f" {completed_process.returncode}:\n{completed_process.stderr}"
            )
        return json.loads(completed_process.stdout)

    def bytes(self) -> int:
        """Return the total size in bytes of the files that the runs have left in the home
        (REKINDLE_HOME)."""
        measured_paths = [
            path
            for path_name in MEASURED_PATHS
            for path in (self.home / path_name, *(self.home / path_name).rglob("*"))
        ]
        return sum(path.stat().st_size for path in measured_paths if path.is_file())


def measure_retention(temporary_project: TemporaryProject, run_count: int) -> dict[str, Any]:
    """Execute all runs, and measure the size of the home (REKINDLE_HOME)."""
    # train longer in each run with a training, so that each model is better than the previous one
    epochs_by_run = {1: 4, run_count // 3: 12, 2 * run_count // 3: 40}
    size_bytes_by_run = list[int]()

    for run_number in range(1, run_count + 1):
        if run_number in epochs_by_run:
            run_output = temporary_project.rekindle(
                "run", "configs/shop.yaml", "--set", f"train.epochs={epochs_by_run[run_number]}"
            )
            assert run_output["verdict"] == "release", run_output
        else:
            bytes_before_run = temporary_project.bytes()
            temporary_project.rekindle("run", "configs/table.yaml")
            size_bytes_by_run.append(temporary_project.bytes() - bytes_before_run)

        print(
            f"run {run_number} of {run_count}: {temporary_project.bytes() / 1e6:.1f} MB",
            file=sys.stderr,
            flush=True,
        )

    prune_output = temporary_project.rekindle("prune")
    remaining_runs = temporary_project.rekindle("status")["runs"]

    return {
        "sizes": size_bytes_by_run,
        "bytes": temporary_project.bytes(),
        "left": remaining_runs,
        "to_prune": prune_output["runs"] + prune_output["releases"],
    }


def use_kept_releases(temporary_project: TemporaryProject) -> dict[str, Any]:
    """Roll back to the previous release, return to the champion, and train the models of both
    releases again with `rekindle reproduce`."""
    rollback_output = temporary_project.rekindle("rollback", "shop")
    return_output = temporary_project.rekindle("rollback", "shop", "3")
    is_equal_by_version = {
        version: temporary_project.rekindle("reproduce", f"shop@{version}")["equal"]
        for version in ("2", "3")
    }
    return {
        "rollbacks": [rollback_output["version"], return_output["version"]],
        "equal": is_equal_by_version,
    }


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--runs", type=int, default=200, help="number of runs (default: 200)"
    )
    options = argument_parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary_folder:
        temporary_project = TemporaryProject(Path(temporary_folder))
        try:
            # the first command of Rekindle also starts the services
            temporary_project.rekindle("env")
            empty_project_bytes = temporary_project.bytes()
            measurements = measure_retention(temporary_project, options.runs)
            release_bytes = sum(
                release_file.stat().st_size
                for release_file in (temporary_project.home / "s3").rglob("*")
                if release_file.is_file() and re.search("releases/shop/", str(release_file))
            )
            kept_release_outputs = use_kept_releases(temporary_project)
        finally:
            temporary_project.rekindle("down")

    one_run_bytes = max(measurements["sizes"][: KEEP_RUNS - 2])
    kept_run_bytes = measurements["bytes"] - empty_project_bytes - release_bytes

    bars = [
        make_bar(
            "bytes of all runs, in bytes of one run",
            kept_run_bytes / one_run_bytes,
            "runs",
            MAX_RUNS,
            remark_text=f"{options.runs} runs",
        ),
        make_bar("runs in `rekindle status`", len(measurements["left"]), "runs", MAX_RUNS),
        make_bar(
            "runs and releases that `rekindle prune` still finds",
            len(measurements["to_prune"]),
            "",
            0,
        ),
        make_bar(
            "rollbacks that succeeded", len(kept_release_outputs["rollbacks"]), "of 2", 2, "more"
        ),
        make_bar(
            "releases that were trained again with equal bits",
            sum(kept_release_outputs["equal"].values()),
            "of 2",
            2,
            "more",
        ),
        make_bar("bytes of one run", one_run_bytes / 1e6, "MB"),
        make_bar("home at the end", measurements["bytes"] / 1e6, "MB"),
    ]

    return report(bars, as_json=options.json, needed=kept_release_outputs)


if __name__ == "__main__":
    raise SystemExit(main())
