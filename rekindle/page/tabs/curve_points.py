"""Reads the curves of a run from MLflow: for each metric, its value at each training step.

The database of the embedded MLflow is read directly, so the MLflow server need not run.
"""

import math
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from rekindle import mlflow_api, tracking
from rekindle.errors import TrackingError
from rekindle.local.services.services import DATABASE_FILE
from rekindle.page.tabs.charts import Point, downsample

# maximum number of metrics of a run to read
MAX_CURVES = 60
DATABASE_TIMEOUT_S = 2.0
# matches the names of the metrics of trainings and canaries
SHOWN_METRICS = re.compile(r"(^|/)(train|validation)/|^canary\.")
# maximum points of a metric in MLflow's answer
MAX_HISTORY = 25_000

# name of a metric → its points, sorted by step
Curves = Mapping[str, list[Point]]


class CurveReader(Protocol):
    """Reads the curves of runs. The methods `version` and `read` raise TrackingError."""

    def version(self, run_name: str) -> str:
        """Return a text that changes when the curves of the run change."""
        ...

    def read(self, run_name: str, experiment: str) -> Curves:
        """Return the curves of a run; {} if MLflow does not have the run."""
        ...


class DatabaseCurves:
    """The curves in the database of the embedded MLflow in REKINDLE_HOME."""

    def __init__(self, home: Path) -> None:
        self.file = home / DATABASE_FILE

    def version(self, run_name: str) -> str:
        try:
            state = self.file.stat()
        except FileNotFoundError:
            return ""
        return f"{state.st_mtime_ns:x}.{state.st_size:x}"

    def read(self, run_name: str, experiment: str) -> Curves:
        if not self.file.exists():
            return {}

        query = """
            SELECT key, step, value FROM metrics
            WHERE run_uuid = (
                SELECT tags.run_uuid FROM tags JOIN runs ON runs.run_uuid = tags.run_uuid
                WHERE tags.key = ? AND tags.value = ? AND runs.lifecycle_stage = 'active'
                ORDER BY runs.start_time LIMIT 1
            )
            AND is_nan = 0
            ORDER BY key, step, timestamp
        """
        try:
            uri = f"{self.file.resolve().as_uri()}?mode=ro"
            connection = sqlite3.connect(uri, uri=True, timeout=DATABASE_TIMEOUT_S)
            with closing(connection):
                rows = connection.execute(query, (tracking.WORKFLOW, run_name))
                return _collect_points(rows)
        except sqlite3.Error as error:
            raise TrackingError(
                f"the curves cannot be read now: {self.file} is not readable ({error})."
            ) from error


def _collect_points(rows: Any) -> Curves:
    """Collect the curves from database rows, which are sorted by name, step and time."""
    curves: dict[str, dict[float, float]] = {}
    for name, step, value in rows:
        # a repeated step has several values, and its last value replaces the earlier values
        if isinstance(value, float) and math.isfinite(value):
            curves.setdefault(name, {})[float(step)] = value
    return {name: downsample(list(points.items())) for name, points in curves.items()}


class HistoryPoint(mlflow_api.Answer):
    value: float | str
    step: mlflow_api.Integer = 0


class History(mlflow_api.Page):
    metrics: mlflow_api.Items[HistoryPoint] = Field(default_factory=list)


class ServerCurves:
    """The curves in the MLflow of $MLFLOW_TRACKING_URI."""

    def version(self, run_name: str) -> str:
        return ""

    def read(self, run_name: str, experiment: str) -> Curves:
        run_id = tracking.find_run(experiment, run_name)
        if not run_id:
            return {}

        run = mlflow_api.send_request(
            "GET", "mlflow/runs/get", mlflow_api.RunAnswer, params={"run_id": run_id}
        )
        names = [
            metric_name
            for metric_name in sorted(run.run.data.metrics)
            if SHOWN_METRICS.search(metric_name)
        ]
        return {
            metric_name: self._read_history(run_id, metric_name)
            for metric_name in names[:MAX_CURVES]
        }

    def _read_history(self, run_id: str, metric_name: str) -> list[Point]:
        search = {"run_id": run_id, "metric_key": metric_name, "max_results": MAX_HISTORY}
        page = mlflow_api.send_request("GET", "mlflow/metrics/get-history", History, params=search)
        points = {
            float(point.step): float(point.value)
            for point in page.metrics
            if math.isfinite(float(point.value))
        }
        return downsample(sorted(points.items()))
