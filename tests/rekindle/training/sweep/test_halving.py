"""Tests of asynchronous halving: the best trials continue, independent of the speed of the trials
and of the pods."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.training.sweep import budget
from rekindle.training.sweep.halving import (
    TrialJob,
    choose_final_job,
    choose_next_job,
    find_usable_result_counts,
    rank_trials,
)
from rekindle.training.sweep.sweep_config import Sweep

SPACE = {"train": {"learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}}}
VALUES = st.dictionaries(st.integers(0, 60), st.none() | st.floats(), max_size=40)
sweeps = st.builds(
    lambda **settings: Sweep.model_validate({"space": SPACE, **settings}),
    trials=st.integers(1, 27),
    rungs=st.integers(1, 5),
    reduction=st.integers(2, 5),
    lag=st.integers(0, 30),
    sampler=st.sampled_from(["tpe", "random"]),
)


def run_sweep(
    sweep: Sweep, pods: int, quality: random.Random, chance: random.Random
) -> tuple[list[TrialJob], dict[TrialJob, float]]:
    """Run a sweep whose jobs end in a random order; return the decisions and the results of the
    sweep."""
    levels = [
        quality.choice([quality.random(), quality.random(), math.nan])
        for _ in range(sweep.trial_count)
    ]
    jobs: list[TrialJob] = []
    running: list[TrialJob] = []
    values: dict[TrialJob, float] = {}

    while True:
        while len(running) < pods and (job := decide(sweep, jobs, values)):
            jobs.append(job)
            running.append(job)

        if not running:
            return jobs, values

        ended = running.pop(chance.randrange(len(running)))
        values[ended] = levels[ended.trial] / (1 + ended.rung)


def decide(sweep: Sweep, jobs: list[TrialJob], values: dict[TrialJob, float]) -> TrialJob | None:
    for number in find_usable_result_counts(sweep, jobs, values):
        job = choose_next_job(
            sweep, jobs, {job: values[job] for job in jobs[:number] if job in values}
        )
        if job:
            return job
    if all(job in values for job in jobs):
        return choose_final_job(sweep, jobs, values)
    return None


@settings(max_examples=50)
@given(sweeps, st.integers(), st.integers(2, 9), st.randoms())
def test_decisions_do_not_depend_on_the_speed_of_trials_and_the_number_of_pods(
    sweep: Sweep, seed: int, pods: int, chance: random.Random
) -> None:
    expected, values = run_sweep(sweep, 1, random.Random(seed), chance)
    jobs, other_values = run_sweep(
        sweep, min(pods, sweep.decision_lag), random.Random(seed), chance
    )
    assert jobs == expected
    assert str(sorted(other_values.items(), key=str)) == str(sorted(values.items(), key=str))
    assert [job.trial for job in jobs if job.rung == 0] == list(range(sweep.trial_count))
    assert len(set(jobs)) == len(jobs)
    finite = [job for job in jobs if math.isfinite(values[job])]
    assert not finite or any(job.rung == sweep.rungs - 1 for job in finite)

    for trial in range(sweep.trial_count):
        rungs = [job.rung for job in jobs if job.trial == trial]
        assert rungs == sorted(rungs)
        assert math.isclose(
            sum(budget.compute_step_share(sweep, job, jobs) for job in jobs if job.trial == trial),
            sweep.compute_step_share(rungs[-1]),
        )


def test_a_slow_trial_does_not_hold_the_other_trials_of_its_rung() -> None:
    sweep = Sweep.model_validate({"space": SPACE, "trials": 27})
    jobs: list[TrialJob] = []
    values: dict[TrialJob, float] = {}
    while job := decide(sweep, jobs, values):
        jobs.append(job)
        if job != TrialJob(9, 0):
            values[job] = float(job.trial)
    held = jobs[jobs.index(TrialJob(9, 0)) + 1 :]
    assert len(held) == sweep.decision_lag - 1
    assert {job.rung for job in held} == {0, 1}


def test_twenty_seven_trials_cost_less_than_a_third_of_the_steps() -> None:
    sweep = Sweep.model_validate({"space": SPACE, "trials": 27})
    costs = [compute_sweep_share(sweep, seed) for seed in range(50)]
    assert min(costs) >= 7 / 27 - 1e-9
    assert sum(costs) / len(costs) < 1 / 3


def compute_sweep_share(sweep: Sweep, seed: int) -> float:
    """Return the steps of a sweep, as a share of the steps for training all trials to the end."""
    jobs, _ = run_sweep(sweep, 2, random.Random(seed), random.Random(seed))
    return sum(budget.compute_step_share(sweep, job, jobs) for job in jobs) / sweep.trial_count


@given(VALUES, st.integers(0, 40), st.sampled_from(["lower", "higher"]), st.randoms())
def test_the_choice_of_trials_depends_only_on_their_values(
    values: dict[int, float | None], count: int, better: str, chance: random.Random
) -> None:
    chosen = rank_trials(values, count, better)
    shuffled = list(values.items())
    chance.shuffle(shuffled)
    assert rank_trials(dict(shuffled), count, better) == chosen

    finite = {
        number: value
        for number, value in values.items()
        if value is not None and math.isfinite(value)
    }

    assert len(chosen) == min(count, len(finite))
    assert set(chosen) <= set(finite)
    sign = 1 if better == "lower" else -1
    dropped = finite.keys() - set(chosen)
    assert all((sign * finite[a], a) < (sign * finite[b], b) for a in chosen for b in dropped)


@settings(max_examples=50)
@given(sweeps, st.integers(), st.floats(0.01, 60), st.integers(1, 4))
def test_a_sweep_ends_within_one_trial_of_its_budget(
    sweep: Sweep, seed: int, hours: float, pods: int
) -> None:
    """Training a trial to the end takes an hour, which is known only when the first trial has
    ended."""
    sweep = sweep.model_copy(update={"budget": sweep.budget.model_copy(update={"hours": hours})})
    quality = random.Random(seed)
    pods = min(pods, sweep.decision_lag)
    jobs: list[TrialJob] = []
    values: dict[TrialJob, float] = {}
    seconds: dict[TrialJob, float] = {}
    stopped = False

    while True:
        running = [job for job in jobs if job not in values]
        job = decide(sweep, jobs, values) if len(running) < pods else None
        if job and not stopped and budget.compute_budget_excess(sweep, job, jobs, values, seconds):
            stopped = True
        if stopped:
            job = None if running else choose_final_job(sweep, jobs, values)

        if job:
            jobs.append(job)
        elif running:
            ended = running[0]
            values[ended], seconds[ended] = (
                quality.random(),
                3600 * budget.compute_step_share(sweep, ended, jobs),
            )
        else:
            break

    used = sum(seconds.values()) / 3600
    unknown = pods * sweep.compute_step_share(0)
    assert used <= max(hours, unknown + 1) + 1e-6
    assert not stopped or used >= hours - 1 - 1e-6
    assert any(job.rung == sweep.rungs - 1 for job in jobs)
