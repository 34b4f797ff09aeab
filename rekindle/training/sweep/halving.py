"""Asynchronous successive halving: pure functions that choose the next trial to train.

A trial continues as soon as it is among the best 1/η of the known results of its rung, without
waiting for the other trials of the rung. Decision n uses only the results of the jobs that
decisions 0 to n - lag have started, so that it does not depend on the speed of any trial. Source:
L. Li and others, A System for Massively Parallel Hyperparameter Tuning, 2020, whose algorithm 2 is
asynchronous successive halving.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from rekindle.training.sweep.sweep_config import Settings, Sweep

Values = Mapping["Job", float | None]  # metric of each finished job; None: the trial failed


@dataclass
class Trial:
    """One training of a sweep."""

    number: int
    settings: Settings
    attrs: dict[str, Any] = field(default_factory=dict)  # attributes that Optuna's sampler needs
    # metric of the trial at each rung; None if the trial failed
    values: dict[int, float | None] = field(default_factory=dict)
    steps: int = 0  # number of updates
    sha256: str = ""  # sha256 of the trial's weights
    failure: str = ""  # reason why the trial failed

    @property
    def rung(self) -> int:
        """The last rung that the trial has reached, or -1."""
        return max(self.values, default=-1)

    @property
    def value(self) -> float | None:
        return self.values.get(self.rung)


@dataclass(frozen=True)
class Job:
    """The training of a trial to `rung`, from the start or from its previous rung."""

    trial: int
    rung: int


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return True if the metric is a finite number. None, NaN and infinity mean that the trial has
    failed."""
    return value is not None and math.isfinite(value)


def rank_trials(values: Mapping[int, float | None], count: int, better: str) -> list[int]:
    """Return the numbers of the best `count` trials that have not failed, best first; equally good
    trials are sorted by number."""
    sign = 1 if better == "lower" else -1
    finite_values = {number: value for number, value in values.items() if is_finite(value)}
    return sorted(finite_values, key=lambda number: (sign * finite_values[number], number))[:count]


def usable_result_counts(sweep: Sweep, jobs: Sequence[Job], finished: Collection[Job]) -> range:
    """Return a range of counts n: the next decision may use the results of the first n jobs.

    The decision uses the smallest n that is sufficient to choose a job. The range is empty while
    the decision must wait for missing results.
    """
    is_sampling = sum(job.rung == 0 for job in jobs) < sweep.trial_count
    available = 0
    for job in jobs:
        if job not in finished and (job.rung < sweep.rungs - 1 or (job.rung == 0 and is_sampling)):
            break
        available += 1
    return range(max(0, len(jobs) - sweep.decision_lag + 1), available + 1)


def choose_next_job(sweep: Sweep, jobs: Sequence[Job], values: Values) -> Job | None:
    """Return the next job: the continuation of a good trial, else a new trial, or None if all
    trials have started. `values`: metric of each finished job."""
    for rung in reversed(range(sweep.rungs - 1)):
        results = {job.trial: values[job] for job in jobs if job.rung == rung and job in values}
        continued = {job.trial for job in jobs if job.rung > rung}
        for trial in rank_trials(results, len(results) // sweep.reduction, sweep.better):
            if trial not in continued:
                return Job(trial, rung + 1)
    started = sum(job.rung == 0 for job in jobs)
    if started < sweep.trial_count:
        return Job(started, 0)
    return None


def choose_final_job(sweep: Sweep, jobs: Sequence[Job], values: Values) -> Job | None:
    """Return the job that trains the best trial to the last rung; None if the best trial has
    reached it.

    `values`: the results of all jobs.
    """
    last = sweep.rungs - 1

    for rung in reversed(range(sweep.rungs)):
        results = {job.trial: values[job] for job in jobs if job.rung == rung}
        continued = {job.trial for job in jobs if job.rung > rung}
        for trial in rank_trials(results, len(results), sweep.better):
            if rung == last:
                return None
            if trial not in continued:
                return Job(trial, last)

    return None
