"""The first process of a worker pod: starts and restarts workers, and reports the outcome by its
exit code.

    python -m rekindle.training.launch.launcher <the same flags as `rekindle step steps.train`>

    exit code of a worker     meaning                    reaction of the launcher
    0                         the run is complete        wait for the other workers; exit with 0
    78, 70, 65                a permanent error          SIGTERM to the other workers; exit with 78,
                                                         70, 65
    143, SIGTERM, SIGKILL     a preemption               restart, the first time immediately
    75                        no object store or MLflow  restart
    76                        exception of the workload  restart; exit with 70 if it occurs again
                                                         without a newer step
    any other, OOM-killed     a bug                      restart; exit with 1 after the third time
                                                         without a newer step

After SIGTERM, SIGINT or the cloud's notice of an interruption (notice.py), the launcher sends
SIGTERM to the workers, which leave the run after their current step; the launcher exits with 143
within $REKINDLE_GRACE (30) seconds. If PET_NPROC_PER_NODE is a number, the launcher starts this
number of workers; worker N gets LOCAL_RANK=N. The launcher does not import torch, because workers
are forked from a process that has imported torch (forkserver.py). The launcher reaps all orphans,
and kills all its descendants when it exits.
"""

import signal

# block signals until a handler is installed, because the kernel discards signals without a handler
# for PID 1
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

import os
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from argolocal.common import exit_codes, linux
from argolocal.common.environment import read_integer
from rekindle.errors import CodeError, ConfigError, RekindleError, write_stderr
from rekindle.kubernetes_names import POD_NAME
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.launch import notice, signals
from rekindle.training.launch.cgroup import MemoryCgroup
from rekindle.training.launch.forkserver import (
    RUN_ABORTED_EXIT_CODE,
    WORKLOAD_ERROR_EXIT_CODE,
    Forkserver,
    WorkerSlot,
)
from rekindle.training.launch.usage import UsageSampler

if TYPE_CHECKING:
    from rekindle.training.spec import TrainingSpec

# the launcher gives up after this number of crashes without a newer step in between
MAX_CRASHES = 3
# maximum number of workers of a pod
MAX_WORKERS = 1024
MAX_RESTART_DELAY_S = 30.0
# seconds in which the other workers must notice that the run is complete
COMPLETION_TIMEOUT_S = 15.0
# exit codes of the launcher after which snapshots are removed; after other exit codes, the pod may
# restart in place
OBSOLETE_SNAPSHOT_CODES = (0, *exit_codes.PERMANENT_ERRORS)
NEVER_S = float("inf")
# maximum number of seconds for which sending the event `usage` blocks the launcher
USAGE_TIMEOUT_S = 0.5
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


class ExitKind(Enum):
    """The kind of exit of a process, which determines if and when the process is restarted."""

    PREEMPTED = auto()
    UNAVAILABLE = auto()
    BUG = auto()


# if a worker exits with one of these codes, all other workers must end, too: exit code of the
# worker → exit code of the launcher
FINAL_EXIT_CODES = {**{code: code for code in OBSOLETE_SNAPSHOT_CODES}, RUN_ABORTED_EXIT_CODE: 1}
# other exit codes of a worker → ExitKind; any code that is not listed means BUG
EXIT_KIND_BY_CODE = {
    exit_codes.UNAVAILABLE: ExitKind.UNAVAILABLE,
    **dict.fromkeys((exit_codes.TERMINATED, -signal.SIGTERM, -signal.SIGKILL), ExitKind.PREEMPTED),
}
# delay in seconds of the restart after the second exit of a kind; the delay doubles after each
# further exit
RESTART_DELAY_S_BY_KIND = {ExitKind.PREEMPTED: 0.25, ExitKind.UNAVAILABLE: 1.0, ExitKind.BUG: 1.0}


