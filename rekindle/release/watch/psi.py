"""The population stability index (PSI), a distance of two histograms, and the PSI that chance alone
can cause.

PSI = Σ (p - q) ln(p / q) over groups with the shares p and q. By convention, a PSI below 0.1 means
no change, and a PSI above 0.25 a significant change. Sources: the convention is from Siddiqi,
Credit Risk Scorecards (2006), chapter 9, and the PSI without a change from Yurdakul and Naranjo,
Statistical properties of the population stability index, Journal of Risk Model Validation 14(4),
2020: without a change, the PSI of n and m rows in B groups is distributed as (1/n + 1/m) times
chi-squared with B - 1 degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

# approximate number of groups, with equal shares in the reference
GROUP_COUNT = 10
# quantile of the PSI under no change; a larger PSI is significant
CHANCE_QUANTILE = 0.999


@dataclass(frozen=True)
class Shift:
    """The difference of one output or feature between the reference and new data."""

    psi: float
    # CHANCE_QUANTILE of the PSI under no change; a larger PSI is significant
    chance: float
    # share of each group in the reference
    expected: list[float]
    # share of each group in the new data
    actual: list[float]


def compute_shift(
    expected_counts: Sequence[int],
    actual_counts: Sequence[int],
    missing_counts: tuple[int, int] = (0, 0),
) -> Shift:
    """Compute the shift (PSI) between two non-empty histograms with the same buckets.

    `missing_counts`: numbers of rows without a value in the reference and in the new data.
    """
    expected_groups, actual_groups = merge_buckets(
        expected_counts, actual_counts, (sum(expected_counts) + missing_counts[0]) / GROUP_COUNT
    )
    # missing values form a separate group, since they are not close to any bucket
    if any(missing_counts):
        expected_groups.append(missing_counts[0])
        actual_groups.append(missing_counts[1])

    expected_total = sum(expected_groups)
    actual_total = sum(actual_groups)
    group_count = len(expected_groups)
    # add half a row to each group, so that no share is 0
    expected_shares = [
        (group_size + 0.5) / (expected_total + group_count / 2) for group_size in expected_groups
    ]
    actual_shares = [
        (group_size + 0.5) / (actual_total + group_count / 2) for group_size in actual_groups
    ]
    psi = sum(
        (actual_share - expected_share) * math.log(actual_share / expected_share)
        for expected_share, actual_share in zip(expected_shares, actual_shares, strict=True)
    )

    return Shift(
        psi,
        compute_chi_squared_quantile(group_count - 1) * (1 / expected_total + 1 / actual_total),
        expected_shares,
        actual_shares,
    )


def merge_buckets(
    expected_counts: Sequence[int], actual_counts: Sequence[int], rows_per_group: float
) -> tuple[list[int], list[int]]:
    """Merge adjacent buckets into groups of about `rows_per_group` reference rows. A bucket with
    more than `rows_per_group` rows stays a group of its own."""
    expected_groups = [0]
    actual_groups = [0]

    for expected_count, actual_count in zip(expected_counts, actual_counts, strict=True):
        if expected_groups[-1] >= rows_per_group or (
            expected_count >= rows_per_group and expected_groups[-1] + actual_groups[-1]
        ):
            expected_groups.append(0)
            actual_groups.append(0)

        expected_groups[-1] += expected_count
        actual_groups[-1] += actual_count

    return expected_groups, actual_groups


def compute_chi_squared_quantile(degrees_of_freedom: int) -> float:
    """Return the CHANCE_QUANTILE of the chi-squared distribution, by the approximation of Wilson
    and Hilferty (1931).

    The error of the approximation is below 2 % for 3 or more degrees of freedom.
    """
    if degrees_of_freedom < 1:
        return 0.0
    scaled_variance = 2 / (9 * degrees_of_freedom)
    return (
        degrees_of_freedom
        * (1 - scaled_variance + NormalDist().inv_cdf(CHANCE_QUANTILE) * math.sqrt(scaled_variance))
        ** 3
    )
