"""Drift of a served model is detected, and the model is trained again at a limited rate."""

import json
import math
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle import tracking
from rekindle.errors import DataError
from rekindle.release import promotion
from rekindle.release.model_client import ModelClient
from rekindle.release.watch.drift import reset_counts
from rekindle.release.watch.reference import record_reference
from rekindle.storage import Store
from steps.monitoring import drift, notify
from tests.rekindle.hook import Hook
from tests.rekindle.serving import echo
from tests.rekindle.serving.running import RunningServer, prefix_of, write_release

RANDOM = random.Random(0)


def draw_ids(count: int, low: int = 0, high: int = 99) -> list[dict[str, Any]]:
    return [{"id": RANDOM.randint(low, high)} for _ in range(count)]


@pytest.fixture
def model(
    s3: Store, mlflow_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A champion with a running server."""
    name = f"echo-{uuid.uuid4().hex[:6]}"
    prefix = prefix_of(name)
    sha256 = write_release(s3, prefix)
    rows = draw_ids(1000)
    record_reference(tmp_path, rows, [echo.Instance.model_validate(row) for row in rows])
    s3.put(f"{prefix}reference.json", (tmp_path / "reference.json").read_bytes())
    version = tracking.register_version(
        name, prefix, "s3://b/x/", sha256, tracking.start_run("drifting", name), {}
    ).version
    s3.put(
        f"{prefix}release.json",
        s3.get(f"{prefix}release.json").replace(b'"7"', json.dumps(version).encode()),
    )
    promotion.promote(s3, name, version, "", f"{name}-1")

    with RunningServer(f"--model={prefix}") as server:
        server.until_ready()
        host, port = server.url.removeprefix("http://").split(":")
        variable = f"{name}-1".upper().replace("-", "_")
        monkeypatch.setenv(f"{variable}_SERVICE_HOST", host)
        monkeypatch.setenv(f"{variable}_SERVICE_PORT", port)
        yield SimpleNamespace(name=name, server=server, prefix=prefix)


def check_drift(model: Any, workflow: str = "", **inputs: Any) -> drift.Outputs:
    workflow = workflow or f"w-{uuid.uuid4().hex[:8]}"
    settings: dict[str, Any] = {
        "model": model.name,
        "workflow": workflow,
        "experiment": "drifting",
        "minimum": 200,
    }
    return drift.run(drift.Inputs(**settings | inputs))


def test_drift_is_reported_with_figures_and_similar_data_is_steady(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.server.predict(*draw_ids(300))
    first_check = check_drift(model)
    assert first_check.verdict == "steady", first_check.reason
    model.server.predict(*draw_ids(30))
    assert check_drift(model).verdict == "few"
    model.server.predict(*draw_ids(270, 100, 199))
    workflow = f"w-{uuid.uuid4().hex[:8]}"
    workflow_check = check_drift(model, workflow)
    second_check = check_drift(model, workflow)
    assert workflow_check.verdict == "drift"
    assert "300 instances" in workflow_check.reason, "the instances of the previous check count too"

    assert "score id (PSI " in workflow_check.reason
    assert "feature id (PSI " in workflow_check.reason
    assert "sleep" not in workflow_check.reason

    assert second_check.reason == workflow_check.reason, (
        "a repeated step starts from the same point"
    )
    assert "evaluation/psi.png" in tracking.artifacts(workflow_check.run_id, "evaluation")
    assert check_drift(model).verdict == "few", "no instance is evaluated twice"

    with Hook() as server:
        monkeypatch.setenv("NOTIFY_URL", server.url)
        inputs: dict[str, Any] = {
            "experiment": "drifting",
            "workflow": workflow,
            "status": "Succeeded",
        }
        assert notify.run(notify.Inputs(format="json", **inputs)).event == "drift"

    assert server.received[0]["reason"] == workflow_check.reason


@pytest.mark.slow
def test_replayed_rows_and_requests_before_the_promotion_do_not_count(
    model: Any, s3: Store
) -> None:
    about = model.server.client.get("/v1/models/echo").json()
    client = ModelClient(model.server.url, "echo", about["sha256"], deadline_seconds=math.inf)
    client.predict({"instances": draw_ids(300, 100, 199)})
    assert "0 instances" in check_drift(model).reason
    # these requests count as copies, as for a shadow
    model.server.predict(*draw_ids(300, 100, 199))
    reset_counts(s3, model.name, about["version"])
    model.server.predict(*draw_ids(250))
    outcome = check_drift(model)
    assert outcome.verdict == "steady"
    assert outcome.reason.split()[0] == "250"


@pytest.mark.slow
def test_a_model_is_trained_again_once_within_the_minimum_days(model: Any) -> None:
    model.server.predict(*draw_ids(300, 100, 199))
    inputs = {"retrain": True, "min_days_between": 7, "workflow": f"w-{uuid.uuid4().hex[:8]}"}
    assert [check_drift(model, **inputs).again for _ in range(2)] == [True, True], (
        "a repeated step decides the same"
    )
    model.server.predict(*draw_ids(300, 100, 199))
    later_check = check_drift(model, **inputs | {"workflow": ""})
    assert not later_check.again
    assert "drift.min_days_between allows a training in 7.0 days" in later_check.reason
    model.server.predict(*draw_ids(300, 100, 199))
    assert check_drift(model, retrain=True, min_days_between=0).again


@pytest.mark.slow
def test_a_manual_training_counts_for_the_minimum_days(model: Any) -> None:
    tracking.start_run(model.name, f"w-{uuid.uuid4().hex[:8]}")
    model.server.predict(*draw_ids(300, 100, 199))
    assert not check_drift(model, retrain=True).again


@pytest.mark.slow
def test_a_release_without_a_reference_is_a_clear_error(model: Any, s3: Store) -> None:
    s3.delete([f"{model.prefix}reference.json"])
    with pytest.raises(DataError, match=r"lacks reference\.json: release it again"):
        check_drift(model)
    with pytest.raises(DataError, match='the model "nobody" does not have a champion'):
        drift.run(drift.Inputs(model="nobody", workflow="w"))
