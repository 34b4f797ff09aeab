"""Asynchronous successive halving: the choice of the next trial to train. Pure functions of the
config and the results.

A trial continues as soon as it is among the best 1/η of the results of its rung that are known; no
trial waits for its whole rung. Decision n knows the results of the decisions 0 to n - lag, so that
it does not depend on the speed of any trial. Source: L. Li and others, A System for Massively
Parallel Hyperparameter Tuning, 2020, algorithm 2.
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
    # metric by rung; None: the trial failed
    values: dict[int, float | None] = field(default_factory=dict)
    steps: int = 0  # number of updates
    sha256: str = ""  # sha256 of the trial's weights
    failure: str = ""  # reason why the trial failed

    @property
    def rung(self) -> int:
        """The last rung that was reached, or -1."""
        return max(self.values, default=-1)

    @property
    def value(self) -> float | None:
        return self.values.get(self.rung)


@dataclass(frozen=True)
class Job:
    """The training of a trial from its previous rung, or from the start, to `rung`."""

    trial: int
    rung: int


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return True for the metric of a trial that has not failed."""
    return value is not None and math.isfinite(value)


def best_trials(values: Mapping[int, float | None], count: int, better: str) -> list[int]:
    """Return the best trials, best first; equal trials by number. Failed trials (None or not
    finite) are left out."""
    sign = 1 if better == "lower" else -1
    finite_values = {number: value for number, value in values.items() if is_finite(value)}
    return sorted(finite_values, key=lambda number: (sign * finite_values[number], number))[:count]


def result_counts(sweep: Sweep, jobs: Sequence[Job], finished: Collection[Job]) -> range:
    """Return the numbers of jobs whose results the next decision may use, in ascending order.

    The decision uses the smallest number with which it is possible. Empty if results are missing.
    """
    is_sampling = sum(job.rung == 0 for job in jobs) < sweep.trial_count
    available = 0
    for job in jobs:
        if job not in finished and (job.rung < sweep.rungs - 1 or (job.rung == 0 and is_sampling)):
            break
        available += 1
    return range(max(0, len(jobs) - sweep.decision_lag + 1), available + 1)


def next_job(sweep: Sweep, jobs: Sequence[Job], values: Values) -> Job | None:
    """Return the next job: the continuation of a trial, else a new trial. `values`: the known
    results."""
    for rung in reversed(range(sweep.rungs - 1)):
        results = {job.trial: values[job] for job in jobs if job.rung == rung and job in values}
        continued = {job.trial for job in jobs if job.rung > rung}
        for trial in best_trials(results, len(results) // sweep.reduction, sweep.better):
            if trial not in continued:
                return Job(trial, rung + 1)
    started = sum(job.rung == 0 for job in jobs)
    if started < sweep.trial_count:
        return Job(started, 0)
    return None


def final_job(sweep: Sweep, jobs: Sequence[Job], values: Values) -> Job | None:
    """Return the job that trains the best trial to the end, unless a trial has trained to the end.

    `values`: the results of all jobs.
    """
    last = sweep.rungs - 1

    for rung in reversed(range(sweep.rungs)):
        results = {job.trial: values[job] for job in jobs if job.rung == rung}
        continued = {job.trial for job in jobs if job.rung > rung}
        for trial in best_trials(results, len(results), sweep.better):
            if rung == last:
                return None
            if trial not in continued:
                return Job(trial, last)

    return None
