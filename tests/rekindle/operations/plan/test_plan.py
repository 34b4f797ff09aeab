"""A plan of a user's pipeline names what will run and why, and neither starts nor writes
anything."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rekindle.cache.changed_pipeline import FIRST_STEP_CODE, PIPELINE, SECOND_STEP_CODE
from tests.rekindle.cli.processes import REKINDLE

AUDITED_PROGRAM = """
import os, sys

def report(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")
    starts = event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system", "socket.connect")
    is_bytecode = bool(arguments) and (isinstance(arguments[0], int) or "__pycache__" in str(arguments[0]))
    if (writes or changes) and not is_bytecode or starts:
        sys.stderr.write(f"AUDIT {event} {arguments[:2]}\\n")

sys.addaudithook(report)
from rekindle.cli import main
sys.exit(main())
"""


class Project:
    """A user's project and home (directory of runs), without any service in its environment except
    an address that MLflow needs."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.home = folder / "home"
        for path, text in {
            "pipelines/pair.py": PIPELINE,
            "steps/first.py": FIRST_STEP_CODE,
            "steps/second.py": SECOND_STEP_CODE,
        }.items():
            self.write(path, text)

        config = {
            "name": "pair",
            "pipeline": "pipelines.pair",
            "workload": "steps.digits",
            "data": {},
            "model": {},
        }

        self.write("pair.yaml", json.dumps(config))

        self.environment = {
            **os.environ,
            "REKINDLE_HOME": str(self.home),
            "MLFLOW_TRACKING_URI": endpoint,
        }

        for name in ("S3_ENDPOINT_URL", "S3_BUCKET", "REKINDLE_PATH"):
            self.environment.pop(name, None)

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(exist_ok=True)
        (self.folder / path).write_text(text)

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def run(self, *options: str) -> None:
        result = self.call(REKINDLE, "run", "pair.yaml", "-o", "json", *options)
        assert result.returncode == 0, result.stderr

    def plan(self, *options: str, code: int = 10) -> dict[str, Any]:
        """Return the output of `rekindle plan`, and the tasks of the plan by name."""
        result = self.call(REKINDLE, "plan", "pair.yaml", "-o", "json", *options)
        assert result.returncode == code, result.stderr
        plan = json.loads(result.stdout)
        return plan | {task["task"]: task for task in plan["tasks"]}

    def tree(self) -> dict[str, tuple[int, int]]:
        """Return the size and the modification time of all files in the home (REKINDLE_HOME)."""
        return {
            str(path): (path.lstat().st_size, path.lstat().st_mtime_ns)
            for path in sorted(self.home.rglob("*"))
        }


@pytest.fixture
def project(tmp_path: Path, s3_environment: dict[str, str]) -> Project:
    return Project(tmp_path, s3_environment["S3_ENDPOINT_URL"])


@pytest.mark.slow
def test_a_plan_names_the_first_difference_from_the_earlier_result(project: Project) -> None:
    new = project.plan()
    assert new["first"]["status"] == "runs"
    assert new["first"]["reason"] == "no earlier result"
    assert new["inner.second"]["reason"] == "never cached"
    assert new["inner.second"]["time"]["seconds"] is None
    assert set(new["total"]["unknown"]) >= {"first", "inner.second"}
    assert not project.home.exists()

    try:
        project.run("--set", "train.seed=5")
    finally:
        project.call(REKINDLE, "down")

    earlier_files = project.tree()
    unchanged_plan = project.plan("--set", "train.seed=5")
    assert unchanged_plan["first"]["status"] == "cached"
    assert unchanged_plan["first"]["reason"].endswith("/first")
    assert unchanged_plan["first"]["requests"] == {}
    assert unchanged_plan["first"]["time"]["seconds"] == 0
    assert unchanged_plan["inner.second"]["time"]["runs"] == 1
    assert unchanged_plan["inner.second"]["requests"]["pods"] == 1
    assert unchanged_plan["total"]["seconds"] > 0
    assert unchanged_plan["total"]["unknown"] == []

    other = project.plan("--set", "train.seed=6")["first"]
    assert other["reason"] == "input number: 5 → 6"
    assert other["compared_with"].endswith("/first")
    assert other["differences"] == [{"kind": "input", "name": "number", "before": "5", "now": "6"}]
    assert (
        project.plan("--set", "train.seed=5", "--no-cache")["first"]["reason"]
        == "the cache is not used"
    )

    project.write("steps/first.py", FIRST_STEP_CODE + "# changed\n")
    changed = project.plan("--set", "train.seed=6")["first"]
    assert changed["reason"].startswith("code steps.first: ")
    assert [d["name"] for d in changed["differences"]] == ["steps.first", "number"]
    assert project.tree() == earlier_files, "a plan writes nothing into the home"


def test_a_plan_starts_no_process_but_git_and_opens_no_connection(project: Project) -> None:
    try:
        project.run()
    finally:
        project.call(REKINDLE, "down")
    result = project.call(sys.executable, "-c", AUDITED_PROGRAM, "plan", "pair.yaml")
    assert result.returncode == 10, result.stderr
    events = [line for line in result.stderr.splitlines() if line.startswith("AUDIT")]
    unexpected = [line for line in events if "'git'" not in line and "/dev/null" not in line]
    assert not unexpected, "\n".join(unexpected)
