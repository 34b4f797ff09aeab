"""The population stability index (PSI), a distance of two histograms, and the PSI that chance alone
can cause.

PSI = Σ (p - q) ln(p / q) over groups with the shares p and q. By convention, a PSI below 0.1 means
no change, and a PSI above 0.25 a significant change. Sources: Siddiqi, Credit Risk Scorecards
(2006), chapter 9, for this convention; Yurdakul and Naranjo, Statistical properties of the
population stability index, Journal of Risk Model Validation 14(4), 2020, for the PSI without a
change: the PSI of n and m rows in B groups is then distributed as (1/n + 1/m) times chi-squared
with B - 1 degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

GROUPS = 10  # approximate number of groups, with equal shares in the reference
CHANCE_QUANTILE = 0.999  # quantile of the PSI under no change; a larger PSI is significant


@dataclass(frozen=True)
class Shift:
    """The difference of one output or feature between the reference and new data."""

    psi: float
    chance: float  # CHANCE_QUANTILE of the PSI under no change; a larger PSI is significant
    expected: list[float]  # share of each group in the reference
    actual: list[float]  # share of each group in the new data


def compute_shift(
    expected: Sequence[int], actual: Sequence[int], missing: tuple[int, int] = (0, 0)
) -> Shift:
    """Compute the shift between two non-empty histograms with the same buckets.

    `missing`: numbers of rows without a value in the reference and in the new data.
    """
    expected_groups, actual_groups = merge_buckets(
        expected, actual, (sum(expected) + missing[0]) / GROUPS
    )
    # missing values form a separate group, since they are not close to any bucket
    if any(missing):
        expected_groups.append(missing[0])
        actual_groups.append(missing[1])

    n = sum(expected_groups)
    m = sum(actual_groups)
    group_count = len(expected_groups)
    # half a row is added to each group, so that no share is 0
    expected_shares = [(count + 0.5) / (n + group_count / 2) for count in expected_groups]
    actual_shares = [(count + 0.5) / (m + group_count / 2) for count in actual_groups]
    psi = sum(
        (b - a) * math.log(b / a) for a, b in zip(expected_shares, actual_shares, strict=True)
    )

    return Shift(
        psi, chi_squared_quantile(group_count - 1) * (1 / n + 1 / m), expected_shares, actual_shares
    )


def merge_buckets(
    expected: Sequence[int], actual: Sequence[int], group_size: float
) -> tuple[list[int], list[int]]:
    """Merge adjacent buckets into groups of about `group_size` reference rows. A bucket with more
    rows stays a group of its own."""
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


def chi_squared_quantile(degrees: int) -> float:
    """Return the CHANCE_QUANTILE of the chi-squared distribution, by the approximation of Wilson
    and Hilferty (1931).

    The error is below 2 % for 3 or more degrees of freedom.
    """
    if degrees < 1:
        return 0.0
    width = 2 / (9 * degrees)
    return degrees * (1 - width + NormalDist().inv_cdf(CHANCE_QUANTILE) * math.sqrt(width)) ** 3
