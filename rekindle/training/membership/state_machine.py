"""The membership of workers in groups, as a pure state machine: its methods receive events with
their times, and add messages to an outbox.

server.py adds the clock and the sockets; protocol.py defines the messages. A generation is *opened*
when a worker joins, leaves or is lost, and *published* as soon as `has_quorum` is true. A
generation number is never reused: a restarted coordinator adopts the group that the workers report.
"""

from dataclasses import dataclass, field
from typing import Any

from argolocal.common import exit_codes
from argolocal.common.wording import first_names
from rekindle.training.membership.protocol import PROTOCOL, Message
from rekindle.training.membership.run_spec import RunSpec

# in a group that makes no steps, a worker that does not acknowledge within this time is hung
HANG_CHECK_TIMEOUT_S = 30.0
# number of consecutive groups that may break without completing a step or losing a worker; after
# that, the next groups are delayed
MAX_FRUITLESS_GROUPS = 3
# the run is aborted after this number of worker errors without a newer step in between
MAX_CRASHES = 3
# maximum number of values that a member sends to the other members of its group, on average
MAX_VALUES = 16
MAX_NAMES = 20  # maximum number of workers that a line of the log names
REMINDER_INTERVAL_S = 30.0  # time between two log lines about the same wait


@dataclass
class Worker:
    """A live worker process. All times are by the clock of the state machine's caller."""

    id: str
    name: str
    address: str
    join_time: float
    last_seen_time: float
    acked_generation: int = 0  # the newest generation that this worker has acknowledged
    # time of the last report that this worker does work other than steps
    last_busy_time: float = float("-inf")


@dataclass
class CrashCounter:
    """Counts worker errors. An error that several members report in the same step counts once."""

    count: int = 0
    position: tuple[int, int] = (-1, -1)  # (step, group) of the newest error
    reporters: set[str] = field(default_factory=set)

    def record(self, name: str, step: int, group: int, members: int) -> int:
        """Record an error, and return the number of errors since the newest step.

        Up to `members` reports by different workers in the same step and group count as one error.
        """
        # step -1 (no state yet) counts as step 0, since both are the same progress
        position = max(step, 0), group
        if position[0] != self.position[0]:
            self.count = 0
        if position != self.position or name in self.reporters or len(self.reporters) >= members:
            self.count = self.count + 1
            self.reporters = set()
        self.position = position
        self.reporters.add(name)
        return self.count


