import math
import re
from pathlib import Path

import pytest

from rekindle.training.metrics import PROGRESS_LINE_PATTERN, LossCurve, TrainingMetrics

LINE = re.compile(r"progress step=\d+/\d+ loss=\d+\.\d{5} samples_per_s=\d+ eta_s=\d+")


def test_the_progress_line_keeps_its_format(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = TrainingMetrics("", 3, 64)
    for step in (1, 2, 3):
        metrics.record(step, 0.5, 1.0, 0.1)
    metrics.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(LINE.fullmatch(line) for line in lines)
    assert lines[-1].startswith("progress step=3/3 loss=0.50000 ")


def test_the_progress_line_shows_the_newest_validation_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = TrainingMetrics("", 2, 64)
    metrics.record(1, 0.5, 1.0, 0.1)
    metrics.record_validation(1, {"loss": 0.25, "accuracy": 0.75})
    metrics.record(2, 0.5, 1.0, 0.1)
    metrics.record_validation(2, {"loss": 0.125, "accuracy": 0.875})
    metrics.close()
    line, last = capsys.readouterr().err.splitlines()
    assert line.endswith(" validation_loss=0.25000")
    assert last == "validation loss=0.12500 accuracy=0.87500"
    match = PROGRESS_LINE_PATTERN.search(line)
    assert match
    assert match[6] == "0.25000"


def test_argo_shows_the_steps_of_a_training_in_its_own_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress_file = tmp_path / "progress"
    monkeypatch.setenv("ARGO_PROGRESS_FILE", str(progress_file))
    metrics = TrainingMetrics("", 3, 64)
    metrics.record(1, 0.5, 1.0, 0.1)
    assert progress_file.read_text() == "1/3\n"
    metrics.record(2, 0.5, 1.0, 0.1)
    metrics.record(3, 0.5, 1.0, 0.1)
    assert progress_file.read_text() == "3/3\n"

    monkeypatch.setenv("ARGO_PROGRESS_FILE", str(tmp_path / "missing/progress"))
    others = TrainingMetrics("", 2, 64)
    others.record(1, 0.5, 1.0, 0.1)
    others.record(2, 0.5, 1.0, 0.1)
    assert capsys.readouterr().err.count("the progress is not shown by Argo") == 1


def test_the_curve_of_a_training_that_diverged_is_json() -> None:
    curve = LossCurve(3)
    for step, loss in ((1, 0.5), (2, math.inf), (3, math.nan)):
        curve.record(step, loss)
    assert curve.dump() == b"[[1, 0.5], [2, null], [3, null]]"


def test_points_that_mlflow_did_not_accept_are_counted_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    metrics = TrainingMetrics("run", 2, 64)
    for step in (1, 2):
        metrics.record(step, 0.5, 1.0, 0.1)
    metrics.close()
    assert "8 points of the curves are not in MLflow: " in capsys.readouterr().err


def test_all_curves_are_in_mlflow_when_training_ends(mlflow_server: str) -> None:
    from mlflow import MlflowClient

    from rekindle import tracking

    run = tracking.start_run("training", "metrics-test")
    metrics = TrainingMetrics(run, 1000, 64)

    for step in range(1, 1001):
        metrics.record(step, 1 / step, 1.0, 0.1)

    metrics.record_validation(1000, {"loss": 0.5, "accuracy": 0.75})
    metrics.close()
    points = MlflowClient(mlflow_server).get_metric_history(run, "train/loss")
    assert [point.step for point in points] == list(range(2, 1001, 2))
    assert points[0].value == pytest.approx(0.75)
    accuracy = MlflowClient(mlflow_server).get_metric_history(run, "validation/accuracy")
    assert [(point.step, point.value) for point in accuracy] == [(1000, 0.75)]
