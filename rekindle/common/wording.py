"""Texts that one part of the program writes and another reads, and numbers in words."""

import re
from dataclasses import dataclass
from typing import Self

PROGRESS = re.compile(r"progress step=(\d+)/(\d+) loss=(\S+) samples_per_s=(\S+) eta_s=(\S+)")


@dataclass(frozen=True)
class Progress:
    """The line that a training prints once a second; its form is fixed, other programs read it."""

    step: int
    total: int
    loss: float
    samples_per_s: float
    eta_s: float

    def __str__(self) -> str:
        return (
            f"progress step={self.step}/{self.total} loss={self.loss:.5f} "
            f"samples_per_s={self.samples_per_s:.0f} eta_s={self.eta_s:.0f}"
        )

    @classmethod
    def newest(cls, log: str) -> Self | None:
        """The last such line of a log."""
        matches = PROGRESS.findall(log)
        if not matches:
            return None
        step, total, *numbers = matches[-1]
        return cls(int(step), int(total), *map(float, numbers))


def minutes(seconds: float) -> str:
    """A duration of a minute or more: `2 min 05 s`, `3 h 20 min`."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole} min {rest:02d} s" if whole < 60 else f"{whole // 60} h {whole % 60:02d} min"
