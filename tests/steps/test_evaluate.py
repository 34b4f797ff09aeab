"""Tests of the verdict of real runs, with a real model registry and object store."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rekindle import tracking
from rekindle.errors import DataError, StorageError
from rekindle.gate import Gate
from rekindle.release.release_files import commit_release, upload
from rekindle.step import write_outputs
from rekindle.storage import Store, file_sha256
from steps import evaluate

EXPERIMENT = "evaluate"


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the directory of the test as the working directory of the steps."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def evaluate_model(dataset: Path, model: Path, **inputs: Any) -> evaluate.Outputs:
    return evaluate.run(
        evaluate.Inputs(
            workload="steps.fraud", dataset=dataset, model=model, resamples=100, **inputs
        )
    )


def sha256_of(model: Path) -> str:
    return json.loads((model / "model.json").read_text())["sha256"]


def make_champion(
    name: str, model: Path, store: Store, run_id: str, code: str = ""
) -> tracking.Release:
    """Make `model` the champion of `name`, as the steps `release` and `verify` do."""
    sha256 = sha256_of(model)

    with TemporaryDirectory() as temporary:
        folder = shutil.copytree(model, Path(temporary) / "release")
        (folder / "dataset.json").write_text('{"digest": "older", "facts": {}}')
        if code:
            (folder / "workload.json").write_text(json.dumps({"sha256": code}))

        paths = [path for path in folder.rglob("*") if path.is_file()]
        hashes = {path.relative_to(folder).as_posix(): file_sha256(path) for path in paths}
        (folder / "verdict.json").write_text(json.dumps({"rows": 10**6}))
        prefix = upload(store, name, folder, hashes)

        release = tracking.register_version(name, prefix, store.uri(prefix), sha256, run_id, {})
        record = {
            "name": name,
            "version": release.version,
            "workload": "steps.fraud",
            "model_sha256": sha256,
        }
        commit_release(store, prefix, folder, record | {"files": hashes})

    tracking.record_champion(name, release.version, "cards-1")

    return release


@pytest.mark.slow
def test_the_verdict_is_release_keep_or_same_by_comparison_with_the_champion(
    s3: Store, mlflow_server: str, small_dataset: Path, novice: Path, expert: Path, tmp_path: Path
):
    from mlflow import MlflowClient

    run_id = tracking.start_run(EXPERIMENT, "generations")
    inputs: dict[str, Any] = {"name": "generations", "run_id": run_id, "minimum": {"auc": 0.1}}

    first_outputs = evaluate_model(small_dataset, novice, **inputs)
    assert first_outputs.verdict == "release"
    assert "No champion exists yet" in first_outputs.reason

    evaluate_model(small_dataset, novice, **inputs, part="evaluate-wide")
    run_data = MlflowClient().get_run(run_id).data
    assert run_data.tags["evaluate-wide/verdict"] == run_data.tags["verdict"] == "release"
    assert run_data.metrics["evaluate-wide/auc"] == run_data.metrics["auc"]
    assert "evaluate-wide/part/auc" in run_data.metrics

    make_champion("generations", novice, s3, run_id)
    repeated_outputs = evaluate_model(small_dataset, novice, **inputs)
    assert repeated_outputs.verdict == "same"

    # the same weights behind other servers, or with other code, are released again if they meet the
    # gate
    assert evaluate_model(small_dataset, novice, **inputs, servers="1").verdict == "same"
    moved = evaluate_model(small_dataset, novice, **inputs, servers="abcdef")
    assert moved.verdict == "release"
    assert "but its servers changed" in moved.reason
    prefix = make_champion("generations", novice, s3, run_id, code="of other code").uri
    assert "but its code changed" in evaluate_model(small_dataset, novice, **inputs).reason
    assert (
        evaluate_model(small_dataset, novice, **inputs | {"minimum": {"auc": 0.99}}).verdict
        == "keep"
    )
    s3.put(f"{prefix}workload.json", b'{"sha256": ""}')

    with pytest.raises(DataError, match=r"workload\.json changed since the release"):
        evaluate_model(small_dataset, novice, **inputs)

    tracking.record_champion("generations", "1", "cards-1")

    better = evaluate_model(small_dataset, expert, **inputs)
    assert better.verdict == "release"
    assert "better, and not by chance" in better.reason
    assert "the champion was released on 1,000,000" in better.reason
    record = json.loads((better.report / "verdict.json").read_text())
    assert record["champion"]["version"] == "1"
    assert record["champion"]["ap"] == pytest.approx(first_outputs.metrics["ap"])
    assert record["candidate"] == {"sha256": better.model_sha256, **better.metrics}
    assert record["difference"]["low"] > 0
    assert len(record["parts"]) == 2

    assert record["gate"] == {
        "minimum": {"auc": 0.1},
        "maximum": {},
        "beats_baseline": 0.0,
        "tolerance": 0.01,
        "confidence": 0.95,
        "resamples": 100,
    }

    run = MlflowClient(mlflow_server).get_run(run_id)
    assert run.data.tags["verdict"] == "release"
    assert run.data.metrics["ap"] == pytest.approx(better.metrics["ap"])
    assert run.data.metrics["champion_ap"] == pytest.approx(first_outputs.metrics["ap"])
    logged = {
        file.path for file in MlflowClient(mlflow_server).list_artifacts(run_id, "evaluation")
    }
    assert {
        f"evaluation/{name}" for name in ("verdict.json", "scores.parquet", "weeks.png")
    } <= logged

    make_champion("generations", expert, s3, run_id)
    assert evaluate_model(small_dataset, novice, name="generations").verdict == "keep"
    write_outputs(better, {"metrics": tmp_path / "metrics", "report": tmp_path / "moved"})
    assert json.loads((tmp_path / "metrics").read_text()) == better.metrics
    assert (tmp_path / "moved" / "verdict.json").exists()


@pytest.mark.slow
def test_a_champion_with_a_deleted_release_is_a_clear_error(
    s3: Store, mlflow_server: str, small_dataset: Path, novice: Path, expert: Path
):
    release = make_champion("gone", novice, s3, tracking.start_run(EXPERIMENT, "gone"))
    s3.delete([entry.key for entry in s3.list(release.uri)])
    with pytest.raises(
        StorageError, match=r"champion's release is incomplete: .* does not exist.*alias `champion`"
    ):
        evaluate_model(small_dataset, expert, name="gone")
    assert evaluate_model(small_dataset, novice, name="gone").verdict == "same"


def test_a_directory_without_a_model_is_refused(small_dataset: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"is not a trained model .*model\.json"):
        evaluate_model(small_dataset, tmp_path)


def test_a_model_is_evaluated_without_a_registry_and_a_run(
    small_dataset: Path, novice: Path, tmp_path: Path
):
    model = shutil.copytree(novice, tmp_path / "model")
    outputs = evaluate_model(small_dataset, model, minimum={"ap": 0.999})
    assert outputs.verdict == "keep"
    assert outputs.report.name == "report"
    assert "ap" in outputs.metrics
    assert 0 < outputs.metrics["ap"] < 0.999


def test_a_past_week_is_evaluated_and_never_released(small_dataset: Path, expert: Path):
    past = evaluate_model(small_dataset, expert, minimum={"auc": 0.1}, backfill="true")
    assert past.verdict == "keep"
    assert past.judged == "release"
    assert past.reason.startswith("a past week is not released: ")
    assert json.loads((past.report / "verdict.json").read_text())["verdict"] == "release"


def test_every_setting_of_the_gate_is_an_input_of_the_step():
    assert set(Gate.model_fields) < set(evaluate.Inputs.model_fields)
