"""Reads the metric by which the trials of a program are compared, from the program's reports or
from MLflow."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.mlflow_api import RunAnswer, send_request
from rekindle.training.ledger.events import Event

# maximum number of reported metrics that a message lists
MAX_LISTED_NAMES = 20


class MissingMetric(Exception):
    """Raised if the program has not reported the metric. The error message lists the metrics that
    the program has reported."""


def find_metric(metric_name: str, ledger_events: Iterable[Event], run_id: str) -> float:
    """Return the newest value of a metric in a program's reports or, if the reports lack the
    metric, in the program's MLflow run. The value may be NaN.

    `ledger_events`: the ledger of the program; `run_id`: id of the program's MLflow run, or "".
    Raises MissingMetric, and TrackingError if MLflow is needed and unavailable.
    """
    reported_metrics = read_reported_metrics(ledger_events)
    if metric_name in reported_metrics:
        return reported_metrics[metric_name]

    logged_metrics = read_logged_metrics(run_id) if run_id else {}
    if metric_name in logged_metrics:
        return logged_metrics[metric_name]

    # do not list the curves of the reported metrics, which are also in MLflow
    curve_names = {f"train/{reported_name}" for reported_name in reported_metrics}
    metric_names = sorted(reported_metrics.keys() | logged_metrics.keys() - curve_names)
    raise MissingMetric(
        f"the program ended without the metric {metric_name} (sweep.metric): it reported"
        f" {_join_names(metric_names)}. Set sweep.metric to a metric that the program reports, or"
        f' let it report {metric_name}, such as by mlflow.log_metric("{metric_name}", ...)'
    )


def read_reported_metrics(ledger_events: Iterable[Event]) -> dict[str, float]:
    """Return the newest value of each metric in the reports of a program. A value of a metric that
    is not finite becomes NaN."""
    newest_values: dict[str, float] = {}
    for ledger_event in ledger_events:
        if ledger_event["event"] == "progress":
            newest_values.update(_read_metric_values(ledger_event))
    return newest_values


def read_logged_metrics(run_id: str) -> dict[str, float]:
    """Return the newest value of each metric of an MLflow run, without values that are not finite.
    Raises TrackingError."""
    run_answer = send_request("GET", "mlflow/runs/get", RunAnswer, params={"run_id": run_id})
    return run_answer.run.data.metrics


def _read_metric_values(ledger_event: Mapping[str, Any]) -> dict[str, float]:
    finite_values = ledger_event.get("metrics")
    non_finite_names = ledger_event.get("not_finite")

    metric_values: dict[str, float] = {}
    if isinstance(finite_values, dict):
        metric_values.update(
            {
                metric_name: metric_value
                for metric_name, metric_value in finite_values.items()
                if isinstance(metric_value, int | float)
            }
        )
    if isinstance(non_finite_names, list):
        metric_values.update(
            {
                metric_name: math.nan
                for metric_name in non_finite_names
                if isinstance(metric_name, str)
            }
        )
    return metric_values


def _join_names(metric_names: list[str]) -> str:
    if not metric_names:
        return "no metrics"
    if len(metric_names) > MAX_LISTED_NAMES:
        return (
            f"{', '.join(metric_names[:MAX_LISTED_NAMES])} and"
            f" {len(metric_names) - MAX_LISTED_NAMES} more"
        )
    return ", ".join(metric_names)
