"""Executes a schedule: starts a real run, does to it what the schedule says, and starts again what dies.

It plays Kubernetes: a pod that ends with anything but 0, 78 or 65 is started again under its name after a short while.
"""

import hashlib
import itertools
import json
import os
import queue
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from steps.storage import Store
from tests.chaos.faults import Proxy
from tests.chaos.schedule import DAMAGES, FAULTS, FOR_EVER, Act, Moment, Schedule
from tests.chaos.watch import Watch
from tests.steps.training.crew import Crew, Member

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
FINAL = (0, 78, 65)  # exit codes after which a pod is not started again
LIMIT = 100.0  # seconds a run may take
FROZEN = 3.0  # seconds after which the operator removes a pod that is stopped for ever
TOLD = 4.0  # seconds after the end of the run until the operator ends the pods that are left

Shared = Path("/dev/shm")


@dataclass
class Pod:
    """A name under which processes come and go."""

    name: str
    member: Member | None = None
    due: float = 0.0  # when to start it (again)
    hurt: set[signal.Signals] = field(default_factory=set)  # what the present process was sent
    started: float = 0.0

    @property
    def lives(self) -> bool:
        return self.member is not None and self.member.process.exitcode is None


class Execution:
    """One execution of a schedule."""

    def __init__(self, schedule: Schedule, crew: Crew, proxy: Proxy, store: Store, argv: list[str], run: str) -> None:
        self.schedule, self.crew, self.proxy, self.store, self.argv, self.run = schedule, crew, proxy, store, argv, run
        self.watch = Watch(crew.logs / "journal")
        self.coordinator = Pod("coordinator")
        self.pods = [Pod(f"w{number}") for number in range(schedule.settings["workers"])]
        self.problems: list[str] = []
        self.done: Counter[str] = Counter()
        self.signals = 0
        self.faulty_until = 0.0
        self._delays = itertools.cycle(schedule.delays)
        self._later: list[tuple[float, str, list[int]]] = []  # (when, what, pids): what else to send
        self.waiting: dict[Moment, list[Act]] = {}
        self._fired: queue.SimpleQueue[tuple[Moment, threading.Event]] = queue.SimpleQueue()
        for act in schedule.acts:
            self.waiting.setdefault(act.when, []).append(act)

    def execute(self) -> None:
        """Run it to its end; fills `problems`."""
        for moment in self.waiting:
            if moment.kind == "request":
                self.proxy.hold(moment.request, moment.number, lambda moment=moment: self._hold(moment))
        self.began = time.monotonic()
        self.watch.say("\n".join(self.schedule.words()))
        while not self._over():
            self.watch.poll()
            self._restart()
            self._act()
            self._send_later()
            time.sleep(0.002)
            if time.monotonic() > self.began + LIMIT:
                self.problems.append(f"it is not done after {LIMIT:.0f} s")
                self._dump()
                break
        self._end()
        self.watch.poll()

    @property
    def everybody(self) -> list[Pod]:
        return [self.coordinator, *self.pods]

    def _over(self) -> bool:
        """Whether the coordinator has ended for good; notes all other ends."""
        for pod in self.everybody:
            if not pod.member or (code := pod.member.process.exitcode) is None:
                continue
            self._ended(pod, code)
            if code not in FINAL:
                pod.due = time.monotonic() + next(self._delays)
            elif pod is self.coordinator:
                return True
            else:
                pod.due = float("inf")
        return False

    def _ended(self, pod: Pod, code: int) -> None:
        pod.member = None
        self.watch.say(f"{pod.name} ended with {code}")
        allowed = {0} | ({143} if signal.SIGTERM in pod.hurt else set())
        if pod.hurt & {signal.SIGKILL}:
            allowed |= {-9, 137, 1}  # a launcher whose child was killed, says so
        if signal.SIGTERM in pod.hurt and time.monotonic() < pod.started + 2:
            allowed.add(-15)  # it could not heed the signal yet
        if time.monotonic() < self.faulty_until:
            allowed.add(1)
        if code not in allowed:
            self.problems.append(f"{pod.name} ended with {code}")

    def _restart(self) -> None:
        for pod in self.everybody:
            if pod.member or time.monotonic() < pod.due:
                continue
            pod.hurt, pod.started = set(), time.monotonic()
            store = {"S3_ENDPOINT_URL": self.proxy.url}
            if pod is self.coordinator:
                pod.member = self.crew.coordinator(self.argv, **store)
            else:
                start = self.crew.launcher if self.schedule.launchers else self.crew.worker
                pod.member = start(pod.name, self.argv, **store)
            self.watch.add(pod.member.log, pod.name)
            self.watch.say(f"{pod.name} is started ({pod.member.process.pid})")

    # what the schedule says

    def _hold(self, moment: Moment) -> None:
        done = threading.Event()
        self._fired.put((moment, done))
        done.wait(5)

    def _act(self) -> None:
        now = time.monotonic()
        for moment in [moment for moment in self.waiting if moment.kind != "request" and self._is(moment, now)]:
            for act in self.waiting.pop(moment):
                self._do(act)
        while not self._fired.empty():
            moment, done = self._fired.get()
            for act in self.waiting.pop(moment, []):
                self._do(act)
            done.set()

    def _is(self, moment: Moment, now: float) -> bool:
        if moment.kind == "start":
            return now >= self.began + moment.plus
        if moment.kind == "step":
            at = next((step.at for step in self.watch.steps if step.step >= moment.number), None)
        else:
            at = next((at for at, number in self.watch.generations if number >= moment.number), None)
        return at is not None and time.time() >= at + moment.plus

    def _do(self, act: Act) -> None:
        self.watch.say(f"ACT {act.words()}")
        self.done[act.verb] += 1
        if act.verb in FAULTS:
            self.proxy.fault(act.verb, act.seconds)
            self.faulty_until = time.monotonic() + act.seconds + 30
        elif act.verb == "join":
            self.pods.append(Pod(f"w{len(self.pods)}"))
        elif act.verb in DAMAGES:
            self._damage(act.verb)
        elif act.target == "coordinator":
            self._send(self.coordinator, SIGNALS[act.verb], "launcher")
            self.coordinator.due = time.monotonic() + act.seconds
        else:
            number = SIGNALS[act.verb]
            living = [pod for pod in self.pods if pod.lives]
            chosen = {victim % len(living) for victim in act.victims} if living else set()
            victims = living if act.target == "all" else [living[at] for at in sorted(chosen)]
            if act.target == "all" and act.verb != "term" and self.coordinator.lives:
                victims = [self.coordinator, *victims]
            for pod in victims:
                self._send(pod, number, act.target, act.seconds)

    def _send(self, pod: Pod, number: signal.Signals, target: str, seconds: float = 0.0) -> None:
        pids = self._processes(pod, target)
        pod.hurt.add(number)
        self.watch.say(f"{number.name} to {pod.name} {pids}")
        self.signals += len(pids)
        _signal(pids, number)
        if number == signal.SIGSTOP:
            what = "remove" if seconds == FOR_EVER else "continue"
            self._later.append((time.monotonic() + min(seconds, FROZEN), f"{what} {pod.name}", pids))

    def _processes(self, pod: Pod, target: str) -> list[int]:
        """The process of a pod that is meant by "worker", "nursery", "launcher", or all of them."""
        if not pod.lives or not pod.member:
            return []
        pid = pod.member.process.pid or 0
        if not self.schedule.launchers or pod is self.coordinator or target == "launcher":
            return [pid]
        try:
            nurseries = psutil.Process(pid).children()
            workers = [worker for nursery in nurseries for worker in nursery.children()]
        except psutil.NoSuchProcess:
            return [pid]
        found = {"nursery": nurseries, "worker": workers}.get(target)
        if found is None:
            return [pid, *(p.pid for p in nurseries), *(p.pid for p in workers)]
        return [process.pid for process in found] or [pid]

    def _send_later(self) -> None:
        due = [entry for entry in self._later if time.monotonic() >= entry[0]]
        self._later = [entry for entry in self._later if entry not in due]
        for _, what, pids in due:
            verb, name = what.split()
            self.watch.say(f"{verb} {name} {pids}")
            if verb == "remove":
                pod = next(pod for pod in self.everybody if pod.name == name)
                pod.hurt.add(signal.SIGKILL)
            _signal(pids, signal.SIGKILL if verb == "remove" else signal.SIGCONT)

    def _damage(self, what: str) -> None:
        """Kill all, and damage the newest copy of the state before anybody is back."""
        for pod in self.everybody:
            if pod.lives and pod.member:
                self._send(pod, signal.SIGKILL, "all")
        for pod in self.everybody:
            if pod.member:
                pod.member.process.join(5)
        if what == "flip chunk":
            self._flip_chunk()
            return
        files = sorted(Shared.glob(f"rekindle-{self.run}-*"), key=lambda path: path.stat().st_mtime)
        self.watch.say(f"{what}: {[path.name for path in files]}")
        for path in files if what == "lose hot" else files[-1:]:
            if what == "lose hot":
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)

    def _flip_chunk(self) -> None:
        prefix = self.argv_value("checkpoints")
        names = sorted(entry.key for entry in self.store.list(f"{prefix}/manifests/"))
        if not names:
            return
        key = f"{prefix}/chunks/{json.loads(self.store.get(names[-1]))['chunks'][0]}"
        data = bytearray(self.store.get(key))
        data[len(data) // 2] ^= 1
        self.store.put(key, data)
        self.watch.say(f"flipped a byte of {key}, of {names[-1]}")

    def argv_value(self, name: str) -> str:
        """The value of a flag of the run."""
        return next(flag.partition("=")[2] for flag in self.argv if flag.startswith(f"--{name}="))

    # the end

    def _end(self) -> None:
        """All pods end by themselves, or when told to."""
        over = time.monotonic()
        frozen = {name.split()[1] for _, name, _ in self._later}
        told = False
        for pod in self.pods:
            if pod.name in frozen and pod.lives:
                self._send(pod, signal.SIGKILL, "all")
        while living := [pod for pod in self.pods if pod.member]:
            self.watch.poll()
            for pod in living:
                if pod.member and (code := pod.member.process.exitcode) is not None:
                    self._ended(pod, code)
            if not told and time.monotonic() > over + TOLD:
                told = True
                for pod in living:
                    if pod.lives:
                        self._send(pod, signal.SIGTERM, "launcher")
            if time.monotonic() > over + 30:
                self.problems += [f"{pod.name} does not end" for pod in living if pod.lives]
                self._dump()
                return
            time.sleep(0.005)

    def _dump(self) -> None:
        """Where all of them are, into their logs."""
        if not self.schedule.launchers:
            for pod in self.everybody:
                if pod.lives and pod.member:
                    pod.member.send(signal.SIGUSR1)
            time.sleep(0.5)
            self.watch.poll()


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def run_of(identity: str, checkpoints: str) -> str:
    """What names a run's shared memory."""
    return hashlib.sha256(f"{identity}{checkpoints}".encode()).hexdigest()[:12]
