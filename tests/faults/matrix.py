"""One training with faults: each fault is injected while all workers train, and its consequences
are read from the ledger.

    matrix = FaultMatrix(stage)
    matrix.inject(fault)
    matrix.outcomes[fault.name].repeated_steps
    print(matrix.format_table("jobset"))
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rekindle.training.ledger.accounting import summarize_events
from rekindle.training.ledger.events import Event
from rekindle.training.ledger.ledger_summary import Incident, LedgerSummary
from tests.faults.catalog import COORDINATOR, WORKERS, Fault, Stage
from tests.waiting import until

STEPS = 2500
# a training whose speed does not depend on the number of cores; it takes some minutes
SETTINGS = (
    "workload=benchmarks.workloads.paced",
    f"train.workers={len(WORKERS)}",
    "train.min_workers=1",
    f"train.virtual_workers={2 * len(WORKERS)}",
    f"train.steps={STEPS}",
    "train.checkpoint_seconds=5",
    "train.silence_seconds=10",
    "train.validation=0",
    "gate.minimum={accuracy: 0.1}",
)
PACE_SETTING = "model.micro_batch_seconds=0.05"
RECOVERY_TIMEOUT_S = 240.0
# steps between the last reading of the ledger and a fault
TOLERATED_STEPS = 20
# number of recorded steps, about one a second, from which the speed is computed
RATE_POINTS = 5


class ObservedStage(Stage, Protocol):
    """A stage whose training can be observed."""

    def read_events(self) -> list[Event]:
        """Return the ledger of the training."""
        ...

    def list_pods(self) -> Mapping[str, str]:
        """Return the running pods of the training: replica → identity of its first process."""
        ...

    def check_running(self) -> None:
        """Raise AssertionError, with the logs, if the training has ended."""
        ...

    def find_victims(self, fault: Fault) -> tuple[str, ...]:
        """Return the replicas whose pods a fault ends here."""
        ...


@dataclass(frozen=True)
class Outcome:
    """The consequences of a fault."""

    fault: Fault
    # replicas whose pods the fault affects
    victims: tuple[str, ...]
    # incidents in the ledger, oldest first
    incidents: list[Incident]
    # replicas outside of the victims whose first process has changed
    restarted: set[str]
    # number of steps that were trained a second time
    repeated_steps: int
    # number of steps since the last durable checkpoint when the fault was injected
    steps_since_checkpoint: int
    # seconds in which no worker trained, and seconds until all workers trained again
    pause_seconds: float
    seconds_to_all_workers: float

    @property
    def lost_workers(self) -> list[Incident]:
        return [incident for incident in self.incidents if incident.kind in ("lost", "drain")]

    @property
    def coordinator_restarts(self) -> list[Incident]:
        return [incident for incident in self.incidents if incident.kind == COORDINATOR]


class FaultMatrix:
    """The training on a stage, and the outcomes of its faults by name."""

    def __init__(self, stage: ObservedStage) -> None:
        self.stage = stage
        self.outcomes: dict[str, Outcome] = {}

    def inject(self, fault: Fault) -> None:
        """Inject a fault, and wait until all workers train again."""
        victims = self.stage.find_victims(fault)
        self._wait_for_all_workers(after=0.0, replaced={}, coordinator_count=1)
        pods_before = self.stage.list_pods()
        summary = self._summarize()
        step = self._newest_step(summary)
        durable_step = max((int(event["step"]) for event in summary.checkpoints), default=0)

        start = time.time()
        fault.inject(self.stage)
        ended = victims if fault.ends_victims else ()
        self._wait_for_all_workers(
            after=time.time(),
            replaced={replica: pods_before[replica] for replica in ended},
            coordinator_count=len(summary.coordinator_starts) + ended.count(COORDINATOR),
        )

        known_incidents = {(each.kind, each.name, each.t) for each in summary.incidents}
        summary = self._summarize()
        pods = self.stage.list_pods()
        incidents = [
            each
            for each in summary.incidents
            if (each.kind, each.name, each.t) not in known_incidents
        ]
        lost_victims = set(victims) - {COORDINATOR}
        self.outcomes[fault.name] = Outcome(
            fault,
            victims,
            incidents,
            restarted={
                replica
                for replica, identity in pods_before.items()
                if replica not in victims and pods.get(replica) != identity
            },
            repeated_steps=sum(incident.repeated for incident in incidents),
            steps_since_checkpoint=step - durable_step,
            pause_seconds=_measure_pause(summary, start, bool(lost_victims)),
            seconds_to_all_workers=(summary.groups[-1][0] - start) if lost_victims else 0.0,
        )

    def format_table(self, heading: str) -> str:
        """Return the outcomes as a Markdown table."""
        rows = [
            f"| {heading} | workers lost | steps repeated | others restarted | pause | all workers |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        rows += [
            f"| {name} | {len(outcome.lost_workers)} | {outcome.repeated_steps}"
            f" | {len(outcome.restarted)} | {outcome.pause_seconds:.2f} s"
            f" | {outcome.seconds_to_all_workers:.1f} s |"
            for name, outcome in self.outcomes.items()
        ]
        return "\n".join(rows)

    def _summarize(self) -> LedgerSummary:
        return summarize_events(self.stage.read_events())

    def _newest_step(self, summary: LedgerSummary) -> int:
        return summary.points[-1][1] if summary.points else 0

    def _wait_for_all_workers(
        self, after: float, replaced: Mapping[str, str], coordinator_count: int
    ) -> None:
        """Wait until a group of all workers has made a step after the time `after`. The processes in
        `replaced` must have new identities, and the ledger must have the start of this number of
        coordinators."""

        def is_complete() -> bool:
            self.stage.check_running()
            summary = self._summarize()
            if not summary.groups or not summary.points:
                return False
            pods = self.stage.list_pods()
            group_start, member_count, _ = summary.groups[-1]
            return (
                member_count == len(WORKERS)
                and len(summary.coordinator_starts) >= coordinator_count
                and summary.points[-1][0] > max(after, group_start)
                and pods.keys() >= {COORDINATOR, *WORKERS}
                and all(pods[replica] != identity for replica, identity in replaced.items())
            )

        until("all workers train", is_complete, RECOVERY_TIMEOUT_S, pause=1)


def check_outcome(outcome: Outcome) -> None:
    """Raise AssertionError if a fault has cost more than it may."""
    assert outcome.restarted == set(), "only the victims restart"
    lost_names = [incident.name for incident in outcome.lost_workers]
    assert len(lost_names) == len(set(outcome.victims) - {COORDINATOR}), lost_names
    assert len(outcome.coordinator_restarts) == int(COORDINATOR in outcome.victims)
    if set(outcome.victims) >= {COORDINATOR, *WORKERS}:
        # the ledger is read some time before the fault
        assert outcome.repeated_steps <= outcome.steps_since_checkpoint + TOLERATED_STEPS
    else:
        assert outcome.repeated_steps == 0


def _measure_pause(summary: LedgerSummary, start: float, has_new_group: bool) -> float:
    """Return the seconds from a fault to the next group that trains. If the group has not changed,
    return the seconds without training until the first step that the ledger has recorded since:
    without a coordinator, the group continues to train, but nothing records its steps."""
    if has_new_group:
        return _find_group(summary, start) - start
    before = [point for point in summary.points if point[0] <= start][-RATE_POINTS:]
    first_time, first_step = before[0]
    last_time, last_step = before[-1]
    seconds_per_step = (last_time - first_time) / (last_step - first_step)
    next_time, next_step = next(point for point in summary.points if point[0] > start)
    return max(0.0, next_time - last_time - (next_step - last_step) * seconds_per_step)


def _find_group(summary: LedgerSummary, start: float) -> float:
    return next(group_start for group_start, _, _ in summary.groups if group_start > start)
