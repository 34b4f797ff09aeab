"""Served and offline predictions are equal only if all of their values agree."""

import math
from typing import Any

import pytest

from rekindle.release.compare import PredictionComparison, compute_difference


@pytest.mark.parametrize(
    ("served", "offline", "expected"),
    [
        (0.25, 0.5, 0.25),
        # the tolerance is relative, so that it fits numbers of any magnitude
        (3e6, 2e6, pytest.approx(1 / 3)),
        (1, 1.0, 0.0),
        ([1, [2.0]], [1, [2.5]], pytest.approx(0.2)),
        ({"a": 1, "b": "x"}, {"b": "x", "a": 1}, 0.0),
        ([1], [1, 2], math.inf),
        ({"a": 1}, {"b": 1}, math.inf),
        ("cat", "dog", math.inf),
        (True, 1, math.inf),
        (None, 0.0, math.inf),
        (math.nan, 1.0, math.inf),
    ],
)
def test_only_numbers_have_a_finite_difference(served: Any, offline: Any, expected: float) -> None:
    assert compute_difference(served, offline) == compute_difference(offline, served) == expected


def test_the_result_contains_the_worst_instance() -> None:
    comparison = PredictionComparison(tolerance=0.1)
    comparison.add({"instances": [{"x": 1}, {"x": 2}, {"x": 3}]}, [0.0, 0.9, 0.5], [0.0, 0.5, 0.0])
    assert comparison.replayed == 3
    assert comparison.differing == 2
    assert comparison.max_difference == 0.5
    assert comparison.worst == '{"x": 3}: served 0.5, offline 0.0'
    with pytest.raises(ValueError):
        comparison.add({"instances": [{"x": 1}]}, [], [0.0])


def test_a_prediction_that_changes_with_its_neighbours_is_counted() -> None:
    comparison = PredictionComparison(tolerance=0.1)
    request = {"instances": [{"x": 1}, {"x": 2}]}
    assert comparison.add_repetition(request, [0.0, 0.5], [0.05, 0.5])
    assert not comparison.add_repetition(request, [0.0, 0.5], [0.0, 0.9])
    assert comparison.unstable == 1
    assert comparison.example == '{"x": 2}: alone 0.5, with others 0.9'
