"""A run that continues until a test lets it end."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from argolocal.common.json_text import to_json
from tests.waiting import until


class RunningRun:
    """A run with one step, whose log a test writes."""

    def __init__(self, home: Path, name: str) -> None:
        self.name = name
        self.logs = home / "runs" / name / "logs"

    @property
    def log(self) -> Path:
        return next(self.logs.glob("*.log"))

    def print(self, text: str) -> None:
        """Append a text to the log of the step, as the runner does."""
        with self.log.open("a") as file:
            file.write(text)


@contextmanager
def start_run(home: Path, name: str) -> Iterator[RunningRun]:
    """Start a run in a process of its own, wait for its step, and end the run after the test."""
    run = RunningRun(home, name)
    step = {"image": "bash:5", "command": ["sleep", "1000"]}
    manifest = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": "main",
            "templates": [
                {"name": "main", "dag": {"tasks": [{"name": "talk", "template": "talk"}]}},
                {"name": "talk", "container": step},
            ],
        },
    }
    file = home.parent / f"{name}.json"
    file.write_text(to_json(manifest))
    process = subprocess.Popen(
        [sys.executable, "-m", "argolocal", "run", str(file), "--yes"],
        env={**os.environ, "ARGOLOCAL_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until("the step of the run", lambda: list(run.logs.glob("*.log")))
        yield run
    finally:
        process.terminate()
        process.wait(30)
