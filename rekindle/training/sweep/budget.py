"""The budget of a sweep: the time that its trials have used, and are expected to use.

A job starts only if the time that was used, the expected rest of the running jobs, and the job
itself are within the budget. Until a trial trains to the end, the time for that is reserved.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rekindle.training.sweep.halving import Job
from rekindle.training.sweep.sweep_config import Sweep


def compute_excess(
    sweep: Sweep,
    job: Job,
    jobs: Sequence[Job],
    finished: Collection[Job],
    seconds: Mapping[Job, float],
) -> dict[str, Any] | None:
    """Return the hours that were used and are expected, if `job` would exceed the budget."""
    limit_s = 3600 * sweep.budget.hours

    finished_jobs = [other for other in jobs if other in finished]
    if not limit_s or not finished_jobs:  # nothing is known about the duration of a trial
        return None

    whole_s = sum(seconds.get(other, 0.0) for other in finished_jobs) / sum(
        step_share(sweep, other, jobs) for other in finished_jobs
    )
    expected_s = whole_s * step_share(sweep, job, jobs)
    for other in jobs:
        if other in finished:
            rest_s = 0.0
        else:
            rest_s = whole_s * step_share(sweep, other, jobs)

        expected_s += max(seconds.get(other, 0.0), rest_s)

    if all(other.rung < sweep.rungs - 1 for other in [*jobs, job]):
        expected_s += whole_s * (1 - sweep.share(job.rung))

    used_s = sum(seconds.values())
    if expected_s > limit_s:
        return {"hours": used_s / 3600, "expected": expected_s / 3600, "limit": limit_s / 3600}

    return None


def step_share(sweep: Sweep, job: Job, jobs: Sequence[Job]) -> float:
    """Return the share of the steps of a whole training that `job` makes."""
    earlier = [
        sweep.share(other.rung)
        for other in jobs
        if other.trial == job.trial and other.rung < job.rung
    ]
    return sweep.share(job.rung) - max(earlier, default=0.0)
