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

from rekindle.storage import Store
from rekindle.training.checkpoint import snapshot_file
from tests.chaos.faults import Proxy
from tests.chaos.schedule import DAMAGES, FAULTS, FOR_EVER, Act, Moment, Schedule
from tests.chaos.watch import Watch
from tests.rekindle.training.crew import Crew, Member

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
FINAL = (0, 78, 65)  # exit codes after which a pod is not started again
STILL = 60.0  # seconds in which something must happen: a step, a generation, a start or an end
FROZEN = 3.0  # seconds after which the operator removes a pod that is stopped for ever
TOLD = 15.0  # seconds after the end of the run until the operator ends the pods that are left

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
        self.pods = [Pod(f"w{number}") for number in range(schedule.settings["workers"] // schedule.per_pod)]
        self.problems: list[str] = []
        self.done: Counter[str] = Counter()  # what was done and when, in the words of `everything`
        self.missed = 0  # acts that came when there was nobody to do it to
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
            self._restart(self.everybody)
            self._act()
            self._send_later()
            time.sleep(0.002)
            if time.time() > self.watch.moved + STILL:
                self.problems.append(f"it stands still: nothing happened for {STILL:.0f} s")
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
        if signal.SIGKILL in pod.hurt:
            allowed.add(-9)
        if signal.SIGTERM in pod.hurt and time.monotonic() < pod.started + 2:
            allowed.add(-15)  # it could not heed the signal yet
        if time.monotonic() < self.faulty_until:
            allowed.add(1)
        if code not in allowed:
            self.problems.append(f"{pod.name} ended with {code}")

    def _restart(self, pods: list[Pod]) -> None:
        for pod in pods:
            if pod.member or time.monotonic() < pod.due:
                continue
            pod.hurt, pod.started = set(), time.monotonic()
            store = {"S3_ENDPOINT_URL": self.proxy.url}
            if pod is self.coordinator:
                pod.member = self.crew.coordinator(self.argv, **store)
            else:
                starts = {"": self.crew.worker, "light": self.crew.light_launcher, "real": self.crew.launcher}
                several = {"PET_NPROC_PER_NODE": str(self.schedule.per_pod)}
                pod.member = starts[self.schedule.launcher](pod.name, self.argv, **store, **several)
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
            self._do_all(self.waiting.pop(moment))
        while not self._fired.empty():
            moment, done = self._fired.get()
            self._do_all(self.waiting.pop(moment, []))
            done.set()

    def _is(self, moment: Moment, now: float) -> bool:
        if moment.kind == "start":
            return now >= self.began + moment.plus
        if moment.kind == "step":
            at = next((step.at for step in self.watch.steps if step.step >= moment.number), None)
        else:
            at = next((at for at, number in self.watch.generations if number >= moment.number), None)
        return at is not None and time.time() >= at + moment.plus

    def _do_all(self, acts: list[Act]) -> None:
        done = 0
        for act in acts:
            self.watch.say(f"ACT {act.words()}")
            if self._do(act):
                self.done.update(act.kinds())
                done += 1
            else:
                self.watch.say("there is nothing to do it to")
                self.missed += 1
        self.done["burst"] += done > 1

    def _do(self, act: Act) -> bool:
        """Whether it was done: whether it found a victim."""
        if act.verb in FAULTS:
            self.proxy.fault(act.verb, act.seconds)
            self.faulty_until = time.monotonic() + act.seconds + 30
            return True
        if act.verb == "join":
            self.pods.append(Pod(f"w{len(self.pods)}"))
            return True
        if act.verb in DAMAGES:
            return self._damage(act.verb)
        if act.target == "coordinator":
            self.coordinator.due = time.monotonic() + act.seconds
            return self._send(self.coordinator, act.verb, self._processes(self.coordinator, "launcher"))
        if act.target == "all":
            whom, pods = ("launcher", self.pods) if act.verb == "term" else ("all", self.everybody)
            return any([self._send(pod, act.verb, self._processes(pod, whom), act.seconds) for pod in pods])
        found = [(pod, pid) for pod in self.pods for pid in self._processes(pod, act.target)]
        chosen = {victim % len(found) for victim in act.victims} if found else set[int]()
        return any([self._send(pod, act.verb, [pid], act.seconds) for pod, pid in (found[at] for at in sorted(chosen))])

    def _send(self, pod: Pod, verb: str, pids: list[int], seconds: float = 0.0) -> bool:
        if not pids or not pod.member:
            return False
        number = SIGNALS[verb]
        if pod.member.process.pid in pids:
            pod.hurt.add(number)
        self.watch.say(f"{number.name} to {pod.name} {pids}")
        self.signals += len(pids)
        _signal(pids, number)
        if verb == "kill" and pod is not self.coordinator:
            self._note_kept(pod)
        if verb == "stop":
            what = "remove" if seconds == FOR_EVER else "continue"
            self._later.append((time.monotonic() + min(seconds, FROZEN), f"{what} {pod.name}", pids))
        return True

    def _note_kept(self, pod: Pod) -> None:
        """What the dead left in shared memory: their successors must not begin before it."""
        for slot in range(self.schedule.per_pod):
            name = pod.name + (f"/{slot}" if slot else "")
            nodes = [hashlib.sha256(node.encode()).hexdigest()[:12] for node in (name, f"{name}/{slot}")]
            self.watch.keep(
                name, max(snapshot_file.newest_step(Shared / f"rekindle-{self.run}-{node}") for node in nodes)
            )

    def _processes(self, pod: Pod, target: str) -> list[int]:
        """The living processes of a pod that are meant by "worker", "nursery", "launcher" (its first) or "all"."""
        if not pod.lives or not pod.member:
            return []
        pid = pod.member.process.pid or 0
        if not self.schedule.launcher or pod is self.coordinator or target == "launcher":
            return [pid]
        children = _children(pid)
        if target == "all":
            return [pid, *children]
        nursery, workers = tell_apart(children)
        return nursery if target == "nursery" else workers

    def _send_later(self) -> None:
        due = [entry for entry in self._later if time.monotonic() >= entry[0]]
        self._later = [entry for entry in self._later if entry not in due]
        for _, what, pids in due:
            verb, name = what.split()
            self.watch.say(f"{verb} {name} {pids}")
            pod = next(pod for pod in self.everybody if pod.name == name)
            if verb == "remove":  # with all that is in it
                self._send(pod, "kill", self._processes(pod, "launcher"))
            else:
                _signal(pids, signal.SIGCONT)

    def _damage(self, what: str) -> bool:
        """Kill all, and damage the newest copy of the state before anybody is back; whether there was one."""
        for pod in self.everybody:
            self._send(pod, "kill", self._processes(pod, "all"))
        for pod in self.everybody:
            if pod.member:
                pod.member.process.join(5)
        if what == "flip chunk":
            return self._flip_chunk()
        files = sorted(Shared.glob(f"rekindle-{self.run}-*"), key=lambda path: path.stat().st_mtime)
        self.watch.say(f"{what}: {[path.name for path in files]}")
        self.watch.kept.clear()
        for path in files if what == "lose hot" else files[-1:]:
            if what == "lose hot":
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)
        return bool(files)

    def _flip_chunk(self) -> bool:
        prefix = self.argv_value("checkpoints")
        names = sorted(entry.key for entry in self.store.list(f"{prefix}/manifests/"))
        if not names:
            return False
        key = f"{prefix}/chunks/{json.loads(self.store.get(names[-1]))['chunks'][0]}"
        data = bytearray(self.store.get(key))
        data[len(data) // 2] ^= 1
        self.store.put(key, data)
        self.watch.say(f"flipped a byte of {key}, of {names[-1]}")
        return True

    def argv_value(self, name: str) -> str:
        """The value of a flag of the run."""
        return next(flag.partition("=")[2] for flag in self.argv if flag.startswith(f"--{name}="))

    # the end

    def _end(self) -> None:
        """All pods end by themselves: those that die now start again, find the run complete and clean up."""
        over, told = time.monotonic(), False
        frozen = {name.split()[1] for _, name, _ in self._later}
        for pod in self.pods:
            if pod.name in frozen:
                self._send(pod, "kill", self._processes(pod, "launcher"))
        while living := [pod for pod in self.pods if pod.member or pod.due < float("inf")]:
            self.watch.poll()
            for pod in living:
                if pod.member and (code := pod.member.process.exitcode) is not None:
                    self._ended(pod, code)
                    pod.due = 0.0 if code not in FINAL and not told else float("inf")
            self._restart(self.pods)
            if not told and time.monotonic() > over + TOLD:
                told = True
                for pod in living:
                    self._send(pod, "term", self._processes(pod, "launcher"))
            if time.monotonic() > over + TOLD + STILL:
                self.problems += [f"{pod.name} does not end" for pod in living if pod.lives]
                self._dump()
                break
            time.sleep(0.005)
        self._send(self.coordinator, "kill", self._processes(self.coordinator, "all"))  # in case it still lives

    def _dump(self) -> None:
        """Where all of them are, into their logs; a real launcher's workers cannot be asked."""
        for pod in self.everybody if self.schedule.launcher != "real" else [self.coordinator]:
            _signal(self._processes(pod, "all"), signal.SIGUSR1)
        time.sleep(0.5)
        self.watch.poll()


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _children(pid: int) -> list[int]:
    """By age."""
    try:
        children = sorted(psutil.Process(pid).children(), key=lambda child: (child.create_time(), child.pid))
        return [child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def tell_apart(children: list[int]) -> tuple[list[int], list[int]]:
    """The nursery and the workers among the children of a launcher, the oldest first.

    A nursery blocks SIGTERM, and so does a worker of it, but a younger one, until it listens by a thread. What does
    neither may be a nursery that has just begun, and is left out.
    """
    status = {child: _status(child) for child in children}
    blocking = [child for child, (threads, blocks) in status.items() if threads == 1 and blocks]
    return blocking[:1], [child for child, (threads, _) in status.items() if threads > 1 or child in blocking[1:]]


def _status(pid: int) -> tuple[int, bool]:
    """The number of threads of a process, 0 if it is dead, and whether it blocks SIGTERM."""
    try:
        fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return 0, False
    return int(fields["Threads"]), bool(int(fields["SigBlk"], 16) >> (signal.SIGTERM - 1) & 1)
