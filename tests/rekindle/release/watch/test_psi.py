"""What changed is seen, and what chance makes is not."""

import numpy as np
import pytest

from rekindle.release.watch.drift import drifted, shifts
from rekindle.release.watch.psi import chi_squared, grouped, shift
from rekindle.release.watch.scores import counted


def buckets(values: "np.ndarray") -> list[int]:
    return counted(map(float, values))["prediction"]


def test_the_index_is_that_of_the_formula() -> None:
    found = shift([500, 500], [800, 200])
    assert found.psi == pytest.approx(0.3 * np.log(0.8 / 0.5) + 0.3 * np.log(0.5 / 0.2), rel=0.01)
    assert shift([500, 500], [500, 500]).psi == 0


def test_neighbours_are_added_up_and_what_holds_nearly_all_stays_alone() -> None:
    assert grouped([0, 0, 100, 0], [5, 0, 90, 5]) == ([0, 100, 0], [5, 90, 5])
    assert grouped([5] * 20, [1] * 20) == ([10] * 10, [2] * 10)


@pytest.mark.parametrize(("degrees", "quantile"), [(3, 16.27), (9, 27.88), (12, 32.91)])
def test_the_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert chi_squared(degrees) == pytest.approx(quantile, rel=0.02)


def test_of_two_hundred_looks_at_an_unchanged_quantity_at_most_two_exceed_what_chance_makes() -> None:
    rng = np.random.default_rng(0)
    reference = buckets(rng.normal(size=2000))
    looks = [shift(reference, buckets(rng.normal(size=500))) for _ in range(200)]
    assert sum(look.psi > look.chance for look in looks) <= 2
    assert max(look.psi for look in looks) < 0.25


@pytest.mark.parametrize("change", [lambda x: x + 0.8, lambda x: x * 2.5, lambda x: np.abs(x), lambda x: x * 0])
def test_another_place_width_or_shape_is_seen(change) -> None:
    rng = np.random.default_rng(1)
    found = shift(buckets(rng.normal(size=2000)), buckets(change(rng.normal(size=500))))
    assert found.psi > max(0.25, found.chance)


def test_a_feature_that_is_left_out_is_seen_and_one_that_may_change_is_not() -> None:
    rng = np.random.default_rng(2)
    rows = [{"a": float(a), "b": float(b)} for a, b in rng.normal(size=(1000, 2))]
    reference = {"rows": 1000, "scores": {}, "features": counted(rows)}
    lacking = [row | {"b": None} if n % 2 else row for n, row in enumerate(rows)]
    new = {"rows": 1000, "scores": {}, "features": counted(lacking)}
    assert list(drifted(shifts(reference, new, []), 0.25)) == ["feature b"]
    assert drifted(shifts(reference, new, ["b"]), 0.25) == {}
