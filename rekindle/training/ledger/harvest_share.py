"""The share of a training that harvested workers computed. Harvested workers run on idle capacity,
and may come and go (`cluster.harvest`).

Each member of a group computes an equal share of each step, so a group of three members with one
harvested worker owes a third of its steps to this worker.
"""

from bisect import bisect_right
from dataclasses import dataclass

from rekindle.training.ledger.ledger_summary import (
    TRAINED_KIND,
    HarvestShare,
    LedgerSummary,
    TimeInterval,
    merge_intervals,
)

# number of steps without harvested workers from which the measured speed of these steps is used
MIN_MEASURED_STEPS = 10


@dataclass(frozen=True)
class _Group:
    """The steps of one group that were not repeated, and the seconds that it trained."""

    members: int
    harvested: int
    steps: int
    seconds: float


def measure_harvest(
    ledger_summary: LedgerSummary, step_points: list[tuple[float, int]]
) -> HarvestShare | None:
    """Return the share of the harvested workers; None if the training had no harvested workers.

    `step_points`: time and number of the completed steps, without steps that were repeated. The
    time without harvested workers is estimated from the speed of the groups that had no harvested
    worker. If no such group exists, the estimate assumes that the other workers compute the shares
    of all members at the same speed.
    """
    if not ledger_summary.harvested:
        return None

    groups = _list_groups(ledger_summary, step_points)
    unaided_groups = [group for group in groups if not group.harvested]
    unaided_steps = sum(group.steps for group in unaided_groups)
    unaided_seconds = sum(group.seconds for group in unaided_groups)
    is_measured = unaided_steps >= MIN_MEASURED_STEPS and unaided_seconds > 0

    seconds_without = unaided_seconds
    for group in groups:
        if group.harvested and is_measured:
            seconds_without += group.steps * unaided_seconds / unaided_steps
        elif group.harvested:
            regular_members = max(1, group.members - group.harvested)
            seconds_without += group.seconds * group.members / regular_members

    return HarvestShare(
        worker_seconds=sum(
            ledger_summary.compute_worker_seconds(TRAINED_KIND, worker_name)
            for worker_name in ledger_summary.harvested
        ),
        steps=sum(group.steps * group.harvested / group.members for group in groups),
        seconds=sum(group.seconds for group in groups),
        seconds_without=seconds_without,
        is_measured=is_measured,
    )


def _list_groups(
    ledger_summary: LedgerSummary, step_points: list[tuple[float, int]]
) -> list[_Group]:
    trained_intervals = merge_intervals(
        [
            interval
            for intervals in ledger_summary.intervals.values()
            for interval in intervals
            if interval.kind == TRAINED_KIND
        ]
    )
    start_times_s = [start_s for start_s, _, _ in ledger_summary.groups]
    end_times_s = [*start_times_s, ledger_summary.ended][1:]

    groups: list[_Group] = []
    for (start_s, member_count, _), harvested_count, end_s in zip(
        ledger_summary.groups, ledger_summary.harvested_members, end_times_s, strict=True
    ):
        step_count = _find_step(step_points, end_s) - _find_step(step_points, start_s)
        trained_seconds = _measure_overlap(trained_intervals, TimeInterval(start_s, end_s, ""))
        if member_count:
            groups.append(
                _Group(member_count, harvested_count, max(0, step_count), trained_seconds)
            )
    return groups


def _find_step(step_points: list[tuple[float, int]], time_s: float) -> int:
    """Return the newest step that was completed at a given time."""
    index = bisect_right(step_points, time_s, key=lambda step_point: step_point[0])
    if index:
        return step_points[index - 1][1]
    return step_points[0][1] if step_points else 0


def _measure_overlap(intervals: list[tuple[float, float]], window: TimeInterval) -> float:
    first_index = bisect_right(intervals, window.start, key=lambda interval: interval[1])
    overlap_s = 0.0
    for start_s, end_s in intervals[first_index:]:
        if start_s >= window.end:
            break
        overlap_s += min(end_s, window.end) - max(start_s, window.start)
    return overlap_s
