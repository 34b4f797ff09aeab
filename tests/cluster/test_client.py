"""Tests of `rekindle` submit, status, logs, stop, resume and delete on a real cluster, with steps
that only echo.

`make test-cluster` runs the tests of this module, too; the tests need neither an object store nor
MLflow.
"""

import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.blocks.manifest.render import manifest_sha256
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import WORKFLOWS, Cluster
from rekindle.cluster.workflows import SHA256_ANNOTATION
from tests.cluster.kube import Kube
from tests.waiting import until

NODE = "workflows.argoproj.io/node-name"
REKINDLE = str(Path(sys.executable).with_name("rekindle"))
ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "Role",
    "metadata": {"name": "executor"},
    "rules": [
        {
            "apiGroups": ["argoproj.io"],
            "resources": ["workflowtaskresults"],
            "verbs": ["create", "patch"],
        }
    ],
}
BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "RoleBinding",
    "metadata": {"name": "executor"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "executor"},
    "subjects": [{"kind": "ServiceAccount", "name": "rekindle"}],
}
PERMISSIONS = [
    {
        "name": "MAY",
        "valueFrom": {"configMapKeyRef": {"name": "may", "key": "may", "optional": True}},
    }
]


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    kube = Kube(f"rekindle-client-{uuid.uuid4().hex[:6]}")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kube.namespace}}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "rekindle"}}

    try:
        kube.apply(namespace)
        kube.apply(account, ROLE, BINDING)
        yield kube
    finally:
        kube(
            "delete",
            "namespace",
            kube.namespace,
            "--ignore-not-found",
            "--timeout=120s",
            timeout=150,
        )


class Client:
    """The command `rekindle` in one namespace."""

    def __init__(self, kube: Kube, folder: Path) -> None:
        self.kube = kube
        self.folder = folder

    def __call__(self, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
        command = [REKINDLE, *args, "--namespace", self.kube.namespace]
        return subprocess.run(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            **more,
        )

    def submit(self, make_manifest: dict[str, Any], *args: str) -> dict[str, Any]:
        (self.folder / "w.json").write_text(json.dumps(make_manifest))
        completed = self("submit", "--manifest", "w.json", "-o", "json", *args)
        assert completed.stdout, completed.stderr
        return json.loads(completed.stdout) | {"code": completed.returncode}

    def phase(self, name: str) -> str:
        return json.loads(self("status", name, "-o", "json").stdout)["phase"]


@pytest.fixture
def client(kube: Kube, tmp_path: Path) -> Client:
    return Client(kube, tmp_path)


def make_manifest(*steps: tuple[str, str], **spec: Any) -> dict[str, Any]:
    """Return a manifest of steps (name, shell script) in sequence; a step without a script is a
    suspend template."""
    container = {
        "image": os.environ["REKINDLE_TEST_IMAGE"],
        "command": ["sh", "-c"],
        "env": PERMISSIONS,
        "resources": {"requests": {"cpu": "20m", "memory": "16Mi"}, "limits": {"memory": "128Mi"}},
    }

    templates: list[dict[str, Any]] = [{"name": "main", "dag": {"tasks": []}}]

    for i, (name, script) in enumerate(steps):
        templates[0]["dag"]["tasks"].append(
            {"name": name, "template": name} | ({"depends": steps[i - 1][0]} if i else {})
        )
        if script:
            body = {"container": container | {"args": [script]}}
        else:
            body = {"suspend": {}}

        templates.append({"name": name, **body})

    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "echo-"},
        "spec": {
            "entrypoint": "main",
            "serviceAccountName": "rekindle",
            "activeDeadlineSeconds": 300,
            "templates": templates,
            **spec,
        },
    }


def test_a_run_is_submitted_and_watched_and_a_duplicate_is_refused(client: Client):
    manifest_document = make_manifest(("first", "echo one"), ("second", "sleep 3; echo two"))
    result = client.submit(manifest_document)
    name = result["workflow"]
    assert result["manifest_sha256"] == manifest_sha256(manifest_document)
    refused = client.submit(manifest_document)
    assert refused["code"] == 2
    assert name in refused["message"]
    watched = client("status", name, "--watch", "-o", "json")
    assert watched.returncode == 0
    assert json.loads(watched.stdout)["phase"] == "Succeeded"
    assert re.search(r"second succeeded in \d", watched.stderr)
    workflow = client.kube.get("workflow", name)
    assert workflow
    assert workflow["metadata"]["annotations"][SHA256_ANNOTATION] == result["manifest_sha256"]


