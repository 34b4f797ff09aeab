"""Malformed documents, and addresses that other programs have written, do not stop retention."""

import json
import uuid
from collections.abc import Callable

import pytest
from pydantic import BaseModel

from rekindle.errors import TrackingError
from rekindle.kubernetes_names import MLFLOW_TRACKING_URI
from rekindle.mlflow_api import ModelVersion
from rekindle.names import RunName
from rekindle.release.retention import mlflow_records, ownership
from rekindle.release.retention.decision import Release
from rekindle.release.retention.listing import make_inputs_function
from rekindle.release.retention.mlflow_records import find_record_id, find_trial_ids
from rekindle.release.retention.registered_versions import RegisteredVersions, list_addresses
from rekindle.storage import Store
from tests.http_server import Answer, HttpServer


@pytest.mark.parametrize("content", [b"[" * 100_000, b"5", b'{"start": "a", "start": "b"}'])
def test_a_release_with_a_malformed_document_reads_no_other(s3: Store, content: bytes) -> None:
    release = Release("demo", 1, "releases/demo/0123456789ab/", "demo")
    s3.put(f"{release.prefix}model.json", content)
    assert list(make_inputs_function(s3, [release])(release)) == ["/"]


def test_the_source_of_a_version_may_be_any_text() -> None:
    version = ModelVersion(name="demo", version="1", source="s3://[x")
    assert list_addresses(version) == {"s3://[x"}


@pytest.mark.parametrize(
    ("path", "search"),
    [
        ("mlflow/model-versions/search", RegisteredVersions),
        ("mlflow/runs/search", lambda: find_record_id("demo", RunName("demo-4k2xp"), "", "id")),
    ],
)
def test_a_search_whose_page_token_repeats_is_an_error(
    monkeypatch: pytest.MonkeyPatch, path: str, search: Callable[[], object]
) -> None:
    experiment = {"experiment_id": "1", "name": "demo"}
    page = json.dumps({"experiment": experiment, "next_page_token": "same"})
    # the last page ends the search even if the code does not notice the repeated token
    with HttpServer(lambda _: Answer(body=page if len(server.requests) < 9 else "{}")) as server:
        monkeypatch.setenv(MLFLOW_TRACKING_URI, server.url)
        with pytest.raises(TrackingError, match=f'{path} with the page token "same" again'):
            search()


def test_a_search_whose_pages_do_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with HttpServer(
        lambda _: Answer(body=json.dumps({"next_page_token": str(len(server.requests))}))
    ) as server:
        monkeypatch.setenv(MLFLOW_TRACKING_URI, server.url)
        with pytest.raises(TrackingError, match="model-versions/search with 101 empty pages"):
            RegisteredVersions()


def test_a_client_of_mlflow_cannot_have_a_foreign_record_removed_as_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent, trial, foreign = "a" * 32, "b" * 32, "c" * 32

    def describe_run(run_id: str, tags: dict[str, str]) -> dict[str, object]:
        info = {"run_id": run_id, "experiment_id": "1", "status": "FINISHED", "artifact_uri": ""}
        listed_tags = [{"key": name, "value": text} for name, text in tags.items()]
        return {"info": info, "data": {"tags": listed_tags}}

    def answer(method: str, path: str, model: type[BaseModel], **_: object) -> BaseModel:
        if path == "mlflow/runs/get":
            return model.model_validate_json(json.dumps({"run": describe_run(parent, {})}))

        tags = {"rekindle.workflow": "demo-x7k2p.trial-1", "mlflow.parentRunId": parent}
        runs = [describe_run(run_id, tags) for run_id in (trial, foreign)]
        return model.model_validate_json(json.dumps({"runs": runs}))

    monkeypatch.setattr(mlflow_records, "send_request", answer)
    run = RunName("demo-x7k2p")
    assert find_trial_ids(parent, run, [trial]) == [trial]
    assert find_trial_ids(parent, run, []) == []


def test_the_trials_of_a_sweep_stay_known_when_it_is_resumed_and_ends(s3: Store) -> None:
    run = RunName(f"demo-{uuid.uuid4().hex[:8]}")
    workflow = {"metadata": {"name": run}}
    ownership.begin_run(s3, workflow, "demo")
    ownership.record_trial(s3, run, "a" * 32)
    ownership.record_trial(s3, run, "a" * 32)
    ownership.begin_run(s3, workflow, "demo", is_first=False)
    ownership.record_trial(s3, run, "b" * 32)
    ownership.end_run(s3, workflow, "demo", has_succeeded=True)
    mark = ownership.read(s3, run)
    assert mark
    assert mark.trial_ids == ["a" * 32, "b" * 32]
