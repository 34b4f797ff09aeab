"""A real Argo, through kubectl: a namespace with what executors need, workflows in it, and what became of them.

with Argo("NS", image="python:3.11") as argo:
    argo.submit(name, text); ended = argo.ended()      # name → outcome of those that are over since

The namespace is made where there is none, and then is gone at the end. In it every service account may do what
executors do, and in the controller's namespace what `memoize` needs. Where REKINDLE_TEST_S3 (an endpoint that pods and
this machine reach) and AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY are set, there is an artifact repository: a bucket of
its own. `instance`: the instanceID of the controller, where it has one.
"""

import json
import os
import re
import subprocess
import time
import uuid
from typing import Any, Self
from urllib.parse import urlsplit

import yaml

from argolocal.manifest.read import documents, split
from argolocal.pods.container_images import BASES
from rekindle.local.services.services import BUCKET
from rekindle.storage import Store
from tests.conformance.outcome import OVER, REFUSED, STUCK, Outcome, in_store, of_status

TIMEOUT = 150.0  # seconds without any change after which a workflow is called Stuck
STANDS_FOR = "python:3.11"
PLAIN = re.compile(rf"(docker\.io/library/)?({'|'.join(BASES)})(:[\w.-]+)?")
GROUP = "rbac.authorization.k8s.io"
CACHES = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "create", "update", "patch", "delete"]}
RESULTS = {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]}
TASKS = [  # what the pod needs that asks by http
    {"apiGroups": ["argoproj.io"], "resources": ["workflowtasksets"], "verbs": ["list", "watch"]},
    {"apiGroups": ["argoproj.io"], "resources": ["workflowtasksets/status"], "verbs": ["patch"]},
]
TOKEN = {
    "apiVersion": "v1",
    "kind": "Secret",
    "type": "kubernetes.io/service-account-token",
    "metadata": {
        "name": "default.service-account-token",
        "annotations": {"kubernetes.io/service-account.name": "default"},
    },
}
MEMOS = "memos-"  # how the caches of random workflows are called
CACHE = "workflows.argoproj.io/configmap-type=Cache"
INSTANCE = "workflows.argoproj.io/controller-instanceid"