def test_logs_are_complete_after_a_forced_deletion_of_a_pod(client: Client):
    script = "for i in $(seq 1 60); do echo line $i; sleep 0.25; done"
    retries = {"limit": 2, "retryPolicy": "Always"}
    manifest_document = make_manifest(
        ("early", "echo early"), ("talks", script), ("late", "echo late")
    )
    manifest_document["spec"]["templates"][2]["retryStrategy"] = retries
    name = client.submit(manifest_document)["workflow"]
    done: list[str] = []
    follower = threading.Thread(target=lambda: done.append(client("logs", name, "-f").stdout))
    follower.start()

    def pods() -> list[dict[str, Any]]:
        return [
            pod
            for pod in client.kube.items("pods")
            if "talks(0)" in pod["metadata"]["annotations"].get(NODE, "")
        ]

    running_pods = until(
        "the step to talk", lambda: [pod for pod in pods() if pod["status"]["phase"] == "Running"]
    )
    client.kube.delete_pods(running_pods[0]["metadata"]["name"], force=True)
    follower.join(200)
    log_lines = [line for line in done[0].splitlines() if "argo=true" not in line]
    numbered = [line.partition(" | ")[2] for line in log_lines if "| line " in line]
    expected = [f"line {i}" for i in range(1, 61)]
    # number of lines of the deleted pod
    early_line_count = len(numbered) - 60
    assert numbered[:early_line_count] == expected[:early_line_count]
    assert numbered[early_line_count:] == expected
    assert early_line_count > 0
    assert {"early | early", "late | late"} <= set(log_lines)


def test_resume_retries_a_failed_run_from_the_failed_step(client: Client):
    manifest_document = make_manifest(
        ("first", "echo once"), ("second", "test -n \"$MAY\" || { echo 'error: may not'; exit 1; }")
    )
    result = client.submit(manifest_document, "--watch")
    assert result["code"] == 1
    assert result["phase"] == "Failed"
    first_start = {step["name"]: step["started"] for step in result["steps"]}["first"]
    client.kube.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "may"}, "data": {"may": "1"}}
    )
    assert client("resume", result["workflow"]).returncode == 0
    watched = client("status", result["workflow"], "--watch", "-o", "json")
    assert watched.returncode == 0, watched.stderr
    assert {step["name"]: step["started"] for step in json.loads(watched.stdout)["steps"]}[
        "first"
    ] == first_start
    client.kube("delete", "configmap", "may")


def test_resume_continues_a_suspended_run_and_stop_runs_exit_steps(client: Client):
    manifest_document = make_manifest(
        ("waits", ""), ("long", "echo begun; sleep 100"), ("end", "echo the end"), onExit="end"
    )
    manifest_document["spec"]["templates"][0]["dag"]["tasks"].pop()
    name = client.submit(manifest_document)["workflow"]
    until(
        "the step to wait",
        lambda: "waits" in client("status", name).stdout and client.phase(name) == "Running",
    )
    until("the run to be resumed", lambda: client("resume", name).returncode == 0, pause=1)
    until("the long step", lambda: "begun" in client("logs", name).stdout, pause=1)
    assert client("stop", name).returncode == 0
    watched = client("status", name, "--watch", "-o", "json")
    assert watched.returncode == 1
    phases = {step["name"]: step["phase"] for step in json.loads(watched.stdout)["steps"]}

    assert phases["waits"] == "Succeeded"
    assert phases["long"] == "Failed"
    assert phases["onExit"] == "Succeeded"

    assert client("delete", name).returncode == 0
    until("the workflow to be deleted", lambda: client.kube.get("workflow", name) is None)
    assert client.kube.items("pods", f"workflows.argoproj.io/workflow={name}") == []


def test_errors_of_a_real_server_become_messages_with_a_remedy(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    cluster = Cluster.connect(namespace=client.kube.namespace)
    with pytest.raises(ApiError, match="namespace rekindle-none does not exist"):
        cluster.in_namespace("rekindle-none").create(
            WORKFLOWS, make_manifest() | {"metadata": {"name": "x"}}
        )

    with pytest.raises(
        ApiError, match="Argo Workflows is not installed in the cluster, or has another version"
    ):
        cluster.call("GET", "/apis/argoproj.io/v9/namespaces/x/workflows")

    config = json.loads(
        client.kube("config", "view", "--raw", "--minify", "--flatten", "-o", "json")
    )
    config["users"][0]["user"] = {"token": client.kube("create", "token", "rekindle").strip()}
    (tmp_path / "weak").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "weak"))
    weak = Cluster.connect(namespace=client.kube.namespace)

    with pytest.raises(
        ApiError, match=f"{client.kube.namespace}:rekindle may not list workflows in namespace"
    ):
        weak.list_objects(WORKFLOWS)

    config["users"][0]["user"] = {"token": "wrong"}
    (tmp_path / "weak").write_text(json.dumps(config))
    with pytest.raises(ApiError, match="rejects the credentials"):
        Cluster.connect(namespace=client.kube.namespace).list_objects(WORKFLOWS)
