"""Sends the metrics that a program reports to MLflow, as curves `train/NAME`."""

import queue
import threading
from collections.abc import Mapping

from rekindle.errors import RekindleError, say

CLOSE_TIMEOUT_S = 10.0
# maximum number of waiting reports maximum number of waiting reports while MLflow does not answer
MAX_WAITING_REPORTS = 1000

Report = tuple[int, Mapping[str, float]]  # step, metrics by name


class Curves:
    """Sends curves to the MLflow run `run_id`; without a run id (""), nothing is sent. `prefix`:
    prefix of the metric names."""

    def __init__(self, run_id: str, prefix: str = "") -> None:
        self._run_id = run_id
        self._prefix = f"{prefix}/train" if prefix else "train"
        self._reports: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(
            MAX_WAITING_REPORTS
        )
        self._number = 0
        self._has_failed = False
        # started by the first report: the pod forks the program's processes, in which a module that
        # this thread imports at that moment would stay locked
        self._thread = threading.Thread(target=self._send_reports, name="curves", daemon=True)

    def record(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one report. The metrics are dropped while too many reports wait.
        `step`: step of the report; if it is -1 (unknown), reports are numbered instead."""
        self._number = max(self._number + 1, step)
        if metrics and self._run_id and not self._reports.full():
            self._reports.put((self._number, metrics))
            if not self._thread.ident:
                self._thread.start()

    def close(self) -> None:
        """Wait at most CLOSE_TIMEOUT_S seconds until the reports are sent."""
        if self._thread.ident and not self._reports.full():
            self._reports.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _send_reports(self) -> None:
        from rekindle import tracking

        while (report := self._reports.get()) is not None:
            step, metrics = report
            points = [(f"{self._prefix}/{name}", value, step) for name, value in metrics.items()]
            try:
                tracking.log_metrics(self._run_id, points)
                self._has_failed = False
            except RekindleError as error:
                if not self._has_failed:
                    say(f"a report of the program is not in MLflow: {error}")
                self._has_failed = True
