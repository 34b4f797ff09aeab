"""The optimal interval of durable checkpoints is W = √(2·C·M), with the cost C of a checkpoint and
the mean time M between losses of workers.

Source: the formula is from J. W. Young, "A first order approximation to the optimum checkpoint
interval", CACM 17(9), 1974. The formula of J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", FGCS 22(3), 2006, has further terms, which are smaller than
the error of the estimate of M.
"""

import math
import time

from rekindle.training.checkpoint.manifest import IntervalFacts

# minimum and maximum of an automatic interval
MIN_INTERVAL_S = 10.0
MAX_INTERVAL_S = 1800.0
# assumed mean time between losses of workers until the first loss, since spot nodes live for hours
PRIOR_MEAN_LOSS_TIME_S = 3600.0
# minimum ratio of the interval to the duration of an upload, so that uploads take at most half of
# the time
MIN_UPLOADS_PER_INTERVAL = 2.0


class CheckpointInterval:
    """Decides when the next durable checkpoint is due: when `interval_seconds` (0: automatic) have
    passed, or `interval_steps` (0: no limit) steps were made, since the last checkpoint started."""

    def __init__(self, interval_seconds: float, interval_steps: int) -> None:
        self.fixed_seconds = interval_seconds
        self.steps = interval_steps
        # seconds that the last checkpoint cost the training: the time of the copy in memory, plus
        # the CPU time of the upload
        self.cost = 0.0
        # seconds that the upload of the last checkpoint took
        self.duration = 0.0
        # training time and number of losses in previous processes of the run
        self._earlier_seconds = 0.0
        self._losses = 0
        # start of this process
        self._start_time = time.monotonic()
        # start of the last checkpoint
        self._last_time = self._start_time
        self._last_step = 0

    def seconds(self) -> float:
        """Return the seconds between two checkpoints."""
        if self.fixed_seconds:
            return self.fixed_seconds
        mean_loss_time_s = (PRIOR_MEAN_LOSS_TIME_S + self._trained_seconds()) / (1 + self._losses)
        optimal_interval_s = math.sqrt(2 * self.cost * mean_loss_time_s)
        return min(
            MAX_INTERVAL_S,
            max(MIN_INTERVAL_S, optimal_interval_s, MIN_UPLOADS_PER_INTERVAL * self.duration),
        )

    def is_due(self, step: int) -> bool:
        """Return True if the state after `step` updates should be checkpointed."""
        if self.steps and step - self._last_step >= self.steps:
            return True
        return time.monotonic() - self._last_time >= self.seconds()

    def record_start(self, step: int) -> None:
        """Record that a checkpoint of `step` starts."""
        self._last_time = time.monotonic()
        self._last_step = step

    def record_loss(self) -> None:
        """Count an interruption of the training because a worker was lost."""
        self._losses += 1

    def facts(self) -> IntervalFacts:
        """Return the measurements that the manifest stores for later processes of the run."""
        return {"trained_seconds": round(self._trained_seconds(), 1), "losses": self._losses}

    def resume(self, step: int, interval_facts: IntervalFacts) -> None:
        """After the loss of all workers, restore the measurements that the checkpoint of `step`
        contains."""
        self._earlier_seconds = interval_facts["trained_seconds"]
        self._losses = interval_facts["losses"] + 1
        self._last_step = step

    def _trained_seconds(self) -> float:
        return self._earlier_seconds + time.monotonic() - self._start_time
