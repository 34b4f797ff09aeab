"""Who trains together, as a state machine: events in, each with its time; messages out. No clock, no socket.

coordinator.py puts sockets around it and says what the messages mean. A generation is *opened* when a worker joins,
leaves or is lost, and *published* as soon as every eligible worker has acknowledged it. Numbers are never used twice,
not even by a coordinator that was restarted: it takes up the group that the workers tell it of.
"""

from dataclasses import dataclass, field
from typing import Any

from rekindle.training.spec import TrainingSpec as Inputs

PROTOCOL = 1  # of the messages; workers and coordinator of a run must speak the same
PATIENCE = 1.0  # seconds that a group which begins from nothing waits for those that are wanted
ANSWER = 30.0  # seconds that a worker of a group that hangs has to say that it does not
FRUITLESS = 3  # groups in a row that broke without a step and without a loss, before the next one is delayed
CRASHES = 3  # errors of workers without a newer step in between, after which trying again is no use
REMIND = 30.0  # seconds between two complaints about the same

Message = dict[str, Any]


@dataclass
class Worker:
    """What is known about one live process."""

    id: str
    name: str
    address: str
    joined: float
    seen: float  # its last sign of life
    acked: int = 0  # the newest generation it has acknowledged
    busy: float = float("-inf")  # when it last said that it is at work, though not at steps


