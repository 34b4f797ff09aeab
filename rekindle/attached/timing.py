"""Measures the duration of steps, and decides how often snapshots are made."""

import time

# a step of at least this duration counts as slow: compared with it, waiting for an exchange between
# the ranks costs little
SLOW_STEP_S = 0.2
# weight of the newest step in the moving average of the durations
LAST_STEP_WEIGHT = 0.3
# maximum fraction of the training time that snapshots may take
MAX_SNAPSHOT_SHARE = 0.03


class StepClock:
    """Computes a moving average of the duration of training steps."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._last_s: float | None = None

    @property
    def is_slow(self) -> bool:
        return self.step_s >= SLOW_STEP_S

    def record_step(self) -> None:
        """Record that a training step is completed now."""
        now_s = time.monotonic()
        if self._last_s is not None:
            duration_s = now_s - self._last_s
            step_weight = LAST_STEP_WEIGHT if self.step_s else 1.0
            self.step_s = step_weight * duration_s + (1 - step_weight) * self.step_s
        self._last_s = now_s


class SnapshotInterval:
    """Decides when the next snapshot is due: after `interval_seconds`, or later if snapshots would
    take more than MAX_SNAPSHOT_SHARE of the time; never if `interval_seconds` is 0."""

    def __init__(self, interval_seconds: float) -> None:
        self._seconds = interval_seconds
        # time by which the last snapshot delayed the program, in seconds
        self.cost_s = 0.0
        self._last_s: float | None = None

    @property
    def seconds(self) -> float:
        """The time between two snapshots."""
        return max(self._seconds, self.cost_s / MAX_SNAPSHOT_SHARE)

    def is_due(self, step_s: float) -> bool:
        """Return True if a snapshot should be made now, because a snapshot after another step of
        `step_s` seconds would be too late."""
        if not self._seconds:
            return False
        if self._last_s is None:
            return True
        return time.monotonic() - self._last_s + step_s >= self.seconds

    def record(self, start_s: float, cost_s: float) -> None:
        """Record a snapshot that started at `start_s` and delayed the program by `cost_s`."""
        self._last_s = start_s
        self.cost_s = cost_s