@dataclass
class RestartBudget:
    """Limits the restarts of one process. The count of exits is reset to 0 whenever a newer step is
    completed."""

    newest_step: int = -1
    exits: Counter[ExitKind] = field(default_factory=Counter)
    # the workload's exception that caused the last exit
    last_exception: str = ""

    def record_exit(self, exit_kind: ExitKind, step: int, exception_text: str = "") -> float | None:
        """Record an exit of the process at `step`; return the seconds until the restart, or None to
        give up."""
        if step > self.newest_step:
            self.newest_step = step
            self.last_exception = ""
            self.exits.clear()

        if exception_text and exception_text == self.last_exception:
            return None

        self.last_exception = exception_text
        self.exits[exit_kind] += 1

        exit_count = self.exits[exit_kind]
        if exit_kind is ExitKind.BUG and exit_count >= MAX_CRASHES:
            return None
        if exit_count > 1:
            return min(
                MAX_RESTART_DELAY_S, RESTART_DELAY_S_BY_KIND[exit_kind] * 2 ** (exit_count - 2)
            )

        return 0.0


@dataclass
class ProcessSlot:
    """A process that the launcher keeps running: a worker or the forkserver."""

    name: str
    memory: WorkerSlot = field(default_factory=WorkerSlot)
    pid: int = 0
    # start time of the process (monotonic)
    start_time: float = 0.0
    budget: RestartBudget = field(default_factory=RestartBudget)


