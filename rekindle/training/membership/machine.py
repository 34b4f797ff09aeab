"""The group membership as a pure state machine: timed events in, messages out. No clock, no sockets.

server.py adds the sockets; protocol.py defines the messages. A generation is *opened* when a worker joins, leaves or
is lost, and *published* as soon as `has_quorum` holds. Generation numbers are never reused, not even by a restarted
coordinator: it adopts the group that the workers report.
"""

from dataclasses import dataclass, field
from typing import Any

from rekindle.training.membership.protocol import PROTOCOL, Message
from rekindle.training.spec import TrainingSpec

JOIN_TIMEOUT_S = 1.0  # how long the first group waits for the expected workers
HANG_CHECK_TIMEOUT_S = 30.0  # time for a worker of a hung group to acknowledge, which proves that it is not the cause
MAX_FRUITLESS_GROUPS = 3  # consecutive groups that broke without a step or a lost worker; the next ones are delayed
MAX_CRASHES = 3  # worker errors without a newer step in between; then the run is aborted
MAX_VALUES = 16  # per member on average, for the other members of its group
REMINDER_INTERVAL_S = 30.0  # between two log lines about the same wait


@dataclass
class Worker:
    """A live worker process. The caller of the state machine supplies all times."""

    id: str
    name: str
    address: str
    joined: float
    last_seen: float
    acked: int = 0  # the newest generation it has acknowledged
    last_busy: float = float("-inf")  # when it last reported to be busy with work other than steps


@dataclass
class CrashCounter:
    """Counts worker errors. An error that every member reports once, in the same step, counts once."""

    count: int = 0
    position: tuple[int, int] = (-1, -1)  # (step, group) of the newest error
    reporters: set[str] = field(default_factory=set)

    def record(self, name: str, step: int, group: int, members: int) -> int:
        """Return the number of errors without a newer step in between; up to `members` workers report the same one."""
        position = max(step, 0), group  # restoring a first state is not progress
        if position[0] != self.position[0]:
            self.count = 0
        if position != self.position or name in self.reporters or len(self.reporters) >= members:
            self.count, self.reporters = self.count + 1, set()
        self.position = position
        self.reporters.add(name)
        return self.count


