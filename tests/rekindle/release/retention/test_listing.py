"""Documents and addresses of others do not stop retention."""

import json
from collections.abc import Callable

import pytest

from rekindle.errors import TrackingError
from rekindle.kubernetes_names import MLFLOW_TRACKING_URI
from rekindle.mlflow_api import ModelVersion
from rekindle.names import RunName
from rekindle.release.retention.decision import Release
from rekindle.release.retention.listing import (
    RegisteredVersions,
    find_record_id,
    list_addresses,
    make_inputs_function,
)
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
    # the last page ends a search that does not notice the repeated token
    with HttpServer(lambda _: Answer(body=page if len(server.requests) < 9 else "{}")) as server:
        monkeypatch.setenv(MLFLOW_TRACKING_URI, server.url)
        with pytest.raises(TrackingError, match=f'{path} with the page token "same" again'):
            search()
