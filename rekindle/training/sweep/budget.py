"""The budget of a sweep. A job (the training of a trial up to a rung) starts only if the expected
time of all jobs is within the budget.

The expected time of a sweep includes the time that jobs have used, the remaining time of running
jobs, and the time of the new job. The time that one trial needs to reach the last rung is reserved
until a trial trains to the last rung.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rekindle.training.sweep.halving import TrialJob
from rekindle.training.sweep.sweep_config import Sweep


def compute_budget_excess(
    sweep: Sweep,
    next_job: TrialJob,
    started_jobs: Sequence[TrialJob],
    completed_jobs: Collection[TrialJob],
    seconds_by_job: Mapping[TrialJob, float],
) -> dict[str, Any] | None:
    """If `next_job` would exceed the budget, return the hours that are used, expected and
    allowed; else None."""
    limit_s = 3600 * sweep.budget.hours

    finished_jobs = [other_job for other_job in started_jobs if other_job in completed_jobs]
    # without a finished job, the duration of a trial is unknown
    if not limit_s or not finished_jobs:
        return None

    training_s = sum(seconds_by_job.get(other_job, 0.0) for other_job in finished_jobs) / sum(
        compute_step_share(sweep, other_job, started_jobs) for other_job in finished_jobs
    )
    expected_s = training_s * compute_step_share(sweep, next_job, started_jobs)
    for other_job in started_jobs:
        if other_job in completed_jobs:
            remaining_s = 0.0
        else:
            remaining_s = training_s * compute_step_share(sweep, other_job, started_jobs)

        expected_s += max(seconds_by_job.get(other_job, 0.0), remaining_s)

    if all(other_job.rung < sweep.rungs - 1 for other_job in [*started_jobs, next_job]):
        expected_s += training_s * (1 - sweep.compute_step_share(next_job.rung))

    used_s = sum(seconds_by_job.values())
    if expected_s > limit_s:
        return {"hours": used_s / 3600, "expected": expected_s / 3600, "limit": limit_s / 3600}

    return None


def compute_step_share(
    sweep: Sweep, trial_job: TrialJob, started_jobs: Sequence[TrialJob]
) -> float:
    """Return the number of steps that `trial_job` makes, as a fraction of the steps of a complete
    training."""
    earlier_shares = [
        sweep.compute_step_share(other_job.rung)
        for other_job in started_jobs
        if other_job.trial == trial_job.trial and other_job.rung < trial_job.rung
    ]
    return sweep.compute_step_share(trial_job.rung) - max(earlier_shares, default=0.0)
