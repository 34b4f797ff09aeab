"""The optimal interval of durable checkpoints: W = √(2·C·M), C what one costs, M the mean time between losses.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, whose further terms are below
the error of our M. Only steps that neither a survivor nor shared memory holds are ever repeated.
"""

import math
import time

from rekindle.training.checkpoint.manifest import Facts

SHORTEST, LONGEST = 10.0, 1800.0  # seconds; the bounds of an automatic interval
PRIOR = 3600.0  # prior: one loss in so many seconds of training; spot nodes live for hours
SPACING = 2.0  # times the duration of an upload: at most half of the time is spent uploading


class CheckpointInterval:
    """When the next durable checkpoint is due: by time, fixed or automatic, and optionally by steps."""

    def __init__(self, seconds: float, steps: int) -> None:
        self.fixed, self.steps = seconds, steps
        self.cost = 0.0  # seconds of training lost to the last checkpoint: the wait for the copy, and CPU time
        self.duration = 0.0  # seconds until it was uploaded
        self._trained, self._losses = 0.0, 0  # including the run's former processes
        self._began = self._last = time.monotonic()
        self._last_step = 0

    def seconds(self) -> float:
        """The current interval."""
        if self.fixed:
            return self.fixed
        mean_time = (PRIOR + self._trained_seconds()) / (1 + self._losses)
        optimum = math.sqrt(2 * self.cost * mean_time)
        return min(LONGEST, max(SHORTEST, optimum, SPACING * self.duration))

    def due(self, step: int) -> bool:
        """Whether to checkpoint the state after `step` updates."""
        if self.steps and step - self._last_step >= self.steps:
            return True
        return time.monotonic() - self._last >= self.seconds()

    def began(self, step: int) -> None:
        """A checkpoint of `step` was started."""
        self._last, self._last_step = time.monotonic(), step

    def lost(self) -> None:
        """A worker was lost, which interrupted the training."""
        self._losses += 1

    def facts(self) -> Facts:
        """What later processes of the run need: goes into the manifest."""
        return {"trained_seconds": round(self._trained_seconds(), 1), "losses": self._losses}

    def resume(self, step: int, facts: Facts) -> None:
        """Continue after the loss of all workers, from the checkpoint of `step` with these `facts`."""
        self._trained, self._losses = facts["trained_seconds"], facts["losses"] + 1
        self._last_step = step

    def _trained_seconds(self) -> float:
        return self._trained + time.monotonic() - self._began
