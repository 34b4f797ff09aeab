"""A malformed answer of an MLflow server leads to one error message that names the server, the call
and the field."""

import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rekindle import mlflow_api, tracking
from rekindle.errors import RekindleError, TrackingError
from rekindle.mlflow_api import Answer, RunsPage
from rekindle.names import RunName
from rekindle.release.retention import listing, mlflow_records, registered_versions, removal
from rekindle.storage import Store
from tests.http_server import Answer as HttpAnswer
from tests.http_server import HttpServer
from tests.rekindle.mlflow_documents import DOCUMENTS, RUN, RUN_ID, MlflowServer
from tests.rekindle.mutations import make_mutations

SOURCE = "s3://bucket/releases/demo/0123456789ab"


def register_version() -> object:
    return tracking.register_version(
        "demo", "releases/demo/0123456789ab", SOURCE, "0" * 64, RUN_ID, {"workload": "w"}
    )


def remove_run_record() -> object:
    tracking._read_artifact_root.cache_clear()
    return removal.delete_record(RUN_ID)


# path of a request → functions that read the answer
READERS: dict[str, list[Callable[[], object]]] = {
    "mlflow/artifacts/list": [lambda: tracking.artifacts(RUN_ID, "evaluation")],
    "mlflow/registered-models/get": [
        lambda: tracking.champion("demo"),
        lambda: registered_versions.has_alias("demo", "1"),
    ],
    "mlflow/experiments/get-by-name": [
        lambda: tracking.find_run("demo", "demo-4k2xp"),
        lambda: tracking.show_columns("demo", ["auc"]),
        lambda: mlflow_records.find_record_id("demo", RunName("demo-4k2xp"), "", "id"),
    ],
    "mlflow/experiments/search": [tracking.find_page_address],
    "mlflow/runs/get": [
        lambda: tracking.read_tags(RUN_ID),
        lambda: tracking.read_params(RUN_ID),
        lambda: mlflow_records.find_trial_ids(RUN_ID, RunName("demo-4k2xp"), [RUN_ID]),
        remove_run_record,
    ],
    "mlflow/runs/create": [lambda: tracking.start_run("demo", "other")],
    "mlflow/runs/search": [
        lambda: tracking.find_run("demo", "demo-4k2xp"),
        lambda: tracking.find_last_start("demo"),
        lambda: tracking.find_last_prepared_runs("demo", "w", ""),
        lambda: tracking.find_page_address("demo-4k2xp"),
        lambda: mlflow_records.find_record_id("demo", RunName("demo-4k2xp"), "", "id"),
    ],
    "mlflow/model-versions/get": [
        lambda: tracking.champion("demo"),
        lambda: tracking.find_version("demo", "1"),
    ],
    "mlflow/model-versions/create": [register_version],
    "mlflow/model-versions/search": [
        register_version,
        lambda: tracking.promoted_releases("demo"),
        lambda: registered_versions.RegisteredVersions().list_run_ids([]),
    ],
    "mlflow/model-versions/get-download-uri": [
        lambda: registered_versions._fetch_download_address.__wrapped__("demo", "1")
    ],
}
CASES = [(path, number) for path, readers in READERS.items() for number in range(len(readers))]


