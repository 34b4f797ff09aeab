"""A release is identified by its content; it is registered once, is complete, and exists only if
the gate decided `release`."""

import json
import multiprocessing
import re
import shutil
import threading
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rekindle import tracking
from rekindle.errors import ConfigError, DataError, StorageError
from rekindle.release import origin
from rekindle.step import encode_parameter
from rekindle.storage import NotFound, Store
from steps import release
from tests.proxy import Proxy, Write

pytestmark = pytest.mark.usefixtures("mlflow_server")
COMMIT = "c0ffee" + "0" * 34
CARD = {
    "workload": "tests.rekindle.serving.echo",
    "sha256": "ab" * 32,
    "digest": "d1",
    "fingerprint": {"torch": "2.13", "threads": 1},
}


@pytest.fixture
def artifacts(tmp_path: Path) -> dict[str, Path]:
    files = {
        "model/model.safetensors": "weights",
        "model/model.json": json.dumps(CARD),
        "dataset/dataset.json": '{"facts": {"data_until": "2024-03-01T00:00:00+00:00"}}',
        "dataset/state/a.npy": "a",
        "dataset/state/deep/b.npy": "b",
        "dataset/state/words.txt": "hello",
        "dataset/shards/large.npy": "not for the server",
        "report/verdict.json": '{"verdict": "release"}',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    return {name: tmp_path / name for name in ("model", "dataset", "report")}


@pytest.fixture
def name() -> str:
    return f"m-{uuid4().hex[:8]}"


def make_inputs(name: str, artifacts: dict[str, Path], **changes: Any) -> release.Inputs:
    run_id = tracking.start_run("releases", changes.pop("workflow", f"{name}-1"))
    facts = {"git_sha": COMMIT, "config_hash": "1", "manifest_hash": "2"}
    return release.Inputs(
        **{"name": name, "verdict": "release", "run_id": run_id, **facts, **artifacts, **changes}
    )


def test_a_release_has_the_files_of_a_server_and_its_provenance(
    s3: Store, name: str, artifacts: dict[str, Path], mlflow_server: str
) -> None:
    request = make_inputs(name, artifacts)
    outputs = release.run(request)
    assert re.fullmatch(f"releases/{name}/{outputs.content}[0-9a-f]{{52}}/", outputs.model_uri)
    keys = {entry.key.removeprefix(outputs.model_uri) for entry in s3.list(outputs.model_uri)}

    served = {
        "model.safetensors",
        "model.json",
        "workload.json",
        "dataset.json",
        "state/a.npy",
        "state/deep/b.npy",
        "state/words.txt",
        "MLmodel",
        "input_example.json",
        "serving_input_example.json",
    }

    described = {"verdict.json", "origin.json"}
    assert keys == served | described | {"release.json"}
    record = json.loads(s3.get(outputs.model_uri + "release.json"))

    assert record["version"] == "1"
    assert record["model_sha256"] == CARD["sha256"]
    assert record["workload"] == CARD["workload"]

    assert record["files"].keys() == served

    from mlflow import MlflowClient

    client = MlflowClient(mlflow_server)
    version = client.get_model_version_by_alias(name, "candidate")

    assert version.version == "1"
    assert version.source == s3.uri(outputs.model_uri)
    assert version.run_id == request.run_id

    facts = {
        "git_sha": COMMIT,
        "image_digest": "host",
        "config_hash": "1",
        "manifest_hash": "2",
        "data_digest": "d1",
        "data_until": "2024-03-01T00:00:00+00:00",
        "torch": "2.13",
        "threads": "1",
    }

    assert version.tags.items() >= facts.items()
    tags = {f"rekindle.{name}": value for name, value in facts.items()}
    assert client.get_run(request.run_id).data.tags.items() >= tags.items()


def test_a_release_keeps_the_origin_that_a_reproduction_needs(
    s3: Store, name: str, artifacts: dict[str, Path]
) -> None:
    losses = {1: 0.1 + 0.2, 2: 1 / 3}
    (artifacts["model"] / "curve.json").write_text(json.dumps(sorted(losses.items())))
    container = {"args": ["steps.prepare", "--x=steps.digits"]}
    manifest = {"spec": {"templates": [{"name": "prepare", "container": container}]}}
    config = {"data": {"source": "rows.csv"}}
    parameters = {
        "manifest": encode_parameter(json.dumps(manifest)),
        "config": json.dumps(config),
        "rows": "7",
    }
    parameter_list = [{"name": key, "value": value} for key, value in parameters.items()]
    outputs = release.run(
        make_inputs(name, artifacts, parameters=parameter_list, source_digest="s1", lock_hash="l1")
    )
    recorded_origin = origin.read(s3, name, outputs.version)
    assert recorded_origin.prefix == outputs.model_uri
    assert recorded_origin.sha256 == CARD["sha256"]
    assert recorded_origin.commit == COMMIT
    assert recorded_origin.whole_config == config
    assert recorded_origin.parameters["rows"] == "7"
    assert recorded_origin.run.manifest == manifest
    assert recorded_origin.curve == losses  # all digits
    assert recorded_origin.run.modules == ["steps.digits", "steps.prepare"]
    assert "rekindle.workload" in recorded_origin.run.code
    assert recorded_origin.provenance["lock_hash"] == "l1"
    assert recorded_origin.provenance["source_digest"] == "s1"
    assert "origin.json" not in recorded_origin.files
    assert "curve.json" not in recorded_origin.files
    without_curve = outputs.content
    (artifacts["model"] / "curve.json").unlink()
    # the hash covers only the served files
    assert release.run(make_inputs(name, artifacts)).content == without_curve


@pytest.mark.parametrize("version", ["7", ""])
def test_an_unknown_version_cannot_be_reproduced(
    s3: Store, name: str, artifacts: dict[str, Path], version: str
) -> None:
    outputs = release.run(make_inputs(name, artifacts))
    if version:
        message = "version 7 of the model .* does not exist"
    else:
        message = "no trained model, .* has nothing to reproduce"
    with pytest.raises(ConfigError, match=message):
        origin.read(s3, name, version)
    with pytest.raises(ConfigError, match="was not released by a workflow"):
        origin.read(s3, name, outputs.version)
    s3.delete([outputs.model_uri + origin.FILE])
    with pytest.raises(ConfigError, match="earlier Rekindle"):
        origin.read(s3, name, outputs.version)


def test_a_retried_release_registers_one_version(
    s3: Store, name: str, artifacts: dict[str, Path]
) -> None:
    outputs = release.run(make_inputs(name, artifacts))
    tracking.record_champion(name, outputs.version, "cards-1")
    second_outputs = release.run(make_inputs(name, artifacts))
    assert second_outputs.version == outputs.version
    assert second_outputs.model_uri == outputs.model_uri


def release_in_process(request: release.Inputs) -> None:
    release.run(request)


@pytest.mark.slow
def test_two_processes_that_release_the_same_files_at_once_register_one_version(
    s3: Store,
    name: str,
    artifacts: dict[str, Path],
    mlflow_server: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    requests = [
        make_inputs(
            name, artifacts, workflow=f"{name}-{number}", created=f"2026-01-0{number}T00:00:00Z"
        )
        for number in (1, 2)
    ]
    start_barrier = threading.Barrier(2, timeout=300)
    waits = Counter[str]()

    def wait_for_other(write: Write) -> None:
        is_awaited = write.path.endswith(("model-versions/create", "registered-models/alias"))
        waits[write.path] += 1
        # the client does not wait for a repetition of the write
        if is_awaited and waits[write.path] <= 2:
            start_barrier.wait()

    with Proxy(mlflow_server) as proxy:
        proxy.before = wait_for_other
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.url)
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=release_in_process, args=(request,)) for request in requests
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()

    assert [process.exitcode for process in processes] == [0, 0]

    from mlflow import MlflowClient

    client = MlflowClient(mlflow_server)
    versions = client.search_model_versions(f"name = '{name}'")
    assert [version.version for version in versions] == ["1"]
    assert client.get_model_version_by_alias(name, "candidate").version == "1"

    prefix = versions[0].tags[tracking.URI]
    record = json.loads(s3.get(f"{prefix}release.json"))
    assert record["version"] == "1"
    assert record["described"]["origin.json"] == sha256(s3.get(f"{prefix}origin.json")).hexdigest()


