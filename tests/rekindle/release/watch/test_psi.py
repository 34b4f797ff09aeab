"""The PSI finds changes, and ignores random differences."""

import numpy as np
import pytest

from rekindle.release.watch.drift import compute_shifts, select_drifted_shifts
from rekindle.release.watch.psi import compute_chi_squared_quantile, compute_shift, merge_buckets
from rekindle.release.watch.scores import count_numbers


def count_buckets(values: "np.ndarray") -> list[int]:
    return count_numbers(map(float, values))["prediction"]


def test_the_psi_follows_its_formula() -> None:
    result = compute_shift([500, 500], [800, 200])
    assert result.psi == pytest.approx(0.3 * np.log(0.8 / 0.5) + 0.3 * np.log(0.5 / 0.2), rel=0.01)
    assert compute_shift([500, 500], [500, 500]).psi == 0


def test_small_buckets_are_merged_and_a_large_bucket_is_not() -> None:
    assert merge_buckets([0, 0, 100, 0], [5, 0, 90, 5], 10) == ([0, 100, 0], [5, 90, 5])
    assert merge_buckets([5] * 20, [1] * 20, 10) == ([10] * 10, [2] * 10)


@pytest.mark.parametrize(("degrees", "quantile"), [(3, 16.27), (9, 27.88), (12, 32.91)])
def test_chi_squared_quantiles_agree_with_published_tables(degrees: int, quantile: float) -> None:
    assert compute_chi_squared_quantile(degrees) == pytest.approx(quantile, rel=0.02)


def test_at_most_two_of_two_hundred_checks_of_unchanged_values_are_significant() -> None:
    rng = np.random.default_rng(0)
    reference = count_buckets(rng.normal(size=2000))
    checks = [compute_shift(reference, count_buckets(rng.normal(size=500))) for _ in range(200)]
    assert sum(check.psi > check.chance for check in checks) <= 2
    assert max(check.psi for check in checks) < 0.25


@pytest.mark.parametrize(
    "change", [lambda x: x + 0.8, lambda x: x * 2.5, lambda x: np.abs(x), lambda x: x * 0]
)
def test_a_distribution_of_another_location_width_or_shape_is_found(change) -> None:
    rng = np.random.default_rng(1)
    result = compute_shift(
        count_buckets(rng.normal(size=2000)), count_buckets(change(rng.normal(size=500)))
    )
    assert result.psi > max(0.25, result.chance)


def test_missing_values_are_a_group_of_their_own() -> None:
    tenths = [100] * 9
    # in the last tenth, the values are missing
    swapped = compute_shift([*tenths, 100], [*tenths, 0], (0, 100))
    assert swapped.psi > max(0.25, swapped.chance)
    rare = compute_shift(
        [*tenths, 90], [*tenths, 0], (10, 100)
    )  # the last group has less than a tenth of the rows
    assert rare.psi > max(0.25, rare.chance)
    assert compute_shift([*tenths, 90], [*tenths, 90], (10, 10)).psi == 0
    single = compute_shift(
        [*tenths, 100], [*tenths, 99], (0, 1)
    )  # the reference has no missing values
    assert single.psi < single.chance


def test_missing_values_of_a_feature_are_found_unless_it_is_ignored() -> None:
    rng = np.random.default_rng(2)
    rows = [{"a": float(a), "b": float(b)} for a, b in rng.normal(size=(1000, 2))]
    reference = {"rows": 1000, "scores": {}, "features": count_numbers(rows)}
    incomplete = [row | {"b": None} if n % 2 else row for n, row in enumerate(rows)]
    new = {"rows": 1000, "scores": {}, "features": count_numbers(incomplete)}
    assert list(select_drifted_shifts(compute_shifts(reference, new, []), 0.25)) == ["feature b"]
    assert select_drifted_shifts(compute_shifts(reference, new, ["b"]), 0.25) == {}
