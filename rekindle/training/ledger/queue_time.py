"""The time that a training was queued, that is, its job existed, but a worker of the job was not
running.

The pod of a queued worker waits in a queue, for a node or for its image, or its process starts. The
ledger has no events of queued time, because no process of the worker exists. The queued time is
therefore computed from the creation of the job, and from the gaps between the lives of workers.

A gap after the end of a training does not count as queued, because a later process continues the
training only after a user has resumed it.
"""

from dataclasses import dataclass

from rekindle.training.ledger.ledger_summary import (
    CoordinatorStart,
    LedgerSummary,
    TimeInterval,
    merge_intervals,
)


@dataclass
class _WorkerSlot:
    """One of the workers of a job, with the processes that have its place one after the other."""

    free_since: float
    last_worker: str = ""


def measure_queue_time(ledger_summary: LedgerSummary) -> None:
    """Add the queued time to a summary whose other intervals are complete. A training without a
    coordinator has no queued time."""
    coordinator_starts = ledger_summary.coordinator_starts
    if not coordinator_starts:
        return

    first_start = coordinator_starts[0]
    ledger_summary.created = min(first_start.created or ledger_summary.began, ledger_summary.began)

    worker_intervals = [
        interval for intervals in ledger_summary.intervals.values() for interval in intervals
    ]
    for gap in _find_gaps(ledger_summary, merge_intervals(worker_intervals)):
        for waiting_time in _exclude_ended_time(ledger_summary, gap):
            ledger_summary.queued_seconds += waiting_time.end - waiting_time.start
            ledger_summary.coordinator_idle_seconds += _measure_idle_coordinator(
                ledger_summary, waiting_time
            )

    _assign_queue_time(ledger_summary)


def _find_gaps(
    ledger_summary: LedgerSummary, busy_intervals: list[tuple[float, float]]
) -> list[TimeInterval]:
    """Return the times without a live worker, from the creation of the job to the newest event."""
    gap_starts_s = [ledger_summary.created or 0.0, *(end_s for _, end_s in busy_intervals)]
    gap_ends_s = [*(start_s for start_s, _ in busy_intervals), ledger_summary.ended]
    return [
        TimeInterval(start_s, end_s, "")
        for start_s, end_s in zip(gap_starts_s, gap_ends_s, strict=True)
        if start_s < end_s
    ]


def _exclude_ended_time(ledger_summary: LedgerSummary, gap: TimeInterval) -> list[TimeInterval]:
    """Return the parts of a gap in which the training had a job, which are the parts until the
    training ended, and from the creation of its next job."""
    end_times_s = [time_s for time_s in ledger_summary.end_times if gap.start <= time_s <= gap.end]
    earliest_s = end_times_s[-1] if end_times_s else gap.start
    new_jobs_s = [
        _find_job_start(coordinator_start, earliest_s)
        for coordinator_start in ledger_summary.coordinator_starts
        if earliest_s < coordinator_start.t <= gap.end
        and (end_times_s or (coordinator_start.created or 0.0) > earliest_s)
    ]

    parts: list[TimeInterval] = []
    if end_times_s:
        parts.append(TimeInterval(gap.start, end_times_s[0], ""))
    if new_jobs_s:
        parts.append(TimeInterval(new_jobs_s[0], gap.end, ""))
    return parts or [gap]


def _find_job_start(coordinator_start: CoordinatorStart, earliest_s: float) -> float:
    """Return the time when the job of a coordinator was created, if it was created after
    `earliest_s`; otherwise the start of the coordinator, because the creation is unknown."""
    created_s = coordinator_start.created or 0.0
    if earliest_s < created_s <= coordinator_start.t:
        return created_s
    return coordinator_start.t


def _measure_idle_coordinator(ledger_summary: LedgerSummary, gap: TimeInterval) -> float:
    """Return the seconds of a gap in which a coordinator was running. A coordinator that started in
    the gap shows that the pod of the previous coordinator had ended."""
    start_s = max(gap.start, ledger_summary.began)
    starts_s = [
        coordinator_start.t
        for coordinator_start in ledger_summary.coordinator_starts
        if start_s < coordinator_start.t <= gap.end
    ]
    return max(0.0, gap.end - max([start_s, *starts_s]))


def _assign_queue_time(ledger_summary: LedgerSummary) -> None:
    """Assign the queued time of each worker of the job to the process that ended it; the names of
    pods may differ from one process to the next. Workers outside of the job, harvested or on
    demand, are never queued."""
    slots = [
        _WorkerSlot(ledger_summary.created or 0.0)
        for _ in range(int(ledger_summary.run.get("workers") or 0))
    ]

    lives = [
        (start_s, end_s, worker_name)
        for worker_name, intervals in ledger_summary.intervals.items()
        if worker_name not in ledger_summary.harvested
        and not ledger_summary.is_on_demand(worker_name)
        for start_s, end_s in merge_intervals(intervals)
    ]
    for start_s, end_s, worker_name in sorted(lives):
        free_slots = [slot for slot in slots if slot.free_since <= start_s]
        if not free_slots:
            continue

        slot = min(free_slots, key=lambda slot: (slot.last_worker != worker_name, slot.free_since))
        _add_queued(ledger_summary, worker_name, TimeInterval(slot.free_since, start_s, ""))
        slot.free_since = end_s
        slot.last_worker = worker_name

    for slot in slots:
        _add_queued(
            ledger_summary,
            slot.last_worker,
            TimeInterval(slot.free_since, ledger_summary.ended, ""),
        )


def _add_queued(ledger_summary: LedgerSummary, worker_name: str, gap: TimeInterval) -> None:
    if gap.start >= gap.end:
        return
    queued_seconds = _sum_lengths(_exclude_ended_time(ledger_summary, gap))
    ledger_summary.queued_by_worker[worker_name] = (
        ledger_summary.queued_by_worker.get(worker_name, 0.0) + queued_seconds
    )


def _sum_lengths(intervals: list[TimeInterval]) -> float:
    return sum(interval.end - interval.start for interval in intervals)