class SignalPipe:
    """Collects signals. A pipe whose descriptor `reader` becomes readable when a signal arrives."""

    def __init__(self) -> None:
        self.reader, write_descriptor = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(write_descriptor, False)
        for signal_number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(signal_number, lambda *_: None)
        signal.set_wakeup_fd(write_descriptor, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def take_received(self) -> set[int]:
        with suppress(BlockingIOError):
            return set(os.read(self.reader, 65536))
        return set()


class Launcher:
    """The workers, their forkserver, and the reaction to their exits."""

    def __init__(self, signal_pipe: SignalPipe, worker_count: int) -> None:
        linux.LIBC.prctl(linux.SET_CHILD_SUBREAPER, 1)
        self.signals = signal_pipe
        self.cgroup = MemoryCgroup()
        pod_name = os.environ.get(POD_NAME) or socket.gethostname()
        self.slots = [
            ProcessSlot(f"{pod_name}/{worker_index}" if worker_index else pod_name)
            for worker_index in range(worker_count)
        ]
        self.forkserver_slot = ProcessSlot("the process that loads torch for the workers")
        self.oom_kills = self.cgroup.count_oom_kills()
        self.starts = 0
        # exit code of the launcher once all child processes have exited
        self.exit_code: int | None = None
        self.deadline = NEVER_S
        self.name = pod_name
        self.usage = UsageSampler()
        self._start_forkserver()

    def run(self, training_spec: "TrainingSpec") -> int:
        """Run the workers until the run is complete or this pod must give up; return the exit
        code."""
        self.spec = training_spec
        self.forkserver.send_spec(training_spec)

        while self.exit_code is None or self._has_children():
            self._start_due_processes()
            self._wait_for_event()
            self._report_usage()
            if self.signals.take_received() & STOP_SIGNALS:
                self._shut_down(
                    exit_codes.TERMINATED,
                    signals.LAUNCHER_GRACE_SHARE * signals.read_grace_seconds(),
                )

            exited_children = self._reap()
            # call this method after `_reap`, because the forkserver has then announced every worker
            # that was reaped
            self._record_started_workers()
            for pid, exit_code in exited_children:
                self._on_exit(pid, exit_code)

            if time.monotonic() >= self.deadline:
                self._kill_workers()

        return self.exit_code

    def _start_forkserver(self) -> None:
        self.forkserver = Forkserver(
            [process_slot.memory for process_slot in self.slots], self.forkserver_slot.memory
        )
        self.forkserver_slot.pid = self.forkserver.pid
        self.forkserver_slot.start_time = NEVER_S

    def _start_due_processes(self) -> None:
        """Start the processes whose start time has come."""
        now_s = time.monotonic()
        if self.exit_code is not None:
            return
        if self.forkserver_slot.start_time <= now_s:
            self._start_forkserver()
            self.forkserver.send_spec(self.spec)
        for slot_index, process_slot in enumerate(self.slots):
            if self.forkserver_slot.pid and process_slot.start_time <= now_s:
                self.forkserver.request(slot_index)
                process_slot.start_time = NEVER_S

    def _wait_for_event(self) -> None:
        """Wait for a signal, a new worker, the next start time or the deadline."""
        wake_times_s = [self.deadline]
        if self.exit_code is None:
            wake_times_s.append(self.usage.next_sample_time)
            wake_times_s += (
                [self.forkserver_slot.start_time]
                if not self.forkserver_slot.pid
                else [process_slot.start_time for process_slot in self.slots]
            )

        wait_seconds = max(0.0, min(wake_times_s) - time.monotonic())
        watched_descriptors = [
            self.signals.reader,
            *([self.forkserver.socket] if self.forkserver_slot.pid else []),
        ]
        select.select(
            watched_descriptors, [], [], None if wait_seconds == NEVER_S else wait_seconds
        )

    def _report_usage(self) -> None:
        """Send the use of CPU, memory and GPUs to the coordinator, about once a minute."""
        if self.exit_code is not None:
            return
        resource_usage = self.usage.sample()
        if resource_usage:
            _report_usage_to_coordinator(self.name, resource_usage)

    def _reap(self) -> list[tuple[int, int]]:
        """Reap the children that have exited, and kill their process groups. Return (pid, exit
        code) of each child; the exit code -N means that signal N killed it."""
        exited_children = []
        with suppress(ChildProcessError):
            while exited_child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = exited_child.si_pid
                # the signal cannot reach another process, because the pid of a zombie is not reused
                if pid != self.forkserver_slot.pid and os.getpgid(pid) == pid:
                    send_signal(-pid, signal.SIGKILL)
                exited_children.append((pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        return exited_children

    def _record_started_workers(self) -> None:
        for worker_index, pid in self.forkserver.take_started():
            self.slots[worker_index].pid = pid
            self.starts += 1
            if self.exit_code is not None:
                send_signal(pid, signal.SIGTERM)

    def _on_exit(self, pid: int, exit_code: int) -> None:
        if pid == self.forkserver_slot.pid:
            self.forkserver_slot.pid = 0
            for worker_index in self.forkserver.requested_indices:
                self.slots[worker_index].start_time = 0.0
            if self.exit_code is None:
                self._restart(self.forkserver_slot, exit_code, self.starts)
        for process_slot in self.slots:
            if process_slot.pid == pid:
                process_slot.pid = 0
                self._restart(
                    process_slot,
                    exit_code,
                    max(process_slot.memory.step[0] for process_slot in self.slots),
                )

    def _restart(self, process_slot: ProcessSlot, exit_code: int, step: int) -> None:
        """Schedule the restart of a process that has exited, or end the launcher."""
        exit_kind, cause, last_output = self._classify_exit(process_slot, exit_code)

        if exit_code in FINAL_EXIT_CODES:
            self._shut_down(
                FINAL_EXIT_CODES[exit_code],
                signals.read_grace_seconds() if exit_code else COMPLETION_TIMEOUT_S,
            )
        elif self.exit_code is None:
            delay_s = process_slot.budget.record_exit(
                exit_kind, step, last_output if exit_code == WORKLOAD_ERROR_EXIT_CODE else ""
            )
            if delay_s is None:
                self._give_up(
                    process_slot,
                    exit_code,
                    f"{cause}, {MAX_CRASHES} times without a newer step (now {step})",
                    last_output,
                )
            else:
                process_slot.start_time = time.monotonic() + delay_s
                delay_text = f" in {delay_s:g} s" if delay_s else ""
                write_stderr(f"{process_slot.name} {cause}: restarting it{delay_text}")
                self._start_due_processes()

            if exit_kind is ExitKind.BUG and exit_code not in (1, WORKLOAD_ERROR_EXIT_CODE):
                # the launcher reports the error, because the process itself was not able to report
                # it
                _report_to_coordinator(process_slot.name, f"{cause}\n{last_output}", 1)

    def _give_up(
        self, process_slot: ProcessSlot, exit_code: int, cause: str, last_output: str
    ) -> None:
        """Report why the launcher does not restart a process, and end the launcher."""
        from rekindle.step import fail

        if exit_code == WORKLOAD_ERROR_EXIT_CODE:
            error = CodeError(f"twice without a newer step: {last_output}")
            _report_to_coordinator(process_slot.name, str(error), error.exit_code)
            fail(error)
            self._shut_down(error.exit_code, signals.read_grace_seconds())
            return

        fail(
            RekindleError(f"{process_slot.name} {cause}. The last time:", *last_output.splitlines())
        )
        self._shut_down(1, signals.read_grace_seconds())

    def _classify_exit(
        self, process_slot: ProcessSlot, exit_code: int
    ) -> tuple[ExitKind, str, str]:
        """Return the kind of a process's exit, the cause of the exit as text, and the last output
        of the process (an error message, a traceback, or "")."""
        exit_kind = EXIT_KIND_BY_CODE.get(exit_code, ExitKind.BUG)
        last_output = process_slot.memory.read_last_output()

        if exit_code < 0:
            cause = f"was ended by {_format_signal_name(-exit_code)}"
        else:
            cause = f"ended with code {exit_code}"

        cause = "raised an exception" if exit_code == WORKLOAD_ERROR_EXIT_CODE else cause
        if exit_code < 0 and last_output:
            # the launcher prints the traceback, because the crashed process could not print it
            write_stderr(*last_output.splitlines())

        earlier_kills = self.oom_kills
        self.oom_kills = self.cgroup.count_oom_kills()
        if self.oom_kills > earlier_kills and exit_code < 0:
            exit_kind = ExitKind.BUG
            cause = "was OOM-killed"
            limit_text = self.cgroup.format_limit()
            last_output = (
                f"Its pod may use {limit_text}, including the hot snapshots in /dev/shm. Raise"
                " cluster.pods.train.memory, or lower train.batch_size (this changes the result)."
            )

        return exit_kind, cause, last_output

    def _shut_down(self, exit_code: int, timeout_seconds: float) -> None:
        """Start no more processes, send SIGTERM to the workers unless `exit_code` is 0, and let
        `run` return `exit_code` within `timeout_seconds`."""
        if self.exit_code in (None, exit_codes.TERMINATED) or exit_code == 0:
            self.exit_code = exit_code
        self.deadline = min(self.deadline, time.monotonic() + timeout_seconds)
        if self.forkserver_slot.pid:
            self.forkserver.end()
        for process_slot in self.slots:
            if exit_code and process_slot.pid:
                send_signal(process_slot.pid, signal.SIGTERM)

    def _kill_workers(self) -> None:
        self.deadline = NEVER_S
        for process_slot in self.slots:
            if process_slot.pid:
                write_stderr(f"{process_slot.name} is killed: it did not exit in time")
                send_signal(process_slot.pid, signal.SIGKILL)

    def _has_children(self) -> bool:
        """Return True while child processes are alive. The remaining child processes are killed
        once all workers have exited."""
        child_pids = list_children()
        if not self.forkserver_slot.pid and not any(
            process_slot.pid for process_slot in self.slots
        ):
            for pid in child_pids:
                send_signal(pid, signal.SIGKILL)
        return bool(child_pids)


def _report_to_coordinator(process_name: str, message: str, exit_code: int) -> None:
    """Report to the coordinator, if the run has one, why a process ends."""
    from rekindle.training.membership.client import report_error
    from rekindle.training.membership.protocol import read_coordinator_address

    coordinator_endpoint = read_coordinator_address()
    if coordinator_endpoint:
        report_error(coordinator_endpoint, process_name, message, exit_code, timeout_s=1)


def _report_usage_to_coordinator(pod_name: str, resource_usage: Mapping[str, float]) -> None:
    """Send the event `usage` to the coordinator. The event is lost if the coordinator does not
    answer."""
    from rekindle.training.membership.client import send_single_message
    from rekindle.training.membership.protocol import read_coordinator_address

    with suppress(OSError, RekindleError):
        coordinator_endpoint = read_coordinator_address()
        if coordinator_endpoint:
            usage_event = {"event": "usage", "name": pod_name, **resource_usage}
            send_single_message(coordinator_endpoint, usage_event, USAGE_TIMEOUT_S)


def send_signal(pid: int, signal_number: int) -> None:
    """Send a signal to a process, unless the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def _format_signal_name(signal_number: int) -> str:
    """Return a signal's name, or "signal N" for a real-time signal."""
    with suppress(ValueError):
        return signal.Signals(signal_number).name
    return f"signal {signal_number}"


def list_children() -> list[int]:
    """Return the pids of the children of this process."""
    child_pids = []
    for stat_path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat_path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                child_pids.append(int(stat_path.parent.name))
    return child_pids


def count_workers() -> int:
    """Return the number of workers of this pod from PET_NPROC_PER_NODE, which the training operator
    sets. Raises ConfigError."""
    count_text = os.environ.get("PET_NPROC_PER_NODE", "")
    if count_text.isdecimal():
        worker_count = read_integer("PET_NPROC_PER_NODE", 1, 0, MAX_WORKERS)
    else:
        # the variable may contain a word that torchrun accepts, such as `auto`
        worker_count = 1

    if worker_count < 1 or (worker_count > 1 and not os.environ.get("MASTER_ADDR")):
        raise ConfigError(
            f"PET_NPROC_PER_NODE is {count_text}: it must be at least 1, and more than one worker"
            " needs a coordinator (MASTER_ADDR). Set nprocPerNode of the job to 1, or give it a"
            " Master."
        )
    return worker_count


def _wait_for_interruption(signal_pipe: SignalPipe) -> bool:
    """Wait while the cloud announces an interruption of this node, because workers that start now
    would be lost. Return True after SIGTERM."""
    while notice.is_interruption_announced():
        write_stderr("this node is about to be interrupted: no worker is started on it")
        readable_descriptors, _, _ = select.select(
            [signal_pipe.reader], [], [], 10 * notice.POLL_INTERVAL_S
        )
        if readable_descriptors and signal_pipe.take_received() & STOP_SIGNALS:
            return True
    return False


def main(argv: list[str]) -> int:
    signal_pipe = SignalPipe()
    if _wait_for_interruption(signal_pipe):
        return exit_codes.TERMINATED

    notice.start_polling_process()
    try:
        # start the forkserver first, so that it imports torch while this process parses the flags
        launcher = Launcher(signal_pipe, count_workers())
        from rekindle.training.membership.handshake import read_run_secret
        from rekindle.training.membership.protocol import read_coordinator_address
        from rekindle.training.spec import TrainingSpec

        signals.read_grace_seconds()

        if read_coordinator_address():
            read_run_secret()

        training_spec = TrainingSpec.from_flags(argv)
        run_hash = snapshot_file.hash_run_name(
            training_spec.identity_hash(), training_spec.checkpoints
        )
        snapshot_file.remove_stale_files(run_hash)
        exit_code = launcher.run(training_spec)
    except RekindleError as error:
        from rekindle.step import fail

        _report_to_coordinator(
            os.environ.get(POD_NAME) or socket.gethostname(), str(error), error.exit_code
        )
        return fail(error)

    if exit_code in OBSOLETE_SNAPSHOT_CODES:
        snapshot_file.remove_run_files(run_hash)

    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
