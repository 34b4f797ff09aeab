"""Successive halving: the plan of rounds, and the best trials. Pure functions of the config and the results.

A round starts new trials, or continues the best trials of a rung to the next rung. The trials of a round are compared
when all have ended, so that the result does not depend on their speed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.training.search.config import Settings, Sweep


@dataclass
class Trial:
    """One training of a sweep."""

    number: int
    settings: Settings
    attrs: dict[str, Any] = field(default_factory=dict)  # attributes that Optuna's sampler needs
    values: dict[int, float | None] = field(default_factory=dict)  # metric by rung; None: the trial failed
    steps: int = 0  # number of updates
    sha256: str = ""  # sha256 of the trial's weights
    why: str = ""  # reason why the trial failed

    @property
    def rung(self) -> int:
        """The last rung that was reached, or -1."""
        return max(self.values, default=-1)

    @property
    def value(self) -> float | None:
        return self.values.get(self.rung)


@dataclass(frozen=True)
class Round:
    """Trials that train at the same time: `count` new trials (rung 0), or the `count` best of the previous rung."""

    rung: int
    count: int


def rounds(sweep: Sweep) -> list[Round]:
    """Return the rounds of a sweep, which only depend on the config."""
    size = min(sweep.batch or (math.ceil(sweep.count / 3) if sweep.sampler == "tpe" else sweep.count), sweep.count)
    starts = range(0, sweep.count, size)
    first_rounds = [Round(0, min(size, sweep.count - start)) for start in starts]
    return first_rounds + [Round(rung, max(1, sweep.count // sweep.reduction**rung)) for rung in range(1, sweep.rungs)]


def best(values: Mapping[int, float | None], count: int, better: str) -> list[int]:
    """Return the best trials, best first; equal trials by number. Failed trials (None or not finite) are left out."""
    sign = 1 if better == "lower" else -1
    finite_values = {number: value for number, value in values.items() if value is not None and math.isfinite(value)}
    return sorted(finite_values, key=lambda number: (sign * finite_values[number], number))[:count]


def shares(numbers: Sequence[int], pods: int) -> list[list[int]]:
    """Distribute the trials to the pods, in turn."""
    return [list(numbers[pod::pods]) for pod in range(min(pods, len(numbers)))]
