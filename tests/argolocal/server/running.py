"""Start servers of a home (directory of runs) as processes of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from argolocal.pods import filesystem
from argolocal.runner.cluster import LocalCluster
from argolocal.server import queue
from argolocal.server.server_lock import find_server
from argolocal.state.journal import RunFiles
from argolocal.view import runs
from tests import builders
from tests.waiting import until


class RunningServer:
    """A server that a test kills and starts again."""

    def __init__(self, home: Path, *arguments: str, environ: Mapping[str, str] = {}) -> None:
        self.home = home
        self.output = home.parent / "server.log"
        self.command = [sys.executable, "-m", "argolocal", "server", *arguments]
        self.environ = {**os.environ, "ARGOLOCAL_HOME": str(home), **environ}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it has the lock of the home (directory of all runs)."""
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, env=self.environ
            )
        until("the server", self.is_running, evidence=self.read_output)

    def is_running(self) -> bool:
        server = find_server(self.home)
        return bool(self.process and server and server.pid == self.process.pid)

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the server, and wait until it has ended."""
        if self.process:
            self.process.send_signal(signal_number)
            self.process.wait(30)
            self.process = None

    def read_output(self) -> str:
        return self.output.read_text()


@contextmanager
def start_server(
    home: Path, *arguments: str, environ: Mapping[str, str] = {}
) -> Iterator[RunningServer]:
    """Start a server, and end the server and its runs after the test."""
    server = RunningServer(home, *arguments, environ=environ)
    server.start()
    try:
        yield server
    finally:
        server.kill(signal.SIGTERM)
        for run in RunFiles.all(home):
            pid = run.runner()
            if pid:
                os.kill(pid, signal.SIGTERM)


CLAIM = {"kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "spec": {}}


def make_shell_spec(script: str) -> dict[str, Any]:
    """Return the spec of a workflow with one step, which runs a shell script. A script that
    contains /shared sees the folder `shared_folder`."""
    container = builders.make_shell_container(script)
    spec = {"entrypoint": "main", "templates": [{"name": "main", "container": container}]}
    if "/shared" in script:
        if not filesystem.supports_namespaces():
            pytest.skip("needs mount namespaces")
        container["volumeMounts"] = [{"name": "shared", "mountPath": "/shared"}]
        spec["volumes"] = [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}]
    return spec


def shared_folder(home: Path) -> Path:
    """Create the folder that the shell scripts of workflows see as /shared."""
    LocalCluster(home).store_objects([CLAIM])
    folder = home / "claims/shared"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def submit_script(home: Path, name: str, script: str, **spec: Any) -> str:
    """Queue a workflow with one step, which runs a shell script."""
    workflow = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {**make_shell_spec(script), **spec},
    }
    return queue.submit(LocalCluster(home), workflow)


def load_phase(home: Path, name: str) -> str:
    return runs.load_status(home, name)["phase"]


def wait_for_phase(home: Path, name: str, expected: str) -> None:
    until(f"{name} to be {expected}", lambda: load_phase(home, name) == expected)


def find_runner(home: Path, name: str) -> int:
    """Wait until a process runs the run, and return its pid."""
    return until(f"a process of {name}", RunFiles(home, name).runner)
