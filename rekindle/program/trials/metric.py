"""Reads the metric by which the trials of a program are compared, from the program's reports or
from MLflow."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.mlflow_api import RunAnswer, request
from rekindle.training.ledger.events import Event

MAX_NAMES = 20  # maximum number of reported metrics that a message lists


class MissingMetric(Exception):
    """Raised if the program has not reported the metric. The message lists the metrics that it has
    reported."""


def find_metric(name: str, events: Iterable[Event], run_id: str) -> float:
    """Return the newest value of a metric in a program's reports or, if it is missing there, in its
    MLflow run. The value may be NaN.

    `events`: the ledger of the program; `run_id`: its MLflow run, or "". Raises MissingMetric, and
    TrackingError if MLflow is needed and unavailable.
    """
    reported = read_reported_metrics(events)
    if name in reported:
        return reported[name]

    logged = read_logged_metrics(run_id) if run_id else {}
    if name in logged:
        return logged[name]

    # the curves of the reported metrics are also in MLflow
    curves = {f"train/{reported_name}" for reported_name in reported}
    names = sorted(reported.keys() | logged.keys() - curves)
    raise MissingMetric(
        f"the program ended without the metric {name} (sweep.metric): it reported"
        f" {_join_names(names)}. Set sweep.metric to a metric that the program reports, or let it"
        f' report {name}, such as by mlflow.log_metric("{name}", ...)'
    )


def read_reported_metrics(events: Iterable[Event]) -> dict[str, float]:
    """Return the newest value of each metric in the reports of a program. A value that is not
    finite becomes NaN."""
    metrics: dict[str, float] = {}
    for event in events:
        if event["event"] == "progress":
            metrics.update(_read_values(event))
    return metrics


def read_logged_metrics(run_id: str) -> dict[str, float]:
    """Return the newest value of each metric of an MLflow run, without values that are not finite.
    Raises TrackingError."""
    answer = request("GET", "mlflow/runs/get", RunAnswer, params={"run_id": run_id})
    return answer.run.data.metrics


def _read_values(event: Mapping[str, Any]) -> dict[str, float]:
    values = event.get("metrics")
    names = event.get("not_finite")

    metrics: dict[str, float] = {}
    if isinstance(values, dict):
        metrics.update(
            {name: value for name, value in values.items() if isinstance(value, int | float)}
        )
    if isinstance(names, list):
        metrics.update({name: math.nan for name in names if isinstance(name, str)})
    return metrics


def _join_names(names: list[str]) -> str:
    if not names:
        return "no metrics"
    if len(names) > MAX_NAMES:
        return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"
    return ", ".join(names)
