"""How far two histograms are apart: the population stability index (PSI), beside what chance alone makes of it.

PSI = Σ (p - q) ln(p / q) over groups with the shares p and q. Below 0.1 is taken for stable, above 0.25 for changed.
Sources: Siddiqi, Credit Risk Scorecards (2006), chapter 9; Yurdakul and Naranjo, Statistical properties of the
population stability index, Journal of Risk Model Validation 14(4), 2020: without a change the PSI of n and m rows in B
groups is distributed as (1/n + 1/m) times chi-squared with B - 1 degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

GROUPS = 10  # about so many, of equal share in the reference
LEVEL = 0.999  # chance explains less than a PSI that it exceeds this rarely


@dataclass(frozen=True)
class Shift:
    """One quantity in two populations."""

    psi: float
    chance: float  # what the PSI of an unchanged quantity stays below, nearly always
    expected: list[float]  # share of each group in the reference
    actual: list[float]


def shift(expected: Sequence[int], actual: Sequence[int]) -> Shift:
    """Compare the counts of the same buckets; both populations have rows."""
    before, after = grouped(expected, actual)
    n, m, size = sum(before), sum(after), len(before)
    # half a row in each group: an empty one is a small share, not none
    p = [(count + 0.5) / (n + size / 2) for count in before]
    q = [(count + 0.5) / (m + size / 2) for count in after]
    psi = sum((b - a) * math.log(b / a) for a, b in zip(p, q, strict=True))
    return Shift(psi, chi_squared(size - 1) * (1 / n + 1 / m), p, q)


def grouped(expected: Sequence[int], actual: Sequence[int]) -> tuple[list[int], list[int]]:
    """Neighbouring buckets added up to groups of a tenth of the reference; a larger bucket is a group of its own."""
    enough = sum(expected) / GROUPS
    before, after = [0], [0]
    for old, new in zip(expected, actual, strict=True):
        if before[-1] >= enough or (old >= enough and before[-1] + after[-1]):
            before.append(0)
            after.append(0)
        before[-1] += old
        after[-1] += new
    return before, after


def chi_squared(degrees: int) -> float:
    """The quantile LEVEL, by the approximation of Wilson and Hilferty (1931), good to 2 % from 3 degrees on."""
    if degrees < 1:
        return 0.0
    width = 2 / (9 * degrees)
    return degrees * (1 - width + NormalDist().inv_cdf(LEVEL) * math.sqrt(width)) ** 3
