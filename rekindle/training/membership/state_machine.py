"""The membership of workers in groups, as a pure state machine: its methods receive events with
their times, and add messages to an outbox.

server.py connects the state machine with the clock and the sockets; protocol.py defines the
messages. A generation is *opened* when a worker joins, leaves or is lost, and *published* as soon
as `has_quorum` is true. A generation number is never reused, because a restarted coordinator adopts
the group that the workers report.
"""

from dataclasses import dataclass, field
from typing import Any

from argolocal.common import exit_codes
from argolocal.common.wording import join_first_names
from rekindle.kubernetes_names import ON_DEMAND_CAPACITY
from rekindle.training.membership.protocol import PROTOCOL_VERSION, Message
from rekindle.training.membership.run_spec import RunSpec

# in a group that makes no steps, a worker that does not acknowledge within this time is hung
HANG_CHECK_TIMEOUT_S = 30.0
# number of consecutive groups that may break without completing a step or losing a worker; after
# that, the next groups are delayed
MAX_FRUITLESS_GROUPS = 3
# the run is aborted after this number of worker errors without a newer step in between
MAX_CRASHES = 3
# maximum number of values that a member sends to the other members of its group, on average
MAX_FORWARDED_VALUES = 16
# maximum number of workers that a log line names
MAX_LISTED_NAMES = 20
# seconds between two log lines about the same wait
REMINDER_INTERVAL_S = 30.0


@dataclass
class Worker:
    """A live worker process, as the coordinator sees it. All times are by the clock of the state
    machine's caller."""

    id: str
    name: str
    address: str
    join_time: float
    last_seen_time: float
    # the newest generation that this worker has acknowledged
    acked_generation: int = 0
    # time of the last report that this worker does work other than steps
    last_busy_time: float = float("-inf")
    # kind of its node: `spot`, `on-demand`, or "" if unknown
    capacity: str = ""


@dataclass
class CrashCounter:
    """Counts worker errors. An error that several members report in the same step counts once."""

    count: int = 0
    # step and generation of the newest error
    position: tuple[int, int] = (-1, -1)
    reporters: set[str] = field(default_factory=set)

    def record(self, worker_name: str, step: int, group_generation: int, member_count: int) -> int:
        """Record an error, and return the number of errors since the newest step.

        Up to `member_count` reports by different workers in the same step and group count as one
        error.
        """
        # step -1 (no state yet) counts as step 0, since both are the same progress
        crash_position = max(step, 0), group_generation
        if crash_position[0] != self.position[0]:
            self.count = 0
        if (
            crash_position != self.position
            or worker_name in self.reporters
            or len(self.reporters) >= member_count
        ):
            self.count = self.count + 1
            self.reporters = set()
        self.position = crash_position
        self.reporters.add(worker_name)
        return self.count


