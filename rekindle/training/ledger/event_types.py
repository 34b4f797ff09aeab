"""The types of the events in the ledger (history) of a training. ledger_summary.py describes the
events.

    check_event({"t": 1.5, "event": "step", "step": "many"})   # ValueError

A client of the object store or a worker may have written any line into a ledger. An event of a
ledger with an invalid field is therefore skipped and counted as soon as it is read. Fields and
events that are not listed here are permitted, since a later version of Rekindle may have written
them.
"""

from typing import Annotated, Any

from pydantic import Field

from rekindle.documents import Document, validate_value

# largest valid time of an event, in Unix seconds (the year 5138)
MAX_TIME_S = 1e11

Count = Annotated[int, Field(ge=0, lt=2**53)]
# -1: the worker has not trained
Step = Annotated[int, Field(ge=-1, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, lt=2**41)]


class AnyEvent(Document):
    """The fields of every event, and the texts that several kinds of events have."""

    t: float = Field(ge=0, lt=MAX_TIME_S)
    event: str
    name: str = ""
    worker: str = ""
    reason: str = Field("", alias="why")
    message: str = ""


class RunEvent(AnyEvent):
    device: str = ""
    workers: Count = 0
    virtual_workers: Count = 0
    steps: Count | None = None
    samples: Count | None = None
    program: bool = False
    unit: str = ""


class CoordinatorEvent(AnyEvent):
    id: str = ""
    created: Annotated[float, Field(ge=0, lt=MAX_TIME_S)] | None = None


class TrainedTimeEvent(AnyEvent):
    """The total number of seconds in which the coordinators of a job have seen the job train."""

    seconds: Seconds


class MembershipEvent(AnyEvent):
    """An event of one worker, at a step."""

    step: Step = -1
    harvested: bool = False
    capacity: str = ""


class OnDemandEvent(AnyEvent):
    """A change of the number of on-demand workers, after `seconds` with the wrong number."""

    workers: Count
    previous: Count
    seconds: Seconds


class GroupOpenedEvent(AnyEvent):
    hard: bool = False


class GenerationEvent(AnyEvent):
    members: list[str] = Field(default_factory=list)
    step: Step = -1


class TrainedStepEvent(AnyEvent):
    step: Step
    last: bool = False


class RestoredEvent(AnyEvent):
    step: Step
    tier: str = ""


class CheckpointEvent(AnyEvent):
    step: Step | None = None
    seconds: Seconds = 0.0
    cost: Seconds = 0.0
    bytes: Count = 0
    uploaded: Count = 0


class ProgressEvent(AnyEvent):
    percentage: Annotated[float, Field(ge=0, le=100)] | None = None
    seconds_left: Seconds | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    not_finite: list[str] = Field(default_factory=list)


class LossEvent(AnyEvent):
    """The newest loss of the training. The event `loss` reaches only the coordinator's metrics, not
    the ledger."""

    loss: float


class UsageEvent(AnyEvent):
    """The resources that a pod used in a period of `seconds`. The fields about GPUs have one value
    for each GPU."""

    seconds: Seconds
    cpu_cores_mean: Annotated[float, Field(ge=0, lt=1e6)] = 0.0
    cpu_cores_max: Annotated[float, Field(ge=0, lt=1e6)] = 0.0
    memory_bytes_mean: Annotated[float, Field(ge=0, lt=2**60)] = 0.0
    memory_bytes_max: Annotated[float, Field(ge=0, lt=2**60)] = 0.0
    gpu_percent_mean: Annotated[float, Field(ge=0, le=100)] | None = None
    gpu_percent_max: Annotated[float, Field(ge=0, le=100)] | None = None
    gpu_memory_bytes_mean: Annotated[float, Field(ge=0, lt=2**60)] | None = None
    gpu_memory_bytes_max: Annotated[float, Field(ge=0, lt=2**60)] | None = None


class UnsavedWorkEvent(AnyEvent):
    seconds: Seconds


class EndedEvent(AnyEvent):
    """An error of a worker or of the run."""

    code: Annotated[int, Field(ge=0, lt=2**31)] = 1


class RunCompleteEvent(AnyEvent):
    sha256: str = ""
    step: Step = -1


class DroppedEventsEvent(AnyEvent):
    events: Count


class SkippedLinesEvent(AnyEvent):
    lines: Count


EVENT_TYPES: dict[str, type[AnyEvent]] = {
    "run": RunEvent,
    "coordinator": CoordinatorEvent,
    "trained": TrainedTimeEvent,
    "join": MembershipEvent,
    "lost": MembershipEvent,
    "drain": MembershipEvent,
    "on_demand": OnDemandEvent,
    "open": GroupOpenedEvent,
    "generation": GenerationEvent,
    "step": TrainedStepEvent,
    "restored": RestoredEvent,
    "checkpoint": CheckpointEvent,
    "progress": ProgressEvent,
    "loss": LossEvent,
    "unsaved": UnsavedWorkEvent,
    "usage": UsageEvent,
    "failed": EndedEvent,
    "verdict": EndedEvent,
    "complete": RunCompleteEvent,
    "dropped": DroppedEventsEvent,
    "skipped": SkippedLinesEvent,
}


def check_event(event: Any) -> None:
    """Raise ValueError unless a value is an event whose fields have the right types."""
    event_name = event.get("event") if isinstance(event, dict) else None
    event_type = EVENT_TYPES.get(event_name, AnyEvent) if isinstance(event_name, str) else AnyEvent
    validate_value(event_type, event)