class Argo:
    """One namespace. `image`: what stands for python:3.11 and the like on that cluster."""

    def __init__(self, namespace: str, image: str = STANDS_FOR, instance: str = "") -> None:
        self.namespace, self.image, self.instance = namespace, image, instance
        self.running: dict[str, list[dict[str, Any]]] = {}  # what lies beside each
        self.changed: dict[str, tuple[str, float]] = {}  # the version of each, and since when
        self.refused: dict[str, Outcome] = {}
        endpoint = os.environ.get("REKINDLE_TEST_S3")
        keys = [os.environ.get(name, "") for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
        self.store = Store(f"conformance-{uuid.uuid4().hex[:8]}", endpoint, *keys) if endpoint else None

    def __enter__(self) -> Self:
        self.made = not self("get", "namespace", self.namespace, "--ignore-not-found", "-o", "name")
        if self.made:
            self("create", "namespace", self.namespace)
        if self.store:
            self.store.client.create_bucket(Bucket=self.store.bucket)
        self.controller, self.version = self._controller()
        self("apply", "-f", "-", text=yaml.safe_dump_all(self._needed()))
        caches = yaml.safe_dump_all(_allowed(self.namespace, [CACHES]))
        self("apply", "--namespace", self.controller, "-f", "-", text=caches)
        return self

    def __exit__(self, *_: object) -> None:
        caches = self("get", "configmaps", "--namespace", self.controller, "-l", CACHE, "-o", "name").split()
        mine = [cache for cache in caches if cache.startswith(f"configmap/{MEMOS}")]
        self("delete", "--namespace", self.controller, f"role/{self.namespace}", f"rolebinding/{self.namespace}", *mine)
        if self.made:
            self("delete", "namespace", self.namespace, "--wait=false")
        if self.store:
            self.store.delete([entry.key for entry in self.store.list("")])
            self.store.client.delete_bucket(Bucket=self.store.bucket)

    def _needed(self) -> list[dict[str, Any]]:
        objects = [*_allowed("executors", [CACHES, RESULTS, *TASKS]), TOKEN]
        if not self.store:
            return objects
        endpoint = urlsplit(os.environ["REKINDLE_TEST_S3"])
        keys = {key: {"name": "store", "key": key} for key in ("accessKey", "secretKey")}
        s3 = {
            "bucket": self.store.bucket,
            "endpoint": endpoint.netloc,
            "insecure": endpoint.scheme == "http",
            "accessKeySecret": keys["accessKey"],
            "secretKeySecret": keys["secretKey"],
        }
        default = {"workflows.argoproj.io/default-artifact-repository": "store"}
        secret = {"accessKey": os.environ["AWS_ACCESS_KEY_ID"], "secretKey": os.environ["AWS_SECRET_ACCESS_KEY"]}
        return [
            *objects,
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
        if self.store:
            text = text.replace(f"bucket: {BUCKET}", f"bucket: {self.store.bucket}")
        flow, beside = split([self._imaged(document) for document in documents(text)])
        if self.instance:
            flow["metadata"].setdefault("labels", {})[INSTANCE] = self.instance
        try:
            if beside:
                self("apply", "-f", "-", text=yaml.safe_dump_all(beside))
            self("create", "-f", "-", text=json.dumps(flow))
        except subprocess.CalledProcessError as error:  # the API server's own check of a Workflow
            self.refused[name] = _refused(f"{REFUSED}: {error.stderr}")
        self.running[name] = beside

    def _imaged(self, value: Any) -> Any:
        """With our image in the place of those that are programs of the machine for the local runner."""
        if isinstance(value, list):
            return [self._imaged(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {
            key: self.image if key == "image" and PLAIN.fullmatch(str(item).strip()) else self._imaged(item)
            for key, item in value.items()
        }

    def ended(self) -> dict[str, Outcome]:
        """Those of the submitted that are over since the last call, by name; they are gone from the cluster then."""
        outcomes = dict(self.refused)
        for flow in json.loads(self("get", "workflows", "-o", "json"))["items"] if self.running else []:
            name, status = flow["metadata"]["name"], flow.get("status") or {}
            if name not in self.running:
                continue
            if _settled(flow) or self._stuck(name, flow["metadata"]["resourceVersion"]):
                outcome = of_status(name, status, in_store(self.store) if self.store else None)
                outcomes[name] = outcome if status.get("phase") in OVER else {"phase": STUCK, "was": outcome}
        for name in outcomes:
            beside = self.running.pop(name)
            if name not in self.refused:
                self("delete", "workflow", name, "--wait=false")
            if beside:
                self("delete", "-f", "-", "--wait=false", "--ignore-not-found", text=yaml.safe_dump_all(beside))
        self.refused.clear()
        return outcomes

    def _stuck(self, name: str, version: str) -> bool:
        before, since = self.changed.get(name, ("", 0.0))
        if before != version:
            since = time.monotonic()
            self.changed[name] = (version, since)
        return time.monotonic() - since > TIMEOUT

    def _controller(self) -> tuple[str, str]:
        """The namespace and the version of the controller, from its Deployment."""
        deployments = json.loads(self("get", "deployments", "--all-namespaces", "-o", "json"))["items"]
        images = {
            deployment["metadata"]["namespace"]: container["image"].rpartition(":")[2]
            for deployment in deployments
            for container in deployment["spec"]["template"]["spec"]["containers"]
            if "workflow-controller" in container["image"]
        }
        namespace = self.namespace if self.namespace in images else next(iter(images))
        return namespace, images[namespace]

    def __call__(self, *arguments: str, text: str = "") -> str:
        """kubectl in the namespace. Raises CalledProcessError."""
        command = ["kubectl", "--namespace", self.namespace, *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _allowed(name: str, rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What lets every service account do that."""
    version, metadata = {"apiVersion": f"{GROUP}/v1"}, {"metadata": {"name": name}}
    role = {"apiGroup": GROUP, "kind": "Role", "name": name}
    everyone = {"kind": "Group", "name": "system:serviceaccounts", "apiGroup": GROUP}
    return [
        {**version, "kind": "Role", **metadata, "rules": rules},
        {**version, "kind": "RoleBinding", **metadata, "roleRef": role, "subjects": [everyone]},
    ]


def _refused(message: str) -> Outcome:
    return {"phase": "Error", "message": message.strip(), "outputs": {}, "nodes": []}


def _settled(flow: dict[str, Any]) -> bool:
    """It is over, and the outputs of its pods have arrived (Argo labels it completed then)."""
    over = (flow.get("status") or {}).get("phase") in OVER
    return over and (flow["metadata"].get("labels") or {}).get("workflows.argoproj.io/completed") == "true"
