"""Tests of the page of a cluster's runs, which `rekindle ui --cluster` serves, with a real Argo."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.browser import start_page
from tests.cluster.kube import Kube
from tests.waiting import until

WAIT = {"name": "wait", "suspend": {"duration": "1"}}
ASK = {"name": "ask", "suspend": {}}
TASKS = [
    {"name": "first", "template": "wait"},
    {"name": "approval", "template": "ask", "depends": "first"},
    {"name": "last", "template": "wait", "depends": "approval"},
]
WORKFLOW = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "Workflow",
    "metadata": {"name": "asking"},
    "spec": {
        "entrypoint": "main",
        "templates": [{"name": "main", "dag": {"tasks": TASKS}}, WAIT, ASK],
    },
}


@pytest.fixture
def kube() -> Iterator[Kube]:
    kube = Kube(f"rekindle-page-{uuid4().hex[:6]}")
    kube("create", "namespace", kube.namespace)
    yield kube
    with contextlib.suppress(AssertionError):
        kube("delete", "namespace", kube.namespace, "--wait=false")


def test_a_run_of_a_cluster_says_what_it_waits_for_and_shows_its_end(
    kube: Kube, tmp_path: Path
) -> None:
    kube.apply(WORKFLOW)
    flags = ("--cluster", "-n", kube.namespace, "--allow-actions")
    with start_page(tmp_path / "home", "rekindle", *flags) as server:

        def waits() -> bool:
            answer = server.get("/runs/asking", "text/html")
            return f"resume asking --cluster -n {kube.namespace}`" in answer.text

        until("the page shows the command that resumes the run", waits)
        (row,) = server.get("/").json()["rows"]
        assert (row["name"], row["state"]) == ("asking", "waiting")

        kube("patch", "workflow", "asking", "--type=merge", "-p", '{"spec": {"shutdown": "Stop"}}')
        until(
            "the end of the run is on the page",
            lambda: server.get("/").json()["rows"][0]["state"] == "failed",
        )


def test_a_namespace_without_runs_is_an_empty_list(kube: Kube, tmp_path: Path) -> None:
    with start_page(tmp_path / "home", "rekindle", "--cluster", "-n", "no-such-place") as server:
        assert server.get("/").json()["rows"] == []
