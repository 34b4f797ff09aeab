"""Logs of pods are copied once, grow while the pod runs, and are kept when the pod is deleted."""

from pathlib import Path
from typing import Any

import pytest

from argolocal.manifest.object_labels import WORKFLOW
from argolocal.page.log_files import LocalLog, LogFile
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.page.pod_logs import PodLogs
from tests.rekindle.cluster.server import ApiServer, make_status
from tests.rekindle.page.workflows import make_node, make_workflow
from tests.waiting import until

POD = "demo-x-say-5"
PODS = "/api/v1/namespaces/models/pods"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with ApiServer(tmp_path) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        monkeypatch.delenv("S3_BUCKET", raising=False)
        yield running


def path_of(log: LogFile) -> Path:
    assert isinstance(log, LocalLog)
    return log.path


def put_pod(server: ApiServer, state: str = "running") -> None:
    details = {"exitCode": 0} if state == "terminated" else {}
    containers = [{"name": name, "state": {state: details}} for name in ("main", "wait")]
    labels = {WORKFLOW: "demo-x"}
    pod = {"metadata": {"name": POD, "labels": labels}, "status": {"containerStatuses": containers}}
    server.put(PODS, pod)


def test_the_log_of_a_running_pod_grows_without_repeated_lines(
    server: ApiServer, tmp_path: Path
) -> None:
    put_pod(server)
    server.write_log(POD, "one")
    logs = PodLogs(Cluster.connect(), tmp_path / "logs")
    workflow = make_workflow("demo-x", "Running", make_node("demo-x", "first", "Running"))
    path = path_of(logs.files(workflow)[POD])
    assert path.read_text() == "one\n"
    assert path.stat().st_mode & 0o077 == 0

    server.write_log(POD, "two")
    until(
        "the second line is copied", lambda: "two" in path_of(logs.files(workflow)[POD]).read_text()
    )
    assert path.read_text() == "one\ntwo\n"


def test_the_log_of_a_deleted_pod_is_explained(server: ApiServer, tmp_path: Path) -> None:
    artifact = {"name": "main-logs", "s3": {"key": "demo-x/main.log"}}
    archived = make_node("demo-x", "first", outputs={"artifacts": [artifact]})
    workflow = make_workflow("demo-x", "Succeeded", archived, make_node("demo-x", "second"))
    files = PodLogs(Cluster.connect(), tmp_path / "logs").files(workflow)
    texts = [path_of(log).read_text() for log in files.values()]
    assert "rekindle logs demo-x first --cluster" in texts[0]
    assert "was not archived" in texts[1]


def test_a_log_that_the_reader_may_not_see_is_a_sentence(server: ApiServer, tmp_path: Path) -> None:
    put_pod(server, "terminated")
    server.refuse("GET", "/log", 403, make_status(403, "Forbidden", "pods/log is forbidden"))
    workflow = make_workflow("demo-x", "Succeeded", make_node("demo-x", "first"))
    files = PodLogs(Cluster.connect(), tmp_path / "logs").files(workflow)
    assert "cannot be read" in path_of(files[POD]).read_text()
