"""A training of `rekindle run` on this machine, and its faults.

Processes get the signals that a node or a controller sends to pods. A pod cannot lose its network
here: its processes are stopped for this time instead, and its connections stay silent.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from argolocal.state.journal import RunFiles
from argolocal.view.runs import list_processes
from rekindle.storage import Store
from rekindle.training.ledger.events import Event, read_events
from tests.chaos.faults import Proxy
from tests.commands import BIN, ROOT
from tests.faults.catalog import COORDINATOR, WORKERS, Fault, parse_replica
from tests.waiting import until

CONFIG = ROOT / "configs/digits.yaml"


class LocalStage:
    """`rekindle run` with the given settings, in a home (directory of runs) of its own.
    `environment` has the credentials of the object store, which the run reaches through a proxy."""

    def __init__(self, home: Path, settings: list[str], environment: Mapping[str, str]) -> None:
        self.home = home
        self.store = Store(
            environment["S3_BUCKET"],
            environment["S3_ENDPOINT_URL"],
            environment["AWS_ACCESS_KEY_ID"],
            environment["AWS_SECRET_ACCESS_KEY"],
        )
        self.proxy = Proxy(environment["S3_ENDPOINT_URL"])
        self.environment = {
            **os.environ,
            **environment,
            "S3_ENDPOINT_URL": self.proxy.url,
            "REKINDLE_HOME": str(home),
        }
        self.log = home.with_suffix(".log")
        self.proxy.__enter__()
        flags = [flag for setting in settings for flag in ("--set", setting)]
        self._start("run", str(CONFIG), "--no-cache", *flags)
        self.name = until("the run has started", self._find_name, 60)

    def close(self) -> None:
        """End the run and the services of the run's home (REKINDLE_HOME)."""
        if self.runner.poll() is None:
            self.runner.terminate()
            self.runner.wait()
        subprocess.run([BIN / "rekindle", "down"], env=self.environment, capture_output=True)
        self.proxy.__exit__()

    def wait_for_end(self) -> int:
        """Wait for the end of the run; return its exit code."""
        return self.runner.wait(900)

    def read_events(self) -> list[Event]:
        return read_events(self.store, f"{self.name}/train/checkpoints/ledger")

    def list_pods(self) -> Mapping[str, str]:
        return {replica: str(pid) for replica, pid in self._pids().items()}

    def check_running(self) -> None:
        assert self.runner.poll() is None, self.log.read_text()

    def find_victims(self, fault: Fault) -> tuple[str, ...]:
        """Return the victims of a fault: all pods if `rekindle run` ends, since they end with it."""
        if fault.reaches_controllers:
            return (COORDINATOR, *WORKERS)
        return fault.victims

    def terminate(self, *replicas: str) -> None:
        pids = self._pids()
        for replica in replicas:
            os.kill(pids[replica], signal.SIGTERM)

    def kill(self, *replicas: str) -> None:
        for process in self._list_trees(*replicas):
            _send(process, signal.SIGKILL)

    def kill_executor(self) -> None:
        """Kill `rekindle run`, which is executor and controllers in one, and resume the run."""
        self.runner.kill()
        self.runner.wait()
        self._start("resume", self.name)

    def restart_controllers(self) -> None:
        self.kill_executor()

    def interrupt_store(self, seconds: float) -> None:
        self.proxy.fault("refuse", seconds)
        time.sleep(seconds)

    def cut_network(self, replica: str, seconds: float) -> None:
        processes = self._list_trees(replica)
        for process in processes:
            _send(process, signal.SIGSTOP)
        time.sleep(seconds)
        for process in processes:
            _send(process, signal.SIGCONT)

    def _start(self, *arguments: str) -> None:
        with self.log.open("ab") as log:
            self.runner = subprocess.Popen(
                [BIN / "rekindle", *arguments],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _find_name(self) -> str:
        self.check_running()
        return next((run_files.name for run_files in RunFiles.all(self.home)), "")

    def _pids(self) -> dict[str, int]:
        """Return the pid of each replica's first process."""
        return {
            replica: process["pid"]
            for process in list_processes(self.home, self.name)
            if (replica := parse_replica(process["pod"]))
        }

    def _list_trees(self, *replicas: str) -> list[psutil.Process]:
        """Return the processes of these pods, the first process of each pod first."""
        pids = self._pids()
        processes = [psutil.Process(pids[replica]) for replica in replicas]
        return [
            *processes,
            *(child for process in processes for child in process.children(recursive=True)),
        ]


def _send(process: psutil.Process, signal_number: signal.Signals) -> None:
    try:
        process.send_signal(signal_number)
    except psutil.NoSuchProcess:
        # the process has ended together with the first process of its pod
        return
