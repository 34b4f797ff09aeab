"""The first process of a worker pod: starts and restarts the run's workers; its exit code says what happened.

    python -m rekindle.training.launch.launcher <the same flags as `rekindle step steps.train`>

    a worker ends with               meaning              reaction
    0                                the run is complete  the others end by themselves; exit code 0
    78, 70, 65                       a permanent error    the others are told to leave; exit code 78, 70, 65
    143, by SIGTERM, by SIGKILL      a preemption         restarted, the first time at once
    no object store, no MLflow       temporary            restarted
    76                               user's exception     restarted; the same again, without a newer step: exit code 70
    anything else, OOM-killed        a bug                restarted; the third without a newer step: exit code 1

SIGTERM (or SIGINT, or the cloud's notice: notice.py) is passed on to the workers, which leave in order: exit code 143
within $REKINDLE_GRACE (30) seconds. PET_NPROC_PER_NODE says how many workers, if it is a number; worker N gets
LOCAL_RANK=N. This process imports no torch, forks workers from one that has it (forkserver.py), reaps all orphans, and
ends all processes with itself.
"""

import signal

if __name__ == "__main__":  # pending until there is a handler: PID 1 would never see it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

import os
import select
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from argolocal.common import linux
from rekindle.errors import CodeError, ConfigError, RekindleError, say
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.launch import notice, signals
from rekindle.training.launch.cgroup import Memory
from rekindle.training.launch.forkserver import AWAY, RAISED, VERDICT, Forkserver, WorkerSlot

if TYPE_CHECKING:
    from rekindle.training.spec import TrainingSpec

BUGS = 3  # crashes without a newer step in between, after which the launcher gives up
LONGEST = 30.0  # seconds between two attempts
COMPLETE = 15.0  # seconds for the other workers to learn that the run is complete
FINAL = {0, 78, 70, 65}  # codes after which no snapshot is needed; after all others the pod may restart in place
NEVER = float("inf")
STOP = {signal.SIGTERM, signal.SIGINT}


class ExitKind(Enum):
    """Why a process is restarted."""

    PREEMPTED = auto()
    AWAY = auto()
    BUG = auto()


ENDS = {0: 0, 78: 78, 70: 70, 65: 65, VERDICT: 1}  # exit code of a worker that ends them all → ours
EXIT_KINDS = {  # of the others; everything else: BUG
    AWAY: ExitKind.AWAY,
    **dict.fromkeys((143, -signal.SIGTERM, -signal.SIGKILL), ExitKind.PREEMPTED),
}
PAUSE = {ExitKind.PREEMPTED: 0.25, ExitKind.AWAY: 1.0, ExitKind.BUG: 1.0}  # seconds after the second exit; then doubled


@dataclass
class Budget:
    """Restarts of one process; only exits without a newer step in between count."""

    newest: int = -1
    exits: Counter[ExitKind] = field(default_factory=Counter)
    exception: str = ""  # of the workload's code, that the last exit was caused by

    def pause(self, kind: ExitKind, step: int, exception: str = "") -> float | None:
        """Seconds until the restart after an exit at that step; None: give up."""
        if step > self.newest:
            self.newest, self.exception = step, ""
            self.exits.clear()
        if exception and exception == self.exception:
            return None
        self.exception = exception
        self.exits[kind] += 1
        count = self.exits[kind]
        if kind is ExitKind.BUG and count >= BUGS:
            return None
        return min(LONGEST, PAUSE[kind] * 2 ** (count - 2)) if count > 1 else 0.0


@dataclass
class Slot:
    """One worker to keep running, or the forkserver."""

    name: str
    memory: WorkerSlot = field(default_factory=WorkerSlot)
    pid: int = 0
    due: float = 0.0  # when to start it
    budget: Budget = field(default_factory=Budget)


