"""Successive halving: the best trials continue, independent of the order of results."""

import math
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rekindle.training.search.config import Sweep
from rekindle.training.search.rounds import best, rounds, shares

SPACE = {"train": {"learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}}}
VALUES = st.dictionaries(st.integers(0, 60), st.none() | st.floats(), max_size=40)
sweeps = st.builds(
    lambda **settings: Sweep.model_validate({"space": SPACE, **settings}),
    trials=st.integers(1, 100),
    rungs=st.integers(1, 6),
    reduction=st.integers(2, 5),
    batch=st.integers(0, 120),
    sampler=st.sampled_from(["tpe", "random"]),
    parallel=st.integers(1, 9),
)


def cost(sweep: Sweep) -> float:
    """Return the maximum of all steps, as a share of the steps for training all trials to the end."""
    done = {round.rung: sum(r.count for r in rounds(sweep) if r.rung == round.rung) for round in rounds(sweep)}
    steps = sum(n * (sweep.share(rung) - (sweep.share(rung - 1) if rung else 0)) for rung, n in done.items())
    return steps / sweep.count


@given(sweeps)
def test_every_trial_starts_once_and_fewer_trials_continue_at_each_rung(sweep: Sweep) -> None:
    plan = rounds(sweep)
    assert sum(step.count for step in plan if not step.rung) == sweep.trials
    later = [step for step in plan if step.rung]
    assert [step.rung for step in later] == list(range(1, sweep.rungs))
    counts = [sweep.trials, *(step.count for step in later)]
    assert all(1 <= fewer <= more for more, fewer in pairwise(counts))
    assert math.isclose(sweep.share(sweep.rungs - 1), 1) and 0 < cost(sweep) <= 1 + 1e-9


def test_twenty_seven_trials_cost_a_quarter_of_the_steps() -> None:
    sweep = Sweep.model_validate({"space": SPACE, "trials": 27})
    assert [(step.rung, step.count) for step in rounds(sweep)] == [(0, 9), (0, 9), (0, 9), (1, 9), (2, 3)]
    assert math.isclose(cost(sweep), 7 / 27)


@given(VALUES, st.integers(0, 40), st.sampled_from(["lower", "higher"]), st.randoms())
def test_the_choice_of_trials_depends_only_on_their_values(
    values: dict[int, float | None], count: int, better: str, chance: random.Random
) -> None:
    chosen = best(values, count, better)
    shuffled = list(values.items())
    chance.shuffle(shuffled)
    assert best(dict(shuffled), count, better) == chosen
    finite = {number: value for number, value in values.items() if value is not None and math.isfinite(value)}
    assert len(chosen) == min(count, len(finite)) and set(chosen) <= set(finite)
    sign = 1 if better == "lower" else -1
    dropped = finite.keys() - set(chosen)
    assert all((sign * finite[a], a) < (sign * finite[b], b) for a in chosen for b in dropped)


@given(st.lists(st.integers(), unique=True), st.integers(1, 12))
def test_each_trial_has_one_pod_and_trials_are_spread_evenly_over_pods(numbers: list[int], pods: int) -> None:
    pods_trials = shares(numbers, pods)
    assert sorted(number for trials in pods_trials for number in trials) == sorted(numbers)
    assert len(pods_trials) <= pods and all(pods_trials)
    assert not pods_trials or max(map(len, pods_trials)) - min(map(len, pods_trials)) <= 1
