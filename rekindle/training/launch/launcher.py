"""The first process of a worker pod: starts the run's workers, and again, and ends with a code that means what it says.

    python -m rekindle.training.launch.launcher <the same flags as `rekindle step steps.train`>

    a worker ends with               what it was          what follows
    0                                the run is complete  the others end by themselves; exit code 0
    78, 65                           wrong for good       the others are told to leave; exit code 78, 65
    143, by SIGTERM, by SIGKILL      a preemption         started again, the first time at once
    the object store or MLflow away  temporary            started again
    anything else, out of memory     a bug                started again; the third without a newer step: exit code 1

SIGTERM (or SIGINT) is passed on to the workers, which leave in order: exit code 143 within $REKINDLE_GRACE (30)
seconds. PET_NPROC_PER_NODE says how many workers, if it is a number; worker N gets LOCAL_RANK=N. This process imports
no torch, forks workers from one that has it (nursery.py), reaps what they leave behind, and takes all with it.
"""

import signal

if __name__ == "__main__":  # kept until somebody listens; else a PID 1 would never hear of it
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

from rekindle.errors import ConfigError, RekindleError, say
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.launch import signals
from rekindle.training.launch.cgroup import Memory
from rekindle.training.launch.forkserver import AWAY, VERDICT, Berth, Nursery

if TYPE_CHECKING:
    from rekindle.training.spec import TrainingSpec as Inputs

BUGS = 3  # deaths without a newer step in between, after which trying again is no use
LONGEST = 30.0  # seconds between two attempts
COMPLETE = 15.0  # seconds in which the other workers hear that the run is complete
OVER = {0, 78, 65}  # codes after which no snapshot is needed; after all others the pod may start again in place
NEVER = float("inf")
STOP = {signal.SIGTERM, signal.SIGINT}


class Fate(Enum):
    """What the end of a worker means."""

    COMPLETE = auto()
    PERMANENT = auto()
    VERDICT = auto()
    PREEMPTED = auto()
    AWAY = auto()
    BUG = auto()


FATES = {0: Fate.COMPLETE, 78: Fate.PERMANENT, 65: Fate.PERMANENT, VERDICT: Fate.VERDICT, AWAY: Fate.AWAY}
FATES |= {143: Fate.PREEMPTED, -signal.SIGTERM: Fate.PREEMPTED, -signal.SIGKILL: Fate.PREEMPTED}  # all else: BUG
PAUSE = {Fate.PREEMPTED: 0.25, Fate.AWAY: 1.0, Fate.BUG: 1.0}  # seconds after the second death; then ever twice


@dataclass
class Budget:
    """How often something may die; only deaths without a newer step in between count."""

    newest: int = -1
    deaths: Counter[Fate] = field(default_factory=Counter)

    def pause(self, fate: Fate, step: int) -> float | None:
        """Seconds until it is started again after this death, at that step; None: no more."""
        if step > self.newest:
            self.newest = step
            self.deaths.clear()
        self.deaths[fate] += 1
        count = self.deaths[fate]
        if fate is Fate.BUG and count >= BUGS:
            return None
        return min(LONGEST, PAUSE[fate] * 2 ** (count - 2)) if count > 1 else 0.0


@dataclass
class Place:
    """Room for one worker."""

    name: str
    berth: Berth = field(default_factory=Berth)
    pid: int = 0
    due: float = 0.0  # when a worker is to be asked for
    budget: Budget = field(default_factory=Budget)


