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

After SIGTERM, SIGINT or the cloud's notice (notice.py), the launcher sends SIGTERM to the workers,
which leave the run after their current step; the launcher exits with 143 within $REKINDLE_GRACE
(30) seconds. If PET_NPROC_PER_NODE is a number, the launcher starts that many workers; worker N
gets LOCAL_RANK=N. This process imports no torch: it forks workers from a process that has imported
it (forkserver.py). The launcher reaps all orphans, and kills all its descendants when it exits.
"""

import signal

# block signals until a handler is installed: the kernel would discard them for PID 1
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
from rekindle.errors import CodeError, ConfigError, RekindleError, say
from rekindle.kubernetes_names import POD_NAME
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.launch import notice, signals
from rekindle.training.launch.cgroup import MemoryCgroup
from rekindle.training.launch.forkserver import (
    RUN_ABORTED,
    WORKLOAD_ERROR,
    Forkserver,
    WorkerSlot,
)
from rekindle.training.launch.usage import UsageSampler

if TYPE_CHECKING:
    from rekindle.training.spec import TrainingSpec

# the launcher gives up after this number of crashes without a newer step in between
MAX_CRASHES = 3
MAX_WORKERS = 1024  # maximum number of workers of a pod
MAX_RESTART_DELAY_S = 30.0
# time in which the other workers must notice that the run is complete
COMPLETION_TIMEOUT_S = 15.0
# exit codes that make snapshots obsolete; after other codes the pod may restart in place
OBSOLETE_SNAPSHOT_CODES = (0, *exit_codes.PERMANENT)
NEVER = float("inf")
USAGE_TIMEOUT_S = 0.5  # maximum time for which this request blocks the launcher
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


class ExitKind(Enum):
    """The kind of exit of a process; it determines if and when the process is restarted."""

    PREEMPTED = auto()
    UNAVAILABLE = auto()
    BUG = auto()


# if a worker exits with one of these codes, all other workers must end, too: exit code of the
# worker → exit code of the launcher
FINAL_EXIT_CODES = {**{code: code for code in OBSOLETE_SNAPSHOT_CODES}, RUN_ABORTED: 1}
# other exit codes of a worker → ExitKind; any code that is not listed means BUG
EXIT_KINDS = {
    exit_codes.UNAVAILABLE: ExitKind.UNAVAILABLE,
    **dict.fromkeys((exit_codes.TERMINATED, -signal.SIGTERM, -signal.SIGKILL), ExitKind.PREEMPTED),
}
# delay in seconds of the restart after the second exit of a kind; the delay doubles after each
# further exit
RESTART_DELAY_S = {ExitKind.PREEMPTED: 0.25, ExitKind.UNAVAILABLE: 1.0, ExitKind.BUG: 1.0}


@dataclass
class RestartBudget:
    """Limits the restarts of one process; the count of exits is reset to 0 whenever a newer step is
    completed."""

    newest_step: int = -1
    exits: Counter[ExitKind] = field(default_factory=Counter)
    last_exception: str = ""  # the workload's exception that caused the last exit

    def record_exit(self, kind: ExitKind, step: int, exception: str = "") -> float | None:
        """Record an exit at `step`; return the seconds until the restart, or None to give up."""
        if step > self.newest_step:
            self.newest_step = step
            self.last_exception = ""
            self.exits.clear()

        if exception and exception == self.last_exception:
            return None

        self.last_exception = exception
        self.exits[kind] += 1

        count = self.exits[kind]
        if kind is ExitKind.BUG and count >= MAX_CRASHES:
            return None
        if count > 1:
            return min(MAX_RESTART_DELAY_S, RESTART_DELAY_S[kind] * 2 ** (count - 2))

        return 0.0


@dataclass
class ProcessSlot:
    """A process that the launcher keeps running: a worker or the forkserver."""

    name: str
    memory: WorkerSlot = field(default_factory=WorkerSlot)
    pid: int = 0
    start_time: float = 0.0  # start time of the process (monotonic)
    budget: RestartBudget = field(default_factory=RestartBudget)


class SignalPipe:
    """Collects signals. The descriptor `reader` becomes readable when a signal arrives."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(writer, False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def take_received(self) -> set[int]:
        with suppress(BlockingIOError):
            return set(os.read(self.reader, 65536))
        return set()


