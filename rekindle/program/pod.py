"""The state of a pod that runs a training program: its checkpoints, its progress, and the process
that forks the program's processes."""

import hashlib
import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from argolocal.common import exit_codes
from rekindle.cache.folder import cache_folder
from rekindle.errors import say
from rekindle.program.checkpoints.program_checkpoints import ProgramCheckpoints
from rekindle.program.config import PLACEHOLDER
from rekindle.program.curves import Curves
from rekindle.program.position import read_position
from rekindle.program.processes.commands import count_processes
from rekindle.program.processes.environment import default_threads
from rekindle.program.processes.node_processes import NodeProcesses
from rekindle.program.processes.process_parent import ProcessParent
from rekindle.program.progress import Progress, ProgressServer, SavedProgress
from rekindle.program.spec import ProgramSpec
from rekindle.training.launch.cgroup import MemoryCgroup
from rekindle.training.launch.launcher import list_children, send_signal
from rekindle.training.launch.usage import UsageSampler
from rekindle.training.membership.client import Client
from rekindle.training.membership.completion import open_store

POLL_INTERVAL_S = 0.02


class Pod:
    """The state of one pod over all generations of the program."""

    def __init__(self, spec: ProgramSpec, client: Client) -> None:
        self.spec = spec
        self.client = client
        self.position = read_position()
        self.processes: NodeProcesses | None = None
        self.checkpoints = ProgramCheckpoints(
            open_store(),
            spec.checkpoints,
            checkpoint_folder(spec, client.name),
            self.are_processes_alive,
            keep=spec.program.keep,
            marker=spec.program.marker,
            result=spec.program.result_in_checkpoints,
        )
        self.progress = ProgressServer(self.checkpoints.folder.with_name(f"{client.name}.progress"))
        self.saved_progress = SavedProgress()
        self.saves = 0  # number of saves whose progress was reported
        self.usage = UsageSampler()
        self.curves = Curves(spec.run_id, spec.part)
        self.last_progress_time = time.monotonic()
        self.cgroup = MemoryCgroup()
        self.oom_kills = self.cgroup.count_oom_kills()
        self.process_count = count_processes(spec.program)
        self.restarts = -1
        self.last_generation = ""
        self.damaged: list[str] = []
        self.errors: Counter[str] = Counter()
        self.leaving = threading.Event()
        self._start_parent()

    def are_processes_alive(self) -> bool:
        """Return True if no process has failed, so that no save was interrupted."""
        if self.processes is None:
            return False
        return not any(process.exit_code for process in self.processes.processes)

    def _start_parent(self) -> None:
        program = self.spec.program
        environment = {
            name: value
            for name, value in program.environment.items()
            if not PLACEHOLDER.search(value)
        }
        environment |= default_threads({**os.environ, **environment}, self.process_count)
        self.parent = ProcessParent(program.preload, environment)

    def reap(self, processes: NodeProcesses | None) -> None:
        """Reap the children that have exited."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return

                code = os.waitstatus_to_exitcode(status)
                if pid == self.parent.pid:
                    if processes and processes.give_up_starts():
                        say("the process that starts the program has ended: this pod starts again")
                        raise SystemExit(exit_codes.TERMINATED)
                    say("the process that loads the program's modules has ended: starting it again")
                    self._start_parent()
                elif processes:
                    processes.record_exit(pid, code)

    def report_progress(self) -> None:
        """Send the newest report of the program to the log, the ledger and MLflow. Also record the
        use of CPU, memory and GPUs."""
        usage = self.usage.sample()
        if usage:
            self.client.note("usage", **usage)

        progress = self.progress.take() or self._read_saved_progress()
        if progress is None:
            return

        self.last_progress_time = time.monotonic()
        say(progress.log_line)
        self.client.note(
            "progress",
            percentage=progress.percentage,
            seconds_left=progress.seconds_left,
            metrics=progress.metrics,
            not_finite=progress.not_finite,
        )
        self.client.step = max(self.client.step, progress.step)
        self.curves.record(progress.metrics, progress.step)

    def _read_saved_progress(self) -> Progress | None:
        """If the program sends no reports, return the progress that its newest checkpoint contains,
        else None."""
        if self.progress.has_reports or self.checkpoints.saves == self.saves:
            return None

        self.saves = self.checkpoints.saves
        newest = self.checkpoints.newest_complete()
        return self.saved_progress.read(newest) if newest else None

    def has_new_oom_kill(self) -> bool:
        """Return True if a process was OOM-killed since the last call."""
        earlier = self.oom_kills
        self.oom_kills = self.cgroup.count_oom_kills()
        return self.oom_kills > earlier

    def kill_all(self, processes: NodeProcesses) -> None:
        """Kill the processes of the program and their descendants, and wait until they have
        ended."""
        processes.kill()
        while True:
            self.reap(processes)
            others = [pid for pid in list_children() if pid != self.parent.pid]
            if not processes.running and not others:
                break
            for pid in others:
                send_signal(pid, signal.SIGKILL)
            processes.wait(POLL_INTERVAL_S)
        processes.close()


def checkpoint_folder(spec: ProgramSpec, pod: str) -> Path:
    """Return the folder for the checkpoints of this pod. Raises RekindleError."""
    run = hashlib.sha256(spec.checkpoints.encode()).hexdigest()[:16]
    return cache_folder() / "programs" / run / pod