@dataclass
class MembershipStateMachine:
    """The state machine that decides which workers train together. The methods of the state machine
    add messages to `outbox`, ledger events to `events`, and log lines to `log`; the caller sends
    and removes all of them."""

    config: RunSpec
    # the newest opened generation
    generation: int = 0
    # the newest published generation
    published_generation: int = 0
    # True if the newest group is broken, so its members must not finish their step
    must_abort: bool = False
    # members of the published group
    members: list[str] = field(default_factory=list)
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
    # values (messages `put`) that the members of the group have sent
    values: dict[str, Message] = field(default_factory=dict)
    # number of workers for which the first group waits until `join_deadline`
    expected_members: int = 0
    join_deadline: float = 0.0
    step: int = -1
    # time when the newest step was completed, or the newest group published
    last_progress_time: float = 0.0
    # time when the newest generation was opened
    open_time: float = 0.0
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
        """True if the live workers are too few for any group."""
        return len(self.eligible_ids) < max(1, self.config.min_workers)

    def count_spot_workers(self) -> int:
        """Return the number of live workers that are not on on-demand nodes."""
        return sum(worker.capacity != ON_DEMAND_CAPACITY for worker in self.alive_workers.values())

    def has_quorum(self, now_s: float) -> bool:
        """Return True if the next group can be published, because all its workers have acknowledged
        the open generation, and no further worker is expected."""
        is_expecting_more = (
            len(self.eligible_ids) < self.expected_members and now_s < self.join_deadline
        )
        return not (self.lacks_workers or self.unacknowledged_ids or is_expecting_more)

    def join(self, now_s: float, hello_message: Message) -> None:
        """Register a worker, for the first time or after a reconnect."""
        worker_id = hello_message["id"]
        worker_name = hello_message["name"]
        reported_step = hello_message["step"]
        worker_capacity = hello_message.get("capacity") or ""
        worker = Worker(
            worker_id,
            worker_name,
            hello_message["address"],
            now_s,
            now_s,
            capacity=worker_capacity,
        )
        is_newer = hello_message["generation"] > self.generation
        # True if the worker trains in a group of the previous coordinator
        is_training = is_newer and not self.published_generation and hello_message["group"] > 0

        if not (self.alive_workers or self.has_fixed_fingerprint):
            self.fingerprint = {}

        mismatch_reason = self._find_mismatch(hello_message, allows_any_fingerprint=is_training)
        if mismatch_reason:
            return self._refuse_worker(now_s, worker_id, worker_name, mismatch_reason)
        if is_training:
            self._adopt_fingerprint(now_s, hello_message)

        self.fingerprint = self.fingerprint or hello_message["fingerprint"]
        if not self.alive_workers:
            self.join_deadline = now_s + self.config.join_timeout_s
            self.expected_members = len(self.members) or self.config.workers

        is_rejoining = worker_id in self.alive_workers
        self.alive_workers[worker_id] = worker
        if not is_rejoining and not (is_newer and not self.published_generation):
            self.events.append(
                {"event": "join", "worker": worker_id, "name": worker_name, "step": reported_step}
                | ({"harvested": True} if hello_message.get("harvested") else {})
                | ({"capacity": worker_capacity} if worker_capacity else {})
            )

        if is_newer and not self.published_generation:
            self._adopt_generation(now_s, hello_message)
        elif is_newer or (
            not is_rejoining
            and hello_message["generation"] == self.generation
            and not self.is_published
        ):
            self._open_generation_after(now_s, hello_message["generation"])

        if self.unregistered_ids:
            self.unregistered_ids.discard(worker_id)
            if not self.unregistered_ids:
                self.log.append(
                    f"generation {self.published_generation} continues, all {len(self.members)} are"
                    " connected again"
                )

        self.step = max(self.step, reported_step)
        self._update_next_group()
        # True if the worker is in an older group, or not in any group
        is_outside_group = (
            hello_message["group"] != self.published_generation or worker_id not in self.members
        )
        generation_number = self.generation

        if self.is_published and is_outside_group and worker_id in self.members:
            # this member has missed the member list of its group, so the other members would wait
            # for it forever
            self._open_generation(now_s, should_abort=True)

        self.advance(now_s)
        if generation_number == self.generation and (is_outside_group or not self.is_published):
            self.outbox.append(
                (
                    worker_id,
                    {"open": generation_number, "hard": self.must_abort or is_outside_group},
                )
            )
        if not is_outside_group:
            self.outbox += [(worker_id, value_message) for value_message in self.values.values()]

    def heartbeat(self, now_s: float, worker_id: str, step: int, is_busy: bool = False) -> None:
        """Record that a worker is alive and has completed `step` updates."""
        worker = self.alive_workers[worker_id]
        worker.last_seen_time = now_s

        if is_busy:
            worker.last_busy_time = now_s

        if step > self.step:
            self.step = step
            self.last_progress_time = now_s

            self.fruitless_groups = 0
            if now_s - self.last_step_event_time >= 1:
                self.last_step_event_time = now_s
                self.events.append({"event": "step", "step": step})
        elif is_busy and worker_id in self.members:
            self.last_progress_time = now_s

    def forward_value(self, sender_id: str, value_message: Message) -> None:
        """Forward a member's value to the other members of its group. Raises ValueError if the
        member has sent too many values."""
        if value_message["put"] != self.published_generation or sender_id not in self.members:
            return
        if len(self.values) >= MAX_FORWARDED_VALUES * len(self.members):
            raise ValueError(f"more than {MAX_FORWARDED_VALUES} values of each member")
        self.values[value_message["key"]] = value_message
        self.outbox += [
            (member_id, value_message) for member_id in self.members if member_id != sender_id
        ]

    def acknowledge(self, now_s: float, worker_id: str, generation: int, step: int) -> None:
        """Record that a worker has left its group and waits until `generation` is published."""
        self._check_generation_number(generation)
        self.heartbeat(now_s, worker_id, step)
        self.alive_workers[worker_id].acked_generation = generation
        if generation == self.generation:
            self.unacknowledged_ids.discard(worker_id)
            self.advance(now_s)

    def report_failure(self, now_s: float, worker_id: str, generation: int) -> None:
        """Record that a collective operation failed, which breaks the group of `generation` for all
        its members."""
        self._check_generation_number(generation)
        self.heartbeat(now_s, worker_id, -1)

        if (
            generation != self.published_generation
            or worker_id not in self.members
            or (self.must_abort and not self.is_published)
        ):
            return

        self.events.append(
            {"event": "fault", "name": self.alive_workers[worker_id].name, "generation": generation}
        )
        if self.is_published:
            self.fruitless_groups += 1
        self._open_generation(now_s, should_abort=True)

        if self.fruitless_groups > MAX_FRUITLESS_GROUPS:
            pause_s = min(5.0, 0.05 * 2 ** (self.fruitless_groups - MAX_FRUITLESS_GROUPS))
            self.join_deadline = now_s + pause_s
            self.expected_members = len(self.alive_workers) + 1
            self.log.append(
                f"{self.fruitless_groups} consecutive groups broke before their first step,"
                " although no worker was lost: can the workers reach each other? The next group"
                f" starts in {pause_s:.1f} s."
            )

    def remove(self, now_s: float, worker_id: str, reason: str = "connection") -> None:
        """Remove a worker from the live workers. The reason `drain` means that the worker left on
        purpose, after a step that all members have completed."""
        worker = self.alive_workers.pop(worker_id, None)
        if worker is None:
            return

        step_field = {"step": self.step} if self.step >= 0 else {}
        if reason == "drain":
            self.events.append(
                {"event": "drain", "worker": worker_id, "name": worker.name, **step_field}
            )
        else:
            self.events.append(
                {
                    "event": "lost",
                    "worker": worker_id,
                    "name": worker.name,
                    "why": reason,
                    **step_field,
                }
            )

        if reason in ("silent", "hung"):
            self.outbox.append((worker_id, {"dropped": reason}))

        self._update_next_group()
        if worker_id in self.members and reason != "drain":
            self._open_generation(now_s, should_abort=True)

        self.advance(now_s)

    def report_error(
        self, worker_name: str, message: str, exit_code: int, is_temporary: bool = False
    ) -> None:
        """Record that a worker ends with an error. End the run if a retry cannot help, or after
        MAX_CRASHES errors."""
        self.events.append(
            {"event": "failed", "name": worker_name, "message": message, "code": exit_code}
        )
        # the error is temporary, because a service that the worker needs is unavailable
        if is_temporary:
            self.log.append(f"{worker_name} ends temporarily: {message}")
            return

        member_count = max(len(self.members), self.config.workers)
        crash_count = self.crashes.record(
            worker_name, self.step, self.published_generation, member_count
        )
        if exit_code != 1 or crash_count >= MAX_CRASHES:
            if exit_code == 1:
                repeat_text = f" ({crash_count} times without a newer step)"
            else:
                repeat_text = ""

            self.end_run(exit_code, f"{worker_name}{repeat_text}: {message}")

    def tick(self, now_s: float) -> None:
        """Drop silent and hung workers; log the reason why the training waits. Called at regular
        intervals."""
        for silent_id in [
            worker.id for worker in self.alive_workers.values() if self._is_silent(now_s, worker)
        ]:
            self.remove(now_s, silent_id, "silent")
        self._drop_hung_workers(now_s)
        self._log_wait_reason(now_s)
        self.advance(now_s)

    def shift_times(self, pause_seconds: float) -> None:
        """Shift all stored times by the length of a pause of the coordinator process, during which
        it received no messages."""
        self.last_progress_time += pause_seconds
        self.open_time += pause_seconds
        self.refused_since += pause_seconds
        for worker in self.alive_workers.values():
            worker.last_seen_time += pause_seconds
            worker.last_busy_time += pause_seconds

    def advance(self, now_s: float) -> None:
        """Open a generation if the workers of the next group have changed; publish the open
        generation if it has a quorum."""
        if self.is_published and self.eligible_ids and self.eligible_ids != self.members:
            self._open_generation(now_s, should_abort=False)
        if not self.is_published and self.has_quorum(now_s):
            self._publish_generation(now_s, list(self.eligible_ids))

    def _publish_generation(self, now_s: float, member_ids: list[str]) -> None:
        self.members = member_ids
        self.published_generation = self.generation
        self.values = {}
        self.expected_members = 0
        self.last_progress_time = now_s
        self.is_hang_check = False
        self.has_fixed_fingerprint = True
        self.refused_since = float("inf")
        group_message = {
            "members": [
                [member_id, self.alive_workers[member_id].address] for member_id in member_ids
            ],
            "generation": self.generation,
        }
        self.outbox += [(member_id, group_message) for member_id in member_ids]
        member_names = [self.alive_workers[member_id].name for member_id in member_ids]

        self.events.append(
            {
                "event": "generation",
                "generation": self.published_generation,
                "members": member_names,
                "step": self.step,
            }
        )

        shown_names = join_first_names(member_names, MAX_LISTED_NAMES, " ")
        self.log.append(f"generation {self.published_generation}: {shown_names}")

    def _adopt_generation(self, now_s: float, hello_message: Message) -> None:
        """After a restart of the coordinator, adopt the generation that a worker reports."""
        self.generation = self.published_generation = hello_message["generation"]
        self.values = {}
        peer_ids = list(dict.fromkeys(hello_message["peers"]))

        # the worker waits for this generation, which the previous coordinator may already have
        # published to other workers
        if hello_message["group"] != self.generation:
            self.members = [peer_id for peer_id in peer_ids if peer_id in self.alive_workers]
            self.join_deadline = now_s + self.config.join_timeout_s
            self.expected_members = len(peer_ids)
            self._update_next_group()

            return self._open_generation(now_s, should_abort=True)

        self.members = peer_ids
        self.last_progress_time = now_s

        self.expected_members = 0
        # count each member of the adopted group as alive until it has been silent for
        # silence_seconds
        for peer_id in self.members:
            self.alive_workers.setdefault(
                peer_id,
                Worker(peer_id, peer_id, "", now_s, now_s, acked_generation=self.generation),
            )

        self.unregistered_ids = set(self.members)

    def _open_generation_after(self, now_s: float, generation: int) -> None:
        """Open a generation with a number above `generation`, which another coordinator used, since
        workers acknowledge only newer generations."""
        if self.is_published:
            self.open_time = now_s
            self.must_abort = False
        self.generation = generation + 1
        self._announce_generation()

    def _is_silent(self, now_s: float, worker: Worker) -> bool:
        """Return True if a worker has been silent for too long. A completed step counts as a sign
        of life of all members of the group."""
        # True unless the worker has already left its group
        may_train = worker.acked_generation < self.generation or self.is_published
        is_training_member = may_train and worker.id in self.members
        if is_training_member:
            last_sign_s = max(worker.last_seen_time, self.last_progress_time)
        else:
            last_sign_s = worker.last_seen_time
        return now_s - last_sign_s > self.config.silence_seconds

    def _drop_hung_workers(self, now_s: float) -> None:
        """Abort a group that is alive but completes no steps, then drop the workers that do not
        acknowledge the next generation."""
        hung_limit_s = self.config.hung_seconds

        if self.is_published or (
            not self.must_abort and self.unacknowledged_ids.intersection(self.members)
        ):
            if self.members and now_s - max(self.last_progress_time, self.open_time) > hung_limit_s:
                self.log.append(
                    f"no step for {hung_limit_s:.0f} s, although all workers are alive: probing"
                    " each of them"
                )
                self.is_hang_check = True
                # all workers acknowledge the abort, except hung workers
                self._open_generation(now_s, should_abort=True)
                self.open_time = now_s

            return

        if self.is_hang_check:
            timeout_s = min(HANG_CHECK_TIMEOUT_S, hung_limit_s)
        else:
            timeout_s = hung_limit_s

        for worker in [self.alive_workers[hung_id] for hung_id in self.unacknowledged_ids]:
            if now_s - max(self.open_time, worker.join_time, worker.last_busy_time) > timeout_s:
                self.remove(now_s, worker.id, "hung")

    def _log_wait_reason(self, now_s: float) -> None:
        if (self.is_published and self.members) or not self.last_reminder_time:
            self.last_reminder_time = now_s
        elif now_s - self.last_reminder_time >= REMINDER_INTERVAL_S:
            self.last_reminder_time = now_s
            if self.lacks_workers:
                alive_count = len(self.eligible_ids)
                required_count = max(1, self.config.min_workers)
                self.log.append(
                    f"training waits for workers: {alive_count} alive, at least {required_count}"
                    " required"
                )
            else:
                worker_names = sorted(
                    self.alive_workers[worker_id].name for worker_id in self.unacknowledged_ids
                )
                shown_names = join_first_names(worker_names, MAX_LISTED_NAMES, " ")
                self.log.append(
                    f"generation {self.generation} waits for {shown_names} to stop their last step"
                )

    def _update_next_group(self) -> None:
        """Update the list of workers of the next group, and the set of its workers that have not
        acknowledged the open generation."""
        staying_ids = dict.fromkeys(
            member_id for member_id in self.members if member_id in self.alive_workers
        )
        self.eligible_ids = [*(staying_ids | dict.fromkeys(self.alive_workers))][
            : self.config.max_workers
        ]
        self.unacknowledged_ids = {
            member_id
            for member_id in self.eligible_ids
            if self.alive_workers[member_id].acked_generation != self.generation
        }

    def _open_generation(self, now_s: float, *, should_abort: bool) -> None:
        if self.is_published:
            self.generation += 1
            self.open_time = now_s
        elif self.must_abort or not should_abort:
            # the open generation has already told the workers to stop
            return
        self.must_abort = should_abort
        self._announce_generation()

    def _announce_generation(self) -> None:
        self.events.append(
            {"event": "open", "generation": self.generation, "hard": self.must_abort}
        )
        self._update_next_group()
        message_to_members = {"open": self.generation, "hard": self.must_abort}
        message_to_others = {"open": self.generation, "hard": True}
        member_ids = set(self.members)
        self.outbox += [
            (worker_id, message_to_members if worker_id in member_ids else message_to_others)
            for worker_id in self.alive_workers
        ]

    def _check_generation_number(self, generation: int) -> None:
        if generation > self.generation:
            raise ValueError(
                f"generation {generation} was never opened; the newest is {self.generation}"
            )

    def _refuse_worker(
        self, now_s: float, worker_id: str, worker_name: str, mismatch_reason: str
    ) -> None:
        """Refuse a worker, which may be started again on another node. End the run if, during the
        last `hung_seconds`, the other live workers were too few for a group."""
        self.outbox.append((worker_id, {"refused": mismatch_reason}))
        self.events.append({"event": "refused", "name": worker_name, "message": mismatch_reason})
        if not self.lacks_workers:
            return
        self.refused_since = min(self.refused_since, now_s)
        if now_s - self.refused_since > self.config.hung_seconds:
            self.end_run(exit_codes.INVALID_CONFIG, mismatch_reason)

    def end_run(self, exit_code: int, end_message: str) -> None:
        """End the run with the given exit code and error message."""
        self.verdict = exit_code, end_message
        self.events.append({"event": "verdict", "code": exit_code, "message": end_message})

    def _adopt_fingerprint(self, now_s: float, hello_message: Message) -> None:
        """Adopt the fingerprint of a group that is training, and refuse the workers that joined
        before with a different fingerprint."""
        previous_fingerprint = self.fingerprint

        self.fingerprint = hello_message["fingerprint"]
        if previous_fingerprint in ({}, self.fingerprint):
            return

        for worker in self.alive_workers.values():
            hypothetical_hello = {
                "name": worker.name,
                "protocol": PROTOCOL_VERSION,
                "fingerprint": previous_fingerprint,
            }
            self._refuse_worker(
                now_s, worker.id, worker.name, self._find_mismatch(hypothetical_hello)
            )
            self.events.append(
                {"event": "lost", "worker": worker.id, "name": worker.name, "why": "dropped"}
            )

        self.alive_workers.clear()

    def _find_mismatch(
        self, hello_message: Message, *, allows_any_fingerprint: bool = False
    ) -> str:
        """Return the reason to refuse a worker, or "". If `allows_any_fingerprint` is True, the
        worker's fingerprint must match only train.fingerprint."""
        protocol_version = hello_message.get("protocol")
        if protocol_version != PROTOCOL_VERSION:
            return (
                f'worker "{hello_message["name"]}" is refused: its protocol is {protocol_version}'
                f" and not {PROTOCOL_VERSION}. Give the workers and the coordinator of a run the"
                " same image."
            )

        expected_fingerprint = {} if allows_any_fingerprint else self.fingerprint
        actual_fingerprint = hello_message["fingerprint"]
        if expected_fingerprint:
            differing_keys = [
                key
                for key in expected_fingerprint | actual_fingerprint
                if expected_fingerprint.get(key) != actual_fingerprint.get(key)
            ]
        else:
            differing_keys = []

        differences = [
            f"{key} is {actual_fingerprint.get(key)} and not {expected_fingerprint.get(key)}"
            for key in differing_keys
        ]
        details_text = ", ".join(
            self.config.find_fingerprint_mismatches(actual_fingerprint) or differences
        )
        if not details_text:
            return ""

        return (
            f'worker "{hello_message["name"]}" is refused: its {details_text}. Every worker of a'
            " run must compute the same bits: give all of them the same image, kind of node,"
            " threads, config and data. If the cluster has several kinds of nodes, choose one with"
            " train.fingerprint."
        )
