"""Use a real Argo through kubectl: create a namespace with the objects that executors need, run
workflows in this namespace, and collect their outcomes.

with Argo("NS", image="python:3.11") as argo:
    argo.submit(name, text); outcomes = argo.collect_ended()      # name → outcome of newly ended
    workflows

If the namespace does not exist, it is created, and deleted at the end. The service accounts of the
namespace get the permissions of executors, and in the controller's namespace the permissions for
`memoize`. If REKINDLE_TEST_S3 (an endpoint that pods and this machine reach) and AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY are set, the namespace gets an artifact repository in a new bucket.
`instance`: the instanceID of the controller, if the controller has one.
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

from argolocal.manifest.read import parse_objects, split_main_object
from argolocal.pods.container_images import BASE_IMAGES
from rekindle.local.services.services import DEFAULT_BUCKET
from rekindle.storage import Store
from tests.conformance.outcome import (
    END_PHASES,
    REJECTED_PREFIX,
    STUCK_PHASE,
    Outcome,
    in_store,
    of_status,
)

# time without a change after which a workflow counts as Stuck
STUCK_AFTER_S = 150.0
DEFAULT_IMAGE = "python:3.11"
BASE_IMAGE_PATTERN = re.compile(rf"(docker\.io/library/)?({'|'.join(BASE_IMAGES)})(:[\w.-]+)?")
GROUP = "rbac.authorization.k8s.io"
CACHES = {
    "apiGroups": [""],
    "resources": ["configmaps"],
    "verbs": ["get", "create", "update", "patch", "delete"],
}
RESULTS = {
    "apiGroups": ["argoproj.io"],
    "resources": ["workflowtaskresults"],
    "verbs": ["create", "patch"],
}
# permissions of Argo's agent pod, which sends HTTP requests
TASKS = [
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
# prefix of the caches of random workflows
CACHE_PREFIX = "memos-"
CACHE = "workflows.argoproj.io/configmap-type=Cache"
INSTANCE = "workflows.argoproj.io/controller-instanceid"


class Argo:
    """One namespace. `image`: the image to use on the cluster for python:3.11 and similar
    images."""

    def __init__(self, namespace: str, image: str = DEFAULT_IMAGE, instance: str = "") -> None:
        self.namespace = namespace
        self.image = image
        self.instance = instance
        # name of a workflow → the other objects of its manifest
        self.running: dict[str, list[dict[str, Any]]] = {}
        # name of a workflow → (resourceVersion, time of its last change)
        self.changed: dict[str, tuple[str, float]] = {}
        self.rejected: dict[str, Outcome] = {}
        endpoint = os.environ.get("REKINDLE_TEST_S3")
        keys = [os.environ.get(name, "") for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
        self.store = (
            Store(f"conformance-{uuid.uuid4().hex[:8]}", endpoint, *keys) if endpoint else None
        )

    def __enter__(self) -> Self:
        self.created = not self(
            "get", "namespace", self.namespace, "--ignore-not-found", "-o", "name"
        )
        if self.created:
            self("create", "namespace", self.namespace)
        if self.store:
            self.store.client.create_bucket(Bucket=self.store.bucket)
        self.controller, self.version = self._read_controller()
        self("apply", "-f", "-", text=yaml.safe_dump_all(self._setup_objects()))
        caches = yaml.safe_dump_all(_make_role(self.namespace, [CACHES]))
        self("apply", "--namespace", self.controller, "-f", "-", text=caches)
        return self

    def __exit__(self, *_: object) -> None:
        caches = self(
            "get", "configmaps", "--namespace", self.controller, "-l", CACHE, "-o", "name"
        ).split()
        own_caches = [cache for cache in caches if cache.startswith(f"configmap/{CACHE_PREFIX}")]

        self(
            "delete",
            "--namespace",
            self.controller,
            f"role/{self.namespace}",
            f"rolebinding/{self.namespace}",
            *own_caches,
        )

        if self.created:
            self("delete", "namespace", self.namespace, "--wait=false")

        if self.store:
            self.store.delete([entry.key for entry in self.store.list("")])
            self.store.client.delete_bucket(Bucket=self.store.bucket)

    def _setup_objects(self) -> list[dict[str, Any]]:
        objects = [*_make_role("executors", [CACHES, RESULTS, *TASKS]), TOKEN]
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
        secret = {
            "accessKey": os.environ["AWS_ACCESS_KEY_ID"],
            "secretKey": os.environ["AWS_SECRET_ACCESS_KEY"],
        }

        return [
            *objects,
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "store"},
                "stringData": secret,
            },
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "artifact-repositories", "annotations": default},
                "data": {"store": yaml.safe_dump({"s3": s3})},
            },
        ]

    def submit(self, name: str, text: str) -> None:
        """Create the Workflow of a manifest, and apply the other objects of the manifest."""
        if self.store:
            text = text.replace(f"bucket: {DEFAULT_BUCKET}", f"bucket: {self.store.bucket}")

        flow, other_objects = split_main_object(
            [self._replace_images(document) for document in parse_objects(text)]
        )
        if self.instance:
            flow["metadata"].setdefault("labels", {})[INSTANCE] = self.instance

        try:
            if other_objects:
                self("apply", "-f", "-", text=yaml.safe_dump_all(other_objects))

            self("create", "-f", "-", text=json.dumps(flow))
        except subprocess.CalledProcessError as error:  # the API server rejects the manifest
            self.rejected[name] = _rejected_outcome(f"{REJECTED_PREFIX}: {error.stderr}")

        self.running[name] = other_objects

    def _replace_images(self, value: Any) -> Any:
        """Replace the images that the local runner maps to programs of the machine."""
        if isinstance(value, list):
            return [self._replace_images(item) for item in value]
        if not isinstance(value, dict):
            return value

        return {
            key: (
                self.image
                if key == "image" and BASE_IMAGE_PATTERN.fullmatch(str(item).strip())
                else self._replace_images(item)
            )
            for key, item in value.items()
        }

    def collect_ended(self) -> dict[str, Outcome]:
        """Return the outcomes of workflows that ended since the last call, by name, and delete the
        workflows."""
        outcomes = dict(self.rejected)

        for flow in (
            json.loads(self("get", "workflows", "-o", "json"))["items"] if self.running else []
        ):
            name = flow["metadata"]["name"]
            status = flow.get("status") or {}
            if name not in self.running:
                continue

            if _has_settled(flow) or self._is_stuck(name, flow["metadata"]["resourceVersion"]):
                outcome = of_status(name, status, in_store(self.store) if self.store else None)
                outcomes[name] = (
                    outcome
                    if status.get("phase") in END_PHASES
                    else {"phase": STUCK_PHASE, "was": outcome}
                )

        for name in outcomes:
            other_objects = self.running.pop(name)
            if name not in self.rejected:
                self("delete", "workflow", name, "--wait=false")

            if other_objects:
                self(
                    "delete",
                    "-f",
                    "-",
                    "--wait=false",
                    "--ignore-not-found",
                    text=yaml.safe_dump_all(other_objects),
                )

        self.rejected.clear()
        return outcomes

    def _is_stuck(self, name: str, version: str) -> bool:
        old_version, since = self.changed.get(name, ("", 0.0))
        if old_version != version:
            since = time.monotonic()
            self.changed[name] = (version, since)
        return time.monotonic() - since > STUCK_AFTER_S

    def _read_controller(self) -> tuple[str, str]:
        """Return the namespace and version of the controller, from its Deployment."""
        deployments = json.loads(self("get", "deployments", "--all-namespaces", "-o", "json"))[
            "items"
        ]

        images = {
            deployment["metadata"]["namespace"]: container["image"].rpartition(":")[2]
            for deployment in deployments
            for container in deployment["spec"]["template"]["spec"]["containers"]
            if "workflow-controller" in container["image"]
        }
        if self.namespace in images:
            namespace = self.namespace
        else:
            namespace = next(iter(images))

        return namespace, images[namespace]

    def __call__(self, *arguments: str, text: str = "") -> str:
        """Run kubectl in the namespace of the comparison. Raises CalledProcessError."""
        command = ["kubectl", "--namespace", self.namespace, *arguments]
        return subprocess.run(
            command, input=text, capture_output=True, text=True, check=True
        ).stdout


def _make_role(name: str, rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a Role with the given rules, and a RoleBinding to all service accounts."""
    version = {"apiVersion": f"{GROUP}/v1"}
    metadata = {"metadata": {"name": name}}
    role = {"apiGroup": GROUP, "kind": "Role", "name": name}
    everyone = {"kind": "Group", "name": "system:serviceaccounts", "apiGroup": GROUP}
    return [
        {**version, "kind": "Role", **metadata, "rules": rules},
        {**version, "kind": "RoleBinding", **metadata, "roleRef": role, "subjects": [everyone]},
    ]


def _rejected_outcome(message: str) -> Outcome:
    return {"phase": "Error", "message": message.strip(), "outputs": {}, "nodes": []}


def _has_settled(flow: dict[str, Any]) -> bool:
    """Return True if a workflow has ended and the outputs of its pods have arrived, because Argo
    has labelled it completed."""
    over = (flow.get("status") or {}).get("phase") in END_PHASES
    return (
        over
        and (flow["metadata"].get("labels") or {}).get("workflows.argoproj.io/completed") == "true"
    )
