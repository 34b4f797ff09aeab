"""Who trains together, as a state machine: events with their times in, messages out. No clock, no socket.

server.py puts sockets around it; protocol.py has the messages. A generation is *opened* when a worker joins, leaves or
is lost, and *published* as soon as `quorum` holds. Generation numbers are never reused, not even by a restarted
coordinator: it adopts the group that the workers report.
"""

from dataclasses import dataclass, field
from typing import Any

from rekindle.training.membership.protocol import PROTOCOL, Message
from rekindle.training.spec import TrainingSpec

PATIENCE = 1.0  # seconds that a group which starts from nothing waits for the expected workers
ANSWER = 30.0  # seconds that a worker of a hung group has to acknowledge, which proves that it is not the cause
FRUITLESS = 3  # groups in a row that broke without a step and without a loss, before the next one is delayed
CRASHES = 3  # worker errors without a newer step in between, after which the run is given up
VALUES = 16  # that a member may have for the others of its group, on average
REMIND = 30.0  # seconds between two log lines about the same wait


@dataclass
class Worker:
    """What is known about one live process. Times are those of the state machine's caller."""

    id: str
    name: str
    address: str
    joined: float
    last_seen: float
    acked: int = 0  # the newest generation it has acknowledged
    last_busy: float = float("-inf")  # when it last reported to be working on something that makes no steps


@dataclass
class CrashCounter:
    """Counts worker errors. One error that all members report once each, in the same step, counts once."""

    count: int = 0
    position: tuple[int, int] = (-1, -1)  # (step, group) of the newest
    reporters: set[str] = field(default_factory=set)

    def record(self, name: str, step: int, group: int, members: int) -> int:
        """The number of errors without a newer step in between; `members`: how many may report the same one."""
        position = max(step, 0), group  # restoring a first state is no progress
        if position[0] != self.position[0]:
            self.count = 0
        if position != self.position or name in self.reporters or len(self.reporters) >= members:
            self.count, self.reporters = self.count + 1, set()
        self.position = position
        self.reporters.add(name)
        return self.count


