"""The budget of a sweep: the time that its trials have used, and are expected to use.

A job starts only if the time that was used, the expected rest of the running jobs, and the job itself are within the
budget. Until a trial trains to the end, the time for that is reserved.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rekindle.training.search.config import Sweep
from rekindle.training.search.halving import Job


def exceeded(
    sweep: Sweep, job: Job, jobs: Sequence[Job], finished: Collection[Job], seconds: Mapping[Job, float]
) -> dict[str, Any] | None:
    """Return the hours that were used and are expected, if `job` would exceed the budget."""
    limit = 3600 * sweep.budget.hours
    done = [other for other in jobs if other in finished]
    if not limit or not done:  # nothing is known about the duration of a trial
        return None
    whole = sum(seconds.get(other, 0.0) for other in done) / sum(share(sweep, other, jobs) for other in done)
    expected = whole * share(sweep, job, jobs)
    for other in jobs:
        rest = 0.0 if other in finished else whole * share(sweep, other, jobs)
        expected += max(seconds.get(other, 0.0), rest)
    if all(other.rung < sweep.rungs - 1 for other in [*jobs, job]):
        expected += whole * (1 - sweep.share(job.rung))
    used = sum(seconds.values())
    return {"hours": used / 3600, "expected": expected / 3600, "limit": limit / 3600} if expected > limit else None


def share(sweep: Sweep, job: Job, jobs: Sequence[Job]) -> float:
    """Return the share of the steps of a whole training that `job` makes."""
    earlier = [sweep.share(other.rung) for other in jobs if other.trial == job.trial and other.rung < job.rung]
    return sweep.share(job.rung) - max(earlier, default=0.0)
