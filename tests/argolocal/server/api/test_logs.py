"""Tests of the logs that clients read by the API of an Argo server: each line of the selected pods
is sent once, also while the pods run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.language.regexp import compile_matcher
from argolocal.page.log_files import LocalLog
from argolocal.server.api.logs import MAX_LINE_BYTES, LogOptions, LogReader, PodLog
from tests.argolocal.server.api.running import (
    ApiServer,
    Document,
    describe_error,
    make_api_workflow,
    make_step_template,
    make_steps_template,
)


def read_log(api: ApiServer, path: str, **parameters: Any) -> list[Document]:
    """Return the lines of a log."""
    with api.client.stream("GET", f"{api.url}/api/v1{path}", params=parameters) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line)["result"] for line in answer.iter_lines() if line]


def read_contents(api: ApiServer, path: str, **parameters: Any) -> list[str]:
    return [line["content"] for line in read_log(api, path, **parameters)]


@pytest.fixture(scope="module")
def finished(api: ApiServer) -> Document:
    """A workflow with two pods, where the log of the second pod has no line break at its end."""
    first_step = make_step_template(
        "one", "echo alpha; echo beta", metadata={"labels": {"app": "first"}}
    )
    second_step = make_step_template("two", "echo gamma; printf delta")
    name = api.submit(
        make_api_workflow(make_steps_template("one", "two"), first_step, second_step, name="logged")
    )
    return api.wait(name)


def list_log_lines(document: Document) -> list[str]:
    nodes = document["status"]["nodes"].values()
    ids = sorted((node["startedAt"], node["id"], node) for node in nodes if node["type"] == "Pod")
    return [f"logged-{node['templateName']}-{id.rpartition('-')[2]}" for _, id, node in ids]


def test_the_log_of_a_workflow_has_the_lines_of_all_pods_in_order(
    api: ApiServer, finished: Document
) -> None:
    lines = read_log(api, "/workflows/argo/logged/log")
    assert [line["content"] for line in lines] == ["alpha", "beta", "gamma", "delta"]
    assert {line["podName"] for line in lines} == set(list_log_lines(finished))


def test_a_client_chooses_pods_and_lines(api: ApiServer, finished: Document) -> None:
    pod = next(name for name in list_log_lines(finished) if "-two-" in name)
    address = "/workflows/argo/logged/log"
    assert read_contents(api, f"/workflows/argo/logged/{pod}/log") == ["gamma", "delta"]
    assert read_contents(api, address, podName=pod) == ["gamma", "delta"]
    assert read_contents(api, address, selector="app=first") == ["alpha", "beta"]
    assert read_contents(api, address, grep="^(alpha|delta)$") == ["alpha", "delta"]
    assert read_contents(api, address, **{"logOptions.tailLines": "1"}) == ["beta", "delta"]
    assert read_contents(api, address, **{"logOptions.tailLines": "0"}) == []
    assert read_contents(api, address, **{"logOptions.limitBytes": "7"}) == [
        "alpha",
        "b",
        "gamma",
        "d",
    ]
    assert read_contents(api, address, **{"logOptions.container": "main"}) != []
    assert read_contents(api, address, **{"logOptions.container": "wait"}) == []
    assert read_contents(api, address, **{"logOptions.sinceSeconds": "3600"}) != []
    assert read_contents(api, address, **{"logOptions.sinceTime.seconds": "9999999999"}) == []
    with_times = read_contents(api, address, **{"logOptions.timestamps": "true"})
    assert all(line[:2] == "20" and line[19] in ".Z" for line in with_times)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"grep": "("}, "failed to compile"),
        ({"grep": "a" * 20_000}, "longer than"),
        ({"selector": "a b"}, "unable to parse"),
        ({"logOptions.tailLines": "-5"}, "tailLines"),
        ({"logOptions.container": "../../../../etc/passwd"}, "not the name of a container"),
        ({"logOptions.container": "x/../../manifest.yaml"}, "not the name of a container"),
    ],
)
def test_malformed_options_are_refused(
    api: ApiServer, finished: Document, parameters: dict[str, str], message: str
) -> None:
    answer = api.send("GET", "/workflows/argo/logged/log", params=parameters)
    assert message in describe_error(answer)[2]


def test_the_log_of_another_pod_is_empty(api: ApiServer, finished: Document) -> None:
    for pod in ("nothing", "..", "%2e%2e%2fmanifest"):
        answer = api.send("GET", f"/workflows/argo/logged/{pod}/log")
        assert answer.status_code in (200, 404, 501)
        assert "alpha" not in answer.text


def test_a_followed_log_ends_with_the_workflow(api: ApiServer) -> None:
    templates = [
        make_step_template("one", "echo one"),
        {"name": "gate", "suspend": {}},
        make_step_template("two", "echo two"),
    ]
    name = api.submit(make_api_workflow(make_steps_template("one", "gate", "two"), *templates))
    address = f"{api.url}/api/v1/workflows/argo/{name}/log"
    parameters = {"logOptions.follow": "true"}
    with api.client.stream("GET", address, params=parameters) as answer:
        lines: Iterator[str] = (line for line in answer.iter_lines() if line)
        assert json.loads(next(lines))["result"]["content"] == "one"
        api.wait_until_suspended(name)
        api.change("PUT", f"/workflows/argo/{name}/resume")
        assert [json.loads(line)["result"]["content"] for line in lines] == ["two"]


def test_a_pattern_that_needs_exponential_time_elsewhere_is_fast(
    api: ApiServer, finished: Document
) -> None:
    assert read_contents(api, "/workflows/argo/logged/log", grep="(a|a)*(a|aa)+$(x+x+)+y") == []
    assert not compile_matcher("(a+)+$")("a" * 50_000 + "b")


def test_a_line_without_end_is_sent_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "pod.log"
    path.write_bytes(b"x" * (2 * MAX_LINE_BYTES) + b"\nend\n")
    log = PodLog("pod", LocalLog("pod", path))
    lines = list(log.read_lines(is_complete=True))
    assert "".join(lines) == "x" * (2 * MAX_LINE_BYTES) + "end"
    assert len(lines) < 5
    assert len(max(lines, key=len)) < 2 * MAX_LINE_BYTES


def test_a_reader_sends_each_line_once(tmp_path: Path) -> None:
    node = {"id": "w", "name": "w", "type": "Pod", "startedAt": "", "templateName": "main"}
    document = {"metadata": {"name": "w"}, "spec": {}, "status": {"nodes": {"w": node}}}
    options = LogOptions("", "main", lambda line: True, [])
    reader = LogReader(tmp_path, "w", options)
    assert list(reader.read(document, False)) == []

    log = tmp_path / "w.log"
    log.write_text("one\ntw")
    assert len(list(reader.read(document, False))) == 1
    log.write_text("one\ntwo\nthree")
    assert len(list(reader.read(document, False))) == 1
    assert len(list(reader.read(document, True))) == 1
    assert list(reader.read(document, True)) == []
