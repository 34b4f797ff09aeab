"""A refresh of the champion with newer data gives a release of the same weights that can be
verified."""

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rekindle import tracking
from rekindle.errors import ConfigError, DataError
from rekindle.release.compare import read_predictions
from rekindle.storage import Store
from rekindle.workload import read_data_until
from steps import refresh, release
from tests.steps.conftest import WORLD


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the directory of the test as the working directory of the steps."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def make_inputs(name: str, workload: str = "steps.fraud") -> refresh.Inputs:
    return refresh.Inputs(
        workload=workload,
        name=name,
        data={"source": WORLD},
        workflow=f"{name}-newer",
        experiment=name,
    )


def test_the_weights_of_the_champion_are_released_with_newer_state(
    s3: Store,
    mlflow_server: str,
    small_dataset: Path,
    expert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"m-{uuid4().hex[:8]}"
    report = tmp_path / "report"
    report.mkdir()
    (report / "verdict.json").write_text('{"verdict": "release", "rows": 5}')
    run_id = tracking.start_run(name, f"{name}-first")
    artifacts: dict[str, Any] = {"model": expert, "dataset": small_dataset, "report": report}
    first_release = release.run(
        release.Inputs(name=name, verdict="release", run_id=run_id, **artifacts)
    )
    tracking.record_champion(name, first_release.version, "servers-1")

    first_refresh = refresh.run(make_inputs(name))
    assert first_refresh.verdict == "release"
    assert first_refresh.champion == first_release.version
    assert (
        f"version {first_release.version} with {first_refresh.rows:,} rows of data since"
        in first_refresh.reason
    )
    assert read_data_until(first_refresh.dataset) > read_data_until(small_dataset)
    assert (first_refresh.report / "verdict.json").read_text() == (
        report / "verdict.json"
    ).read_text()
    [(request, expected), *_] = read_predictions(first_refresh.report, 200)
    assert len(request["instances"]) == len(expected) == 20

    artifacts = {
        "model": first_refresh.model,
        "dataset": first_refresh.dataset,
        "report": first_refresh.report,
    }
    second_result = release.run(
        release.Inputs(name=name, verdict="release", run_id=first_refresh.run_id, **artifacts)
    )
    assert second_result.content != first_release.content
    records = [
        json.loads(s3.get(f"{outputs.model_uri}release.json"))
        for outputs in (first_release, second_result)
    ]
    assert records[0]["model_sha256"] == records[1]["model_sha256"] == first_refresh.model_sha256
    tracking.record_champion(name, second_result.version, "servers-2")

    monkeypatch.setenv("TMPDIR", str(tmp_path / "another-pod"))
    second_refresh = refresh.run(make_inputs(name))
    assert second_refresh.verdict == "same"
    assert second_refresh.rows == 0
    assert (
        f"does not reach beyond {records[1]['provenance']['data_until']}" in second_refresh.reason
    )


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("steps.fraud", "does not have a champion: release a version first"),
        ("steps.digits", "does not define refresh"),
    ],
)
def test_a_model_that_cannot_be_refreshed_is_a_clear_error(
    mlflow_server: str, s3: Store, workload: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refresh.run(make_inputs("nobody", workload))


@pytest.mark.parametrize("reference", [b'{"rows": 6, "scores": {}, "features": {}}', None])
def test_a_changed_reference_of_the_champion_is_not_released_again(
    s3: Store,
    mlflow_server: str,
    small_dataset: Path,
    expert: Path,
    tmp_path: Path,
    reference: bytes | None,
) -> None:
    name = f"m-{uuid4().hex[:8]}"
    report = tmp_path / "report"
    report.mkdir()
    (report / "verdict.json").write_text('{"verdict": "release", "rows": 5}')
    (report / "reference.json").write_text('{"rows": 5, "scores": {}, "features": {}}')
    run_id = tracking.start_run(name, f"{name}-first")
    artifacts: dict[str, Any] = {"model": expert, "dataset": small_dataset, "report": report}
    first_release = release.run(
        release.Inputs(name=name, verdict="release", run_id=run_id, **artifacts)
    )
    tracking.record_champion(name, first_release.version, "servers-1")

    key = f"{first_release.model_uri}reference.json"
    if reference:
        s3.put(key, reference)
    else:
        s3.delete([key])

    with pytest.raises(DataError, match=r"reference\.json changed since the release"):
        refresh.run(make_inputs(name))
