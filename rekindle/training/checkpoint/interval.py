"""How often a durable checkpoint pays: W = √(2·C·M), C what one costs, M the mean time between losses.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, whose further terms are below
the error of our M. Both tiers count: only steps that no survivor and no shared memory holds are ever done again.
"""

import math
import time
from typing import Any

SHORTEST, LONGEST = 10.0, 1800.0  # seconds; the bounds of an automatic interval
PRIOR = 3600.0  # seconds of training with one loss that we pretend to have seen: spot nodes live for hours
ROOM = 2.0  # a checkpoint that takes long to write may be under way half of the time at most


class Interval:
    """When the next durable checkpoint is due: by time, fixed or automatic, and perhaps by steps, too."""

    def __init__(self, seconds: float, steps: int) -> None:
        self.fixed, self.steps = seconds, steps
        self.cost = 0.0  # seconds of training that the last checkpoint took: the wait for the copy, and CPU time
        self.duration = 0.0  # seconds until it was written
        self._trained, self._losses = 0.0, 0  # of the run's former processes
        self._began = self._last = time.monotonic()
        self._last_step = 0

    def seconds(self) -> float:
        """The interval as it is now."""
        if self.fixed:
            return self.fixed
        mean = (PRIOR + self._seen()) / (1 + self._losses)
        best = math.sqrt(2 * self.cost * mean)
        return min(LONGEST, max(SHORTEST, best, ROOM * self.duration))

    def due(self, step: int) -> bool:
        """Whether a checkpoint should be made of the state after `step` updates."""
        if self.steps and step - self._last_step >= self.steps:
            return True
        return time.monotonic() - self._last >= self.seconds()

    def began(self, step: int) -> None:
        """A checkpoint of `step` is under way."""
        self._last, self._last_step = time.monotonic(), step

    def lost(self) -> None:
        """A worker was lost, and all were kept from training."""
        self._losses += 1

    def facts(self) -> dict[str, Any]:
        """What later processes of the run should know."""
        return {"trained_seconds": round(self._seen(), 1), "losses": self._losses}

    def resume(self, step: int, facts: dict[str, Any]) -> None:
        """Everybody was lost at some time after `step`; `facts` as they were then."""
        self._trained, self._losses = facts["trained_seconds"], facts["losses"] + 1
        self._last_step = step

    def _seen(self) -> float:
        return self._trained + time.monotonic() - self._began