@dataclass
class Membership:
    """The state machine: messages go to `outbox`, what happened to `events`, what a person should know to `log`."""

    config: Inputs
    generation: int = 0  # the newest opened
    group: int = 0  # the newest published
    hard: bool = False  # the group before the open generation is broken: do not wait for the end of its step
    members: list[str] = field(default_factory=list)  # of the group
    alive: dict[str, Worker] = field(default_factory=dict)
    eligible: list[str] = field(default_factory=list)  # members first, then by arrival; those beyond stand by
    awaited: set[str] = field(default_factory=set)  # members of a group taken up that have not registered again
    missing: set[str] = field(default_factory=set)  # eligible, but not acknowledged yet
    fingerprint: dict[str, Any] = field(default_factory=dict)
    wanted: int = 0  # members worth waiting for until `patient_until`
    patient_until: float = 0.0
    step: int = -1
    moved: float = 0.0  # when the newest step was made, or the newest group published
    opened: float = 0.0
    hanging: bool = False  # why the open generation was opened
    fruitless: int = 0
    crashes: int = 0
    crashed_at: tuple[int, int] = (-1, -1)  # (step, group) of the newest
    crashed: set[str] = field(default_factory=set)  # who reported it: one fault may hit all at once
    reminded: float = 0.0
    noted: float = float("-inf")  # when a step was last an event
    verdict: tuple[int, str] | None = None
    outbox: list[tuple[str, Message]] = field(default_factory=list)
    events: list[Message] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def agreed(self) -> bool:
        """Whether the newest generation is published."""
        return self.group == self.generation

    def join(self, now: float, hello: Message) -> None:
        """A worker is there, for the first time or again."""
        id, name, step = hello["id"], hello["name"], hello["step"]
        known = Worker(id, name, hello["address"], now, now)
        living = hello["generation"] > self.generation and hello["group"] > 0  # what it computes is the run
        if problem := self._objection(hello, any_bits=living):
            return self._refuse(id, name, problem)
        if living:
            self._yield_to(hello)
        self.fingerprint = self.fingerprint or hello["fingerprint"]
        if not self.alive:
            self.patient_until, self.wanted = now + PATIENCE, len(self.members) or self.config.workers
        expected = id in self.alive
        self.alive[id] = known
        if hello["generation"] > self.generation:
            self._take_up(now, hello)
        elif not expected:
            self.events.append({"event": "join", "worker": id, "name": name, "step": step})
            if hello["generation"] == self.generation and not self.agreed:
                self.generation += 1  # the one it knows may be another coordinator's, which it would never acknowledge
                self._announce()
        if self.awaited:
            self.awaited.discard(id)
            if not self.awaited:
                self.log.append(f"generation {self.group} goes on, all {len(self.members)} are back")
        self.step = max(self.step, step)
        self._recount()
        stray = hello["group"] != self.group or id not in self.members  # it is in no group, or in one that is over
        before = self.generation
        if self.agreed and stray and id in self.members:  # it has missed the list: the others wait for it in vain
            self._open(now, hard=True)
        self.settle(now)
        if before == self.generation and (stray or not self.agreed):
            self.outbox.append((id, {"open": before, "hard": self.hard or stray}))

    def beat(self, now: float, worker: str, step: int, busy: bool = False) -> None:
        """A worker lives, and has made so many steps."""
        known = self.alive[worker]
        known.seen = now
        if busy:
            known.busy = now
        if step > self.step:
            self.step, self.moved, self.fruitless = step, now, 0
            if now - self.noted >= 1:
                self.noted = now
                self.events.append({"event": "step", "step": step})
        elif busy and worker in self.members:
            self.moved = now

    def ack(self, now: float, worker: str, generation: int, step: int) -> None:
        """A worker has left its former group and waits for the members of `generation`."""
        self._check(generation)
        self.beat(now, worker, step)
        self.alive[worker].acked = generation
        if generation == self.generation:
            self.missing.discard(worker)
            self.settle(now)

    def fault(self, now: float, worker: str, generation: int) -> None:
        """A collective failed: the group of that generation is of no more use to anybody."""
        self._check(generation)
        self.beat(now, worker, -1)
        if generation != self.group or worker not in self.members or (self.hard and not self.agreed):
            return
        self.events.append({"event": "fault", "name": self.alive[worker].name, "generation": generation})
        self.fruitless += self.agreed
        self._open(now, hard=True)
        if self.fruitless > FRUITLESS:
            pause = min(5.0, 0.05 * 2 ** (self.fruitless - FRUITLESS))
            self.patient_until, self.wanted = now + pause, len(self.alive) + 1
            self.log.append(
                f"{self.fruitless} groups in a row broke before their first step, though nobody was lost: can the "
                f"workers reach each other? The next one begins in {pause:.1f} s."
            )

    def lost(self, now: float, worker: str, why: str = "connection") -> None:
        """A worker is gone; `drain`: on purpose, after the step that all agreed to stop at."""
        gone = self.alive.pop(worker, None)
        if gone is None:
            return
        if why == "drain":
            self.events.append({"event": "drain", "worker": worker, "name": gone.name})
        else:
            self.events.append({"event": "lost", "worker": worker, "name": gone.name, "why": why})
        if why in ("silent", "hung"):
            self.outbox.append((worker, {"dropped": why}))
        self._recount()
        if worker in self.members and why != "drain":
            self._open(now, hard=True)
        self.settle(now)

    def failed(self, name: str, message: str, code: int, temporary: bool = False) -> None:
        """A worker ends with an error: the verdict, if a retry cannot cure it or did not."""
        self.events.append({"event": "failed", "name": name, "message": message, "code": code})
        if temporary:  # a service that the worker needs is away: no fault of its own
            self.log.append(f"{name} ends for now: {message}")
            return
        self._count_crash(name)
        if code != 1 or self.crashes >= CRASHES:
            again = f" ({self.crashes} times without a newer step)" if code == 1 else ""
            self.verdict = code, f"{name}{again}: {message}"
            self.events.append({"event": "verdict", "code": code, "message": self.verdict[1]})

    def _count_crash(self, name: str) -> None:
        """What all members report once each, in the same step, is one error."""
        now = max(self.step, 0), self.group  # a first state is no progress
        most = max(len(self.members), self.config.workers)
        if now[0] != self.crashed_at[0]:
            self.crashes = 0
        if now != self.crashed_at or name in self.crashed or len(self.crashed) >= most:
            self.crashes, self.crashed = self.crashes + 1, set()
        self.crashed_at = now
        self.crashed.add(name)

    def tick(self, now: float) -> None:
        """Time passed: drop who is silent or hangs, say what is missing."""
        for worker in [worker.id for worker in self.alive.values() if self._silent(now, worker)]:
            self.lost(now, worker, "silent")
        self._drop_hung(now)
        self._remind(now)
        self.settle(now)

    def slept(self, seconds: float) -> None:
        """It is us who did not listen for so long: nobody is to blame for a silence that we could not hear."""
        self.moved += seconds
        self.opened += seconds
        for worker in self.alive.values():
            worker.seen += seconds
            worker.busy += seconds

    def settle(self, now: float) -> None:
        """Open a generation if the members changed; publish the open one if everybody is ready."""
        if self.agreed and self.eligible and self.eligible != self.members:
            self._open(now, hard=False)
        if self.agreed or self.missing or len(self.eligible) < max(1, self.config.min_workers):
            return
        if len(self.eligible) < self.wanted and now < self.patient_until:
            return
        self.members, self.group, self.wanted = list(self.eligible), self.generation, 0
        self.moved, self.hanging = now, False
        group = {"members": [[id, self.alive[id].address] for id in self.members], "generation": self.generation}
        self.outbox += [(worker, group) for worker in self.members]
        names = [self.alive[id].name for id in self.members]
        self.events.append({"event": "generation", "generation": self.group, "members": names, "step": self.step})
        self.log.append(f"generation {self.group}: {listed(names)}")

    def _take_up(self, now: float, hello: Message) -> None:
        """A worker knows a generation that we do not: we were restarted, and go on with what it tells us."""
        self.generation = self.group = hello["generation"]
        if hello["group"] != self.generation:  # it waits for a list that may be published or not
            self.members = [id for id in hello["peers"] if id in self.alive]
            self.patient_until, self.wanted = now + PATIENCE, len(hello["peers"])
            self._recount()
            return self._open(now, hard=True)
        self.members, self.moved, self.wanted = list(hello["peers"]), now, 0
        for id in self.members:  # they are given as much time as anybody else to be heard
            self.alive.setdefault(id, Worker(id, id, "", now, now, acked=self.generation))
        self.awaited = set(self.members)

    def _silent(self, now: float, worker: Worker) -> bool:
        """A step of the group proves that all its members lived, whatever became of their signs of life."""
        trains = worker.acked < self.generation or self.agreed  # if it is a member
        last = max(worker.seen, self.moved) if trains and worker.id in self.members else worker.seen
        return now - last > self.config.silence_seconds

    def _drop_hung(self, now: float) -> None:
        """Who lives, but neither makes steps nor answers: first ask all of the group, then drop who says nothing."""
        limit = self.config.hung_seconds
        if self.agreed or (not self.hard and self.missing.intersection(self.members)):
            if self.members and now - max(self.moved, self.opened) > limit:
                self.log.append(f"no step for {limit:.0f} s, though all workers live: asking each of them")
                self.hanging = True
                self._open(now, hard=True)  # who only waits for one that hangs, or is busy, can answer that
                self.opened = now
            return
        patience = min(ANSWER, limit) if self.hanging else limit
        for worker in [self.alive[id] for id in self.missing]:
            if now - max(self.opened, worker.joined, worker.busy) > patience:
                self.lost(now, worker.id, "hung")

    def _remind(self, now: float) -> None:
        if (self.agreed and self.members) or not self.reminded:
            self.reminded = now
        elif now - self.reminded >= REMIND:
            self.reminded = now
            there, least = len(self.eligible), max(1, self.config.min_workers)
            if there < least:
                self.log.append(f"training waits for workers: {there} of at least {least} are there")
            else:
                names = sorted(self.alive[id].name for id in self.missing)
                self.log.append(f"generation {self.generation} waits for {listed(names)} to stop the last step")

    def _recount(self) -> None:
        """Who is to be in the next group, and whom it waits for."""
        kept = [id for id in self.members if id in self.alive]
        old = set(kept)
        self.eligible = (kept + [id for id in self.alive if id not in old])[: self.config.max_workers]
        self.missing = {id for id in self.eligible if self.alive[id].acked != self.generation}

    def _open(self, now: float, *, hard: bool) -> None:
        if self.agreed:
            self.generation += 1
            self.opened = now
        elif self.hard or not hard:
            return  # they know
        self.hard = hard
        self._announce()

    def _announce(self) -> None:
        self.events.append({"event": "open", "generation": self.generation, "hard": self.hard})
        self._recount()
        now_, later = ({"open": self.generation, "hard": hard} for hard in (True, self.hard))
        old = set(self.members)
        self.outbox += [(id, later if id in old else now_) for id in self.alive]

    def _check(self, generation: int) -> None:
        if generation > self.generation:
            raise ValueError(f"generation {generation} was never opened, the newest is {self.generation}")

    def _refuse(self, id: str, name: str, problem: str) -> None:
        self.outbox.append((id, {"refused": problem}))
        self.events.append({"event": "refused", "name": name, "message": problem})

    def _yield_to(self, hello: Message) -> None:
        """A group that lives decides which bits are right, not who came first to a coordinator that was restarted."""
        others, self.fingerprint = self.fingerprint, hello["fingerprint"]
        if others in ({}, self.fingerprint):
            return
        for worker in self.alive.values():
            theirs = {"name": worker.name, "protocol": PROTOCOL, "fingerprint": others}
            self._refuse(worker.id, worker.name, self._objection(theirs))
            self.events.append({"event": "lost", "worker": worker.id, "name": worker.name, "why": "dropped"})
        self.alive.clear()

    def _objection(self, hello: Message, *, any_bits: bool = False) -> str:
        if (theirs := hello.get("protocol")) != PROTOCOL:
            return (
                f'worker "{hello["name"]}" is refused: it speaks protocol {theirs} and not {PROTOCOL}. Give the '
                "workers and the coordinator of a run the same image."
            )
        mine, theirs = {} if any_bits else self.fingerprint, hello["fingerprint"]
        differ = [key for key in mine | theirs if mine.get(key) != theirs.get(key)] if mine else []
        if not differ:
            return ""
        listed = ", ".join(f"{key} is {theirs.get(key)} and not {mine.get(key)}" for key in differ)
        return (
            f'worker "{hello["name"]}" is refused: its {listed}. Every worker of a run must compute the same bits: '
            "give all of them the same image, kind of node, threads, config and data."
        )


def listed(names: list[str], most: int = 20) -> str:
    """The names, or the first of many."""
    return " ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
