"""Measure the disk usage of many runs with `retention.keep_runs: 10`, and test that the required
releases survive.

    python -m benchmarks.release.retention [--runs 200] [--json]

The runs are runs of one new project on this machine. Three of them train and release a model; the
others run a step that stores a table of 1 MB, and a curve in MLflow. At the end, the benchmark
measures the home, rolls back to the previous release, returns to the champion, and trains both
models again with `rekindle reproduce`.
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

from benchmarks.bars import bar, parser, report
from rekindle.project.template import create

KEEP_RUNS = 10
MAX_RUNS = 12
FOLDERS = ("runs", "s3", "mlflow.db")  # folders of a home that contain data of runs
PIPELINE = '''"""A run without a training."""

from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        blocks.step("steps.table", workflow="{{workflow.name}}", experiment=config.name)
    return workflow
'''
STEP = '''"""Store a table, and a curve in MLflow."""

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


class Project:
    """A project in a new folder, with its own home."""

    def __init__(self, base: Path) -> None:
        self.folder = base / "shop"
        self.home = base / "home"
        create(self.folder)
        (self.folder / "pipelines/table.py").write_text(PIPELINE)
        (self.folder / "steps/table.py").write_text(STEP)
        config = yaml.safe_load((self.folder / "configs/shop.yaml").read_text())
        config["retention"] = {"keep_runs": KEEP_RUNS, "keep_releases": 1}
        config["gate"] = {"maximum": {"rmse": 1000}, "tolerance": 1000}
        config["serve"]["port"] = 8093
        config["serve"]["keep_releases"] = 1
        (self.folder / "configs/shop.yaml").write_text(yaml.safe_dump(config))
        (self.folder / "configs/table.yaml").write_text(
            yaml.safe_dump(config | {"pipeline": "pipelines.table"})
        )
        git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.com")

        for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
            subprocess.run([*git, *command], cwd=self.folder, check=True)

    def rekindle(self, *arguments: str) -> dict[str, Any]:
        """Run a command, and return its JSON."""
        command = [str(Path(sys.executable).with_name("rekindle")), *arguments, "-o", "json"]
        environment = {**os.environ, "REKINDLE_HOME": str(self.home)}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
        return json.loads(done.stdout)

    def bytes(self) -> int:
        """Return the total size in bytes of the files that the runs have left in the home."""
        paths = [
            path for name in FOLDERS for path in (self.home / name, *(self.home / name).rglob("*"))
        ]
        return sum(path.stat().st_size for path in paths if path.is_file())


def measure(project: Project, runs: int) -> dict[str, Any]:
    """Run all runs, and measure the home."""
    # train longer each time, so that each model is better than the previous one
    epochs = {1: 4, runs // 3: 12, 2 * runs // 3: 40}
    sizes = list[int]()

    for number in range(1, runs + 1):
        if number in epochs:
            result = project.rekindle(
                "run", "configs/shop.yaml", "--set", f"train.epochs={epochs[number]}"
            )
            assert result["verdict"] == "release", result
        else:
            start = project.bytes()
            project.rekindle("run", "configs/table.yaml")
            sizes.append(project.bytes() - start)

        print(
            f"run {number} of {runs}: {project.bytes() / 1e6:.1f} MB", file=sys.stderr, flush=True
        )

    listed = project.rekindle("prune")
    left = project.rekindle("status")["runs"]

    return {
        "sizes": sizes,
        "bytes": project.bytes(),
        "left": left,
        "to_prune": listed["runs"] + listed["releases"],
    }


def use_kept_releases(project: Project) -> dict[str, Any]:
    """Roll back to the previous release, return to the champion, and reproduce both releases."""
    back = project.rekindle("rollback", "shop")
    forth = project.rekindle("rollback", "shop", "3")
    equal = {
        version: project.rekindle("reproduce", f"shop@{version}")["equal"] for version in ("2", "3")
    }
    return {"rollbacks": [back["version"], forth["version"]], "equal": equal}


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--runs", type=int, default=200, help="number of runs (default: 200)")
    args = command.parse_args()

    with tempfile.TemporaryDirectory() as base:
        project = Project(Path(base))
        try:
            project.rekindle("env")  # this command also starts the services
            empty = project.bytes()
            figures = measure(project, args.runs)
            releases = sum(
                f.stat().st_size
                for f in (project.home / "s3").rglob("*")
                if f.is_file() and re.search("releases/shop/", str(f))
            )
            needed = use_kept_releases(project)
        finally:
            project.rekindle("down")

    one_run = max(figures["sizes"][: KEEP_RUNS - 2])
    kept = figures["bytes"] - empty - releases

    bars = [
        bar(
            "bytes of all runs, in bytes of one run",
            kept / one_run,
            "runs",
            MAX_RUNS,
            text=f"{args.runs} runs",
        ),
        bar("runs in `rekindle status`", len(figures["left"]), "runs", MAX_RUNS),
        bar("runs and releases that `rekindle prune` still finds", len(figures["to_prune"]), "", 0),
        bar("rollbacks that succeeded", len(needed["rollbacks"]), "of 2", 2, "more"),
        bar(
            "releases that were trained again with equal bits",
            sum(needed["equal"].values()),
            "of 2",
            2,
            "more",
        ),
        bar("bytes of one run", one_run / 1e6, "MB"),
        bar("home at the end", figures["bytes"] / 1e6, "MB"),
    ]

    return report(bars, as_json=args.json, needed=needed)


if __name__ == "__main__":
    raise SystemExit(main())