def test_a_version_of_another_bucket_is_not_the_version_of_this_release(
    s3: Store, name: str, artifacts: dict[str, Path]
) -> None:
    outputs = release.run(make_inputs(name, artifacts))
    other_version = tracking.register_version(
        name, outputs.model_uri, f"s3://other/{outputs.model_uri}", "ab" * 32, "", {}
    )
    assert other_version.version == "2"
    assert release.run(make_inputs(name, artifacts)).version == "1"


@pytest.mark.parametrize("lost", ["release.json", "state/a.npy"])
def test_an_interrupted_release_is_completed_by_the_retry(
    s3: Store, name: str, artifacts: dict[str, Path], lost: str
) -> None:
    outputs = release.run(make_inputs(name, artifacts))
    s3.delete([outputs.model_uri + lost])
    assert release.run(make_inputs(name, artifacts)) == outputs
    assert s3.head(outputs.model_uri + lost)


def test_changed_content_is_a_new_release(s3: Store, name: str, artifacts: dict[str, Path]) -> None:
    first_outputs = release.run(make_inputs(name, artifacts))
    tracking.record_champion(name, first_outputs.version, "cards-1")
    # the weights are the same, but the state differs
    (artifacts["dataset"] / "state" / "a.npy").write_text("newer")
    second_result = release.run(make_inputs(name, artifacts, workflow=f"{name}-2"))
    assert second_result.version == "2"
    assert second_result.content != first_outputs.content


def test_a_model_with_another_verdict_is_not_released(
    s3: Store, name: str, artifacts: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match='the verdict is "keep"'):
        release.run(make_inputs(name, artifacts, verdict="keep"))
    assert not list(s3.list(f"releases/{name}/"))


def test_an_incomplete_model_or_dataset_is_rejected(
    s3: Store, name: str, artifacts: dict[str, Path]
) -> None:
    request = make_inputs(name, artifacts)
    (artifacts["model"] / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"model\.safetensors does not exist"):
        release.run(request)
    shutil.rmtree(artifacts["model"])
    with pytest.raises(DataError, match="is not a trained model"):
        release.run(request)


def test_a_missing_bucket_is_named(
    s3: Store, name: str, artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_inputs(name, artifacts)
    monkeypatch.setenv("S3_BUCKET", "nowhere")
    with pytest.raises((StorageError, NotFound), match="nowhere"):
        release.run(request)
    assert tracking.champion(name) is None
