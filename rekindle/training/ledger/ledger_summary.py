"""The events of a ledger, and their Summary: the use of all worker-seconds (computed in
accounting.py).

An event is {"t": unix seconds, "event": event name, ...}. `name` is a worker's name, a step a
number of updates:

    run {device, workers, virtual_workers, steps, samples}    the plan, written by rank 0 when it
    starts
    coordinator {id}                                 a coordinator started or restarted
    join {worker, name, step}                        a process joined (`worker`: its id), with the
    state of `step`
    lost {worker, name, why, step}                   why: connection, silent, hung, dropped
    drain {worker, name, step}                       the worker left after an announcement
    open {generation, hard}                          the group stops after its step; hard:
    immediately, since it broke
    generation {generation, members, step}           the next group trains
    step {step, last}                                at most one event a second; last: the last step
    of a killed
                                                     worker, which its shared memory told its next
                                                     process
    checkpoint {step, seconds, cost, bytes, uploaded, name}      cost: seconds that it took from the
    training
    restored {step, tier, name}    torn {object, why}
    fault {name, generation}    refused {name, message}    failed {name, message, code}
    verdict {code, message}     complete {sha256, step}    dropped {events}    skipped {lines}

Each second of a live worker is *trained* (in a group, making steps that are not repeated), *waited*
(in no group) or *lost* (in a group, for work that was repeated: after the last finished step if the
group broke, and after the restored step if all workers were lost). Steps are recorded once a second
and assumed to be evenly spread in between.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from rekindle.training.ledger.events import Event

TRAINED = "trained"
WAITED = "waited"
LOST = "lost"
UNSEEN = "unseen"  # reason of a loss that no coordinator saw


@dataclass
class Interval:
    """A time interval of one worker."""

    start: float
    end: float
    kind: str


@dataclass
class Incident:
    """A disturbance: a worker lost, drained, failed or joined, or a coordinator restarted."""

    t: float
    kind: str  # one of: lost, drain, failed, join, coordinator (its restart)
    name: str
    why: str = ""
    # newest step that is known to be completed at the time `t`; None: none is known
    step: int | None = None
    # True if `t` and `step` are those of the incident; False if nobody saw it: it happened at `t`
    # or later
    seen: bool = True
    # number of surviving members of the group; if a coordinator restarted: of its workers
    left: int = 0
    resumed: float | None = None  # start time of the next group
    repeated: int = 0  # number of repeated steps
    back: float | None = None  # time when a worker with this name trained again
    # worker-seconds of repeated work, for all incidents of the same pause together
    cost: float = 0.0
    # if no worker was left: source of the state that training continued with, hot or durable
    tier: str = ""


@dataclass
class Summary:
    """The report of a run. Times are unix seconds."""

    began: float = 0.0
    ended: float = 0.0
    state: str = "running"  # one of: running, complete, failed
    message: str = ""  # message of the verdict
    code: int = 0
    sha256: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    # worker name → its intervals
    intervals: dict[str, list[Interval]] = field(default_factory=dict)
    # (time, step) of all recorded steps
    points: list[tuple[float, int]] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    checkpoints: list[Event] = field(default_factory=list)
    restored: list[Event] = field(default_factory=list)
    steps: int = 0
    repeated: int = 0
    generations: int = 0
    dropped: int = 0  # number of events that were never written
    skipped: int = 0  # number of unreadable lines and invalid events
    counts: dict[str, int] = field(default_factory=dict)  # number of events by name

    def seconds(self, kind: str, name: str | None = None) -> float:
        """Return the worker-seconds of a kind, for one worker or all."""
        intervals = [self.intervals[name]] if name else self.intervals.values()
        return sum(
            interval.end - interval.start
            for worker in intervals
            for interval in worker
            if interval.kind == kind
        )

    @property
    def first_step(self) -> int:
        """The first step of the training; above 0 if the training was resumed."""
        if self.points:
            return self.points[0][1]
        return 0

    @property
    def training_seconds(self) -> float:
        """Seconds during which any worker was in a group."""
        working = [
            interval
            for worker in self.intervals.values()
            for interval in worker
            if interval.kind != WAITED
        ]
        return sum(end - start for start, end in alive(working))

    @property
    def steps_per_second(self) -> float:
        """Steps (repeated steps count once) per second during which any worker was in a group."""
        busy = self.training_seconds
        if busy:
            return (self.steps - self.first_step) / busy
        return 0.0

    @property
    def preemptions(self) -> int:
        """Number of workers that were lost or had to leave."""
        return self.number("lost") + self.number("drain")

    @property
    def uploaded(self) -> int:
        """Bytes uploaded for durable checkpoints."""
        return sum(event.get("uploaded", 0) for event in self.checkpoints)

    def number(self, kind: str) -> int:
        return sum(incident.kind == kind for incident in self.incidents)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object, without the raw events."""
        seconds = {kind: round(self.seconds(kind), 3) for kind in (TRAINED, WAITED, LOST)}

        workers = {
            name: {kind: round(self.seconds(kind, name), 3) for kind in seconds}
            | {"alive": alive(intervals)}
            for name, intervals in self.intervals.items()
        }

        tiers = [str(event.get("tier")) for event in self.restored]

        attributes = (
            "state",
            "message",
            "began",
            "ended",
            "run",
            "steps",
            "generations",
            "preemptions",
        )

        return {name: getattr(self, name) for name in attributes} | {
            "steps_repeated": self.repeated,
            "steps_per_second": round(self.steps_per_second, 3),
            "worker_seconds": seconds,
            "drains": self.number("drain"),
            "coordinator_restarts": self.number("coordinator"),
            "checkpoints": {
                "number": len(self.checkpoints),
                "bytes": sum(event.get("bytes", 0) for event in self.checkpoints),
                "bytes_uploaded": self.uploaded,
                "seconds": round(sum(event.get("seconds", 0.0) for event in self.checkpoints), 3),
            },
            "restores": {tier: tiers.count(tier) for tier in sorted(set(tiers))},
            "incidents": [asdict(incident) for incident in self.incidents],
            "workers": workers,
            "events": self.counts,
        }


def alive(intervals: list[Interval]) -> list[tuple[float, float]]:
    """Return the union of the intervals, as disjoint (start, end)."""
    union: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda interval: interval.start):
        if union and interval.start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], interval.end)
        else:
            union.append((interval.start, interval.end))
    return union


def percent(share: float) -> str:
    """Format a share as `96.4 %` or `100 %`."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def short_name(worker: str) -> str:
    """Return `worker-1` for the pod demo-x7k2p-train-worker-1."""
    return worker.rpartition("-train-")[2] or worker