class Launcher:
    """The workers, their forkserver, and the reaction to their exits."""

    def __init__(self, signal_pipe: SignalPipe, workers: int) -> None:
        linux.LIBC.prctl(linux.SET_CHILD_SUBREAPER, 1)
        self.signals = signal_pipe
        self.cgroup = MemoryCgroup()
        name = os.environ.get(POD_NAME) or socket.gethostname()
        self.slots = [ProcessSlot(f"{name}/{index}" if index else name) for index in range(workers)]
        self.forkserver_slot = ProcessSlot("the process that loads torch for the workers")
        self.oom_kills = self.cgroup.count_oom_kills()
        self.starts = 0
        self.exit_code: int | None = None  # exit code of the launcher once all children have exited
        self.deadline = NEVER
        self.name = name
        self.usage = UsageSampler()
        self._start_forkserver()

    def run(self, spec: "TrainingSpec") -> int:
        """Run the workers until the run is complete or this pod must give up; return the exit
        code."""
        self.spec = spec
        self.forkserver.send_spec(spec)

        while self.exit_code is None or self._has_children():
            self._start_due_processes()
            self._wait_for_event()
            self._report_usage()
            if self.signals.take_received() & STOP_SIGNALS:
                self._shut_down(
                    exit_codes.TERMINATED, signals.LAUNCHER_SHARE * signals.read_grace_period()
                )

            exits = self._reap()
            # called after `_reap`, because by then the forkserver has announced every worker that
            # was reaped
            self._take_started()
            for pid, code in exits:
                self._on_exit(pid, code)

            if time.monotonic() >= self.deadline:
                self._kill_workers()

        return self.exit_code

    def _start_forkserver(self) -> None:
        self.forkserver = Forkserver(
            [slot.memory for slot in self.slots], self.forkserver_slot.memory
        )
        self.forkserver_slot.pid = self.forkserver.pid
        self.forkserver_slot.start_time = NEVER

    def _start_due_processes(self) -> None:
        """Start the processes whose start time has come."""
        now = time.monotonic()
        if self.exit_code is not None:
            return
        if self.forkserver_slot.start_time <= now:
            self._start_forkserver()
            self.forkserver.send_spec(self.spec)
        for index, slot in enumerate(self.slots):
            if self.forkserver_slot.pid and slot.start_time <= now:
                self.forkserver.request(index)
                slot.start_time = NEVER

    def _wait_for_event(self) -> None:
        """Wait for a signal, a new worker, the next start time or the deadline."""
        wake_times = [self.deadline]
        if self.exit_code is None:
            wake_times.append(self.usage.next_sample_time)
            wake_times += (
                [self.forkserver_slot.start_time]
                if not self.forkserver_slot.pid
                else [slot.start_time for slot in self.slots]
            )

        seconds = max(0.0, min(wake_times) - time.monotonic())
        sources = [
            self.signals.reader,
            *([self.forkserver.socket] if self.forkserver_slot.pid else []),
        ]
        select.select(sources, [], [], None if seconds == NEVER else seconds)

    def _report_usage(self) -> None:
        """Send the use of CPU, memory and GPUs to the coordinator, about once a minute."""
        if self.exit_code is not None:
            return
        usage = self.usage.sample()
        if usage:
            _report_usage_to_coordinator(self.name, usage)

    def _reap(self) -> list[tuple[int, int]]:
        """Reap the children that have exited, and kill their process groups. Return (pid, exit
        code) of each child; the exit code -N means that signal N killed it."""
        exits = []
        with suppress(ChildProcessError):
            while child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = child.si_pid
                # the signal cannot reach another process, because the pid of a zombie is not reused
                if pid != self.forkserver_slot.pid and os.getpgid(pid) == pid:
                    send_signal(-pid, signal.SIGKILL)
                exits.append((pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        return exits

    def _take_started(self) -> None:
        for index, pid in self.forkserver.take_started():
            self.slots[index].pid = pid
            self.starts += 1
            if self.exit_code is not None:
                send_signal(pid, signal.SIGTERM)

    def _on_exit(self, pid: int, code: int) -> None:
        if pid == self.forkserver_slot.pid:
            self.forkserver_slot.pid = 0
            for index in self.forkserver.requested_indices:
                self.slots[index].start_time = 0.0
            if self.exit_code is None:
                self._restart(self.forkserver_slot, code, self.starts)
        for slot in self.slots:
            if slot.pid == pid:
                slot.pid = 0
                self._restart(slot, code, max(slot.memory.step[0] for slot in self.slots))

    def _restart(self, slot: ProcessSlot, code: int, step: int) -> None:
        """Schedule the restart of a process that has exited, or end the launcher."""
        kind, cause, last_words = self._classify_exit(slot, code)

        if code in FINAL_EXIT_CODES:
            self._shut_down(
                FINAL_EXIT_CODES[code],
                signals.read_grace_period() if code else COMPLETION_TIMEOUT_S,
            )
        elif self.exit_code is None:
            delay = slot.budget.record_exit(
                kind, step, last_words if code == WORKLOAD_ERROR else ""
            )
            if delay is None:
                self._give_up(
                    slot,
                    code,
                    f"{cause}, {MAX_CRASHES} times without a newer step (now {step})",
                    last_words,
                )
            else:
                slot.start_time = time.monotonic() + delay
                delay_text = f" in {delay:g} s" if delay else ""
                say(f"{slot.name} {cause}: restarting it{delay_text}")
                self._start_due_processes()

            if kind is ExitKind.BUG and code not in (1, WORKLOAD_ERROR):
                # the launcher reports this error, because the process was not able to do so
                _report_to_coordinator(slot.name, f"{cause}\n{last_words}", 1)

    def _give_up(self, slot: ProcessSlot, code: int, cause: str, last_words: str) -> None:
        """Report why the launcher does not restart a process, and end the launcher."""
        from rekindle.step import fail

        if code == WORKLOAD_ERROR:
            error = CodeError(f"twice without a newer step: {last_words}")
            _report_to_coordinator(slot.name, str(error), error.exit_code)
            fail(error)
            return self._shut_down(error.exit_code, signals.read_grace_period())
        fail(RekindleError(f"{slot.name} {cause}. The last time:", *last_words.splitlines()))
        self._shut_down(1, signals.read_grace_period())

    def _classify_exit(self, slot: ProcessSlot, code: int) -> tuple[ExitKind, str, str]:
        """Return the kind of an exit, its cause as text, and the process's last words."""
        kind = EXIT_KINDS.get(code, ExitKind.BUG)
        last_words = slot.memory.last_words()

        if code < 0:
            cause = f"was ended by {_signal_name(-code)}"
        else:
            cause = f"ended with code {code}"

        cause = "raised an exception" if code == WORKLOAD_ERROR else cause
        if code < 0 and last_words:
            # the launcher prints the last words, because the crashed process could not
            say(*last_words.splitlines())

        earlier_kills = self.oom_kills
        self.oom_kills = self.cgroup.count_oom_kills()
        if self.oom_kills > earlier_kills and code < 0:
            kind = ExitKind.BUG
            cause = "was OOM-killed"
            limit = self.cgroup.format_limit()
            last_words = (
                f"Its pod may use {limit}, including the hot snapshots in /dev/shm. Raise"
                " cluster.pods.train.memory, or lower train.batch_size (this changes the result)."
            )

        return kind, cause, last_words

    def _shut_down(self, code: int, seconds: float) -> None:
        """Start no more processes, send SIGTERM to the workers unless `code` is 0, and let `run`
        return `code` within `seconds`."""
        if self.exit_code in (None, exit_codes.TERMINATED) or code == 0:
            self.exit_code = code
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        if self.forkserver_slot.pid:
            self.forkserver.end()
        for slot in self.slots:
            if code and slot.pid:
                send_signal(slot.pid, signal.SIGTERM)

    def _kill_workers(self) -> None:
        self.deadline = NEVER
        for slot in self.slots:
            if slot.pid:
                say(f"{slot.name} is killed: it did not exit in time")
                send_signal(slot.pid, signal.SIGKILL)

    def _has_children(self) -> bool:
        """Return True while children are alive. Kills the remaining children once all workers have
        exited."""
        children = list_children()
        if not self.forkserver_slot.pid and not any(slot.pid for slot in self.slots):
            for pid in children:
                send_signal(pid, signal.SIGKILL)
        return bool(children)


def _report_to_coordinator(name: str, message: str, code: int) -> None:
    """Report to the coordinator, if the run has one, why a process ends."""
    from rekindle.training.membership.client import report_error
    from rekindle.training.membership.protocol import coordinator_address

    coordinator = coordinator_address()
    if coordinator:
        report_error(coordinator, name, message, code, timeout=1)


def _report_usage_to_coordinator(name: str, usage: Mapping[str, float]) -> None:
    """Send the event `usage`; it is lost if the coordinator does not answer."""
    from rekindle.training.membership.client import send_single_message
    from rekindle.training.membership.protocol import coordinator_address

    with suppress(OSError, RekindleError):
        coordinator = coordinator_address()
        if coordinator:
            message = {"event": "usage", "name": name, **usage}
            send_single_message(coordinator, message, USAGE_TIMEOUT_S)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_name(number: int) -> str:
    """Return a signal's name, or "signal N" for a real-time signal."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def list_children() -> list[int]:
    """Return the pids of the children of this process."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(stat.parent.name))
    return children


def count_workers() -> int:
    """Return the number of workers of this pod from PET_NPROC_PER_NODE, which the training operator
    sets. Raises ConfigError."""
    text = os.environ.get("PET_NPROC_PER_NODE", "")
    if text.isdecimal():
        number = read_integer("PET_NPROC_PER_NODE", 1, 0, MAX_WORKERS)
    else:
        # the variable may contain a word that torchrun accepts, such as `auto`
        number = 1

    if number < 1 or (number > 1 and not os.environ.get("MASTER_ADDR")):
        raise ConfigError(
            f"PET_NPROC_PER_NODE is {text}: it must be at least 1, and more than one worker needs a"
            " coordinator (MASTER_ADDR). Set nprocPerNode of the job to 1, or give it a Master."
        )
    return number


def _wait_for_interruption(signal_pipe: SignalPipe) -> bool:
    """Wait while the cloud announces an interruption of this node, because workers that start now
    would be lost. Return True after SIGTERM."""
    while notice.is_interruption_announced():
        say("this node is about to be interrupted: no worker is started on it")
        readable, _, _ = select.select([signal_pipe.reader], [], [], 10 * notice.POLL_INTERVAL_S)
        if readable and signal_pipe.take_received() & STOP_SIGNALS:
            return True
    return False


def main(argv: list[str]) -> int:
    signal_pipe = SignalPipe()
    if _wait_for_interruption(signal_pipe):
        return exit_codes.TERMINATED

    notice.start_polling_process()
    try:
        # the forkserver is started first, so that it imports torch while this process parses the
        # flags
        launcher = Launcher(signal_pipe, count_workers())
        from rekindle.training.membership.handshake import read_run_secret
        from rekindle.training.membership.protocol import coordinator_address
        from rekindle.training.spec import TrainingSpec

        signals.read_grace_period()

        if coordinator_address():
            read_run_secret()

        spec = TrainingSpec.from_flags(argv)
        name = snapshot_file.hash_run_name(spec.identity_hash(), spec.checkpoints)
        snapshot_file.remove_stale_files(name)
        code = launcher.run(spec)
    except RekindleError as error:
        from rekindle.step import fail

        _report_to_coordinator(
            os.environ.get(POD_NAME) or socket.gethostname(), str(error), error.exit_code
        )
        return fail(error)

    if code in OBSOLETE_SNAPSHOT_CODES:
        snapshot_file.remove_run_files(name)

    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
