"""Tests of watches in the API of an Argo server: the client gets each change, and a watch needs
little memory and CPU time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from argolocal.server.api import streams
from argolocal.server.api.catalogue import Change
from argolocal.server.api.streams import StreamLimit, coalesce
from tests.argolocal.server.api.running import (
    ApiServer,
    describe_error,
    make_gated_workflow,
    make_hello_workflow,
    start_api,
)
from tests.waiting import until


@contextmanager
def watch_workflows(api: ApiServer, **parameters: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Watch workflows, and return an iterator of the events."""
    address = f"{api.url}/api/v1/workflow-events/argo"
    with api.client.stream("GET", address, params=parameters) as answer:
        assert answer.status_code == 200, answer.read()
        lines = (line for line in answer.iter_lines() if line)
        yield (json.loads(line)["result"] for line in lines)


def test_a_watch_shows_a_workflow_from_its_creation_to_its_end(api: ApiServer) -> None:
    version = api.get("/workflows/argo")["metadata"]["resourceVersion"]
    with watch_workflows(api, **{"listOptions.resourceVersion": version}) as events:
        api.submit(make_hello_workflow("watched"))
        seen = [next(events)]
        while seen[-1]["object"]["status"]["phase"] != "Succeeded":
            seen.append(next(events))

    assert seen[0]["type"] == "ADDED"
    assert {event["type"] for event in seen[1:]} <= {"MODIFIED"}
    assert {event["object"]["metadata"]["name"] for event in seen} == {"watched"}
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in seen]
    assert versions == sorted(versions)


def test_a_watch_of_one_workflow_ends_with_its_deletion(api: ApiServer) -> None:
    api.submit(make_hello_workflow("short"))
    api.wait("short")
    selector = {"listOptions.fieldSelector": "metadata.name=short"}
    with watch_workflows(api, **selector) as events:
        first_event = next(events)
        assert (first_event["type"], first_event["object"]["metadata"]["name"]) == (
            "ADDED",
            "short",
        )
        api.change("DELETE", "/workflows/argo/short")
        last = next(events)
        assert (last["type"], last["object"]["metadata"]["name"]) == ("DELETED", "short")
        assert last["object"]["metadata"]["uid"] == first_event["object"]["metadata"]["uid"]

    answer = api.send("GET", "/workflow-events/argo", params=selector)
    assert describe_error(answer)[:2] == (404, 5)


def test_a_watch_contains_only_selected_workflows_and_fields(api: ApiServer) -> None:
    selected = make_hello_workflow("selected")
    selected["metadata"]["labels"] = {"watch": "yes"}
    parameters = {"listOptions.labelSelector": "watch=yes", "fields": "result.object.metadata.name"}
    with watch_workflows(api, **parameters) as events:
        api.submit(make_hello_workflow())
        api.submit(selected)
        assert next(events) == {"type": "ADDED", "object": {"metadata": {"name": "selected"}}}


def test_a_watch_from_an_old_version_must_list_again(api: ApiServer) -> None:
    answer = api.send("GET", "/workflow-events/argo", params={"listOptions.resourceVersion": "5"})
    status, code, message = describe_error(answer)
    assert (status, code) == (410, 11)
    assert message.startswith("too old resource version: 5")


def test_a_watch_continues_after_an_interruption(api: ApiServer) -> None:
    version = api.get("/workflows/argo")["metadata"]["resourceVersion"]
    api.submit(make_hello_workflow("missed"))
    api.wait("missed")
    with watch_workflows(api, **{"listOptions.resourceVersion": version}) as events:
        event = next(events)
        assert event["type"] == "ADDED"
        assert event["object"]["metadata"]["name"] == "missed"
        assert event["object"]["status"]["phase"] == "Succeeded"


def test_a_client_of_server_sent_events_gets_them(api: ApiServer) -> None:
    api.submit(make_hello_workflow("sent"))
    headers = {"Accept": "text/event-stream"}
    parameters = {"listOptions.fieldSelector": "metadata.name=sent"}
    address = f"{api.url}/api/v1/workflow-events/argo"
    with api.client.stream("GET", address, params=parameters, headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        line = next(line for line in lines if line.startswith("data: "))
        assert json.loads(line.removeprefix("data: "))["result"]["type"] == "ADDED"


def test_streams_that_are_open_are_limited_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    monkeypatch.setattr(StreamLimit.__init__, "__defaults__", (2,))
    with start_api(tmp_path / "home") as server:
        name = server.submit(make_gated_workflow())
        server.wait_until_suspended(name)
        with watch_workflows(server) as first_watch, watch_workflows(server) as second_watch:
            assert next(first_watch)["type"] == next(second_watch)["type"] == "ADDED"
            answer = server.send("GET", "/stream/events/argo")
            status, code, message = describe_error(answer)
            assert (status, code) == (429, 8)
            assert "2 watches" in message

        def opens_again() -> bool:
            try:
                with watch_workflows(server) as events:
                    return bool(next(events))
            except AssertionError:
                return False

        until("a free place", opens_again)


def test_kubernetes_events_are_an_empty_stream(api: ApiServer) -> None:
    address = f"{api.url}/api/v1/stream/events/argo"
    with (
        pytest.raises(httpx.ReadTimeout),
        api.client.stream("GET", address, timeout=0.5) as answer,
    ):
        assert answer.status_code == 200
        next(answer.iter_lines())


def test_changes_of_the_same_run_are_reported_once() -> None:
    changes = [
        Change(1, "ADDED", "a"),
        Change(2, "ADDED", "b"),
        Change(3, "MODIFIED", "a"),
        Change(4, "MODIFIED", "b"),
        Change(5, "DELETED", "b"),
    ]
    assert list(coalesce(changes)) == [Change(3, "ADDED", "a"), Change(5, "DELETED", "b")]
