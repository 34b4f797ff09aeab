"""Collects the metrics of a program, and sends them to MLflow in a thread."""

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from rekindle.errors import TrackingError, say, to_number
from rekindle.kubernetes_names import MLFLOW_TRACKING_URI

SEND_INTERVAL_S = 5.0
# minimum number of seconds between two points of a curve
POINT_INTERVAL_S = 1.0


class Metrics:
    """Sends the curves of rank 0 to the MLflow run $MLFLOW_RUN_ID. Does nothing unless
    MLFLOW_TRACKING_URI is set, too."""

    def __init__(self, rank: int) -> None:
        self._run_id = os.environ.get("MLFLOW_RUN_ID", "")
        self.is_on = rank == 0 and bool(self._run_id and os.environ.get(MLFLOW_TRACKING_URI))
        self._points: list[tuple[str, float, int]] = []
        self._last_point_s = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Record values of a step: numbers, or tensors with one element. At most one step per
        second is recorded, because reading a tensor waits for the GPU."""
        if not self.is_on or not values:
            return

        now = time.monotonic()
        if now - self._last_point_s < POINT_INTERVAL_S:
            return
        self._last_point_s = now
        points = [(name, to_number(value), step) for name, value in values.items()]
        with self._lock:
            self._points += [
                (name, value, step) for name, value, step in points if value is not None
            ]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Send the last points."""
        self._stop.set()
        if self._thread:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._stop.wait(SEND_INTERVAL_S):
            self._send()
        self._send()

    def _send(self) -> None:
        from rekindle.tracking import log_metrics

        with self._lock:
            points = self._points
            self._points = []
        if not points:
            return

        try:
            log_metrics(self._run_id, points)
            self._problem = ""
        except TrackingError as error:
            # the points are sent again after the next interval
            with self._lock:
                self._points = points + self._points
            if str(error) != self._problem:
                self._problem = str(error)
                say(f"metrics are not recorded yet: {error}")
