"""Workflows that clients send to a server have the same outcomes as with `argolocal run`, and
survive the death of the server.

The environment variable ARGO_MANIFESTS is a folder with further manifests for the comparison.
"""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hera.workflows import WorkflowsService
from hera.workflows import models as m

from argolocal.manifest.read import parse_objects, split_main_object
from argolocal.page.server import read_token
from argolocal.pods import filesystem
from argolocal.runner.cluster import LocalCluster
from argolocal.server.server_lock import find_server
from argolocal.store import FolderStore
from tests.argolocal.server.api.running import Document, make_gated_workflow
from tests.argolocal.server.running import RunningServer, start_server
from tests.conformance import recorded
from tests.conformance.alone import RunnerProcess
from tests.conformance.outcome import (
    END_PHASES,
    REJECTED_PREFIX,
    Outcome,
    in_store,
    list_differences,
    of_status,
)
from tests.waiting import until

ARGO = os.environ.get("ARGO_CLI") or shutil.which("argo")
SAMPLE = 15


class Client:
    """A client of a server process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        server = find_server(home)
        assert server
        self.url = f"http://127.0.0.1:{server.port}"
        self.token = read_token(home)
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "KUBECONFIG": "/dev/null",
            "ARGO_SERVER": f"127.0.0.1:{server.port}",
            "ARGO_HTTP1": "true",
            "ARGO_SECURE": "false",
            "ARGO_NAMESPACE": "argo",
            "ARGO_TOKEN": f"Bearer {self.token}",
        }

    def send(self, method: str, path: str, body: object = None, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        url = f"{self.url}/api/v1{path}"
        return httpx.request(method, url, json=body, headers=headers, timeout=60, **options)

    def workflow(self, name: str) -> Document:
        return self.send("GET", f"/workflows/argo/{name}").json()

    def submit(self, manifest: Document, folder: Path) -> str:
        """Submit a workflow with `argo`, or without `argo` by a request, and wait until it has
        ended. Return the message of the server if the workflow is refused."""
        name = manifest["metadata"]["name"]
        # `argo` drops an empty loop before it sends the workflow
        if ARGO and '"withItems": []' not in json.dumps(manifest):
            file = folder / "workflow.yaml"
            file.write_text(yaml.safe_dump(manifest))
            ended = subprocess.run(
                [ARGO, "submit", "--wait", str(file)],
                env=self.environ,
                capture_output=True,
                text=True,
                timeout=150,
            )
            if "Error: " in ended.stderr and ended.stderr.find("rpc error") >= 0:
                return ended.stderr
        else:
            answer = self.send("POST", "/workflows/argo", {"workflow": manifest})
            if answer.status_code != 200:
                return answer.json()["message"]
        until(f"{name} to end", lambda: self.workflow(name)["status"]["phase"] in END_PHASES, 150)
        return ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with start_server(tmp_path_factory.mktemp("server") / "home", "--parallelism", "8") as server:
        yield server


@pytest.fixture(scope="module")
def separate_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunnerProcess]:
    with RunnerProcess(tmp_path_factory.mktemp("alone")) as runner:
        yield runner


def make_manifests() -> dict[str, str]:
    """Return the names and texts of the manifests to compare."""
    recordings = [item for item in recorded.read() if item.name.startswith("random-")]
    sample = random.Random(56).sample(recordings, SAMPLE)
    # use the bucket of argolocal, because the bucket of rekindle does not exist in a home of
    # argolocal
    texts = {item.name: item.manifest.replace("rekindle", LocalCluster.bucket) for item in sample}
    folder = os.environ.get("ARGO_MANIFESTS")
    for path in sorted(Path(folder).glob("*.yaml")) if folder else []:
        texts[path.stem] = path.read_text()
    return texts


def outcome_by_server(client: Client, manifest: str, folder: Path) -> Outcome:
    workflow, other_objects = split_main_object(parse_objects(manifest))
    LocalCluster(client.home).store_objects(other_objects)
    name = workflow["metadata"]["name"]
    message = client.submit(workflow, folder)
    if message:
        return {
            "phase": "Error",
            "message": f"{REJECTED_PREFIX}: {message}",
            "outputs": {},
            "nodes": [],
        }
    status = client.workflow(name)["status"]
    store = FolderStore(client.home / "store", LocalCluster.bucket)
    return of_status(name, status, in_store(store))


@pytest.mark.slow
@pytest.mark.skipif(not filesystem.supports_namespaces(), reason="needs mount namespaces")
@pytest.mark.parametrize("name", make_manifests())
def test_a_workflow_of_a_client_has_the_outcome_of_a_run_in_the_foreground(
    server: RunningServer, separate_runner: RunnerProcess, tmp_path: Path, name: str
) -> None:
    manifest = make_manifests()[name]
    expected = separate_runner.run(
        manifest, split_main_object(parse_objects(manifest))[0]["metadata"]["name"]
    )
    actual = outcome_by_server(Client(server.home), manifest, tmp_path)
    assert not list_differences(actual, expected), "\n".join(list_differences(actual, expected))


def test_a_workflow_of_hera_survives_the_death_of_its_server(tmp_path: Path) -> None:
    with start_server(tmp_path / "home") as server:
        client = Client(server.home)
        service = WorkflowsService(host=client.url, token=client.token, namespace="argo")
        request = m.WorkflowCreateRequest(workflow=m.Workflow(**make_gated_workflow("survivor")))
        service.create_workflow(request)
        until("the step to wait", lambda: has_suspended_step(client, "survivor"))
        version = client.send("GET", "/workflows/argo").json()["metadata"]["resourceVersion"]

        server.kill()
        server.start()
        client = Client(server.home)
        parameters = {"listOptions.resourceVersion": version}
        answer = client.send("GET", "/workflow-events/argo", params=parameters)
        assert answer.status_code == 410

        service = WorkflowsService(host=client.url, token=client.token, namespace="argo")
        service.resume_workflow("survivor", m.WorkflowResumeRequest())
        until("the end", lambda: client.workflow("survivor")["status"]["phase"] == "Succeeded")


def has_suspended_step(client: Client, name: str) -> bool:
    nodes = client.workflow(name)["status"].get("nodes") or {}
    return any(node["type"] == "Suspend" for node in nodes.values())
