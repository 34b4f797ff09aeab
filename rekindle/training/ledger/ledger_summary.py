"""The events of a ledger, and the LedgerSummary that accounting.py computes from them.

An event is {"t": unix seconds, "event": event name, ...}. In the following list of events, `name`
is the name of a worker, and `step` a number of updates.

    run {device, workers, virtual_workers, steps, samples, program, unit}
                                      the plan, which rank 0 writes when it starts; program: true if
                                      the workers are processes of a training program, whose steps
                                      are those of its checkpoints, or the number of these
                                      checkpoints (unit: steps, checkpoints)
    coordinator {id, created}         a coordinator has started; created: time in Unix seconds from
                                      which its job could be created, if known
    trained {seconds}                 seconds that the job has trained, for its time limit
    join {worker, name, step, harvested, capacity}
                                      a process with this state has joined (`worker`: its id);
                                      harvested: true if it is an extra worker on idle capacity;
                                      capacity: kind of its node, spot or on-demand, if known
    on_demand {workers, previous, seconds}
                                      new and previous number of on-demand workers that the
                                      coordinator has requested, since the number of workers on spot
                                      nodes was too low, or high enough again, for `seconds`
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

The types of the events' fields are in event_types.py.

Each second of a live worker counts as *waited* (outside of a group), *trained* (in a group, on
steps that are not repeated) or *lost* (in a group, on work that is repeated). If a group of workers
broke, all work after its last finished step is repeated; if all workers were lost, all work after
the restored step is repeated. The ledger has about one event `step` per second; the steps between
two events are assumed to be evenly spaced. A worker of the job that is not alive counts as *queued*
(queue_time.py).
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from rekindle.kubernetes_names import ON_DEMAND_CAPACITY
from rekindle.training.ledger.events import Event

TRAINED_KIND = "trained"
WAITED_KIND = "waited"
LOST_KIND = "lost"
# of a worker that is not alive; no interval has this kind
QUEUED_KIND = "queued"
# value of `Incident.why` for a worker that was lost while no coordinator was running
UNSEEN_LOSS_REASON = "unseen"
# value of `Incident.why` if a process of a program was killed, but its pod survived
KILLED_PROCESS_REASON = "process"


@dataclass
class TimeInterval:
    """A time interval of one worker, of one kind."""

    start: float
    end: float
    kind: str


@dataclass
class Incident:
    """An interruption of a run: a worker was lost, left, failed or joined, or the coordinator
    restarted."""

    t: float
    # kind of the incident: lost, drain, failed, join, or coordinator (the coordinator restarted)
    kind: str
    name: str
    why: str = ""
    # newest step that is known to be completed at the time `t` of the incident; None if no step is
    # known
    step: int | None = None
    # False if no coordinator was running; the incident then happened at or after the time `t` and
    # the step `step`
    seen: bool = True
    # number of surviving members of the group; after a restart of the coordinator, number of
    # members that continued the training
    left: int = 0
    # time when the next group of workers started to train
    resumed: float | None = None
    # number of training steps that were repeated after a loss
    repeated: int = 0
    # time when a worker with the same name trained again
    back: float | None = None
    # worker-seconds of repeated work, as a total over all incidents of the same pause
    cost: float = 0.0
    # if no worker was left, the source of the state from which the training continued, either "hot"
    # (a snapshot) or "durable" (a checkpoint)
    tier: str = ""


@dataclass(frozen=True)
class CoordinatorStart:
    """The start of a coordinator, and the time from which its job could be created, if known."""

    t: float
    created: float | None


@dataclass(frozen=True)
class HarvestShare:
    """The part of a training that harvested workers computed. `seconds`: duration of the training
    without pauses; `seconds_without`: estimated duration if no harvested workers had trained."""

    worker_seconds: float
    steps: float
    seconds: float
    seconds_without: float
    # True if the estimate uses the speed measured without harvested workers
    is_measured: bool


@dataclass
class LedgerSummary:
    """The report of a training, computed from its ledger. Times are unix seconds."""

    began: float = 0.0
    ended: float = 0.0
    # state of the training: running, complete or failed
    state: str = "running"
    # reason why the run failed, from the event `verdict`
    message: str = ""
    code: int = 0
    sha256: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    # worker name → its intervals
    intervals: dict[str, list[TimeInterval]] = field(default_factory=dict)
    # time and number of each recorded step
    points: list[tuple[float, int]] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    checkpoints: list[Event] = field(default_factory=list)
    restored: list[Event] = field(default_factory=list)
    unsaved: list[Event] = field(default_factory=list)
    # pod → its use of resources, over all periods
    usage: dict[str, dict[str, float]] = field(default_factory=dict)
    # newest report of a training program
    progress: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    repeated: int = 0
    generations: int = 0
    # start time, number of members and first step of each generation
    groups: list[tuple[float, int, int]] = field(default_factory=list)
    # number of harvested members of each generation
    harvested_members: list[int] = field(default_factory=list)
    # names of the harvested workers
    harvested: set[str] = field(default_factory=set)
    # worker name → kind of its node, spot or on-demand; unknown kinds are missing
    capacities: dict[str, str] = field(default_factory=dict)
    # events about the number of on-demand workers
    on_demand_changes: list[Event] = field(default_factory=list)
    # None if the training had no harvested workers
    harvest: HarvestShare | None = None
    # time when the queue time starts; None without a coordinator
    created: float | None = None
    coordinator_starts: list[CoordinatorStart] = field(default_factory=list)
    # times when the run was complete or aborted; a later process may continue the run
    end_times: list[float] = field(default_factory=list)
    # seconds without a live worker since the creation of the job
    queued_seconds: float = 0.0
    # worker name → seconds until the worker was alive; "": workers that were never alive
    queued_by_worker: dict[str, float] = field(default_factory=dict)
    # seconds in which a coordinator, but no worker was running
    coordinator_idle_seconds: float = 0.0
    # number of events that were never written
    dropped: int = 0
    # number of unreadable lines and invalid events
    skipped: int = 0
    # number of events by name
    counts: dict[str, int] = field(default_factory=dict)

    def compute_worker_seconds(self, interval_kind: str, worker_name: str | None = None) -> float:
        """Return the total length of the intervals of a kind, in seconds, of the worker
        `worker_name` or of all workers."""
        interval_lists = [self.intervals[worker_name]] if worker_name else self.intervals.values()
        return sum(
            interval.end - interval.start
            for worker_intervals in interval_lists
            for interval in worker_intervals
            if interval.kind == interval_kind
        )

    def compute_alive_seconds(self, worker_name: str) -> float:
        """Return the seconds during which processes of a worker were alive."""
        return sum(
            interval.end - interval.start for interval in self.intervals.get(worker_name, [])
        )

    @property
    def capacity_seconds(self) -> dict[str, float]:
        """Seconds that workers were alive, by kind of node; {} if all kinds are unknown."""
        seconds_by_capacity: dict[str, float] = {}
        for worker_name in self.intervals:
            capacity = self.capacities.get(worker_name)
            if capacity:
                seconds_by_capacity[capacity] = seconds_by_capacity.get(
                    capacity, 0.0
                ) + self.compute_alive_seconds(worker_name)
        return seconds_by_capacity

    def is_on_demand(self, worker_name: str) -> bool:
        """Return True for a worker on an on-demand node that has replaced a worker on a spot
        node."""
        return self.capacities.get(worker_name) == ON_DEMAND_CAPACITY

    def describe_worker_kind(self, worker_name: str) -> str:
        """Return why a worker was outside of the job: `harvested` or `on demand`; "" if it was a
        worker of the job."""
        if worker_name in self.harvested:
            return "harvested"
        if self.is_on_demand(worker_name):
            return "on demand"
        return ""

    @property
    def first_step(self) -> int:
        """The step at which the recorded training starts, which is above 0 if the training was
        resumed."""
        if self.points:
            return self.points[0][1]
        return 0

    @property
    def training_seconds(self) -> float:
        """Seconds during which any worker was in a group."""
        group_intervals = [
            interval
            for worker_intervals in self.intervals.values()
            for interval in worker_intervals
            if interval.kind != WAITED_KIND
        ]
        return sum(
            interval_end_s - interval_start_s
            for interval_start_s, interval_end_s in merge_intervals(group_intervals)
        )

    @property
    def unit(self) -> str:
        """The unit of `steps`: "steps", or "checkpoints" for a program that does not report its
        steps."""
        return "checkpoints" if self.run.get("unit") == "checkpoints" else "steps"

    @property
    def steps_per_second(self) -> float:
        """Steps per second of `training_seconds`; a repeated step counts once."""
        busy_seconds = self.training_seconds
        if busy_seconds:
            return (self.steps - self.first_step) / busy_seconds
        return 0.0

    @property
    def preemptions(self) -> int:
        """Number of times that a worker was lost or had to leave before the run was complete."""
        return self.count_incidents("lost") + self.count_incidents("drain")

    @property
    def uploaded(self) -> int:
        """Bytes uploaded for durable checkpoints."""
        return sum(checkpoint_event.get("uploaded", 0) for checkpoint_event in self.checkpoints)

    def count_incidents(self, incident_kind: str) -> int:
        return sum(incident.kind == incident_kind for incident in self.incidents)

    def as_json(self) -> dict[str, Any]:
        """Return the LedgerSummary as a JSON object, without the raw events."""
        seconds_by_kind = {
            interval_kind: round(self.compute_worker_seconds(interval_kind), 3)
            for interval_kind in (TRAINED_KIND, WAITED_KIND, LOST_KIND)
        }

        seconds_by_worker = {
            worker_name: {
                interval_kind: round(self.compute_worker_seconds(interval_kind, worker_name), 3)
                for interval_kind in seconds_by_kind
            }
            | {
                QUEUED_KIND: round(self.queued_by_worker.get(worker_name, 0.0), 3),
                "harvested": worker_name in self.harvested,
                "capacity": self.capacities.get(worker_name, ""),
                "alive": merge_intervals(intervals),
            }
            for worker_name, intervals in self.intervals.items()
        }
        seconds_by_kind[QUEUED_KIND] = round(sum(self.queued_by_worker.values()), 3)

        restore_tiers = [str(restored_event.get("tier")) for restored_event in self.restored]

        attribute_names = (
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

        return {
            **{attribute_name: getattr(self, attribute_name) for attribute_name in attribute_names},
            "steps_repeated": self.repeated,
            "steps_per_second": round(self.steps_per_second, 3),
            "worker_seconds": seconds_by_kind,
            "queued_seconds": round(self.queued_seconds, 3),
            **({"harvest": self._harvest_as_json()} if self.harvest else {}),
            **self._capacity_as_json(),
            "drains": self.count_incidents("drain"),
            "coordinator_restarts": self.count_incidents("coordinator"),
            "checkpoints": {
                "number": len(self.checkpoints),
                "bytes": sum(event.get("bytes", 0) for event in self.checkpoints),
                "bytes_uploaded": self.uploaded,
                "seconds": round(sum(event.get("seconds", 0.0) for event in self.checkpoints), 3),
            },
            "restores": {
                restore_tier: restore_tiers.count(restore_tier)
                for restore_tier in sorted(set(restore_tiers))
            },
            "incidents": [asdict(incident) for incident in self.incidents],
            "workers": seconds_by_worker,
            "usage": self.usage,
            "events": self.counts,
        }

    def _capacity_as_json(self) -> dict[str, Any]:
        capacity_seconds = {
            capacity: round(alive_seconds, 3)
            for capacity, alive_seconds in sorted(self.capacity_seconds.items())
        }
        return {
            **({"capacity_seconds": capacity_seconds} if capacity_seconds else {}),
            **({"on_demand_changes": self.on_demand_changes} if self.on_demand_changes else {}),
        }

    def _harvest_as_json(self) -> dict[str, Any]:
        assert self.harvest
        return {
            "workers": sorted(self.harvested),
            **{
                field_name: round(field_value, 3) if isinstance(field_value, float) else field_value
                for field_name, field_value in asdict(self.harvest).items()
            },
        }


def merge_intervals(intervals: list[TimeInterval]) -> list[tuple[float, float]]:
    """Return the union of the intervals, as disjoint (start, end) in ascending order."""
    merged_intervals: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda interval: interval.start):
        if merged_intervals and interval.start <= merged_intervals[-1][1]:
            merged_intervals[-1] = (
                merged_intervals[-1][0],
                max(merged_intervals[-1][1], interval.end),
            )
        else:
            merged_intervals.append((interval.start, interval.end))
    return merged_intervals


def format_percent(fraction: float) -> str:
    """Format a fraction as a percentage, such as `96.4 %` or `100 %`."""
    return f"{100 * fraction:.1f}".removesuffix(".0") + " %"


def shorten_worker_name(worker_name: str) -> str:
    """Return the short name of a worker, such as `worker-1` for the pod
    demo-x7k2p-train-worker-1."""
    return worker_name.rpartition("-train-")[2] or worker_name
