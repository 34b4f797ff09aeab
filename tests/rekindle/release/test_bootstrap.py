"""Bootstrap intervals must contain the true value as often as they promise, or a worse model could
replace a better one."""

import math
from typing import Any

import numpy as np
import pytest

from rekindle.release.bootstrap import compute_weighted_bootstrap, paired_bootstrap


@pytest.mark.slow
def test_the_interval_of_a_mean_covers_the_truth_as_often_as_promised() -> None:
    hits = 0
    for seed in range(200):
        values = np.random.default_rng(seed).normal(0.3, 1, 80)
        _, low, high = paired_bootstrap(
            lambda rows, v=values: float(v[rows].mean()), 80, resamples=200, confidence=0.9
        )
        hits += low <= 0.3 <= high
    assert 0.82 <= hits / 200 <= 0.97


def test_rows_of_one_group_are_resampled_together() -> None:
    # the data are a thousand rows of twenty customers
    values = np.repeat(np.random.default_rng(1).normal(0, 1, 20), 50)
    customers = np.repeat(np.arange(20), 50).tolist()
    widths = []
    for groups in (None, customers):
        value, low, high = paired_bootstrap(lambda rows: float(values[rows].mean()), 1000, groups)
        assert value == pytest.approx(values.mean())
        assert low < value < high
        widths.append(high - low)
    assert widths[1] > 4 * widths[0]


def test_the_interval_is_deterministic() -> None:
    values = np.arange(50.0)
    assert (
        len({paired_bootstrap(lambda rows: float(values[rows].mean()), 50) for _ in range(3)}) == 1
    )


def test_a_statistic_that_is_undefined_for_most_draws_has_a_nan_interval() -> None:
    def undefined(rows: np.ndarray) -> float:
        if not (rows == 0).all() and len(set(rows.tolist())) < 10:
            raise ValueError("too few rows")
        return 1.0

    value, low, high = paired_bootstrap(undefined, 10)
    assert value == 1.0
    assert math.isnan(low)
    assert math.isnan(high)


@pytest.mark.parametrize("confidence", [0.5, 0.9])
def test_the_interval_has_the_quantiles_of_the_draws(confidence: float) -> None:
    draws: list[np.ndarray] = []

    def mean(rows: np.ndarray) -> float:
        draws.append(rows)
        return float(values[rows].mean())

    values = np.random.default_rng(3).normal(0, 1, 30)
    value, low, high = paired_bootstrap(mean, 30, resamples=120, confidence=confidence)
    *samples, all_rows = draws
    assert len(samples) == 120
    assert {len(rows) for rows in samples} == {30}
    assert {int(row) for rows in samples for row in rows} == set(range(30))
    assert all_rows.tolist() == list(range(30))
    means = [values[rows].mean() for rows in samples]
    assert value == values.mean()
    assert (low, high) == pytest.approx(
        np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    )


@pytest.mark.parametrize(("missing", "is_defined"), [(50, True), (51, False)])
def test_an_interval_needs_values_of_half_of_the_draws(missing: int, is_defined: bool) -> None:
    results = iter([*[math.nan] * missing, *[1.0] * (101 - missing)])
    assert (
        math.isfinite(paired_bootstrap(lambda rows: next(results), 10, resamples=100)[1])
        == is_defined
    )


@pytest.mark.parametrize("groups", [None, [row // 3 for row in range(30)]])
def test_weighted_and_paired_bootstrap_agree(groups: list[int] | None) -> None:
    values = np.random.default_rng(4).normal(size=30)

    def weighted_mean(group_values: Any, draws: Any) -> Any:
        weights = draws[group_values]
        return (values[:, None] * weights).sum(0) / weights.sum(0)

    _, *expected = paired_bootstrap(
        lambda rows: float(values[rows].mean()), 30, groups, 80, 0.9, seed=3
    )
    assert compute_weighted_bootstrap(weighted_mean, 30, groups, 80, 0.9, seed=3) == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize(("undefined", "is_defined"), [(40, True), (41, False)])
def test_draws_with_an_undefined_value_are_ignored(undefined: int, is_defined: bool) -> None:
    values = np.array([np.nan] * undefined + [1.0] * (80 - undefined))
    low, high = compute_weighted_bootstrap(lambda group_values, draws: values, 5, resample_count=80)
    assert (low, high) == (1.0, 1.0) if is_defined else np.isnan([low, high]).all()
