"""Tests of `rekindle ui --cluster`, which shows the runs of a namespace, with the permissions of
the user."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.cluster.workflows import compress_nodes
from tests.browser import PageServer, start_page
from tests.rekindle.cluster.server import ApiServer, make_status
from tests.rekindle.page.workflows import make_node, make_workflow
from tests.waiting import until

WORKFLOWS = "/apis/argoproj.io/v1alpha1/namespaces/models/workflows"
CRON_WORKFLOWS = "/apis/argoproj.io/v1alpha1/namespaces/models/cronworkflows"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("api")) as running:
        failed_workflow = make_workflow(
            "demo-failed",
            "Failed",
            make_node("demo-failed", "first"),
            make_node("demo-failed", "second", "Failed", message="exit code 3"),
        )
        running.put(WORKFLOWS, failed_workflow)
        large_workflow = make_workflow("demo-large", "Succeeded", make_node("demo-large", "first"))
        running.put(WORKFLOWS, compress_nodes(large_workflow))
        offloaded = make_workflow("demo-offloaded", "Running")
        offloaded["status"] = {"phase": "Running", "offloadNodeStatusVersion": "fnv:1"}
        running.put(WORKFLOWS, offloaded)
        yield running


@pytest.fixture(scope="module")
def environ(server: ApiServer) -> dict[str, str]:
    return {"KUBECONFIG": str(server.kubeconfig), "MLFLOW_TRACKING_URI": "", "S3_BUCKET": ""}


@pytest.fixture(scope="module")
def page(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    home = tmp_path_factory.mktemp("cluster") / "home"
    with start_page(home, "rekindle", "--cluster", environ=environ) as server:
        yield server


def read_rows(page: PageServer) -> dict[str, Any]:
    return {row["name"]: row for row in page.get("/").json()["rows"]}


def test_the_runs_of_the_namespace_are_shown(page: PageServer) -> None:
    rows = read_rows(page)
    assert rows["demo-failed"]["message"] == "second: exit code 3"
    assert rows["demo-failed"]["pipeline"] == "demo"
    assert "cluster here, namespace models" in page.get("/", "text/html").text


def test_compressed_steps_are_read_and_offloaded_steps_are_explained(page: PageServer) -> None:
    steps = page.get("/runs/demo-large/overview").text
    assert "first" in steps
    row = read_rows(page)["demo-offloaded"]
    assert row["state"] == "running"
    assert "argo get demo-offloaded" in row["message"]


def test_a_change_on_the_cluster_is_shown_with_one_watch(
    page: PageServer, server: ApiServer
) -> None:
    server.put(WORKFLOWS, make_workflow("demo-new", "Running"))
    until("the new run is shown", lambda: "demo-new" in read_rows(page))
    server.put(WORKFLOWS, make_workflow("demo-new", "Succeeded"))
    until("its end is shown", lambda: read_rows(page)["demo-new"]["state"] == "succeeded")
    server.remove(WORKFLOWS, "demo-new")
    until("its removal is shown", lambda: "demo-new" not in read_rows(page))

    requests = len(server.requests)
    for _ in range(5):
        read_rows(page)
    assert len(server.requests) == requests


def test_without_allow_actions_the_page_changes_nothing(
    page: PageServer, server: ApiServer
) -> None:
    assert page.get("/runs/demo-failed/actions").json() == {"actions": []}
    address = f"{page.root}/runs/demo-failed/actions/resume"
    headers = {"Authorization": f"Bearer {page.token}"}
    assert httpx.post(address, headers=headers, json={}).status_code == 404
    rollback = f"{page.root}/models/demo/rollback/1"
    assert httpx.post(rollback, headers=headers, json={}).status_code == 404
    page.get("/models")
    page.get("/schedules")
    assert {method for method, _, _ in server.requests} == {"GET"}


def test_with_allow_actions_a_run_is_stopped(
    environ: dict[str, str], server: ApiServer, tmp_path: Path
) -> None:
    server.put(WORKFLOWS, make_workflow("demo-long", "Running"))
    flags = ("--cluster", "--allow-actions", "-n", "models")
    with start_page(tmp_path / "home", "rekindle", *flags, environ=environ) as page:
        plan = page.get("/runs/demo-long/actions/stop").json()
        assert plan["command"] == "rekindle stop demo-long --cluster"
        address = f"{page.root}{plan['address']}"
        headers = {"Authorization": f"Bearer {page.token}"}
        assert httpx.post(address, headers=headers, json={}).status_code == 200

    assert server.objects[WORKFLOWS]["demo-long"]["spec"]["shutdown"] == "Stop"
    server.remove(WORKFLOWS, "demo-long")


def test_a_missing_permission_is_a_sentence_at_its_place(
    page: PageServer, server: ApiServer, environ: dict[str, str], tmp_path: Path
) -> None:
    refusal = make_status(403, "Forbidden", "cronworkflows is forbidden")
    server.refuse("GET", "/cronworkflows", 403, refusal)
    notes = page.get("/schedules").json()["notes"]
    assert "cannot be read" in notes[0]
    assert "permission" in notes[0] or "forbidden" in notes[0]

    server.refuse(
        "GET", "/deployments", 403, make_status(403, "Forbidden", "deployments is forbidden")
    )
    notes = page.get("/models").json()["notes"]
    assert any("servers cannot be read" in note for note in notes)

    server.refuse("GET", "/workflows", 403, make_status(403, "Forbidden", "workflows is forbidden"))
    with start_page(tmp_path / "home", "rekindle", "--cluster", environ=environ) as other:
        answer = other.get("/")
        assert answer.status_code == 502
        assert "workflows" in answer.json()["error"]


def test_schedules_of_the_cluster_are_shown(page: PageServer, server: ApiServer) -> None:
    spec = {"schedules": ["0 3 * * 1"], "timezone": "Europe/Paris", "workflowSpec": {}}
    cron = {"metadata": {"name": "demo"}, "spec": spec, "status": {}}
    server.put(CRON_WORKFLOWS, cron)
    (schedule,) = page.get("/schedules").json()["schedules"]
    assert schedule["cron"] == "0 3 * * 1"
    assert len(schedule["next_times"]) == 3
