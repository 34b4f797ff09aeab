"""A real Argo, through kubectl: a namespace with what executors need, workflows in it, and what became of them.

with Argo("NS", image="python:3.11") as argo:
    argo.submit(name, text); ended = argo.ended()      # name → outcome of those that are over since

The namespace is made where there is none, and then is gone at the end. In it every service account may what executors
do, and what the controller needs for `memoize`. Where REKINDLE_TEST_S3 (an endpoint that pods and this machine reach)
and AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY are set, it has an artifact repository: a bucket of the namespace's name.
"""

import json
import os
import subprocess
import time
from typing import Any, Self
from urllib.parse import urlsplit

import yaml

from pipelines.local.manifest import documents, split
from steps.storage import Store
from tests.conformance.outcome import OVER, REFUSED, STUCK, Outcome, in_store, of_status

TIMEOUT = 240.0  # seconds after which a workflow is called Stuck
STANDS_FOR = "python:3.11"
RULES = [
    {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "create", "update", "patch", "delete"]},
]


class Argo:
    """One namespace. `image`: what stands for python:3.11 on that cluster."""

    def __init__(self, namespace: str, image: str = STANDS_FOR) -> None:
        self.namespace, self.image = namespace, image
        self.running: dict[str, tuple[float, list[dict[str, Any]]]] = {}  # since when, and what lies beside it
        self.refused: dict[str, Outcome] = {}
        endpoint = os.environ.get("REKINDLE_TEST_S3")
        keys = [os.environ.get(name, "") for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
        self.store = Store(namespace, endpoint, *keys) if endpoint else None

    def __enter__(self) -> Self:
        self.made = not self("get", "namespace", self.namespace, "--ignore-not-found", "-o", "name")
        if self.made:
            self("create", "namespace", self.namespace)
            self("apply", "-f", "-", text=yaml.safe_dump_all(self._needed()))
            if self.store:
                self.store.client.create_bucket(Bucket=self.store.bucket)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.made:
            return
        self("delete", "namespace", self.namespace, "--wait=false")
        if self.store:
            self.store.delete([entry.key for entry in self.store.list("")])
            self.store.client.delete_bucket(Bucket=self.store.bucket)

    def _needed(self) -> list[dict[str, Any]]:
        group = "rbac.authorization.k8s.io"
        everyone = {"kind": "Group", "name": "system:serviceaccounts", "apiGroup": group}
        found: list[dict[str, Any]] = [
            {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": "conformance"}, "rules": RULES},
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": {"name": "conformance"},
                "roleRef": {"apiGroup": group, "kind": "Role", "name": "conformance"},
                "subjects": [everyone],
            },
        ]
        if not self.store:
            return found
        endpoint = urlsplit(os.environ["REKINDLE_TEST_S3"])
        keys = {key: {"name": "store", "key": key} for key in ("accessKey", "secretKey")}
        s3 = {
            "bucket": self.namespace,
            "endpoint": endpoint.netloc,
            "insecure": endpoint.scheme == "http",
            "accessKeySecret": keys["accessKey"],
            "secretKeySecret": keys["secretKey"],
        }
        default = {"workflows.argoproj.io/default-artifact-repository": "store"}
        secret = {"accessKey": os.environ["AWS_ACCESS_KEY_ID"], "secretKey": os.environ["AWS_SECRET_ACCESS_KEY"]}
        return [
            *found,
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store"}, "stringData": secret},
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "artifact-repositories", "annotations": default},
                "data": {"store": yaml.safe_dump({"s3": s3})},
            },
        ]

    def submit(self, name: str, text: str) -> None:
        """Creates the Workflow of a manifest's text, and applies what lies beside it."""
        flow, beside = split(documents(text.replace(STANDS_FOR, self.image)))
        if beside:
            self("apply", "-f", "-", text=yaml.safe_dump_all(beside))
        try:
            self("create", "-f", "-", text=json.dumps(flow))
        except subprocess.CalledProcessError as error:  # the API server's own check of a Workflow
            self.refused[name] = _refused(f"{REFUSED}: {error.stderr}")
        self.running[name] = (time.monotonic(), beside)

    def ended(self) -> dict[str, Outcome]:
        """Those of the submitted that are over since the last call, by name; they are gone from the cluster then."""
        found = dict(self.refused)
        for flow in json.loads(self("get", "workflows", "-o", "json"))["items"] if self.running else []:
            name, status = flow["metadata"]["name"], flow.get("status") or {}
            if name not in self.running:
                continue
            stuck = time.monotonic() - self.running[name][0] > TIMEOUT
            if _settled(flow) or stuck:
                outcome = of_status(name, status, in_store(self.store) if self.store else None)
                found[name] = outcome if status.get("phase") in OVER else {"phase": STUCK, "was": outcome}
        for name in found:
            _, beside = self.running.pop(name)
            if name not in self.refused:
                self("delete", "workflow", name, "--wait=false")
            if beside:
                self("delete", "-f", "-", "--wait=false", "--ignore-not-found", text=yaml.safe_dump_all(beside))
        self.refused.clear()
        return found

    def version(self) -> str:
        """The image of the controller, from what pods of workflows show; empty if it cannot be seen."""
        found = self("get", "deployments", "--all-namespaces", "-o", "json")
        images = [
            container["image"]
            for each in json.loads(found)["items"]
            for container in each["spec"]["template"]["spec"]["containers"]
        ]
        return next((image.rpartition(":")[2] for image in images if "workflow-controller" in image), "")

    def __call__(self, *arguments: str, text: str = "") -> str:
        """kubectl in the namespace. Raises CalledProcessError."""
        command = ["kubectl", "--namespace", self.namespace, *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _refused(message: str) -> Outcome:
    return {"phase": "Error", "message": message.strip(), "outputs": {}, "nodes": []}


def _settled(flow: dict[str, Any]) -> bool:
    """It is over, and the outputs of its pods have arrived (Argo labels it completed then)."""
    over = (flow.get("status") or {}).get("phase") in OVER
    return over and (flow["metadata"].get("labels") or {}).get("workflows.argoproj.io/completed") == "true"
