"""Tests of runs whose files another program has damaged: each answer of the server names the run
and the damaged file."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from argolocal.page.application import Page
from argolocal.page.site import make_parts
from argolocal.runner.cluster import LocalCluster
from tests.argolocal.running import execute_manifest
from tests.argolocal.server.api.running import (
    ApiServer,
    Document,
    describe_error,
    make_failing_workflow,
    start_api,
)

MANIFEST = "manifest.yaml"
JOURNAL = "journal.jsonl"
ACTIONS = ("stop", "terminate", "suspend", "resume", "retry", "resubmit")


def edit_object(change: Callable[[Any], object]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        document = json.loads(text)
        change(document)
        return json.dumps(document)

    return edit


# name of a run → the damaged file, and its damage
DAMAGES: dict[str, tuple[str, Callable[[str], str]]] = {
    "labels": (MANIFEST, edit_object(lambda item: item["metadata"].update(labels=[1]))),
    "annotations": (MANIFEST, edit_object(lambda item: item["metadata"].update(annotations="x"))),
    "templates": (MANIFEST, edit_object(lambda item: item["spec"].update(templates=[5]))),
    "submitted": (MANIFEST, edit_object(lambda item: item.update(submittedSpec={"a": 1}))),
    "half": (MANIFEST, lambda text: text[:300]),
    "status": (JOURNAL, lambda text: text + '{"status": 5}\n'),
    "time": (JOURNAL, lambda text: text + '{"status": {"phase": "Failed", "startedAt": "x"}}\n'),
    "nodes": (JOURNAL, lambda text: text + '{"nodes": {"a": {"id": "a", "phase": 5}}}\n'),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server of a home with a sound run, and a damaged copy of this run for each damage."""
    home = tmp_path_factory.mktemp("damage") / "home"
    execute_manifest(make_failing_workflow("sound"), {}, LocalCluster(home))
    runs = home / "runs"
    for name, (file, edit) in DAMAGES.items():
        shutil.copytree(runs / "sound", runs / name)
        manifest = runs / name / MANIFEST
        manifest.write_text(manifest.read_text().replace('"name": "sound"', f'"name": "{name}"'))
        path = runs / name / file
        path.write_text(edit(path.read_text()))
    with start_api(home, parallelism=0) as api:
        yield api


@pytest.fixture
def server_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of the server; the records of this log do not reach the root logger."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def list_errors(server: ApiServer, name: str) -> Iterator[tuple[str, Any]]:
    """Send all kinds of requests for a run, and yield the error messages of the answers."""
    address = f"/workflows/argo/{name}"
    for path in (address, f"{address}/log", f"{address}/{name}/log"):
        yield path, server.send("GET", path)
    options = {"listOptions.fieldSelector": f"metadata.name={name}"}
    yield "watch", server.send("GET", "/workflow-events/argo", params=options)
    for action in ACTIONS:
        yield action, server.send("PUT", f"{address}/{action}", {"name": name})


@pytest.mark.parametrize("name", DAMAGES)
def test_an_answer_about_a_damaged_run_names_the_file_in_one_line(
    server: ApiServer, name: str, server_log: pytest.LogCaptureFixture
) -> None:
    path = str(server.home / "runs" / name / DAMAGES[name][0])
    for request, answer in list_errors(server, name):
        status, code, message = describe_error(answer)
        assert (status, code) == (500, 13), request
        assert message.startswith(path), request
        assert "was changed" in message
        assert "\n" not in message

    # no traceback
    assert not server_log.records
    names = [item["metadata"]["name"] for item in server.get("/workflows/argo")["items"]]
    assert names == ["sound"]


@pytest.mark.parametrize("name", ["labels", "time"])
def test_the_page_of_a_damaged_run_names_the_file(server: ApiServer, name: str) -> None:
    page = TestClient(Page(make_parts(server.home)).application())
    answer = page.get(f"/runs/{name}", headers={"Accept": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(str(server.home / "runs" / name / DAMAGES[name][0]))


def test_a_run_with_a_damaged_manifest_is_not_deleted(server: ApiServer) -> None:
    status, _, message = describe_error(server.send("DELETE", "/workflows/argo/labels"))
    path = server.home / "runs/labels" / MANIFEST
    assert status == 500
    assert message.startswith(str(path))
    assert path.exists()


def test_a_log_that_is_followed_ends_with_an_error_if_the_run_is_damaged(
    tmp_path: Path, server_log: pytest.LogCaptureFixture
) -> None:
    execute_manifest(make_failing_workflow("w"), {}, LocalCluster(tmp_path / "home"))
    journal = tmp_path / "home/runs/w" / JOURNAL
    sound_text = journal.read_text()
    # change the run to an interrupted run, which does not end
    journal.write_text(sound_text.replace('"phase":"Failed"', '"phase":"Running"'))
    (tmp_path / "home/queue").mkdir(exist_ok=True)
    (tmp_path / "home/queue/w").touch()

    with start_api(tmp_path / "home", parallelism=0) as server:
        address = f"{server.url}/api/v1/workflows/argo/w/log"
        options = {"logOptions.follow": "true"}
        with server.client.stream("GET", address, params=options) as answer:
            lines = answer.iter_lines()
            first: Document = json.loads(next(line for line in lines if line))
            assert answer.status_code == 200
            assert first["result"]["content"] in ("one", "two")
            journal.write_text(sound_text + '{"status": 5}\n')
            last = [json.loads(line) for line in lines if line][-1]

    assert last["error"]["http_code"] == 500
    assert last["error"]["message"].startswith(f"{journal}, line ")
    assert not server_log.records
