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
from rekindle.errors import write_stderr
from rekindle.program.checkpoints.program_checkpoints import ProgramCheckpoints
from rekindle.program.config import PLACEHOLDER_PATTERN
from rekindle.program.curves import MetricCurves
from rekindle.program.position import read_pod_position
from rekindle.program.processes.commands import count_processes
from rekindle.program.processes.environment import make_thread_defaults
from rekindle.program.processes.node_processes import NodeProcesses
from rekindle.program.processes.process_parent import ProcessParent
from rekindle.program.progress import ProgressReport, ProgressServer, SavedProgress
from rekindle.program.spec import ProgramSpec
from rekindle.training.launch.cgroup import MemoryCgroup
from rekindle.training.launch.launcher import list_children, send_signal
from rekindle.training.launch.usage import UsageSampler
from rekindle.training.membership.client import CoordinatorClient
from rekindle.training.membership.completion import open_store

POLL_INTERVAL_S = 0.02


class Pod:
    """The state of one pod over all generations of the program."""

    def __init__(self, program_spec: ProgramSpec, group_client: CoordinatorClient) -> None:
        self.spec = program_spec
        self.client = group_client
        self.position = read_pod_position()
        self.processes: NodeProcesses | None = None
        self.checkpoints = ProgramCheckpoints(
            open_store(),
            program_spec.checkpoints,
            make_checkpoint_folder(program_spec, group_client.name),
            self.are_processes_alive,
            keep_count=program_spec.program.keep,
            marker_name=program_spec.program.marker,
            result_path=program_spec.program.result_checkpoint_path,
        )
        self.progress = ProgressServer(
            self.checkpoints.folder.with_name(f"{group_client.name}.progress")
        )
        self.saved_progress = SavedProgress()
        # number of saves whose progress was reported
        self.reported_saves = 0
        self.usage = UsageSampler()
        self.curves = MetricCurves(program_spec.run_id, program_spec.part)
        self.last_progress_time = time.monotonic()
        self.cgroup = MemoryCgroup()
        self.oom_kills = self.cgroup.count_oom_kills()
        self.process_count = count_processes(program_spec.program)
        self.restarts = -1
        self.last_generation = ""
        self.damaged: list[str] = []
        self.errors: Counter[str] = Counter()
        self.leaving = threading.Event()
        self._start_process_parent()

    def are_processes_alive(self) -> bool:
        """Return True if no process has failed, so that no save was interrupted."""
        if self.processes is None:
            return False
        return not any(process.exit_code for process in self.processes.processes)

    def _start_process_parent(self) -> None:
        program_config = self.spec.program
        literal_variables = {
            variable_name: variable_value
            for variable_name, variable_value in program_config.environment.items()
            if not PLACEHOLDER_PATTERN.search(variable_value)
        }
        thread_defaults = make_thread_defaults(
            {**os.environ, **literal_variables}, self.process_count
        )
        self.parent = ProcessParent(
            program_config.preload, {**literal_variables, **thread_defaults}
        )

    def reap(self, node_processes: NodeProcesses | None) -> None:
        """Reap the children that have exited, and record their exit codes in `node_processes`.

        If the process that loads the program's modules has ended, start this process again. Raises
        SystemExit if the loading process has ended before it had started all processes of the
        program.
        """
        with suppress(ChildProcessError):
            while True:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return

                exit_code = os.waitstatus_to_exitcode(wait_status)
                if pid == self.parent.pid:
                    if node_processes and node_processes.give_up_starts():
                        write_stderr(
                            "the process that starts the program has ended: this pod starts again"
                        )
                        raise SystemExit(exit_codes.TERMINATED)
                    write_stderr(
                        "the process that loads the program's modules has ended: starting it again"
                    )
                    self._start_process_parent()
                elif node_processes:
                    node_processes.record_exit(pid, exit_code)

    def report_progress(self) -> None:
        """Send the newest report of the program to the log, the ledger and MLflow. The use of CPU,
        memory and GPUs is recorded, too."""
        resource_usage = self.usage.sample()
        if resource_usage:
            self.client.note("usage", **resource_usage)

        newest_progress = self.progress.take() or self._read_saved_progress()
        if newest_progress is None:
            return

        self.last_progress_time = time.monotonic()
        write_stderr(newest_progress.log_line)
        self.client.note(
            "progress",
            percentage=newest_progress.percentage,
            seconds_left=newest_progress.seconds_left,
            metrics=newest_progress.metrics,
            not_finite=newest_progress.not_finite,
        )
        self.client.step = max(self.client.step, newest_progress.step)
        self.curves.record(newest_progress.metrics, newest_progress.step)

    def _read_saved_progress(self) -> ProgressReport | None:
        """If the program sends no reports, return the progress that its newest checkpoint contains,
        else None."""
        if self.progress.has_reports or self.checkpoints.saves == self.reported_saves:
            return None

        self.reported_saves = self.checkpoints.saves
        newest_checkpoint = self.checkpoints.newest_complete()
        return self.saved_progress.read(newest_checkpoint) if newest_checkpoint else None

    def has_new_oom_kill(self) -> bool:
        """Return True if a process was OOM-killed since the last call."""
        earlier_oom_kills = self.oom_kills
        self.oom_kills = self.cgroup.count_oom_kills()
        return self.oom_kills > earlier_oom_kills

    def kill_all(self, node_processes: NodeProcesses) -> None:
        """Kill the processes of the program and their descendants, and wait until they have
        ended."""
        node_processes.kill()
        while True:
            self.reap(node_processes)
            other_pids = [pid for pid in list_children() if pid != self.parent.pid]
            if not node_processes.running and not other_pids:
                break
            for pid in other_pids:
                send_signal(pid, signal.SIGKILL)
            node_processes.wait(POLL_INTERVAL_S)
        node_processes.close()


def make_checkpoint_folder(program_spec: ProgramSpec, pod_name: str) -> Path:
    """Return the folder for the checkpoints of this pod. Raises RekindleError."""
    run_hash = hashlib.sha256(program_spec.checkpoints.encode()).hexdigest()[:16]
    return cache_folder() / "programs" / run_hash / pod_name
