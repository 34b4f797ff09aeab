"""Execute a schedule: start a real run, perform the schedule's acts on this run, and restart
processes that die.

This module takes the role of Kubernetes: a pod that exits with a code other than 0, 78 or 65 is restarted
with the same name after a short delay.
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
from tests.chaos.schedule import DAMAGES, FAULTS, FOREVER, Act, Moment, Schedule
from tests.chaos.watch import Watch
from tests.rekindle.training.crew import Crew, Member

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
# exit codes of pods that are not restarted
FINAL = (0, 78, 65)
# within this time, a worker must make a step, start or end, or a generation of the worker group
# must begin
PROGRESS_TIMEOUT_S = 60.0
# time until the operator removes a pod that was stopped forever
FROZEN_TIMEOUT_S = 3.0
# time from the end of the run until the operator sends SIGTERM to the remaining pods
END_TIMEOUT_S = 15.0

Shared = Path("/dev/shm")


@dataclass
class Pod:
    """A pod: its name, and its current process, if any."""

    name: str
    member: Member | None = None
    # earliest time to start or restart the process
    start_time: float = 0.0
    # signals that were sent to the current process
    signals: set[signal.Signals] = field(default_factory=set)
    started: float = 0.0

    @property
    def is_alive(self) -> bool:
        return self.member is not None and self.member.process.exitcode is None


class Execution:
    """One execution of a schedule."""

    def __init__(
        self, schedule: Schedule, crew: Crew, proxy: Proxy, store: Store, argv: list[str], run: str
    ) -> None:
        self.schedule = schedule
        self.crew = crew
        self.proxy = proxy
        self.store = store
        self.argv = argv
        self.run = run
        self.watch = Watch(crew.logs / "journal")
        self.coordinator = Pod("coordinator")
        self.pods = [
            Pod(f"w{number}") for number in range(schedule.settings["workers"] // schedule.per_pod)
        ]
        self.problems: list[str] = []
        # number of acts and moments, named as in `required_coverage`
        self.done: Counter[str] = Counter()
        # number of acts without a victim
        self.missed = 0
        self.signals = 0
        self.faulty_until = 0.0
        self._delays = itertools.cycle(schedule.delays)
        # (time, action and pod, pids) of later actions
        self._later: list[tuple[float, str, list[int]]] = []
        self.waiting: dict[Moment, list[Act]] = {}
        self._fired: queue.SimpleQueue[tuple[Moment, threading.Event]] = queue.SimpleQueue()

        for act in schedule.acts:
            self.waiting.setdefault(act.when, []).append(act)

    def execute(self) -> None:
        """Execute the schedule until the run ends, and record deviations in `problems`."""
        for moment in self.waiting:
            if moment.kind == "request":
                self.proxy.hold(
                    moment.request, moment.number, lambda moment=moment: self._hold_request(moment)
                )

        self.start_time = time.monotonic()
        self.watch.say("\n".join(self.schedule.words()))

        while not self._is_over():
            self.watch.poll()
            self._restart_pods(self.all_pods)
            self._perform_fired_acts()
            self._send_later()
            time.sleep(0.002)

            if time.time() > self.watch.last_progress + PROGRESS_TIMEOUT_S:
                self.problems.append(f"no progress for {PROGRESS_TIMEOUT_S:.0f} s")
                self._dump_stacks()
                break

        self._end_pods()
        self.watch.poll()

    @property
    def all_pods(self) -> list[Pod]:
        return [self.coordinator, *self.pods]

    def _is_over(self) -> bool:
        """Return True if the coordinator has ended permanently; record all other exits."""
        for pod in self.all_pods:
            if not pod.member or (code := pod.member.process.exitcode) is None:
                continue
            self._record_exit(pod, code)
            if code not in FINAL:
                pod.start_time = time.monotonic() + next(self._delays)
            elif pod is self.coordinator:
                return True
            else:
                pod.start_time = float("inf")
        return False

    def _record_exit(self, pod: Pod, code: int) -> None:
        pod.member = None
        self.watch.say(f"{pod.name} ended with {code}")
        allowed = {0} | ({143} if signal.SIGTERM in pod.signals else set())
        if signal.SIGKILL in pod.signals:
            allowed.add(-9)
        if signal.SIGTERM in pod.signals and time.monotonic() < pod.started + 2:
            # the process received the signal before its handler was installed
            allowed.add(-15)
        if time.monotonic() < self.faulty_until:
            allowed.add(1)
        if code not in allowed:
            self.problems.append(f"{pod.name} ended with {code}")

    def _restart_pods(self, pods: list[Pod]) -> None:
        for pod in pods:
            if pod.member or time.monotonic() < pod.start_time:
                continue

            pod.signals = set()
            pod.started = time.monotonic()
            store_variables = {"S3_ENDPOINT_URL": self.proxy.url}

            if pod is self.coordinator:
                pod.member = self.crew.start_coordinator(self.argv, **store_variables)
            else:
                start_by_launcher = {
                    "": self.crew.start_worker,
                    "light": self.crew.start_light_launcher,
                    "real": self.crew.start_launcher,
                }
                worker_variables = {"PET_NPROC_PER_NODE": str(self.schedule.per_pod)}
                pod.member = start_by_launcher[self.schedule.launcher](
                    pod.name, self.argv, **store_variables, **worker_variables
                )

            self.watch.add(pod.member.log, pod.name)
            self.watch.say(f"{pod.name} is started ({pod.member.process.pid})")

    # acts of the schedule

    def _hold_request(self, moment: Moment) -> None:
        acts_performed = threading.Event()
        self._fired.put((moment, acts_performed))
        acts_performed.wait(5)

    def _perform_fired_acts(self) -> None:
        now = time.monotonic()
        for moment in [
            moment
            for moment in self.waiting
            if moment.kind != "request" and self._has_come(moment, now)
        ]:
            self._do_all(self.waiting.pop(moment))
        while not self._fired.empty():
            moment, done = self._fired.get()
            self._do_all(self.waiting.pop(moment, []))
            done.set()

    def _has_come(self, moment: Moment, now: float) -> bool:
        if moment.kind == "start":
            return now >= self.start_time + moment.plus
        if moment.kind == "step":
            reached_time = next(
                (step.time for step in self.watch.steps if step.step >= moment.number), None
            )
        else:
            reached_time = next(
                (
                    seconds
                    for seconds, generation in self.watch.generations
                    if generation >= moment.number
                ),
                None,
            )
        return reached_time is not None and time.time() >= reached_time + moment.plus

    def _do_all(self, acts: list[Act]) -> None:
        performed_count = 0
        for act in acts:
            self.watch.say(f"ACT {act.words()}")
            if self._perform_act(act):
                self.done.update(act.kinds())
                performed_count += 1
            else:
                self.watch.say("no victim was found")
                self.missed += 1
        self.done["burst"] += performed_count > 1

    def _perform_act(self, act: Act) -> bool:
        """Perform an act; return False if no process is left that the act could affect."""
        if act.verb in FAULTS:
            self.proxy.fault(act.verb, act.seconds)
            self.faulty_until = time.monotonic() + act.seconds + 30
            return True

        if act.verb == "join":
            self.pods.append(Pod(f"w{len(self.pods)}"))
            return True

        if act.verb in DAMAGES:
            return self._damage_newest_copy(act.verb)

        if act.target == "coordinator":
            self.coordinator.start_time = time.monotonic() + act.seconds
            return self._send_to_processes(
                self.coordinator, act.verb, self._find_processes(self.coordinator, "launcher")
            )

        if act.target == "all":
            target, pods = ("launcher", self.pods) if act.verb == "term" else ("all", self.all_pods)
            return any(
                [
                    self._send_to_processes(
                        pod, act.verb, self._find_processes(pod, target), act.seconds
                    )
                    for pod in pods
                ]
            )

        candidates = [
            (pod, pid) for pod in self.pods for pid in self._find_processes(pod, act.target)
        ]
        if candidates:
            indices = {victim % len(candidates) for victim in act.victims}
        else:
            indices = set[int]()

        victims = [candidates[index] for index in sorted(indices)]
        return any(
            [self._send_to_processes(pod, act.verb, [pid], act.seconds) for pod, pid in victims]
        )

    def _send_to_processes(
        self, pod: Pod, verb: str, pids: list[int], seconds: float = 0.0
    ) -> bool:
        if not pids or not pod.member:
            return False

        signal_number = SIGNALS[verb]
        if pod.member.process.pid in pids:
            pod.signals.add(signal_number)

        self.watch.say(f"{signal_number.name} to {pod.name} {pids}")
        self.signals += len(pids)
        _send_signal(pids, signal_number)

        if verb == "kill" and pod is not self.coordinator:
            self._record_snapshot(pod)

        if verb == "stop":
            action = "remove" if seconds == FOREVER else "continue"
            self._later.append(
                (time.monotonic() + min(seconds, FROZEN_TIMEOUT_S), f"{action} {pod.name}", pids)
            )

        return True

    def _record_snapshot(self, pod: Pod) -> None:
        """Record the newest step in the shared memory of the killed workers, because new processes
        must not start with an earlier step."""
        for slot in range(self.schedule.per_pod):
            name = pod.name + (f"/{slot}" if slot else "")
            nodes = [
                hashlib.sha256(node.encode()).hexdigest()[:12] for node in (name, f"{name}/{slot}")
            ]
            steps = (
                snapshot_file.read_newest_step(Shared / f"rekindle-{self.run}-{node}")
                for node in nodes
            )
            self.watch.record_snapshot(name, max(steps))

    def _find_processes(self, pod: Pod, target: str) -> list[int]:
        """Return a pod's live processes for a target: "worker", "forkserver", "launcher" (the pod's
        first process) or "all"."""
        if not pod.is_alive or not pod.member:
            return []

        pid = pod.member.process.pid or 0
        if not self.schedule.launcher or pod is self.coordinator or target == "launcher":
            return [pid]

        children = _find_children(pid)
        if target == "all":
            return [pid, *children]

        forkserver, workers = classify_children(children)
        if target == "forkserver":
            return forkserver

        return workers

    def _send_later(self) -> None:
        due_actions = [
            later_action for later_action in self._later if time.monotonic() >= later_action[0]
        ]
        self._later = [entry for entry in self._later if entry not in due_actions]
        for _, action, pids in due_actions:
            verb, name = action.split()
            self.watch.say(f"{verb} {name} {pids}")
            pod = next(pod for pod in self.all_pods if pod.name == name)
            if verb == "remove":  # remove the pod with all its processes
                self._send_to_processes(pod, "kill", self._find_processes(pod, "launcher"))
            else:
                _send_signal(pids, signal.SIGCONT)

    def _damage_newest_copy(self, damage: str) -> bool:
        """Kill all processes, and damage the newest copy of the state before a restart; return
        False if no copy exists."""
        for pod in self.all_pods:
            self._send_to_processes(pod, "kill", self._find_processes(pod, "all"))

        for pod in self.all_pods:
            if pod.member:
                pod.member.process.join(5)

        if damage == "flip chunk":
            return self._flip_chunk()

        files = sorted(Shared.glob(f"rekindle-{self.run}-*"), key=lambda path: path.stat().st_mtime)
        self.watch.say(f"{damage}: {[path.name for path in files]}")
        self.watch.snapshots.clear()

        for path in files if damage == "lose hot" else files[-1:]:
            if damage == "lose hot":
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
        """Return the value of a flag of the run."""
        return next(flag.partition("=")[2] for flag in self.argv if flag.startswith(f"--{name}="))

    # the end

    def _end_pods(self) -> None:
        """Wait until all pods end by themselves. A pod that dies after the end of the run is
        restarted, finds that the run is complete, and removes its snapshots."""
        end_seconds = time.monotonic()
        is_terminated = False
        frozen_pods = {name.split()[1] for _, name, _ in self._later}

        for pod in self.pods:
            if pod.name in frozen_pods:
                self._send_to_processes(pod, "kill", self._find_processes(pod, "launcher"))

        while remaining := [
            pod for pod in self.pods if pod.member or pod.start_time < float("inf")
        ]:
            self.watch.poll()
            for pod in remaining:
                if pod.member and (code := pod.member.process.exitcode) is not None:
                    self._record_exit(pod, code)
                    pod.start_time = (
                        0.0 if code not in FINAL and not is_terminated else float("inf")
                    )

            self._restart_pods(self.pods)
            if not is_terminated and time.monotonic() > end_seconds + END_TIMEOUT_S:
                is_terminated = True
                for pod in remaining:
                    self._send_to_processes(pod, "term", self._find_processes(pod, "launcher"))

            if time.monotonic() > end_seconds + END_TIMEOUT_S + PROGRESS_TIMEOUT_S:
                self.problems += [f"{pod.name} does not end" for pod in remaining if pod.is_alive]
                self._dump_stacks()
                break

            time.sleep(0.005)

        # the coordinator may still be alive
        self._send_to_processes(
            self.coordinator, "kill", self._find_processes(self.coordinator, "all")
        )

    def _dump_stacks(self) -> None:
        """Let all processes write their stacks into their logs; the workers of a real launcher
        cannot write their stacks."""
        for pod in self.all_pods if self.schedule.launcher != "real" else [self.coordinator]:
            _send_signal(self._find_processes(pod, "all"), signal.SIGUSR1)
        time.sleep(0.5)
        self.watch.poll()


def _send_signal(pids: list[int], signal_number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            continue


def _find_children(pid: int) -> list[int]:
    """Return the live children of a process, from the oldest to the youngest."""
    try:
        children = sorted(
            psutil.Process(pid).children(), key=lambda child: (child.create_time(), child.pid)
        )
        return [child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def classify_children(children: list[int]) -> tuple[list[int], list[int]]:
    """Return the forkserver and the workers among a launcher's children, which are sorted by age.

    A process that blocks SIGTERM may be a forkserver. A new worker also blocks SIGTERM, until its
    signal thread runs; it is younger than the forkserver. A process with one thread that does not
    block SIGTERM may be a forkserver that has just started, so this process is in neither of the
    returned lists.
    """
    status = {child: _read_status(child) for child in children}
    blocking = [child for child, (threads, blocks) in status.items() if threads == 1 and blocks]
    return blocking[:1], [
        child for child, (threads, _) in status.items() if threads > 1 or child in blocking[1:]
    ]


def _read_status(pid: int) -> tuple[int, bool]:
    """Return the number of threads of a process (0 if the process is dead), and True if the process
    blocks SIGTERM."""
    try:
        fields = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
    except OSError:
        return 0, False
    return int(fields["Threads"]), bool(int(fields["SigBlk"], 16) >> (signal.SIGTERM - 1) & 1)