@dataclass
class Membership:
    """The state machine: messages go to `outbox`, ledger events to `events`, lines for a person to `log`."""

    config: TrainingSpec
    generation: int = 0  # the newest opened
    group: int = 0  # the newest published
    immediate: bool = False  # the last group is broken: do not wait for the end of its step
    members: list[str] = field(default_factory=list)  # of the group
    alive: dict[str, Worker] = field(default_factory=dict)
    eligible: list[str] = field(default_factory=list)  # members first, then by arrival; the rest are spares
    unregistered: set[str] = field(default_factory=set)  # members of an adopted group that have not joined again yet
    missing: set[str] = field(default_factory=set)  # eligible, but not acknowledged yet
    fingerprint: dict[str, Any] = field(default_factory=dict)  # of those who are alive, or for good:
    settled: bool = False  # it is that of a group which we have published
    refused_since: float = float("inf")  # workers are refused, and without them there are too few
    values: dict[str, Message] = field(default_factory=dict)  # what the members of the group have told each other
    expected_members: int = 0  # worth waiting for until `join_deadline`
    join_deadline: float = 0.0
    step: int = -1
    last_progress: float = 0.0  # when the newest step was made, or the newest group published
    opened: float = 0.0
    hang_check: bool = False  # the open generation was opened because no step was made
    fruitless: int = 0
    crashes: CrashCounter = field(default_factory=CrashCounter)
    last_reminder: float = 0.0
    last_step_event: float = float("-inf")
    verdict: tuple[int, str] | None = None
    outbox: list[tuple[str, Message]] = field(default_factory=list)
    events: list[Message] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def agreed(self) -> bool:
        """Whether the newest generation is published."""
        return self.group == self.generation

    @property
    def short(self) -> bool:
        """Whether there are too few workers for any group."""
        return len(self.eligible) < max(1, self.config.min_workers)

    def quorum(self, now: float) -> bool:
        """Whether the next group may begin: all have stopped the last step, and no more are expected in a moment."""
        expected = len(self.eligible) < self.expected_members and now < self.join_deadline
        return not (self.short or self.missing or expected)

    def join(self, now: float, hello: Message) -> None:
        """A worker registers, for the first time or again."""
        id, name, step = hello["id"], hello["name"], hello["step"]
        worker = Worker(id, name, hello["address"], now, now)
        newer = hello["generation"] > self.generation
        training = newer and not self.group and hello["group"] > 0  # in a group of the coordinator before us
        if not (self.alive or self.settled):
            self.fingerprint = {}
        if problem := self._objection(hello, any_bits=training):
            return self._refuse(now, id, name, problem)
        if training:
            self._yield_to(now, hello)
        self.fingerprint = self.fingerprint or hello["fingerprint"]
        if not self.alive:
            self._wait_for_joins(now + PATIENCE, len(self.members) or self.config.workers)
        known = id in self.alive
        self.alive[id] = worker
        if not known and not (newer and not self.group):
            self.events.append({"event": "join", "worker": id, "name": name, "step": step})
        if newer and not self.group:
            self._adopt(now, hello)
        elif newer or (not known and hello["generation"] == self.generation and not self.agreed):
            self._surpass(now, hello["generation"])
        if self.unregistered:
            self.unregistered.discard(id)
            if not self.unregistered:
                self.log.append(f"generation {self.group} continues, all {len(self.members)} are back")
        self.step = max(self.step, step)
        self._recount()
        stray = hello["group"] != self.group or id not in self.members  # in no group, or in an older one
        before = self.generation
        if self.agreed and stray and id in self.members:  # it missed the member list: the others wait for it in vain
            self._open(now, immediate=True)
        self.advance(now)
        if before == self.generation and (stray or not self.agreed):
            self.outbox.append((id, {"open": before, "hard": self.immediate or stray}))
        if not stray:
            self.outbox += [(id, message) for message in self.values.values()]

    def heartbeat(self, now: float, id: str, step: int, busy: bool = False) -> None:
        """A worker is alive, and has made `step` updates."""
        worker = self.alive[id]
        worker.last_seen = now
        if busy:
            worker.last_busy = now
        if step > self.step:
            self.step, self.last_progress, self.fruitless = step, now, 0
            if now - self.last_step_event >= 1:
                self.last_step_event = now
                self.events.append({"event": "step", "step": step})
        elif busy and id in self.members:
            self.last_progress = now

    def exchange(self, id: str, message: Message) -> None:
        """A member tells the others of its group something. Raises ValueError if it is too much."""
        if message["put"] != self.group or id not in self.members:
            return
        if len(self.values) >= VALUES * len(self.members):
            raise ValueError(f"more than {VALUES} values of each member")
        self.values[message["key"]] = message
        self.outbox += [(member, message) for member in self.members if member != id]

    def ack(self, now: float, id: str, generation: int, step: int) -> None:
        """A worker has left its former group and waits for the members of `generation`."""
        self._check_number(generation)
        self.heartbeat(now, id, step)
        self.alive[id].acked = generation
        if generation == self.generation:
            self.missing.discard(id)
            self.advance(now)

    def report_failure(self, now: float, id: str, generation: int) -> None:
        """A collective failed: the group of that generation is broken for everybody."""
        self._check_number(generation)
        self.heartbeat(now, id, -1)
        if generation != self.group or id not in self.members or (self.immediate and not self.agreed):
            return
        self.events.append({"event": "fault", "name": self.alive[id].name, "generation": generation})
        self.fruitless += self.agreed
        self._open(now, immediate=True)
        if self.fruitless > FRUITLESS:
            pause = min(5.0, 0.05 * 2 ** (self.fruitless - FRUITLESS))
            self._wait_for_joins(now + pause, len(self.alive) + 1)
            self.log.append(
                f"{self.fruitless} groups in a row broke before their first step, though nobody was lost: can the "
                f"workers reach each other? The next one begins in {pause:.1f} s."
            )

    def lost(self, now: float, id: str, why: str = "connection") -> None:
        """A worker is gone; `drain`: on purpose, after the step that all agreed to stop at."""
        worker = self.alive.pop(id, None)
        if worker is None:
            return
        if why == "drain":
            self.events.append({"event": "drain", "worker": id, "name": worker.name})
        else:
            self.events.append({"event": "lost", "worker": id, "name": worker.name, "why": why})
        if why in ("silent", "hung"):
            self.outbox.append((id, {"dropped": why}))
        self._recount()
        if id in self.members and why != "drain":
            self._open(now, immediate=True)
        self.advance(now)

    def report_error(self, name: str, message: str, code: int, temporary: bool = False) -> None:
        """A worker ends with an error: the verdict, if a retry cannot cure it or did not."""
        self.events.append({"event": "failed", "name": name, "message": message, "code": code})
        if temporary:  # a service that the worker needs is unavailable
            self.log.append(f"{name} ends for now: {message}")
            return
        members = max(len(self.members), self.config.workers)
        crashes = self.crashes.record(name, self.step, self.group, members)
        if code != 1 or crashes >= CRASHES:
            again = f" ({crashes} times without a newer step)" if code == 1 else ""
            self.conclude(code, f"{name}{again}: {message}")

    def tick(self, now: float) -> None:
        """Time passed: drop silent and hung workers, log what training waits for."""
        for id in [worker.id for worker in self.alive.values() if self._silent(now, worker)]:
            self.lost(now, id, "silent")
        self._drop_hung(now)
        self._remind(now)
        self.advance(now)

    def exclude_pause(self, seconds: float) -> None:
        """The coordinator itself was paused for so long: no worker's silence during that time counts."""
        self.last_progress += seconds
        self.opened += seconds
        self.refused_since += seconds
        for worker in self.alive.values():
            worker.last_seen += seconds
            worker.last_busy += seconds

    def advance(self, now: float) -> None:
        """Open a generation if the members changed; publish the open one once there is a quorum."""
        if self.agreed and self.eligible and self.eligible != self.members:
            self._open(now, immediate=False)
        if not self.agreed and self.quorum(now):
            self._publish(now, list(self.eligible))

    def _publish(self, now: float, members: list[str]) -> None:
        self.members, self.group, self.values, self.expected_members = members, self.generation, {}, 0
        self.last_progress, self.hang_check = now, False
        self.settled, self.refused_since = True, float("inf")
        message = {"members": [[id, self.alive[id].address] for id in members], "generation": self.generation}
        self.outbox += [(id, message) for id in members]
        names = [self.alive[id].name for id in members]
        self.events.append({"event": "generation", "generation": self.group, "members": names, "step": self.step})
        self.log.append(f"generation {self.group}: {listed(names)}")

    def _adopt(self, now: float, hello: Message) -> None:
        """A worker knows a generation that we do not: we were restarted, and resume from what it reports."""
        self.generation = self.group = hello["generation"]
        self.values = {}
        peers = list(dict.fromkeys(hello["peers"]))
        if hello["group"] != self.generation:  # it waits for a member list that may be published or not
            self.members = [id for id in peers if id in self.alive]
            self._wait_for_joins(now + PATIENCE, len(peers))
            self._recount()
            return self._open(now, immediate=True)
        self.members, self.last_progress, self.expected_members = peers, now, 0
        for id in self.members:  # they have as much time as anybody else to send a heartbeat
            self.alive.setdefault(id, Worker(id, id, "", now, now, acked=self.generation))
        self.unregistered = set(self.members)

    def _surpass(self, now: float, generation: int) -> None:
        """A worker knows that number from another coordinator: it would acknowledge none that is not higher."""
        if self.agreed:
            self.opened, self.immediate = now, False
        self.generation = generation + 1
        self._announce()

    def _wait_for_joins(self, deadline: float, members: int) -> None:
        self.join_deadline, self.expected_members = deadline, members

    def _silent(self, now: float, worker: Worker) -> bool:
        """A step of the group proves that all its members were alive, even if their heartbeats were lost."""
        training = worker.acked < self.generation or self.agreed  # if it is a member
        member = training and worker.id in self.members
        last_sign = max(worker.last_seen, self.last_progress) if member else worker.last_seen
        return now - last_sign > self.config.silence_seconds

    def _drop_hung(self, now: float) -> None:
        """For workers that are alive, but neither make steps nor acknowledge: first ask the group, then drop them."""
        limit = self.config.hung_seconds
        if self.agreed or (not self.immediate and self.missing.intersection(self.members)):
            if self.members and now - max(self.last_progress, self.opened) > limit:
                self.log.append(f"no step for {limit:.0f} s, though all workers live: asking each of them")
                self.hang_check = True
                self._open(now, immediate=True)  # a worker that is busy, or waits for the hung one, can acknowledge
                self.opened = now
            return
        patience = min(ANSWER, limit) if self.hang_check else limit
        for worker in [self.alive[id] for id in self.missing]:
            if now - max(self.opened, worker.joined, worker.last_busy) > patience:
                self.lost(now, worker.id, "hung")

    def _remind(self, now: float) -> None:
        if (self.agreed and self.members) or not self.last_reminder:
            self.last_reminder = now
        elif now - self.last_reminder >= REMIND:
            self.last_reminder = now
            if self.short:
                present, least = len(self.eligible), max(1, self.config.min_workers)
                self.log.append(f"training waits for workers: {present} of at least {least} are there")
            else:
                names = sorted(self.alive[id].name for id in self.missing)
                self.log.append(f"generation {self.generation} waits for {listed(names)} to stop the last step")

    def _recount(self) -> None:
        """Who will be in the next group, and who of them has not acknowledged it."""
        kept = [id for id in self.members if id in self.alive]
        former = set(kept)
        self.eligible = (kept + [id for id in self.alive if id not in former])[: self.config.max_workers]
        self.missing = {id for id in self.eligible if self.alive[id].acked != self.generation}

    def _open(self, now: float, *, immediate: bool) -> None:
        if self.agreed:
            self.generation += 1
            self.opened = now
        elif self.immediate or not immediate:
            return  # the workers know already
        self.immediate = immediate
        self._announce()

    def _announce(self) -> None:
        self.events.append({"event": "open", "generation": self.generation, "hard": self.immediate})
        self._recount()
        at_once, as_agreed = ({"open": self.generation, "hard": hard} for hard in (True, self.immediate))
        members = set(self.members)
        self.outbox += [(id, as_agreed if id in members else at_once) for id in self.alive]

    def _check_number(self, generation: int) -> None:
        if generation > self.generation:
            raise ValueError(f"generation {generation} was never opened, the newest is {self.generation}")

    def _refuse(self, now: float, id: str, name: str, problem: str) -> None:
        """The worker ends, and may be started again; the run ends if for too long there are too few others."""
        self.outbox.append((id, {"refused": problem}))
        self.events.append({"event": "refused", "name": name, "message": problem})
        if not self.short:
            return
        self.refused_since = min(self.refused_since, now)
        if now - self.refused_since > self.config.hung_seconds:
            self.conclude(78, problem)

    def conclude(self, code: int, text: str) -> None:
        """The run cannot go on."""
        self.verdict = code, text
        self.events.append({"event": "verdict", "code": code, "message": text})

    def _yield_to(self, now: float, hello: Message) -> None:
        """A group that trains decides which bits are right, not the first worker to reach a restarted coordinator."""
        former, self.fingerprint = self.fingerprint, hello["fingerprint"]
        if former in ({}, self.fingerprint):
            return
        for worker in self.alive.values():
            refused = {"name": worker.name, "protocol": PROTOCOL, "fingerprint": former}
            self._refuse(now, worker.id, worker.name, self._objection(refused))
            self.events.append({"event": "lost", "worker": worker.id, "name": worker.name, "why": "dropped"})
        self.alive.clear()

    def _objection(self, hello: Message, *, any_bits: bool = False) -> str:
        if (theirs := hello.get("protocol")) != PROTOCOL:
            return (
                f'worker "{hello["name"]}" is refused: it speaks protocol {theirs} and not {PROTOCOL}. Give the '
                "workers and the coordinator of a run the same image."
            )
        ours, theirs = {} if any_bits else self.fingerprint, hello["fingerprint"]
        keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)] if ours else []
        differences = [f"{key} is {theirs.get(key)} and not {ours.get(key)}" for key in keys]
        details = ", ".join(self.config.misfits(theirs) or differences)
        if not details:
            return ""
        return (
            f'worker "{hello["name"]}" is refused: its {details}. Every worker of a run must compute the same bits: '
            "give all of them the same image, kind of node, threads, config and data. Where there are several kinds, "
            "train.fingerprint names one."
        )


def listed(names: list[str], most: int = 20) -> str:
    """The names, or the first of many."""
    return " ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
