"""Successive halving: which trials train in which round, and how far. Pure: a function of the config and the results.

A round begins new trials, or takes the best of a rung on to the next one. All of a round are compared when all have
ended, so that the outcome does not depend on which was faster.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.training.search.config import Settings, Sweep


@dataclass
class Trial:
    """One training of a search."""

    number: int
    settings: Settings
    attrs: dict[str, Any] = field(default_factory=dict)  # of the sampler
    values: dict[int, float | None] = field(default_factory=dict)  # by rung; None: it failed there
    steps: int = 0  # updates made
    sha256: str = ""  # of its weights
    why: str = ""  # it failed

    @property
    def rung(self) -> int:
        """The last one that it has reached; -1: none."""
        return max(self.values, default=-1)

    @property
    def value(self) -> float | None:
        """At the last rung."""
        return self.values.get(self.rung)


@dataclass(frozen=True)
class Round:
    """Trials that train side by side: `count` new ones (rung 0), or at most so many of the best of the rung before."""

    rung: int
    count: int


def rounds(sweep: Sweep) -> list[Round]:
    """Known when the pipeline is built."""
    size = min(sweep.batch or (math.ceil(sweep.count / 3) if sweep.sampler == "tpe" else sweep.count), sweep.count)
    starts = range(0, sweep.count, size)
    new = [Round(0, min(size, sweep.count - start)) for start in starts]
    return new + [Round(rung, max(1, sweep.count // sweep.reduction**rung)) for rung in range(1, sweep.rungs)]


def best(values: Mapping[int, float | None], count: int, better: str) -> list[int]:
    """The best trials, the first one first; of equal ones the earlier. None, and what is not finite, is a failure."""
    sign = 1 if better == "lower" else -1
    known = {number: value for number, value in values.items() if value is not None and math.isfinite(value)}
    return sorted(known, key=lambda number: (sign * known[number], number))[:count]


def shares(numbers: Sequence[int], pods: int) -> list[list[int]]:
    """The trials of each pod, dealt out in turn."""
    return [list(numbers[pod::pods]) for pod in range(min(pods, len(numbers)))]
