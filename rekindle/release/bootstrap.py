"""The confidence interval of the difference between two models, by a paired bootstrap over examples
or groups of examples.

    value, low, high = paired_bootstrap(
        lambda rows: rmse(a[rows], truth[rows]) - rmse(b[rows], truth[rows]), len(truth)
    )

The interval is the percentile interval of Efron and Tibshirani, An Introduction to the Bootstrap
(1993), chapter 13.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RowNumbers = NDArray[np.intp]


def paired_bootstrap(
    statistic: Callable[[RowNumbers], float],
    size: int,
    groups: Sequence[Any] | NDArray[Any] | None = None,
    resamples: int = 300,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Return (value, low, high), that is, `statistic` of all rows 0..size-1, and its confidence
    interval from draws of rows with replacement.

    Both compared models see the same draws. Rows with an equal entry in `groups` [size] are drawn
    together: use groups for dependent rows, such as all rows of one customer. Draws whose statistic
    is undefined (it raises ValueError or ArithmeticError, or is NaN) do not count; if fewer than
    half of the draws remain, the interval is NaN.
    """
    rows_by_group = _group_rows(size, groups)
    random_generator = np.random.default_rng(seed)
    draw_estimates = []

    for _ in range(resamples):
        drawn_groups = random_generator.integers(len(rows_by_group), size=len(rows_by_group))
        try:
            draw_estimates.append(
                statistic(
                    np.concatenate([rows_by_group[group_index] for group_index in drawn_groups])
                )
            )
        except (ValueError, ArithmeticError):
            continue

    return statistic(np.arange(size)), *_compute_interval(draw_estimates, resamples, confidence)


def compute_weighted_bootstrap(
    statistic: Callable[[RowNumbers, NDArray[np.float32]], NDArray[np.float64]],
    row_count: int,
    groups: Sequence[Any] | NDArray[Any] | None = None,
    resample_count: int = 300,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the same (low, high) as `paired_bootstrap`. compute_weighted_bootstrap is faster than
    `paired_bootstrap` for many rows, because `statistic` is called once for all draws.

    `statistic` gets the group number of each row, and the count of each group in each draw, as
    [groups, resamples].
    """
    group_names, row_groups = np.unique(
        np.arange(row_count) if groups is None else groups, return_inverse=True
    )
    random_generator = np.random.default_rng(seed)
    draw_weights = np.empty((len(group_names), resample_count), np.float32)

    for draw_index in range(resample_count):
        draw_weights[:, draw_index] = np.bincount(
            random_generator.integers(len(group_names), size=len(group_names)),
            minlength=len(group_names),
        )

    return _compute_interval(statistic(row_groups, draw_weights), resample_count, confidence)


def _compute_interval(
    estimates: Iterable[float], resample_count: int, confidence: float
) -> tuple[float, float]:
    finite_estimates = [estimate for estimate in estimates if np.isfinite(estimate)]
    if len(finite_estimates) < resample_count / 2:
        return float("nan"), float("nan")
    lower_bound, upper_bound = np.quantile(
        finite_estimates, [(1 - confidence) / 2, (1 + confidence) / 2]
    )
    return float(lower_bound), float(upper_bound)


def _group_rows(row_count: int, groups: Sequence[Any] | NDArray[Any] | None) -> list[RowNumbers]:
    """Return the row numbers of each group; without groups, each row is a group."""
    if groups is None:
        return list(np.arange(row_count).reshape(-1, 1))
    rows_by_group: dict[Any, list[int]] = {}
    for row, group in enumerate(groups):
        rows_by_group.setdefault(group, []).append(row)
    return [np.array(group_rows) for group_rows in rows_by_group.values()]
