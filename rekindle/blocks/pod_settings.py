"""Settings that all pods share, as plain data: environment, security, resources, placement.

Addresses and credentials come from a ConfigMap and a Secret in the namespace, never from the
manifest.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from argolocal.manifest.object_labels import WORKFLOW
from rekindle.kubernetes_names import (
    CONFIG_MAP,
    NAME_LABEL,
    PART_OF_REKINDLE,
    POD_IP,
    REKINDLE_GRACE,
    REKINDLE_IMAGE,
    REKINDLE_NOTICE,
    REKINDLE_TOKEN,
    STORE_SECRET,
    TOKEN_SECRET,
)

if TYPE_CHECKING:
    from rekindle.blocks.settings import PodConfig
    from rekindle.release.serve_config import ServeConfig

Manifest = dict[str, Any]  # an object, or a part of one, that a block builds

USER_ID = 65532  # the user "nonroot" of distroless images; every number except 0 works

POD_ADDRESS = [{"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
# required by the PodSecurity standard `restricted`
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
# the order of the fields is part of the hash that identifies servers
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Argo's own containers in the pod of a step: a namespace that enforces the PodSecurity standard
# `restricted` rejects them without this patch. Resource templates lack these containers: the patch
# would fail.
EXECUTOR_SECURITY = {
    "initContainers": [{"name": "init", "securityContext": CONTAINER_SECURITY}],
    "containers": [{"name": "wait", "securityContext": CONTAINER_SECURITY}],
}
# `argo logs` finds the pods of a workflow by this label
OF_WORKFLOW = {WORKFLOW: "{{workflow.name}}"}
MOUNTS = [{"name": "tmp", "mountPath": "/tmp"}]


def environment(secret: str = STORE_SECRET) -> list[Manifest]:
    """Return the sources of addresses and keys; without the Secret, pods use the cloud role of
    their account (IAM)."""
    return [
        {"configMapRef": {"name": CONFIG_MAP}},
        {"secretRef": {"name": secret, "optional": True}},
    ]


def token(serve: "ServeConfig") -> list[Manifest]:
    """Return the variable with the tokens that a model server accepts."""
    reference = {"name": TOKEN_SECRET, "key": REKINDLE_TOKEN}
    if serve.token:
        return [{"name": REKINDLE_TOKEN, "valueFrom": {"secretKeyRef": reference}}]
    return []


def image_digest(image: str) -> list[Manifest]:
    """Return the variable that tells a pod its image, if the image is pinned by digest."""
    if "@" in image:
        return [{"name": REKINDLE_IMAGE, "value": image}]
    return []


def shutdown_variables(pod: "PodConfig") -> list[Manifest]:
    """Return the environment variables for the end of a worker: grace period, and source of the
    cloud's notices."""
    variables = {REKINDLE_GRACE: str(pod.grace_seconds), REKINDLE_NOTICE: pod.notice}
    return [{"name": name, "value": value} for name, value in variables.items() if value]


def resources(pod: "PodConfig") -> Manifest:
    """Return requests and limits: memory is limited to the request, CPU is not limited (throttling
    slows pods down)."""
    limits = {"memory": pod.memory}
    if pod.gpus:
        limits[pod.gpu_resource] = str(pod.gpus)
    requests = {"cpu": pod.cpu or "1", "memory": pod.memory, "ephemeral-storage": pod.disk}
    return {"requests": requests, "limits": limits}


def volumes(pod: "PodConfig") -> list[Manifest]:
    """Return the only writable directory of a pod; Argo stores artifacts below that directory."""
    return [{"name": "tmp", "emptyDir": {"sizeLimit": pod.disk}}]


def metadata(pod: "PodConfig", labels: Mapping[str, str] = OF_WORKFLOW) -> Manifest:
    """Return the metadata of the pods of a job or a Deployment."""
    return {"labels": {**pod.labels, **labels}} | (
        {"annotations": pod.annotations} if pod.annotations else {}
    )


def container(name: str, pod: "PodConfig", args: list[str], **container_fields: Any) -> Manifest:
    """Return a hardened container that runs `python ARGS` with the common environment."""
    return {
        "name": name,
        "image": pod.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python"],
        "args": args,
        "env": POD_ADDRESS,
        "envFrom": environment(),
        "resources": resources(pod),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": MOUNTS,
        **container_fields,
    }


def affinity(pod: "PodConfig") -> Manifest:
    """Return the affinity that keeps a pod off the nodes with the labels in `avoid`."""
    if not pod.avoid:
        return {}
    excluded_labels = [
        {"key": key, "operator": "NotIn", "values": [value]}
        for key, value in sorted(pod.avoid.items())
    ]
    node_selector = {"nodeSelectorTerms": [{"matchExpressions": excluded_labels}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": node_selector}}


def tolerations(pod: "PodConfig") -> list[Manifest]:
    """Return the pod's tolerations, and the time until it is evicted from a node that does not
    respond."""
    if pod.node_lost_seconds is None:
        return pod.tolerations

    no_execute = {
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": pod.node_lost_seconds,
    }
    return [
        *pod.tolerations,
        {"key": "node.kubernetes.io/not-ready", **no_execute},
        {"key": "node.kubernetes.io/unreachable", **no_execute},
    ]


def pod_spec(
    pod: "PodConfig",
    account: str,
    containers: list[Manifest],
    labels: Mapping[str, str] = OF_WORKFLOW,
    **spec_fields: Any,
) -> Manifest:
    """Return a PodSpec without access to the Kubernetes API; `labels`: labels of the pods."""
    spread_constraint = {
        "maxSkew": 1,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(labels)},
    }

    spec = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "securityContext": POD_SECURITY,
        "nodeSelector": pod.node_selector,
        "affinity": affinity(pod),
        "tolerations": tolerations(pod),
        "topologySpreadConstraints": [
            {"topologyKey": key, **spread_constraint} for key in pod.spread
        ],
        "priorityClassName": pod.priority_class,
        "containers": containers,
        "volumes": volumes(pod),
        **spec_fields,
    }

    return {key: value for key, value in spec.items() if value not in ({}, [], "")}


def labels(name: str) -> dict[str, str]:
    """Return the labels of the workflow of the pipeline `name`; commands find runs by these
    labels."""
    return {**PART_OF_REKINDLE, NAME_LABEL: name}
