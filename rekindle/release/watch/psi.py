"""The population stability index (PSI), a distance of two histograms, and its expected value under
no change.

PSI = Σ (p - q) ln(p / q) over groups with the shares p and q. By convention, a PSI below 0.1 means
no change, and a PSI above 0.25 a significant change. Sources: Siddiqi, Credit Risk Scorecards
(2006), chapter 9; Yurdakul and Naranjo, Statistical properties of the population stability index,
Journal of Risk Model Validation 14(4), 2020: without a change the PSI of n and m rows in B groups
is distributed as (1/n + 1/m) times chi-squared with B - 1 degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

GROUPS = 10  # approximate number of groups, with equal shares in the reference
CHANCE_QUANTILE = 0.999  # quantile of the PSI under no change; a larger PSI is significant


@dataclass(frozen=True)
class Shift:
    """Difference of one output or feature between two populations."""

    psi: float
    chance: float  # largest PSI that chance explains (CHANCE_QUANTILE of the PSI under no change)
    expected: list[float]  # share of each group in the reference
    actual: list[float]  # share of each group in the new data


def shift(
    expected: Sequence[int], actual: Sequence[int], missing: tuple[int, int] = (0, 0)
) -> Shift:
    """Compare the counts of the same buckets in two non-empty populations; `missing`: their counts
    without a value."""
    expected_groups, actual_groups = merge_buckets(
        expected, actual, (sum(expected) + missing[0]) / GROUPS
    )
    if any(missing):  # a group of their own: they are not close to the values of any bucket
        expected_groups.append(missing[0])
        actual_groups.append(missing[1])

    n = sum(expected_groups)
    m = sum(actual_groups)
    group_count = len(expected_groups)
    # each group gets half a row more, so that the share of an empty group is not 0
    expected_shares = [(count + 0.5) / (n + group_count / 2) for count in expected_groups]
    actual_shares = [(count + 0.5) / (m + group_count / 2) for count in actual_groups]
    psi = sum(
        (b - a) * math.log(b / a) for a, b in zip(expected_shares, actual_shares, strict=True)
    )

    return Shift(
        psi, chi_squared(group_count - 1) * (1 / n + 1 / m), expected_shares, actual_shares
    )


def merge_buckets(
    expected: Sequence[int], actual: Sequence[int], group_size: float
) -> tuple[list[int], list[int]]:
    """Merge adjacent buckets to groups of `group_size` rows of the reference; a larger bucket is a
    group by itself."""
    expected_groups = [0]
    actual_groups = [0]

    for expected_count, actual_count in zip(expected, actual, strict=True):
        if expected_groups[-1] >= group_size or (
            expected_count >= group_size and expected_groups[-1] + actual_groups[-1]
        ):
            expected_groups.append(0)
            actual_groups.append(0)

        expected_groups[-1] += expected_count
        actual_groups[-1] += actual_count

    return expected_groups, actual_groups


def chi_squared(degrees: int) -> float:
    """Return the CHANCE_QUANTILE by the approximation of Wilson and Hilferty (1931).

    Its error is below 2 % from 3 degrees on.
    """
    if degrees < 1:
        return 0.0
    width = 2 / (9 * degrees)
    return degrees * (1 - width + NormalDist().inv_cdf(CHANCE_QUANTILE) * math.sqrt(width)) ** 3