@dataclass
class MembershipStateMachine:
    """The state machine. The state machine adds messages to `outbox`, ledger events to `events`,
    and log lines to `log`."""

    config: RunSpec
    generation: int = 0  # the newest opened generation
    published_generation: int = 0  # the newest published generation
    # True if the newest group is broken, so its members must not finish their step
    must_abort: bool = False
    members: list[str] = field(default_factory=list)  # members of the published group
    alive_workers: dict[str, Worker] = field(default_factory=dict)
    # ids of the workers of the next group: first the current members, then others in the order of
    # their arrival; all further workers are spares
    eligible_ids: list[str] = field(default_factory=list)
    # members of an adopted group that have not joined this coordinator yet
    unregistered_ids: set[str] = field(default_factory=set)
    # eligible workers that have not yet acknowledged the open generation
    unacknowledged_ids: set[str] = field(default_factory=set)
    # fingerprint that workers must have; it no longer changes once a group was published
    fingerprint: dict[str, Any] = field(default_factory=dict)
    has_fixed_fingerprint: bool = False
    # time of the first refusal of a worker, if too few other workers have been alive since then
    refused_since: float = float("inf")
    # `put` messages of the group's members
    values: dict[str, Message] = field(default_factory=dict)
    expected_members: int = 0  # number of workers to wait for until `join_deadline`
    join_deadline: float = 0.0
    step: int = -1
    # time when the newest step was completed, or the newest group published
    last_progress_time: float = 0.0
    open_time: float = 0.0  # time when the newest generation was opened
    # True if the newest generation was opened to find hung workers, because no step was completed
    is_hang_check: bool = False
    fruitless_groups: int = 0
    crashes: CrashCounter = field(default_factory=CrashCounter)
    last_reminder_time: float = 0.0
    last_step_event_time: float = float("-inf")
    verdict: tuple[int, str] | None = None
    outbox: list[tuple[str, Message]] = field(default_factory=list)
    events: list[Message] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def is_published(self) -> bool:
        """True if the newest generation is published."""
        return self.published_generation == self.generation

    @property
    def lacks_workers(self) -> bool:
        """True if there are too few workers for any group."""
        return len(self.eligible_ids) < max(1, self.config.min_workers)

    def has_quorum(self, now: float) -> bool:
        """Return True if the next group can be published, because all its workers have acknowledged
        the open generation, and no further worker is expected."""
        expects_more = len(self.eligible_ids) < self.expected_members and now < self.join_deadline
        return not (self.lacks_workers or self.unacknowledged_ids or expects_more)

    def join(self, now: float, hello: Message) -> None:
        """Register a worker, for the first time or after a reconnect."""
        id = hello["id"]
        name = hello["name"]
        step = hello["step"]
        worker = Worker(id, name, hello["address"], now, now)
        is_newer = hello["generation"] > self.generation
        # True if the worker trains in a group of the previous coordinator
        is_training = is_newer and not self.published_generation and hello["group"] > 0

        if not (self.alive_workers or self.has_fixed_fingerprint):
            self.fingerprint = {}

        problem = self._find_mismatch(hello, any_fingerprint=is_training)
        if problem:
            return self._refuse(now, id, name, problem)
        if is_training:
            self._adopt_fingerprint(now, hello)

        self.fingerprint = self.fingerprint or hello["fingerprint"]
        if not self.alive_workers:
            self.join_deadline = now + self.config.join_timeout_s
            self.expected_members = len(self.members) or self.config.workers

        is_rejoining = id in self.alive_workers
        self.alive_workers[id] = worker
        if not is_rejoining and not (is_newer and not self.published_generation):
            self.events.append({"event": "join", "worker": id, "name": name, "step": step})

        if is_newer and not self.published_generation:
            self._adopt_generation(now, hello)
        elif is_newer or (
            not is_rejoining and hello["generation"] == self.generation and not self.is_published
        ):
            self._open_after(now, hello["generation"])

        if self.unregistered_ids:
            self.unregistered_ids.discard(id)
            if not self.unregistered_ids:
                self.log.append(
                    f"generation {self.published_generation} continues, all {len(self.members)} are"
                    " connected again"
                )

        self.step = max(self.step, step)
        self._update_next_group()
        # True if the worker is in an older group, or not in any group
        is_stray = hello["group"] != self.published_generation or id not in self.members
        generation = self.generation

        if self.is_published and is_stray and id in self.members:
            # this member has missed the member list of its group, so the other members would wait
            # for it forever
            self._open_generation(now, abort=True)

        self.advance(now)
        if generation == self.generation and (is_stray or not self.is_published):
            self.outbox.append((id, {"open": generation, "hard": self.must_abort or is_stray}))
        if not is_stray:
            self.outbox += [(id, message) for message in self.values.values()]

    def heartbeat(self, now: float, id: str, step: int, busy: bool = False) -> None:
        """Record that a worker is alive and has completed `step` updates."""
        worker = self.alive_workers[id]
        worker.last_seen_time = now

        if busy:
            worker.last_busy_time = now

        if step > self.step:
            self.step = step
            self.last_progress_time = now

            self.fruitless_groups = 0
            if now - self.last_step_event_time >= 1:
                self.last_step_event_time = now
                self.events.append({"event": "step", "step": step})
        elif busy and id in self.members:
            self.last_progress_time = now

    def forward_value(self, id: str, message: Message) -> None:
        """Forward a member's value to the other members of its group. Raises ValueError for too
        many values."""
        if message["put"] != self.published_generation or id not in self.members:
            return
        if len(self.values) >= MAX_VALUES * len(self.members):
            raise ValueError(f"more than {MAX_VALUES} values of each member")
        self.values[message["key"]] = message
        self.outbox += [(member, message) for member in self.members if member != id]

    def acknowledge(self, now: float, id: str, generation: int, step: int) -> None:
        """Record that a worker has left its group and waits until `generation` is published."""
        self._check_generation(generation)
        self.heartbeat(now, id, step)
        self.alive_workers[id].acked_generation = generation
        if generation == self.generation:
            self.unacknowledged_ids.discard(id)
            self.advance(now)

    def report_failure(self, now: float, id: str, generation: int) -> None:
        """Record that a collective failed, which breaks the group of `generation` for all its
        members."""
        self._check_generation(generation)
        self.heartbeat(now, id, -1)

        if (
            generation != self.published_generation
            or id not in self.members
            or (self.must_abort and not self.is_published)
        ):
            return

        self.events.append(
            {"event": "fault", "name": self.alive_workers[id].name, "generation": generation}
        )
        self.fruitless_groups += self.is_published
        self._open_generation(now, abort=True)

        if self.fruitless_groups > MAX_FRUITLESS_GROUPS:
            pause = min(5.0, 0.05 * 2 ** (self.fruitless_groups - MAX_FRUITLESS_GROUPS))
            self.join_deadline = now + pause
            self.expected_members = len(self.alive_workers) + 1
            self.log.append(
                f"{self.fruitless_groups} consecutive groups broke before their first step,"
                " although no worker was lost: can the workers reach each other? The next group"
                f" starts in {pause:.1f} s."
            )

    def remove(self, now: float, id: str, reason: str = "connection") -> None:
        """Remove a worker. The reason `drain` means that the worker left on purpose, after a step
        that all members have completed."""
        worker = self.alive_workers.pop(id, None)
        if worker is None:
            return

        step = {"step": self.step} if self.step >= 0 else {}
        if reason == "drain":
            self.events.append({"event": "drain", "worker": id, "name": worker.name, **step})
        else:
            self.events.append(
                {"event": "lost", "worker": id, "name": worker.name, "why": reason, **step}
            )

        if reason in ("silent", "hung"):
            self.outbox.append((id, {"dropped": reason}))

        self._update_next_group()
        if id in self.members and reason != "drain":
            self._open_generation(now, abort=True)

        self.advance(now)

    def report_error(self, name: str, message: str, code: int, temporary: bool = False) -> None:
        """Record that a worker ends with an error. End the run if a retry cannot help, or after
        MAX_CRASHES errors."""
        self.events.append({"event": "failed", "name": name, "message": message, "code": code})
        # the error is temporary: a service that the worker needs is unavailable
        if temporary:
            self.log.append(f"{name} ends temporarily: {message}")
            return

        members = max(len(self.members), self.config.workers)
        crashes = self.crashes.record(name, self.step, self.published_generation, members)
        if code != 1 or crashes >= MAX_CRASHES:
            if code == 1:
                repeats = f" ({crashes} times without a newer step)"
            else:
                repeats = ""

            self.end_run(code, f"{name}{repeats}: {message}")

    def tick(self, now: float) -> None:
        """Drop silent and hung workers; log the reason why training waits. Called periodically."""
        for id in [
            worker.id for worker in self.alive_workers.values() if self._is_silent(now, worker)
        ]:
            self.remove(now, id, "silent")
        self._drop_hung(now)
        self._log_wait_reason(now)
        self.advance(now)

    def exclude_pause(self, seconds: float) -> None:
        """Shift all stored times by the length of a pause of the coordinator process, during which
        it received no messages."""
        self.last_progress_time += seconds
        self.open_time += seconds
        self.refused_since += seconds
        for worker in self.alive_workers.values():
            worker.last_seen_time += seconds
            worker.last_busy_time += seconds

    def advance(self, now: float) -> None:
        """Open a generation if the workers of the next group have changed; publish the open
        generation if it has a quorum."""
        if self.is_published and self.eligible_ids and self.eligible_ids != self.members:
            self._open_generation(now, abort=False)
        if not self.is_published and self.has_quorum(now):
            self._publish_generation(now, list(self.eligible_ids))

    def _publish_generation(self, now: float, members: list[str]) -> None:
        self.members = members
        self.published_generation = self.generation
        self.values = {}
        self.expected_members = 0
        self.last_progress_time = now
        self.is_hang_check = False
        self.has_fixed_fingerprint = True
        self.refused_since = float("inf")
        message = {
            "members": [[id, self.alive_workers[id].address] for id in members],
            "generation": self.generation,
        }
        self.outbox += [(id, message) for id in members]
        names = [self.alive_workers[id].name for id in members]

        self.events.append(
            {
                "event": "generation",
                "generation": self.published_generation,
                "members": names,
                "step": self.step,
            }
        )

        shown_names = first_names(names, MAX_NAMES, " ")
        self.log.append(f"generation {self.published_generation}: {shown_names}")

    def _adopt_generation(self, now: float, hello: Message) -> None:
        """After a restart of the coordinator, adopt the generation that a worker reports."""
        self.generation = self.published_generation = hello["generation"]
        self.values = {}
        peers = list(dict.fromkeys(hello["peers"]))

        # the worker waits for this generation, which the previous coordinator may already have
        # published to other workers
        if hello["group"] != self.generation:
            self.members = [id for id in peers if id in self.alive_workers]
            self.join_deadline = now + self.config.join_timeout_s
            self.expected_members = len(peers)
            self._update_next_group()

            return self._open_generation(now, abort=True)

        self.members = peers
        self.last_progress_time = now

        self.expected_members = 0
        # count each member of the adopted group as alive until it has been silent for
        # silence_seconds
        for id in self.members:
            self.alive_workers.setdefault(
                id, Worker(id, id, "", now, now, acked_generation=self.generation)
            )

        self.unregistered_ids = set(self.members)

    def _open_after(self, now: float, generation: int) -> None:
        """Open a generation with a number above `generation`, which another coordinator used, since
        workers acknowledge only newer generations."""
        if self.is_published:
            self.open_time = now
            self.must_abort = False
        self.generation = generation + 1
        self._announce_generation()

    def _is_silent(self, now: float, worker: Worker) -> bool:
        """Return True if a worker has been silent for too long. A completed step counts as a sign
        of life of all members."""
        # False if the worker has already left its group
        may_train = worker.acked_generation < self.generation or self.is_published
        is_training_member = may_train and worker.id in self.members
        if is_training_member:
            last_sign = max(worker.last_seen_time, self.last_progress_time)
        else:
            last_sign = worker.last_seen_time
        return now - last_sign > self.config.silence_seconds

    def _drop_hung(self, now: float) -> None:
        """Abort a group that is alive but completes no steps, then drop the workers that do not
        acknowledge the next generation."""
        limit = self.config.hung_seconds

        if self.is_published or (
            not self.must_abort and self.unacknowledged_ids.intersection(self.members)
        ):
            if self.members and now - max(self.last_progress_time, self.open_time) > limit:
                self.log.append(
                    f"no step for {limit:.0f} s, although all workers are alive: probing each of"
                    " them"
                )
                self.is_hang_check = True
                # all workers acknowledge the abort, except hung workers
                self._open_generation(now, abort=True)
                self.open_time = now

            return

        if self.is_hang_check:
            timeout = min(HANG_CHECK_TIMEOUT_S, limit)
        else:
            timeout = limit

        for worker in [self.alive_workers[id] for id in self.unacknowledged_ids]:
            if now - max(self.open_time, worker.join_time, worker.last_busy_time) > timeout:
                self.remove(now, worker.id, "hung")

    def _log_wait_reason(self, now: float) -> None:
        if (self.is_published and self.members) or not self.last_reminder_time:
            self.last_reminder_time = now
        elif now - self.last_reminder_time >= REMINDER_INTERVAL_S:
            self.last_reminder_time = now
            if self.lacks_workers:
                alive_count = len(self.eligible_ids)
                required_count = max(1, self.config.min_workers)
                self.log.append(
                    f"training waits for workers: {alive_count} alive, at least {required_count}"
                    " required"
                )
            else:
                names = sorted(self.alive_workers[id].name for id in self.unacknowledged_ids)
                shown_names = first_names(names, MAX_NAMES, " ")
                self.log.append(
                    f"generation {self.generation} waits for {shown_names} to stop their last step"
                )

    def _update_next_group(self) -> None:
        """Update the list of workers of the next group, and the set of those that have not
        acknowledged the open generation."""
        staying_ids = dict.fromkeys(id for id in self.members if id in self.alive_workers)
        self.eligible_ids = [*(staying_ids | dict.fromkeys(self.alive_workers))][
            : self.config.max_workers
        ]
        self.unacknowledged_ids = {
            id
            for id in self.eligible_ids
            if self.alive_workers[id].acked_generation != self.generation
        }

    def _open_generation(self, now: float, *, abort: bool) -> None:
        if self.is_published:
            self.generation += 1
            self.open_time = now
        elif self.must_abort or not abort:
            return  # the open generation has already told the workers to stop
        self.must_abort = abort
        self._announce_generation()

    def _announce_generation(self) -> None:
        self.events.append(
            {"event": "open", "generation": self.generation, "hard": self.must_abort}
        )
        self._update_next_group()
        to_members, to_others = (
            {"open": self.generation, "hard": hard} for hard in (self.must_abort, True)
        )
        members = set(self.members)
        self.outbox += [
            (id, to_members if id in members else to_others) for id in self.alive_workers
        ]

    def _check_generation(self, generation: int) -> None:
        if generation > self.generation:
            raise ValueError(
                f"generation {generation} was never opened; the newest is {self.generation}"
            )

    def _refuse(self, now: float, id: str, name: str, problem: str) -> None:
        """Refuse a worker; it may be started again on another node. End the run if, during the last
        `hung_seconds`, there were too few other live workers for a group."""
        self.outbox.append((id, {"refused": problem}))
        self.events.append({"event": "refused", "name": name, "message": problem})
        if not self.lacks_workers:
            return
        self.refused_since = min(self.refused_since, now)
        if now - self.refused_since > self.config.hung_seconds:
            self.end_run(exit_codes.INVALID_CONFIG, problem)

    def end_run(self, code: int, text: str) -> None:
        """End the run with this exit code and message."""
        self.verdict = code, text
        self.events.append({"event": "verdict", "code": code, "message": text})

    def _adopt_fingerprint(self, now: float, hello: Message) -> None:
        """Adopt the fingerprint of a group that is training, and refuse the workers that joined
        before with a different fingerprint."""
        previous_fingerprint = self.fingerprint

        self.fingerprint = hello["fingerprint"]
        if previous_fingerprint in ({}, self.fingerprint):
            return

        for worker in self.alive_workers.values():
            hypothetical_hello = {
                "name": worker.name,
                "protocol": PROTOCOL,
                "fingerprint": previous_fingerprint,
            }
            self._refuse(now, worker.id, worker.name, self._find_mismatch(hypothetical_hello))
            self.events.append(
                {"event": "lost", "worker": worker.id, "name": worker.name, "why": "dropped"}
            )

        self.alive_workers.clear()

    def _find_mismatch(self, hello: Message, *, any_fingerprint: bool = False) -> str:
        """Return the reason to refuse a worker, or "". If `any_fingerprint` is True, the worker's
        fingerprint must match only train.fingerprint."""
        protocol = hello.get("protocol")
        if protocol != PROTOCOL:
            return (
                f'worker "{hello["name"]}" is refused: its protocol is {protocol} and not'
                f" {PROTOCOL}. Give the workers and the coordinator of a run the same image."
            )

        expected = {} if any_fingerprint else self.fingerprint
        actual = hello["fingerprint"]
        if expected:
            differing_keys = [
                key for key in expected | actual if expected.get(key) != actual.get(key)
            ]
        else:
            differing_keys = []

        differences = [
            f"{key} is {actual.get(key)} and not {expected.get(key)}" for key in differing_keys
        ]
        details = ", ".join(self.config.find_fingerprint_mismatches(actual) or differences)
        if not details:
            return ""

        return (
            f'worker "{hello["name"]}" is refused: its {details}. Every worker of a run must'
            " compute the same bits: give all of them the same image, kind of node, threads,"
            " config and data. If the cluster has several kinds of nodes, choose one with"
            " train.fingerprint."
        )
