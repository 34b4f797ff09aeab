"""Tests of the metric of a trial, which is read from its newest report or from its MLflow run."""

import math
from typing import Any

import pytest

from rekindle import tracking
from rekindle.program.trials import metric
from rekindle.program.trials.metric import MissingMetric, find_metric

EVENTS: list[dict[str, Any]] = [
    {"t": 1, "event": "progress", "metrics": {"loss": 3.0, "eval_loss": 4.0}},
    {"t": 2, "event": "checkpoint", "metrics": {"loss": 9.0}},
    {"t": 3, "event": "progress", "metrics": {"loss": 2.0}, "not_finite": []},
]


def test_the_newest_reported_value_counts() -> None:
    assert find_metric("loss", EVENTS, "") == 2
    assert find_metric("eval_loss", EVENTS, "") == 4


def test_a_metric_that_became_nan_is_not_replaced_by_an_earlier_value() -> None:
    diverged = {"t": 4, "event": "progress", "metrics": {}, "not_finite": ["loss"]}
    assert math.isnan(find_metric("loss", [*EVENTS, diverged], ""))


@pytest.mark.parametrize("event", [{"metrics": 3}, {"not_finite": 3}, {"metrics": {"loss": "1"}}])
def test_a_malformed_report_is_ignored(event: dict[str, Any]) -> None:
    assert find_metric("loss", [*EVENTS, {"t": 4, "event": "progress", **event}], "") == 2


def test_a_metric_without_a_report_is_read_from_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = {"auc": 0.9, "train/loss": 2.0}
    monkeypatch.setattr(metric, "read_logged_metrics", lambda run_id: logged)
    assert find_metric("auc", EVENTS, "run") == 0.9
    with pytest.raises(MissingMetric, match=r"it reported auc, eval_loss, loss\. Set"):
        find_metric("f1", EVENTS, "run")


def test_the_error_of_a_program_without_metrics_says_how_to_report() -> None:
    with pytest.raises(MissingMetric, match=r"it reported no metrics\..*mlflow.log_metric"):
        find_metric("f1", [], "")


@pytest.mark.slow
def test_metrics_of_mlflow_have_their_newest_value(mlflow_server: str) -> None:
    run_id = tracking.start_run("metrics-of-a-program", "trial")
    tracking.log_metrics(run_id, [("auc", 0.1, 1), ("auc", 0.3, 2), ("f1", math.nan, 1)])
    assert metric.read_logged_metrics(run_id) == {"auc": 0.3}