class SignalPipe:
    """Collects signals, and makes `reader` readable."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(writer, False)
        for number in (*STOP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)

    def received(self) -> set[int]:
        """The signals since the last call."""
        with suppress(BlockingIOError):
            return set(os.read(self.reader, 65536))
        return set()


class Launcher:
    """The workers, their forkserver, and the reaction to their exits."""

    def __init__(self, signal_pipe: SignalPipe, workers: int) -> None:
        linux.LIBC.prctl(linux.SET_CHILD_SUBREAPER, 1)
        self.signals, self.cgroup = signal_pipe, Memory()
        name = os.environ.get("POD_NAME") or socket.gethostname()
        self.slots = [Slot(f"{name}/{index}" if index else name) for index in range(workers)]
        self.loader = Slot("the process that loads torch for the workers")
        self.oom_kills, self.starts = self.cgroup.kills(), 0
        self.code: int | None = None  # to exit with, once all children have exited
        self.deadline = NEVER
        self._open()

    def run(self, spec: "TrainingSpec") -> int:
        """Until the run is complete, or cannot continue here; returns the exit code."""
        self.spec = spec
        self.forkserver.begin(spec)
        while self.code is None or self._has_children():
            self._start()
            self._wait()
            if self.signals.received() & STOP:
                self._end(143, signals.LAUNCHER * signals.grace())
            exits = self._reap()
            self._take_started()  # not earlier: a process that has exited was announced before
            for pid, code in exits:
                self._on_exit(pid, code)
            if time.monotonic() >= self.deadline:
                self._kill()
        return self.code

    def _open(self) -> None:
        self.forkserver = Forkserver([slot.memory for slot in self.slots], self.loader.memory)
        self.loader.pid, self.loader.due = self.forkserver.pid, NEVER

    def _start(self) -> None:
        """Start what is due."""
        now = time.monotonic()
        if self.code is not None:
            return
        if self.loader.due <= now:
            self._open()
            self.forkserver.begin(self.spec)
        for index, slot in enumerate(self.slots):
            if self.loader.pid and slot.due <= now:
                self.forkserver.request(index)
                slot.due = NEVER

    def _wait(self) -> None:
        """For a signal, a new worker, or the time at which one is due."""
        due = [self.deadline]
        if self.code is None:
            due += [self.loader.due] if not self.loader.pid else [slot.due for slot in self.slots]
        seconds = max(0.0, min(due) - time.monotonic())
        sources = [self.signals.reader, *([self.forkserver.line] if self.loader.pid else [])]
        select.select(sources, [], [], None if seconds == NEVER else seconds)

    def _reap(self) -> list[tuple[int, int]]:
        """(pid, exit code) of exited children (-N: by signal N). A worker's process group is killed with it."""
        exits = []
        with suppress(ChildProcessError):
            while child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = child.si_pid
                if pid != self.loader.pid and os.getpgid(pid) == pid:  # the pid of a zombie is not reused
                    _signal(-pid, signal.SIGKILL)
                exits.append((pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        return exits

    def _take_started(self) -> None:
        for index, pid in self.forkserver.started():
            self.slots[index].pid = pid
            self.starts += 1
            if self.code is not None:
                _signal(pid, signal.SIGTERM)

    def _on_exit(self, pid: int, code: int) -> None:
        """React to an exit."""
        if pid == self.loader.pid:
            self.loader.pid = 0
            for index in self.forkserver.requested:
                self.slots[index].due = 0.0
            if self.code is None:
                self._restart(self.loader, code, self.starts)
        for slot in self.slots:
            if slot.pid == pid:
                slot.pid = 0
                self._restart(slot, code, max(slot.memory.step[0] for slot in self.slots))

    def _restart(self, slot: Slot, code: int, step: int) -> None:
        """Restart it, or give up."""
        kind, why, last_words = self._cause(slot, code)
        if code in ENDS:
            self._end(ENDS[code], signals.grace() if code else COMPLETE)
        elif self.code is None:
            pause = slot.budget.pause(kind, step, last_words if code == RAISED else "")
            if pause is None:
                self._give_up(slot, code, f"{why}, {BUGS} times without a newer step (now {step})", last_words)
            else:
                slot.due = time.monotonic() + pause
                when = f" in {pause:g} s" if pause else ""
                say(f"{slot.name} {why}: restarting it{when}")
                self._start()
            if kind is ExitKind.BUG and code not in (1, RAISED):
                _report(slot.name, f"{why}\n{last_words}", 1)  # which it could not do itself

    def _give_up(self, slot: Slot, code: int, why: str, last_words: str) -> None:
        """Say why a process is not restarted, and end."""
        from rekindle.step import fail

        if code == RAISED:
            error = CodeError(f"twice without a newer step: {last_words}")
            _report(slot.name, str(error), error.exit_code)
            fail(error)
            return self._end(error.exit_code, signals.grace())
        fail(RekindleError(f"{slot.name} {why}. The last time:\n{last_words}"))
        self._end(1, signals.grace())

    def _cause(self, slot: Slot, code: int) -> tuple[ExitKind, str, str]:
        """What an exit means, its cause in words, and the last words."""
        kind, last_words = EXIT_KINDS.get(code, ExitKind.BUG), slot.memory.last_words()
        why = f"was ended by {_name(-code)}" if code < 0 else f"ended with code {code}"
        why = "raised an exception" if code == RAISED else why
        if code < 0 and last_words:
            say(last_words)  # a crashed process could not print them
        kills, self.oom_kills = self.oom_kills, self.cgroup.kills()
        if self.oom_kills > kills and code < 0:
            kind, why = ExitKind.BUG, "was OOM-killed"
            last_words = (
                f"Its pod may use {self.cgroup.limit()}, the hot checkpoints in /dev/shm included. Raise "
                "cluster.pods.train.memory; or lower train.batch_size, which changes the result."
            )
        return kind, why, last_words

    def _end(self, code: int, seconds: float) -> None:
        """Restart nothing, tell the workers to leave unless the run is complete, and exit within so many seconds."""
        if self.code in (None, 143) or code == 0:
            self.code = code
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        if self.loader.pid:
            self.forkserver.end()
        for slot in self.slots:
            if code and slot.pid:
                _signal(slot.pid, signal.SIGTERM)

    def _kill(self) -> None:
        self.deadline = NEVER
        for slot in self.slots:
            if slot.pid:
                say(f"{slot.name} is killed: it has not left in time")
                _signal(slot.pid, signal.SIGKILL)

    def _has_children(self) -> bool:
        """Whether we have children; once no worker is among them, they are killed."""
        children = _children()
        if not self.loader.pid and not any(slot.pid for slot in self.slots):
            for pid in children:
                _signal(pid, signal.SIGKILL)
        return bool(children)


def _report(name: str, message: str, code: int) -> None:
    """Tell the coordinator, if there is one, why a worker ends."""
    from rekindle.training.membership.client import report_error
    from rekindle.training.membership.protocol import coordinator_address

    if coordinator := coordinator_address():
        report_error(coordinator, name, message, code, timeout=1)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _name(number: int) -> str:
    """A signal's name; real-time signals have none."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _children() -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(stat.parent.name))
    return children


def count() -> int:
    """Workers of this pod, as the training operator sets it: a number, or "auto". Raises ConfigError."""
    text = os.environ.get("PET_NPROC_PER_NODE", "")
    number = int(text) if text.isdecimal() else 1
    if number < 1 or (number > 1 and not os.environ.get("MASTER_ADDR")):
        raise ConfigError(
            f"PET_NPROC_PER_NODE is {text}: it must be at least 1, and more than one worker needs a coordinator "
            "(MASTER_ADDR). Set nprocPerNode of the job to 1, or give it a Master."
        )
    return number


def _must_stay_away(signal_pipe: SignalPipe) -> bool:
    """Wait while this node is about to be taken; True if it is: SIGTERM came. A worker started now would be lost."""
    while notice.announced():
        say("this node is about to be taken: no worker starts on it")
        if select.select([signal_pipe.reader], [], [], 10 * notice.PERIOD)[0] and signal_pipe.received() & STOP:
            return True
    return False


def main(argv: list[str]) -> int:
    """The command."""
    signal_pipe = SignalPipe()
    if _must_stay_away(signal_pipe):
        return 143
    notice.watch()
    try:
        launcher = Launcher(signal_pipe, count())  # torch is loaded while we parse the flags
        from rekindle.training.membership.handshake import run_secret
        from rekindle.training.membership.protocol import coordinator_address
        from rekindle.training.spec import TrainingSpec

        signals.grace()
        if coordinator_address():
            run_secret()
        spec = TrainingSpec.from_flags(argv)
        name = snapshot_file.run_name(spec.identity_hash(), spec.checkpoints)
        snapshot_file.sweep(name)
        code = launcher.run(spec)
    except RekindleError as error:
        from rekindle.step import fail

        _report(os.environ.get("POD_NAME") or socket.gethostname(), str(error), error.exit_code)
        return fail(error)
    if code in FINAL:
        snapshot_file.discard(name)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
