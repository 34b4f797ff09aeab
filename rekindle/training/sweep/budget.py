"""The budget of a sweep: a job starts only if the expected time of all jobs is within the budget.

The expected time includes the time that jobs have used, the remaining time of running jobs, and the
new job. Until one trial trains to the last rung, the time that one trial needs to reach the last
rung is reserved.
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
    """If `job` would exceed the budget, return the hours that are used, expected and allowed; else
    None."""
    limit_s = 3600 * sweep.budget.hours

    finished_jobs = [other for other in jobs if other in finished]
    # without a finished job, the duration of a trial is unknown
    if not limit_s or not finished_jobs:
        return None

    training_s = sum(seconds.get(other, 0.0) for other in finished_jobs) / sum(
        step_share(sweep, other, jobs) for other in finished_jobs
    )
    expected_s = training_s * step_share(sweep, job, jobs)
    for other in jobs:
        if other in finished:
            remaining_s = 0.0
        else:
            remaining_s = training_s * step_share(sweep, other, jobs)

        expected_s += max(seconds.get(other, 0.0), remaining_s)

    if all(other.rung < sweep.rungs - 1 for other in [*jobs, job]):
        expected_s += training_s * (1 - sweep.step_share(job.rung))

    used_s = sum(seconds.values())
    if expected_s > limit_s:
        return {"hours": used_s / 3600, "expected": expected_s / 3600, "limit": limit_s / 3600}

    return None


def step_share(sweep: Sweep, job: Job, jobs: Sequence[Job]) -> float:
    """Return the number of steps that `job` makes, as a fraction of the steps of a complete
    training."""
    earlier = [
        sweep.step_share(other.rung)
        for other in jobs
        if other.trial == job.trial and other.rung < job.rung
    ]
    return sweep.step_share(job.rung) - max(earlier, default=0.0)