@dataclass
class Membership:
    """The state machine: messages go to `outbox`, ledger events to `events`, log lines to `log`."""

    config: TrainingSpec
    generation: int = 0  # the newest opened
    group: int = 0  # the newest published
    immediate: bool = False  # the last group is broken: its members must not finish their step
    members: list[str] = field(default_factory=list)  # of the group
    alive: dict[str, Worker] = field(default_factory=dict)
    eligible: list[str] = field(default_factory=list)  # members first, then by arrival; the rest are spares
    unregistered: set[str] = field(default_factory=set)  # members of an adopted group that have not joined again yet
    missing: set[str] = field(default_factory=set)  # eligible, but not acknowledged yet
    fingerprint: dict[str, Any] = field(default_factory=dict)  # of the live workers; fixed once a group was published
    fingerprint_fixed: bool = False
    refused_since: float = float("inf")  # since when workers are refused while too few others are alive
    values: dict[str, Message] = field(default_factory=dict)  # `put` messages of the group's members
    expected_members: int = 0  # number of workers to wait for until `join_deadline`
    join_deadline: float = 0.0
    step: int = -1
    last_progress: float = 0.0  # when the newest step was completed or the newest group published
    opened: float = 0.0
    hang_check: bool = False  # the open generation was opened because no step was completed
    fruitless_groups: int = 0
    crashes: CrashCounter = field(default_factory=CrashCounter)
    last_reminder: float = 0.0
    last_step_event: float = float("-inf")
    verdict: tuple[int, str] | None = None
    outbox: list[tuple[str, Message]] = field(default_factory=list)
    events: list[Message] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def is_published(self) -> bool:
        """True if the newest generation is published."""
        return self.group == self.generation

    @property
    def lacks_workers(self) -> bool:
        """True if there are too few workers for any group."""
        return len(self.eligible) < max(1, self.config.min_workers)

    def has_quorum(self, now: float) -> bool:
        """Return True if the next group may start: all workers have acknowledged, and no others are expected soon."""
        expected = len(self.eligible) < self.expected_members and now < self.join_deadline
        return not (self.lacks_workers or self.missing or expected)

    def join(self, now: float, hello: Message) -> None:
        """Register a worker, for the first time or after a reconnect."""
        id, name, step = hello["id"], hello["name"], hello["step"]
        worker = Worker(id, name, hello["address"], now, now)
        newer = hello["generation"] > self.generation
        training = newer and not self.group and hello["group"] > 0  # in a group of the previous coordinator
        if not (self.alive or self.fingerprint_fixed):
            self.fingerprint = {}
        if problem := self._find_mismatch(hello, any_bits=training):
            return self._refuse(now, id, name, problem)
        if training:
            self._yield_to(now, hello)
        self.fingerprint = self.fingerprint or hello["fingerprint"]
        if not self.alive:
            self.join_deadline, self.expected_members = now + JOIN_TIMEOUT_S, len(self.members) or self.config.workers
        rejoined = id in self.alive
        self.alive[id] = worker
        if not rejoined and not (newer and not self.group):
            self.events.append({"event": "join", "worker": id, "name": name, "step": step})
        if newer and not self.group:
            self._adopt(now, hello)
        elif newer or (not rejoined and hello["generation"] == self.generation and not self.is_published):
            self._skip_past(now, hello["generation"])
        if self.unregistered:
            self.unregistered.discard(id)
            if not self.unregistered:
                self.log.append(f"generation {self.group} continues, all {len(self.members)} are back")
        self.step = max(self.step, step)
        self._recount()
        stray = hello["group"] != self.group or id not in self.members  # in no group, or in an older one
        generation = self.generation
        if self.is_published and stray and id in self.members:  # it missed the member list: the others wait in vain
            self._open(now, immediate=True)
        self.advance(now)
        if generation == self.generation and (stray or not self.is_published):
            self.outbox.append((id, {"open": generation, "hard": self.immediate or stray}))
        if not stray:
            self.outbox += [(id, message) for message in self.values.values()]

    def heartbeat(self, now: float, id: str, step: int, busy: bool = False) -> None:
        """Record that a worker is alive and has completed `step` updates."""
        worker = self.alive[id]
        worker.last_seen = now
        if busy:
            worker.last_busy = now
        if step > self.step:
            self.step, self.last_progress, self.fruitless_groups = step, now, 0
            if now - self.last_step_event >= 1:
                self.last_step_event = now
                self.events.append({"event": "step", "step": step})
        elif busy and id in self.members:
            self.last_progress = now

    def exchange(self, id: str, message: Message) -> None:
        """Forward a member's value to the others of its group. Raises ValueError if there are too many."""
        if message["put"] != self.group or id not in self.members:
            return
        if len(self.values) >= MAX_VALUES * len(self.members):
            raise ValueError(f"more than {MAX_VALUES} values of each member")
        self.values[message["key"]] = message
        self.outbox += [(member, message) for member in self.members if member != id]

    def ack(self, now: float, id: str, generation: int, step: int) -> None:
        """Record that a worker has left its previous group and waits for the members of `generation`."""
        self._check_number(generation)
        self.heartbeat(now, id, step)
        self.alive[id].acked = generation
        if generation == self.generation:
            self.missing.discard(id)
            self.advance(now)

    def report_failure(self, now: float, id: str, generation: int) -> None:
        """Handle a failed collective: the group of that generation is broken for all its members."""
        self._check_number(generation)
        self.heartbeat(now, id, -1)
        if generation != self.group or id not in self.members or (self.immediate and not self.is_published):
            return
        self.events.append({"event": "fault", "name": self.alive[id].name, "generation": generation})
        self.fruitless_groups += self.is_published
        self._open(now, immediate=True)
        if self.fruitless_groups > MAX_FRUITLESS_GROUPS:
            pause = min(5.0, 0.05 * 2 ** (self.fruitless_groups - MAX_FRUITLESS_GROUPS))
            self.join_deadline, self.expected_members = now + pause, len(self.alive) + 1
            self.log.append(
                f"{self.fruitless_groups} consecutive groups broke before their first step, although no worker was "
                f"lost: can the workers reach each other? The next group starts in {pause:.1f} s."
            )

    def remove(self, now: float, id: str, reason: str = "connection") -> None:
        """Remove a worker that is gone; `drain`: it left on purpose, after the step that all agreed to stop at."""
        worker = self.alive.pop(id, None)
        if worker is None:
            return
        if reason == "drain":
            self.events.append({"event": "drain", "worker": id, "name": worker.name})
        else:
            self.events.append({"event": "lost", "worker": id, "name": worker.name, "why": reason})
        if reason in ("silent", "hung"):
            self.outbox.append((id, {"dropped": reason}))
        self._recount()
        if id in self.members and reason != "drain":
            self._open(now, immediate=True)
        self.advance(now)

    def report_error(self, name: str, message: str, code: int, temporary: bool = False) -> None:
        """Record that a worker ends with an error; end the run if a retry cannot or did not help."""
        self.events.append({"event": "failed", "name": name, "message": message, "code": code})
        if temporary:  # a service that the worker needs is unavailable
            self.log.append(f"{name} ends temporarily: {message}")
            return
        members = max(len(self.members), self.config.workers)
        crashes = self.crashes.record(name, self.step, self.group, members)
        if code != 1 or crashes >= MAX_CRASHES:
            repeats = f" ({crashes} times without a newer step)" if code == 1 else ""
            self.conclude(code, f"{name}{repeats}: {message}")

    def tick(self, now: float) -> None:
        """Drop silent and hung workers; log the reason if training waits."""
        for id in [worker.id for worker in self.alive.values() if self._is_silent(now, worker)]:
            self.remove(now, id, "silent")
        self._drop_hung(now)
        self._remind(now)
        self.advance(now)

    def exclude_pause(self, seconds: float) -> None:
        """Ignore a pause of the coordinator itself: workers could not be heard during that time."""
        self.last_progress += seconds
        self.opened += seconds
        self.refused_since += seconds
        for worker in self.alive.values():
            worker.last_seen += seconds
            worker.last_busy += seconds

    def advance(self, now: float) -> None:
        """Open a generation if the members changed; publish the open one once it has a quorum."""
        if self.is_published and self.eligible and self.eligible != self.members:
            self._open(now, immediate=False)
        if not self.is_published and self.has_quorum(now):
            self._publish(now, list(self.eligible))

    def _publish(self, now: float, members: list[str]) -> None:
        self.members, self.group, self.values, self.expected_members = members, self.generation, {}, 0
        self.last_progress, self.hang_check = now, False
        self.fingerprint_fixed, self.refused_since = True, float("inf")
        message = {"members": [[id, self.alive[id].address] for id in members], "generation": self.generation}
        self.outbox += [(id, message) for id in members]
        names = [self.alive[id].name for id in members]
        self.events.append({"event": "generation", "generation": self.group, "members": names, "step": self.step})
        self.log.append(f"generation {self.group}: {join_names(names)}")

    def _adopt(self, now: float, hello: Message) -> None:
        """Continue after a restart of the coordinator from the generation that a worker reports."""
        self.generation = self.group = hello["generation"]
        self.values = {}
        peers = list(dict.fromkeys(hello["peers"]))
        if hello["group"] != self.generation:  # it waits for a member list that may or may not have been published
            self.members = [id for id in peers if id in self.alive]
            self.join_deadline, self.expected_members = now + JOIN_TIMEOUT_S, len(peers)
            self._recount()
            return self._open(now, immediate=True)
        self.members, self.last_progress, self.expected_members = peers, now, 0
        for id in self.members:  # they have the usual time to send a heartbeat
            self.alive.setdefault(id, Worker(id, id, "", now, now, acked=self.generation))
        self.unregistered = set(self.members)

    def _skip_past(self, now: float, generation: int) -> None:
        """Open a number above `generation`, which another coordinator issued: workers acknowledge only higher ones."""
        if self.is_published:
            self.opened, self.immediate = now, False
        self.generation = generation + 1
        self._announce()

    def _is_silent(self, now: float, worker: Worker) -> bool:
        """A step of the group proves that all its members were alive, even if their heartbeats were lost."""
        training = worker.acked < self.generation or self.is_published  # if it is a member
        member = training and worker.id in self.members
        last_sign = max(worker.last_seen, self.last_progress) if member else worker.last_seen
        return now - last_sign > self.config.silence_seconds

    def _drop_hung(self, now: float) -> None:
        """Probe a group that is alive but completes no steps; then drop the workers that do not acknowledge."""
        limit = self.config.hung_seconds
        if self.is_published or (not self.immediate and self.missing.intersection(self.members)):
            if self.members and now - max(self.last_progress, self.opened) > limit:
                self.log.append(f"no step for {limit:.0f} s, although all workers are alive: probing each of them")
                self.hang_check = True
                self._open(now, immediate=True)  # a worker that is busy, or waits for the hung one, can acknowledge
                self.opened = now
            return
        timeout = min(HANG_CHECK_TIMEOUT_S, limit) if self.hang_check else limit
        for worker in [self.alive[id] for id in self.missing]:
            if now - max(self.opened, worker.joined, worker.last_busy) > timeout:
                self.remove(now, worker.id, "hung")

    def _remind(self, now: float) -> None:
        if (self.is_published and self.members) or not self.last_reminder:
            self.last_reminder = now
        elif now - self.last_reminder >= REMINDER_INTERVAL_S:
            self.last_reminder = now
            if self.lacks_workers:
                present, required = len(self.eligible), max(1, self.config.min_workers)
                self.log.append(f"training waits for workers: {present} alive, at least {required} required")
            else:
                names = sorted(self.alive[id].name for id in self.missing)
                self.log.append(f"generation {self.generation} waits for {join_names(names)} to stop their last step")

    def _recount(self) -> None:
        """Update the members of the next group, and the workers among them that have not acknowledged it."""
        staying = dict.fromkeys(id for id in self.members if id in self.alive)
        self.eligible = [*(staying | dict.fromkeys(self.alive))][: self.config.max_workers]
        self.missing = {id for id in self.eligible if self.alive[id].acked != self.generation}

    def _open(self, now: float, *, immediate: bool) -> None:
        if self.is_published:
            self.generation += 1
            self.opened = now
        elif self.immediate or not immediate:
            return  # the workers have been asked already
        self.immediate = immediate
        self._announce()

    def _announce(self) -> None:
        self.events.append({"event": "open", "generation": self.generation, "hard": self.immediate})
        self._recount()
        to_members, to_others = ({"open": self.generation, "hard": hard} for hard in (self.immediate, True))
        members = set(self.members)
        self.outbox += [(id, to_members if id in members else to_others) for id in self.alive]

    def _check_number(self, generation: int) -> None:
        if generation > self.generation:
            raise ValueError(f"generation {generation} was never opened; the newest is {self.generation}")

    def _refuse(self, now: float, id: str, name: str, problem: str) -> None:
        """Refuse a worker; it may be started again. End the run if there are too few others for too long."""
        self.outbox.append((id, {"refused": problem}))
        self.events.append({"event": "refused", "name": name, "message": problem})
        if not self.lacks_workers:
            return
        self.refused_since = min(self.refused_since, now)
        if now - self.refused_since > self.config.hung_seconds:
            self.conclude(78, problem)

    def conclude(self, code: int, text: str) -> None:
        """End the run with this exit code and message."""
        self.verdict = code, text
        self.events.append({"event": "verdict", "code": code, "message": text})

    def _yield_to(self, now: float, hello: Message) -> None:
        """Adopt the fingerprint of a training group: it outranks the first worker to reach a restarted coordinator."""
        previous, self.fingerprint = self.fingerprint, hello["fingerprint"]
        if previous in ({}, self.fingerprint):
            return
        for worker in self.alive.values():
            refused = {"name": worker.name, "protocol": PROTOCOL, "fingerprint": previous}
            self._refuse(now, worker.id, worker.name, self._find_mismatch(refused))
            self.events.append({"event": "lost", "worker": worker.id, "name": worker.name, "why": "dropped"})
        self.alive.clear()

    def _find_mismatch(self, hello: Message, *, any_bits: bool = False) -> str:
        """Return the reason to refuse a worker, or ""; `any_bits`: accept any fingerprint that the config accepts."""
        if (protocol := hello.get("protocol")) != PROTOCOL:
            return (
                f'worker "{hello["name"]}" is refused: it speaks protocol {protocol} and not {PROTOCOL}. Give the '
                "workers and the coordinator of a run the same image."
            )
        expected, actual = {} if any_bits else self.fingerprint, hello["fingerprint"]
        keys = [key for key in expected | actual if expected.get(key) != actual.get(key)] if expected else []
        differences = [f"{key} is {actual.get(key)} and not {expected.get(key)}" for key in keys]
        details = ", ".join(self.config.misfits(actual) or differences)
        if not details:
            return ""
        return (
            f'worker "{hello["name"]}" is refused: its {details}. Every worker of a run must compute the same bits: '
            "give all of them the same image, kind of node, threads, config and data. If the cluster has several kinds "
            "of nodes, choose one with train.fingerprint."
        )


def join_names(names: list[str], limit: int = 20) -> str:
    """Return the names, or the first `limit` of them."""
    return " ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
