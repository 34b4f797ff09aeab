"""Asynchronous successive halving: pure functions that choose the next trial to train.

A trial continues as soon as it is among the best 1/η of the known results of its rung, without
waiting for the other trials of the rung. Decision n uses only the results of the jobs that
decisions 0 to n - lag have started, so that no decision depends on the speed of a trial. Source:
the algorithm is from L. Li and others, A System for Massively Parallel Hyperparameter Tuning, 2020,
whose algorithm 2 is asynchronous successive halving.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from rekindle.training.sweep.sweep_config import Settings, Sweep

# metric of each finished job; None if the trial failed
MetricByJob = Mapping["TrialJob", float | None]


@dataclass
class Trial:
    """One training of a sweep."""

    number: int
    settings: Settings
    # attributes that Optuna's sampler needs
    attrs: dict[str, Any] = field(default_factory=dict)
    # metric of the trial at each rung; None if the trial failed
    values: dict[int, float | None] = field(default_factory=dict)
    # number of updates
    steps: int = 0
    # sha256 of the trial's weights
    sha256: str = ""
    # reason why the trial failed
    failure: str = ""

    @property
    def rung(self) -> int:
        """The last rung that the trial has reached, or -1."""
        return max(self.values, default=-1)

    @property
    def value(self) -> float | None:
        return self.values.get(self.rung)


@dataclass(frozen=True)
class TrialJob:
    """The training of a trial up to `rung`, from the start or from its previous rung."""

    trial: int
    rung: int


def is_finite_metric(metric_value: float | None) -> TypeGuard[float]:
    """Return True if the metric is a finite number. A metric of None, NaN or infinity means that
    the trial has failed."""
    return metric_value is not None and math.isfinite(metric_value)


def rank_trials(
    metric_by_trial: Mapping[int, float | None], trial_count: int, better_direction: str
) -> list[int]:
    """Return the numbers of the best `trial_count` trials that have not failed, best first;
    equally good trials are sorted by number."""
    sign = 1 if better_direction == "lower" else -1
    finite_values = {
        trial_number: metric_value
        for trial_number, metric_value in metric_by_trial.items()
        if is_finite_metric(metric_value)
    }
    return sorted(
        finite_values, key=lambda trial_number: (sign * finite_values[trial_number], trial_number)
    )[:trial_count]


def find_usable_result_counts(
    sweep: Sweep, started_jobs: Sequence[TrialJob], finished_jobs: Collection[TrialJob]
) -> range:
    """Return a range of counts n, such that the next decision may use the results of the first n
    jobs.

    The next decision uses the smallest n that is sufficient to choose a job. The range is empty
    while the decision must wait for missing results.
    """
    is_sampling = sum(started_job.rung == 0 for started_job in started_jobs) < sweep.trial_count
    result_count = 0
    for started_job in started_jobs:
        if started_job not in finished_jobs and (
            started_job.rung < sweep.rungs - 1 or (started_job.rung == 0 and is_sampling)
        ):
            break
        result_count += 1
    return range(max(0, len(started_jobs) - sweep.decision_lag + 1), result_count + 1)


def choose_next_job(
    sweep: Sweep, started_jobs: Sequence[TrialJob], metric_by_job: MetricByJob
) -> TrialJob | None:
    """Return the next job: the continuation of a good trial, else a new trial, or None if all
    trials have started. `metric_by_job`: metric of each finished job."""
    for rung_index in reversed(range(sweep.rungs - 1)):
        metric_by_trial = {
            started_job.trial: metric_by_job[started_job]
            for started_job in started_jobs
            if started_job.rung == rung_index and started_job in metric_by_job
        }
        continued_trials = {
            started_job.trial for started_job in started_jobs if started_job.rung > rung_index
        }
        for trial_number in rank_trials(
            metric_by_trial, len(metric_by_trial) // sweep.reduction, sweep.better
        ):
            if trial_number not in continued_trials:
                return TrialJob(trial_number, rung_index + 1)
    started_trial_count = sum(started_job.rung == 0 for started_job in started_jobs)
    if started_trial_count < sweep.trial_count:
        return TrialJob(started_trial_count, 0)
    return None


def choose_final_job(
    sweep: Sweep, started_jobs: Sequence[TrialJob], metric_by_job: MetricByJob
) -> TrialJob | None:
    """Return the job that trains the best trial to the last rung; None if the best trial has
    reached it.

    `metric_by_job`: the results of all jobs.
    """
    last_rung = sweep.rungs - 1

    for rung_index in reversed(range(sweep.rungs)):
        metric_by_trial = {
            started_job.trial: metric_by_job[started_job]
            for started_job in started_jobs
            if started_job.rung == rung_index
        }
        continued_trials = {
            started_job.trial for started_job in started_jobs if started_job.rung > rung_index
        }
        for trial_number in rank_trials(metric_by_trial, len(metric_by_trial), sweep.better):
            if rung_index == last_rung:
                return None
            if trial_number not in continued_trials:
                return TrialJob(trial_number, last_rung)

    return None
