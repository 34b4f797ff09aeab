"""Tests that kill the server and its runs: each scheduled time has one run, or a recorded reason
for the missing run."""

import os
import random
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from argolocal.common.files import write_atomically
from argolocal.runner.cluster import LocalCluster
from argolocal.server.cron.controller import read_progress
from argolocal.server.objects import Objects
from argolocal.state.journal import MANIFEST_FILE, RunFiles
from tests.argolocal.server.running import RunningServer, load_phase, make_shell_spec
from tests.waiting import until

START = int(datetime(2026, 3, 2, tzinfo=UTC).timestamp())
MINUTE = 60
TWO_HOURS = 120 * MINUTE
POLICIES: dict[str, dict[str, Any]] = {
    "allow": {},
    "forbid": {"concurrencyPolicy": "Forbid", "startingDeadlineSeconds": 30},
    "replace": {"concurrencyPolicy": "Replace"},
}
KEEP_ALL = {"successfulJobsHistoryLimit": 10_000, "failedJobsHistoryLimit": 10_000}


class Machine:
    """A machine with three schedules, each due every minute, and a clock that the test sets."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.home = folder / "home"
        self.clock_file = folder / "clock"
        self.dice = random.Random(seed)
        self.now = START + 1
        self.write_clock()
        # names of the runs that the policy Allow must have started
        self.expected: list[str] = []

        objects = Objects(LocalCluster(self.home), lambda: self.now)
        for name, policy in POLICIES.items():
            spec = {
                "schedules": ["* * * * *"],
                "workflowSpec": make_shell_spec("echo done"),
                **KEEP_ALL,
            }
            objects.create(
                {
                    "apiVersion": "argoproj.io/v1alpha1",
                    "kind": "CronWorkflow",
                    "metadata": {"name": name},
                    "spec": {**spec, **policy},
                }
            )

        self.server = RunningServer(self.home)
        self.server.command = [
            *(sys.executable, "-m", "tests.argolocal.server.simulated", str(self.clock_file))
        ]
        self.server.start()

    def write_clock(self) -> None:
        write_atomically(self.clock_file, str(self.now))

    def advance(self, seconds: int) -> None:
        """Set the clock of the machine forward. Advance the clock until one time is due and the
        earlier times are missed."""
        self.now += seconds
        self.write_clock()
        self.expected.append(f"allow-{self.now // MINUTE * MINUTE}")

    def exists(self, run: str) -> bool:
        return (RunFiles(self.home, run).root / MANIFEST_FILE).exists()

    def wait_for_decision(self) -> None:
        """Wait until the server has decided about the newest time of all schedules."""
        newest = self.now // MINUTE * MINUTE
        for name in POLICIES:
            until(f"{name}-{newest}", lambda name=name: self.is_decided(name, newest))

    def is_decided(self, name: str, time: int) -> bool:
        progress = read_progress(self.home, name).get(name)
        return progress is not None and progress.position >= time

    def wait_for_moment(self) -> None:
        """Wait until the newest run is created, has started or has ended, by chance, or return at
        once; the choice is random."""
        run = RunFiles(self.home, self.expected[-1])
        moments: list[Callable[[], object]] = [
            lambda: True,
            lambda: self.exists(run.name),
            lambda: run.runner() or not run.queue_entry.exists(),
            lambda: self.exists(run.name) and load_phase(self.home, run.name) == "Succeeded",
        ]
        moment = self.dice.choice(moments)
        until("a moment to kill", lambda: moment() or None)

    def kill(self) -> None:
        """Kill the server, the processes of runs, or both, and start the server again."""
        victim = self.dice.choice(["server", "runs", "both"])
        if victim in ("server", "both"):
            self.server.kill()
        if victim in ("runs", "both"):
            for run in RunFiles.all(self.home):
                pid = run.queue_entry.exists() and run.runner()
                if pid and (self.server.process is None or pid != self.server.process.pid):
                    os.kill(pid, signal.SIGKILL)

        if victim != "runs":
            if self.dice.random() < 0.3:
                # only the newest of the times that a dead server has missed gets a run
                if not self.exists(self.expected[-1]):
                    self.expected.pop()
                self.advance(MINUTE)
            self.server.start()

    def turn_off(self, seconds: int) -> None:
        self.server.kill()
        self.advance(seconds)
        self.server.start()
        self.wait_for_decision()

    def end(self) -> None:
        """Wait until all runs have ended, and end the server."""
        until("the end of all runs", lambda: not any((self.home / "queue").iterdir()))
        objects = Objects(LocalCluster(self.home))
        until(
            "the count of all runs",
            lambda: not any(cron["status"]["active"] for cron in objects.list("CronWorkflow")),
        )
        self.server.kill(signal.SIGTERM)

    def check(self) -> None:
        runs = {run.name: load_phase(self.home, run.name) for run in RunFiles.all(self.home)}
        allowed = sorted(name for name in runs if name.startswith("allow-"))
        assert allowed == self.expected

        objects = Objects(LocalCluster(self.home))
        for name in POLICIES:
            started = {int(run.rpartition("-")[2]) for run in runs if run.startswith(f"{name}-")}
            missed_runs = read_progress(self.home, name)[name].missed
            # each scheduled time has a run or a reason for the missing run, but not both
            assert not started & {missed_run.time for missed_run in missed_runs}
            assert all(item.reason for item in missed_runs)
            status = objects.get("CronWorkflow", name)["status"]
            assert status["active"] == []
            assert status.get("succeeded", 0) + status.get("failed", 0) == len(started)

        phases = {phase for name, phase in runs.items() if not name.startswith("replace-")}
        assert phases == {"Succeeded"}


def kill_often(folder: Path, seed: int, kills: int) -> None:
    machine = Machine(folder, seed)
    try:
        for number in range(kills):
            machine.advance(MINUTE)
            machine.wait_for_moment()
            machine.kill()
            machine.wait_for_decision()
            if number == kills // 2:
                machine.turn_off(TWO_HOURS)
        machine.end()
        machine.check()
    finally:
        machine.server.kill(signal.SIGTERM)


def test_schedules_survive_kills_of_the_server_and_of_runs(tmp_path: Path) -> None:
    kill_often(tmp_path, seed=1, kills=5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_schedules_survive_many_kills(tmp_path: Path, seed: int) -> None:
    kill_often(tmp_path, seed, kills=25)
