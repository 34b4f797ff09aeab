"""Sends the metrics that a program reports to MLflow, as curves `train/NAME`."""

import queue
import threading
from collections.abc import Mapping

from rekindle.errors import RekindleError, write_stderr

CLOSE_TIMEOUT_S = 10.0
# maximum number of reports that wait while MLflow does not answer
MAX_WAITING_REPORTS = 1000

# step, metrics by name
MetricsReport = tuple[int, Mapping[str, float]]


class MetricCurves:
    """Sends curves to the MLflow run `run_id`; without a run id (""), nothing is sent.
    `name_prefix`: prefix of the metric names."""

    def __init__(self, run_id: str, name_prefix: str = "") -> None:
        self._run_id = run_id
        self._prefix = f"{name_prefix}/train" if name_prefix else "train"
        self._reports: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(
            MAX_WAITING_REPORTS
        )
        self._number = 0
        self._has_failed = False
        # the thread is started by the first report, because the pod forks processes: if the thread
        # imports a module during a fork, the module's import lock stays locked in the forked
        # process
        self._thread = threading.Thread(target=self._send_reports, name="curves", daemon=True)

    def record(self, metric_values: Mapping[str, float], step: int) -> None:
        """Send the metrics of one report. The metrics are dropped while too many reports wait to be
        sent. `step`: step of the report; if it is -1 (unknown), reports are numbered instead."""
        self._number = max(self._number + 1, step)
        if metric_values and self._run_id and not self._reports.full():
            self._reports.put((self._number, metric_values))
            if not self._thread.ident:
                self._thread.start()

    def close(self) -> None:
        """Wait at most CLOSE_TIMEOUT_S seconds until the waiting reports are sent to MLflow."""
        if self._thread.ident and not self._reports.full():
            self._reports.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _send_reports(self) -> None:
        from rekindle import tracking

        while (waiting_report := self._reports.get()) is not None:
            step, metric_values = waiting_report
            metric_points = [
                (f"{self._prefix}/{metric_name}", metric_value, step)
                for metric_name, metric_value in metric_values.items()
            ]
            try:
                tracking.log_metrics(self._run_id, metric_points)
                self._has_failed = False
            except RekindleError as error:
                if not self._has_failed:
                    write_stderr(f"a report of the program is not in MLflow: {error}")
                self._has_failed = True
