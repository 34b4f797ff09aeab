"""The duration of steps, and the time between two snapshots."""

import time

# from this duration of a step on, waiting for an exchange between the ranks costs little
SLOW_STEP_S = 0.2
# weight of the last step in the average
LAST_STEP_WEIGHT = 0.3
# largest share of the time that snapshots may take
MAX_SNAPSHOT_SHARE = 0.03


class StepClock:
    """The average duration of the last steps."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._last_s: float | None = None

    @property
    def is_slow(self) -> bool:
        return self.step_s >= SLOW_STEP_S

    def record_step(self) -> None:
        """Record that a step is completed now."""
        now = time.monotonic()
        if self._last_s is not None:
            duration = now - self._last_s
            weight = LAST_STEP_WEIGHT if self.step_s else 1.0
            self.step_s = weight * duration + (1 - weight) * self.step_s
        self._last_s = now


class SnapshotInterval:
    """Decides when the next snapshot is due: after `seconds`, or later if snapshots would take more
    than MAX_SNAPSHOT_SHARE of the time; 0 seconds: never."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.cost_s = 0.0  # delay of the program by the last snapshot, in seconds
        self._last_s: float | None = None

    @property
    def seconds(self) -> float:
        """The time between two snapshots."""
        return max(self._seconds, self.cost_s / MAX_SNAPSHOT_SHARE)

    def is_due(self, step_s: float) -> bool:
        """Return True if the next snapshot would be too late after one more step of `step_s`
        seconds."""
        if not self._seconds:
            return False
        if self._last_s is None:
            return True
        return time.monotonic() - self._last_s + step_s >= self.seconds

    def record(self, start_s: float, cost_s: float) -> None:
        """Record a snapshot that started at `start_s` and delayed the program by `cost_s`."""
        self._last_s = start_s
        self.cost_s = cost_s
