"""Collects the metrics of a program, and sends them to MLflow in a thread."""

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from rekindle.errors import TrackingError, to_number, write_stderr
from rekindle.kubernetes_names import MLFLOW_TRACKING_URI

SEND_INTERVAL_S = 5.0
# minimum number of seconds between two points of a curve
RECORD_INTERVAL_S = 1.0


class MetricsRecorder:
    """Sends the metrics of rank 0 to the MLflow run $MLFLOW_RUN_ID. A recorder does nothing unless
    MLFLOW_RUN_ID and MLFLOW_TRACKING_URI are set."""

    def __init__(self, rank: int) -> None:
        self._run_id = os.environ.get("MLFLOW_RUN_ID", "")
        self.is_on = rank == 0 and bool(self._run_id and os.environ.get(MLFLOW_TRACKING_URI))
        self._points: list[tuple[str, float, int]] = []
        self._last_point_s = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""

    def record(self, step: int, metric_values: Mapping[str, Any]) -> None:
        """Record the metrics of a step: numbers, or tensors with one element. At most one step per
        second is recorded, because reading a tensor waits for the GPU."""
        if not self.is_on or not metric_values:
            return

        now_s = time.monotonic()
        if now_s - self._last_point_s < RECORD_INTERVAL_S:
            return
        self._last_point_s = now_s
        metric_points = [
            (metric_name, to_number(metric_value), step)
            for metric_name, metric_value in metric_values.items()
        ]
        with self._lock:
            self._points += [
                (metric_name, metric_value, step)
                for metric_name, metric_value, step in metric_points
                if metric_value is not None
            ]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Send the last points of all metrics to MLflow."""
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
            unsent_points = self._points
            self._points = []
        if not unsent_points:
            return

        try:
            log_metrics(self._run_id, unsent_points)
            self._problem = ""
        except TrackingError as error:
            # MLflow did not answer: the points are sent again after the next interval
            with self._lock:
                self._points = unsent_points + self._points
            if str(error) != self._problem:
                self._problem = str(error)
                write_stderr(f"metrics are not recorded yet: {error}")