class Ears:
    """Hears signals, and wakes whoever waits for `reader`."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(writer, False)
        for number in (*STOP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)

    def heard(self) -> set[int]:
        """The signals since the last call."""
        with suppress(BlockingIOError):
            return set(os.read(self.reader, 65536))
        return set()


class Launcher:
    """The workers, their nursery, and what becomes of them."""

    def __init__(self, ears: Ears, workers: int) -> None:
        signals.LIBC.prctl(signals.SET_CHILD_SUBREAPER, 1)
        self.ears, self.memory = ears, Memory()
        name = os.environ.get("POD_NAME") or socket.gethostname()
        self.places = [Place(f"{name}/{slot}" if slot else name) for slot in range(workers)]
        self.home = Place("the process that loads torch for the workers")
        self.kills, self.births = self.memory.kills(), 0
        self.code: int | None = None  # to end with, once everybody is gone
        self.deadline = NEVER
        self._open()

    def run(self, inputs: "Inputs") -> int:
        """Until the run is complete, or cannot go on here; gives the exit code."""
        self.inputs = inputs
        self.nursery.begin(inputs)
        while self.code is None or self._remain():
            self._start()
            self._wait()
            if self.ears.heard() & STOP:
                self._end(143, signals.LAUNCHER * signals.grace())
            dead = self._reap()
            self._welcome()  # not earlier: whoever died has been announced before
            for pid, code in dead:
                self._bury(pid, code)
            if time.monotonic() >= self.deadline:
                self._kill()
        return self.code

    def _open(self) -> None:
        self.nursery = Nursery([place.berth for place in self.places], self.home.berth)
        self.home.pid, self.home.due = self.nursery.pid, NEVER

    def _start(self) -> None:
        """Whoever is due."""
        now = time.monotonic()
        if self.code is not None:
            return
        if self.home.due <= now:
            self._open()
            self.nursery.begin(self.inputs)
        for slot, place in enumerate(self.places):
            if self.home.pid and place.due <= now:
                self.nursery.ask(slot)
                place.due = NEVER

    def _wait(self) -> None:
        """For a signal, a birth, or the time at which somebody is due."""
        due = [self.deadline]
        if self.code is None:
            due += [self.home.due] if not self.home.pid else [place.due for place in self.places]
        seconds = max(0.0, min(due) - time.monotonic())
        sources = [self.ears.reader, *([self.nursery.line] if self.home.pid else [])]
        select.select(sources, [], [], None if seconds == NEVER else seconds)

    def _reap(self) -> list[tuple[int, int]]:
        """Who died, with the exit code (-N: by signal N). The process group of a worker goes with it."""
        dead = []
        with suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = found.si_pid
                if pid != self.home.pid and os.getpgid(pid) == pid:  # a zombie's number is not given away
                    _signal(-pid, signal.SIGKILL)
                dead.append((pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        return dead

    def _welcome(self) -> None:
        for slot, pid in self.nursery.born():
            self.places[slot].pid = pid
            self.births += 1
            if self.code is not None:
                _signal(pid, signal.SIGTERM)

    def _bury(self, pid: int, code: int) -> None:
        """What follows from a death."""
        if pid == self.home.pid:
            self.home.pid = 0
            for slot in self.nursery.asked:
                self.places[slot].due = 0.0
            if self.code is None:
                self._again(self.home, code, self.births)
        for place in self.places:
            if place.pid == pid:
                place.pid = 0
                self._again(place, code, max(place.berth.step[0] for place in self.places))

    def _again(self, place: Place, code: int, step: int) -> None:
        """Start it again, or not."""
        fate, why, words = self._cause(place, code)
        if fate is Fate.COMPLETE:
            self._end(0, COMPLETE, tell=False)
        elif fate in (Fate.PERMANENT, Fate.VERDICT):
            self._end(code if fate is Fate.PERMANENT else 1, signals.grace())
        elif self.code is None:
            pause = place.budget.pause(fate, step)
            if pause is None:
                from rekindle.step import fail

                times = f"{BUGS} times without a newer step (now {step})"
                fail(RekindleError(f"{place.name} {why}, {times}. The last time:\n{words}"))
                self._end(1, signals.grace())
            else:
                place.due = time.monotonic() + pause
                when = f" in {pause:g} s" if pause else ""
                say(f"{place.name} {why}: it is started again{when}")
                self._start()
            if fate is Fate.BUG and code != 1:
                from rekindle.training.membership.client import coordinator_address, report

                if where := coordinator_address():
                    report(where, place.name, f"{why}\n{words}", 1, patience=1)  # which it could not do itself

    def _cause(self, place: Place, code: int) -> tuple[Fate, str, str]:
        """What a death means, why it was, and the last words."""
        fate, words = FATES.get(code, Fate.BUG), place.berth.words()
        why = f"was ended by {_name(-code)}" if code < 0 else f"ended with code {code}"
        if code < 0 and words:
            say(words)  # which a crash could not say there
        kills, self.kills = self.kills, self.memory.kills()
        if self.kills > kills and code < 0:
            fate, why = Fate.BUG, "was killed for want of memory"
            words = (
                f"Its pod may use {self.memory.limit()}, the hot checkpoints in /dev/shm included. Raise "
                "cluster.pods.train.memory; or lower train.batch_size, which changes the result."
            )
        return fate, why, words

    def _end(self, code: int, seconds: float, *, tell: bool = True) -> None:
        """Start nobody any more, tell those who live to leave, and be gone in so many seconds."""
        if self.code in (None, 143) or code == 0:
            self.code = code
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        if self.home.pid:
            self.nursery.end()
        for place in self.places:
            if tell and place.pid:
                _signal(place.pid, signal.SIGTERM)

    def _kill(self) -> None:
        self.deadline = NEVER
        for place in self.places:
            if place.pid:
                say(f"{place.name} is killed: it has not left in time")
                _signal(place.pid, signal.SIGKILL)

    def _remain(self) -> bool:
        """Whether we have children; once no worker is among them, they are ended."""
        found = _children()
        if not self.home.pid and not any(place.pid for place in self.places):
            for pid in found:
                _signal(pid, signal.SIGKILL)
        return bool(found)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _name(number: int) -> str:
    """A signal's name; those of real time have none."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def count() -> int:
    """Workers of this pod, as the training operator says: a number, or "auto". Raises ConfigError."""
    text = os.environ.get("PET_NPROC_PER_NODE", "")
    number = int(text) if text.isdecimal() else 1
    if number < 1 or (number > 1 and not os.environ.get("MASTER_ADDR")):
        raise ConfigError(
            f"PET_NPROC_PER_NODE is {text}: it must be at least 1, and more than one worker needs a coordinator "
            "(MASTER_ADDR). Set nprocPerNode of the job to 1, or give it a Master."
        )
    return number


def main(argv: list[str]) -> int:
    """The command."""
    ears = Ears()
    try:
        launcher = Launcher(ears, count())  # torch is loaded while we read the flags
        from rekindle.training.spec import TrainingSpec as Inputs

        signals.grace()
        inputs = Inputs.from_flags(argv)
        name = snapshot_file.run_name(inputs.identity_hash(), inputs.checkpoints)
        snapshot_file.sweep(name)
        code = launcher.run(inputs)
    except RekindleError as error:
        from rekindle.step import fail

        return fail(error)
    if code in OVER:
        snapshot_file.discard(name)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