@pytest.fixture
def server() -> Iterator[MlflowServer]:
    tracking._read_artifact_root.cache_clear()
    with MlflowServer() as server:
        yield server


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the error that a call raises; "" if it succeeds."""
    try:
        call()
    except RekindleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("path", "reader_number"), CASES)
def test_a_valid_answer_is_read(server: MlflowServer, path: str, reader_number: int) -> None:
    server.answer_with(path, json.dumps(DOCUMENTS[path] | {"a_later_field": {"x": [1]}}).encode())
    assert error_of(READERS[path][reader_number]) == ""


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_mlflow_may_answer_a_change_of_an_artifact_with_nothing(
    server: MlflowServer, method: str
) -> None:
    path = "mlflow-artifacts/artifacts/1/config.yaml"
    server.answer_with(path, b"")
    mlflow_api.send_request(method, path, mlflow_api.ArtifactChanged, data=b"text")
    with pytest.raises(TrackingError, match="answered 200 OK: 'nothing'"):
        mlflow_api.send_request(method, path, mlflow_api.Answer, data=b"text")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("path", "reader_number"), CASES)
def test_every_malformed_answer_is_accepted_or_one_error(
    server: MlflowServer, path: str, reader_number: int
) -> None:
    for body in make_mutations(DOCUMENTS[path]):
        server.answer_with(path, body)

        message = error_of(READERS[path][reader_number])

        assert not re.search("[\x00-\x1f\x7f-\x9f]", message), (body[:200], message)
        assert len(message) < 2000


MALFORMED_ANSWERS = [
    ("mlflow/runs/get", {}, "run: Field required"),
    ("mlflow/runs/get", {"run": 5}, "run: Input should be an object"),
    ("mlflow/runs/get", {"run": {"info": None, "data": {}}}, "run.info: Input should be an object"),
    (
        "mlflow/runs/get",
        {"run": {**RUN, "info": {**RUN["info"], "run_id": 5}}},
        "run.info.run_id: Input should be a valid string",
    ),
    (
        "mlflow/runs/get",
        {"run": {**RUN, "info": {**RUN["info"], "run_id": "../x"}}},
        'run.info.run_id: "../x" is not an id',
    ),
    (
        "mlflow/runs/get",
        {"run": {**RUN, "info": {**RUN["info"], "start_time": 10**30}}},
        "run.info.start_time: Input should be less than or equal to",
    ),
    (
        "mlflow/runs/get",
        {"run": {**RUN, "data": {"tags": {"a": "b"}}}},
        "run.data.tags: it must be a list",
    ),
    (
        "mlflow/runs/get",
        {"run": {**RUN, "data": {"tags": [{"value": "b"}]}}},
        "run.data.tags: the item 0 must be an object with the text `key`",
    ),
    (
        "mlflow/runs/get",
        {"run": {**RUN, "data": {"metrics": [{"key": "auc", "value": "high"}]}}},
        'run.data.metrics: the value of "auc" must be a number',
    ),
    (
        "mlflow/registered-models/get",
        {"registered_model": {"name": "demo", "aliases": [{"alias": "champion", "version": 1}]}},
        "registered_model.aliases.0.version: Input should be a valid string",
    ),
]


@pytest.mark.parametrize(("path", "document", "fault"), MALFORMED_ANSWERS)
def test_the_error_names_the_server_the_call_and_the_field(
    server: MlflowServer, path: str, document: Any, fault: str
) -> None:
    server.answer_with(path, json.dumps(document).encode())

    message = error_of(READERS[path][0])

    start = f"MLflow at {server.url} answered GET {path} with a malformed document: "
    assert message.startswith(start)
    assert fault in message.replace('"run.', "run.").replace('":', ":").replace('"reg', "reg")
    assert message.endswith("Check that MLFLOW_TRACKING_URI is the address of an MLflow server.")


@pytest.mark.parametrize(
    "body", [b"", b"<html><body>Sign in</body></html>", b"null", b"[]", b'{"a": NaN', b"\xff"]
)
@pytest.mark.parametrize("path", ["mlflow/runs/search", "mlflow/runs/log-batch"])
def test_an_answer_that_is_not_an_object_is_not_an_empty_answer(
    server: MlflowServer, path: str, body: bytes
) -> None:
    server.answer_with(path, body)
    with pytest.raises(TrackingError, match=f"MLflow at {server.url} answered 200 OK: "):
        mlflow_api.send_request(
            "POST", path, Answer if path.endswith("batch") else RunsPage, json={}
        )


@pytest.mark.parametrize("tag", [b"<script ", b"<", b"<style>", b"<p", b"<script></p>"])
def test_a_page_with_many_open_tags_is_one_error(server: MlflowServer, tag: bytes) -> None:
    body = b"<p>Sign in</p>" + 300_000 * tag
    server.answer_with("mlflow/runs/search", body)
    with pytest.raises(TrackingError, match="answered 200 OK: 'Sign in"):
        mlflow_api.send_request("POST", "mlflow/runs/search", RunsPage, json={})


@pytest.mark.parametrize(
    "body", [b'{"error_code": 5}', b'{"error_code": {}}', b'{"error_code": "X", "message": []}']
)
def test_a_malformed_error_is_shown(server: MlflowServer, body: bytes) -> None:
    server.answer_with("mlflow/runs/get", body, 400)
    with pytest.raises(TrackingError, match=r"answered 400 Bad Request: '\{\"error_code\""):
        tracking.read_tags(RUN_ID)


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_of_unlimited_size_is_one_error(status: int) -> None:
    body = gzip.compress(b'{"runs": [' + b" " * (65 << 20), 1)
    answer = HttpAnswer(status, body, {"Content-Encoding": "gzip"})
    with HttpServer(lambda _: answer) as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLFLOW_TRACKING_URI", server.url)
        with pytest.raises(
            TrackingError, match=r"its answer has more than 67,108,864 bytes\. Check"
        ):
            mlflow_api.send_request("POST", "mlflow/runs/search", RunsPage, json={})


def test_metrics_that_are_not_finite_are_left_out(server: MlflowServer) -> None:
    values = ["NaN", "Infinity", 5, -1.5, 10**400]
    metrics = [{"key": f"m{number}", "value": value} for number, value in enumerate(values)]
    run = {**RUN, "data": {**RUN["data"], "metrics": metrics}}
    server.answer_with("mlflow/runs/search", json.dumps({"runs": [run]}).encode())

    (prepared_run,) = tracking.find_last_prepared_runs("demo", "w", "")

    assert prepared_run.metrics == {"m2": 5.0, "m3": -1.5}


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        ("mlflow/runs/get", b"", remove_run_record),
        ("mlflow/runs/get", b'{"run": {}}', remove_run_record),
        ("mlflow/runs/get", b'{"run": {"info": {"run_id": "x"}, "data": {}}}', remove_run_record),
        ("mlflow/model-versions/search", b"", register_version),
        ("mlflow/model-versions/search", b'{"model_versions": {}}', register_version),
        (
            "mlflow/model-versions/search",
            b'{"model_versions": [{"name": "demo"}]}',
            register_version,
        ),
    ],
)
def test_nothing_is_deleted_after_a_malformed_answer(
    server: MlflowServer, path: str, body: bytes, call: Callable[[], object]
) -> None:
    server.answer_with(path, body)

    assert error_of(call).startswith(f"MLflow at {server.url} answered ")

    assert "DELETE" not in [request.method for request in server.requests]
    assert not any(request.path.endswith("/delete") for request in server.requests)


@pytest.mark.parametrize(
    "data",
    [
        {"tags": None, "params": []},
        {**RUN["data"], "params": None},
        {**RUN["data"], "params": [{"key": "data.source", "value": "x"}]},
    ],
)
def test_the_data_of_a_run_that_lacks_its_source_is_not_unused(
    server: MlflowServer, s3: Store, data: dict[str, Any]
) -> None:
    page = {"runs": [{**RUN, "data": data}]}
    server.answer_with("mlflow/runs/search", json.dumps(page).encode())
    with pytest.raises(
        TrackingError, match=f"the run {RUN_ID}, whose .* does not match the filter"
    ):
        listing.read_listing(s3, ["other"], listing.ListingContext({}, 1, 1, None))


def test_a_forked_process_does_not_use_the_connections_of_its_parent() -> None:
    session = mlflow_api._configured_session()
    pid = os.fork()
    if not pid:
        os._exit(mlflow_api._configured_session() is session)

    assert mlflow_api._configured_session() is session
    assert os.waitpid(pid, 0)[1] == 0
