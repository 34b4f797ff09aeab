"""The events of a ledger, and the Summary that accounting.py computes from them.

An event is {"t": unix seconds, "event": event name, ...}. In the events below, `name` is the name
of a worker, and `step` a number of updates:

    run {device, workers, virtual_workers, steps, samples, program, unit}
                                      the plan, which rank 0 writes when it starts; program: true if
                                      the workers are processes of a training program, whose steps
                                      are those of its checkpoints, or the number of these
                                      checkpoints (unit: steps, checkpoints)
    coordinator {id}                  a coordinator has started
    join {worker, name, step}         a process with this state has joined (`worker`: its id)
    lost {worker, name, why, step}    why: connection, silent, hung, dropped
    drain {worker, name, step}        a worker has left after an announcement
    open {generation, hard}           the group stops after its step; hard: at once, since it broke
    generation {generation, members, step}
                                      the next group trains
    step {step, last}                 at most one event a second; last: the last step of a killed
                                      worker, which its next process has read in shared memory
    checkpoint {step, seconds, cost, bytes, uploaded, name}
                                      cost: seconds that the training had to wait for it
    restored {step, tier, name}       the step that a process has loaded; tier: hot, disk, durable,
                                      none
    progress {percentage, seconds_left, metrics, not_finite}
                                      a report of a training program; not_finite: names of metrics
    unsaved {seconds}                 a training program had to stop, and did not save: the work of
                                      these seconds is repeated
    usage {name, seconds, cpu_cores_mean, cpu_cores_max, memory_bytes_mean, memory_bytes_max, ...}
                                      the use of a pod in a period of `seconds`, by its first
                                      process; with GPUs also gpu_percent_mean, gpu_percent_max,
                                      gpu_memory_bytes_mean and gpu_memory_bytes_max, of each GPU
    torn {object, why}                a damaged snapshot or checkpoint
    fault {name, generation}          a collective of this worker has failed
    killed {name}                     a process of a training program was killed on this pod
    refused {name, message}           the coordinator has refused a worker
    failed {name, message, code}      a worker has ended with an error
    verdict {code, message}           the coordinator has aborted the run
    complete {sha256, step}           the model is in the object store
    dropped {events}                  number of events that were not written
    skipped {lines}                   number of unreadable lines, and of events with wrong fields

event_types.py has the types of the fields.

Each second of a live worker counts as *waited* (outside of a group), *trained* (in a group, on
steps that are not repeated) or *lost* (in a group, on work that is repeated: all work after the
last finished step if the group broke, or after the restored step if all workers were lost). The
ledger has about one step per second; the steps in between are assumed to be evenly spaced.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from rekindle.training.ledger.events import Event

TRAINED = "trained"
WAITED = "waited"
LOST = "lost"
# `Incident.why` of a worker that was lost while no coordinator was running
LOST_WITHOUT_COORDINATOR = "unseen"
KILLED_PROCESS = "process"  # why: a process of a program was killed, its pod survived


@dataclass
class Interval:
    """A time interval of one worker."""

    start: float
    end: float
    kind: str


@dataclass
class Incident:
    """An interruption of a run: a worker was lost, left, failed or joined, or the coordinator
    restarted."""

    t: float
    kind: str  # one of: lost, drain, failed, join, coordinator (the coordinator restarted)
    name: str
    why: str = ""
    # newest step that is known to be completed at the time `t`; None if no step is known
    step: int | None = None
    # False if no coordinator was running; the incident then happened at or after the time `t` and
    # the step `step`
    seen: bool = True
    # number of surviving members of the group; after a restart of the coordinator, number of
    # members that continued the training
    left: int = 0
    resumed: float | None = None  # start time of the next group
    repeated: int = 0  # number of training steps that were repeated after a loss
    back: float | None = None  # time when a worker with the same name trained again
    # worker-seconds of repeated work, as a total over all incidents of the same pause
    cost: float = 0.0
    # if no worker was left, the source of the state that training continued from: `hot` (snapshot)
    # or `durable` (checkpoint)
    tier: str = ""


@dataclass
class Summary:
    """The report of a run. Times are unix seconds."""

    began: float = 0.0
    ended: float = 0.0
    state: str = "running"  # one of: running, complete, failed
    message: str = ""  # message of the event `verdict`, which says why the run failed
    code: int = 0
    sha256: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    # worker name → its intervals
    intervals: dict[str, list[Interval]] = field(default_factory=dict)
    # time and number of each recorded step
    points: list[tuple[float, int]] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    checkpoints: list[Event] = field(default_factory=list)
    restored: list[Event] = field(default_factory=list)
    unsaved: list[Event] = field(default_factory=list)
    usage: dict[str, dict[str, float]] = field(default_factory=dict)  # by pod, of all periods
    progress: dict[str, Any] = field(default_factory=dict)  # newest report of a training program
    steps: int = 0
    repeated: int = 0
    generations: int = 0
    # start time, number of members and first step of each generation
    groups: list[tuple[float, int, int]] = field(default_factory=list)
    dropped: int = 0  # number of events that were never written
    skipped: int = 0  # number of unreadable lines and invalid events
    counts: dict[str, int] = field(default_factory=dict)  # number of events by name

    def worker_seconds(self, kind: str, name: str | None = None) -> float:
        """Return the total length of the intervals of a kind, in seconds, of the worker `name` or
        of all workers."""
        intervals = [self.intervals[name]] if name else self.intervals.values()
        return sum(
            interval.end - interval.start
            for worker in intervals
            for interval in worker
            if interval.kind == kind
        )

    @property
    def first_step(self) -> int:
        """The step at which the recorded training starts; above 0 if it was resumed."""
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
        return sum(end - start for start, end in merge_intervals(working))

    @property
    def unit(self) -> str:
        """The unit of `steps`: "steps", or "checkpoints" for a program that does not tell its
        steps."""
        return "checkpoints" if self.run.get("unit") == "checkpoints" else "steps"

    @property
    def steps_per_second(self) -> float:
        """Steps per second of `training_seconds`; a repeated step counts once."""
        busy = self.training_seconds
        if busy:
            return (self.steps - self.first_step) / busy
        return 0.0

    @property
    def preemptions(self) -> int:
        """Number of times that a worker was lost or had to leave before the run was complete."""
        return self.count_incidents("lost") + self.count_incidents("drain")

    @property
    def uploaded(self) -> int:
        """Bytes uploaded for durable checkpoints."""
        return sum(event.get("uploaded", 0) for event in self.checkpoints)

    def count_incidents(self, kind: str) -> int:
        return sum(incident.kind == kind for incident in self.incidents)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object, without the raw events."""
        seconds = {kind: round(self.worker_seconds(kind), 3) for kind in (TRAINED, WAITED, LOST)}

        workers = {
            name: {kind: round(self.worker_seconds(kind, name), 3) for kind in seconds}
            | {"alive": merge_intervals(intervals)}
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
            "progress",
        )

        return {name: getattr(self, name) for name in attributes} | {
            "steps_repeated": self.repeated,
            "steps_per_second": round(self.steps_per_second, 3),
            "worker_seconds": seconds,
            "drains": self.count_incidents("drain"),
            "coordinator_restarts": self.count_incidents("coordinator"),
            "checkpoints": {
                "number": len(self.checkpoints),
                "bytes": sum(event.get("bytes", 0) for event in self.checkpoints),
                "bytes_uploaded": self.uploaded,
                "seconds": round(sum(event.get("seconds", 0.0) for event in self.checkpoints), 3),
            },
            "restores": {tier: tiers.count(tier) for tier in sorted(set(tiers))},
            "incidents": [asdict(incident) for incident in self.incidents],
            "workers": workers,
            "usage": self.usage,
            "events": self.counts,
        }


def merge_intervals(intervals: list[Interval]) -> list[tuple[float, float]]:
    """Return the union of the intervals, as disjoint (start, end) in ascending order."""
    union: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda interval: interval.start):
        if union and interval.start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], interval.end)
        else:
            union.append((interval.start, interval.end))
    return union


def format_percent(share: float) -> str:
    """Format a fraction as a percentage: `96.4 %` or `100 %`."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def shorten_worker_name(worker: str) -> str:
    """Return the short name of a worker, such as `worker-1` for the pod
    demo-x7k2p-train-worker-1."""
    return worker.rpartition("-train-")[2] or worker
