"""Settings that all pods share, as plain data: environment, security, resources, placement.

Pods read addresses and credentials from a ConfigMap and a Secret in the namespace; the manifest
contains neither.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from argolocal.manifest.object_labels import WORKFLOW
from rekindle.kubernetes_names import (
    CONFIG_MAP,
    NAME_LABEL,
    PART_OF_REKINDLE,
    POD_IP,
    PROGRAM_SECRET,
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

Manifest = dict[str, Any]  # a Kubernetes object, or a part of one, as plain data

USER_ID = 65532  # id of the user "nonroot" in distroless images; every id except 0 would work

POD_ADDRESS = [{"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
# fields that the PodSecurity standard `restricted` requires of a container
RESTRICTED_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
# do not reorder the fields, because the hash that identifies servers depends on their order
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Patch for the containers that Argo adds to the pod of a step: without it, a namespace that
# enforces the PodSecurity standard `restricted` rejects the pod. The pods of resource templates do
# not have these containers, so the patch would fail there.
EXECUTOR_SECURITY = {
    "initContainers": [{"name": "init", "securityContext": CONTAINER_SECURITY}],
    "containers": [{"name": "wait", "securityContext": CONTAINER_SECURITY}],
}
# `argo logs` finds the pods of a workflow by this label
WORKFLOW_LABEL = {WORKFLOW: "{{workflow.name}}"}
TMP_MOUNTS = [{"name": "tmp", "mountPath": "/tmp"}]


def environment_sources(secret: str = STORE_SECRET) -> list[Manifest]:
    """Return `envFrom` of a container: the ConfigMap with the addresses, and the Secret `secret`
    with the credentials. If the Secret does not exist, the pods get access through the IAM role of
    their ServiceAccount."""
    return [
        {"configMapRef": {"name": CONFIG_MAP}},
        {"secretRef": {"name": secret, "optional": True}},
    ]


def token_variables(serve: "ServeConfig") -> list[Manifest]:
    """Return the environment variable that contains the tokens which a model server accepts."""
    reference = {"name": TOKEN_SECRET, "key": REKINDLE_TOKEN}
    if serve.token:
        return [{"name": REKINDLE_TOKEN, "valueFrom": {"secretKeyRef": reference}}]
    return []


def secret_variables(names: Iterable[str]) -> list[Manifest]:
    """Return the environment variables that `program.secrets` names."""
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": PROGRAM_SECRET, "key": name}}}
        for name in dict.fromkeys(names)
    ]


def image_variables(image: str) -> list[Manifest]:
    """Return the environment variable that contains the image name of the pod; return nothing if
    this name has no digest."""
    if "@" in image:
        return [{"name": REKINDLE_IMAGE, "value": image}]
    return []


def shutdown_variables(pod: "PodConfig") -> list[Manifest]:
    """Return the environment variables for a worker's grace period and for the cloud whose
    preemption notices the worker polls."""
    variables = {REKINDLE_GRACE: str(pod.grace_seconds), REKINDLE_NOTICE: pod.notice}
    return [{"name": name, "value": value} for name, value in variables.items() if value]


def resources(pod: "PodConfig") -> Manifest:
    """Return the resource requests and limits of a pod. The memory limit equals the memory request;
    CPU has no limit, because throttling slows pods down."""
    limits = {"memory": pod.memory}
    if pod.gpus:
        limits[pod.gpu_resource] = str(pod.gpus)
    requests = {"cpu": pod.cpu or "1", "memory": pod.memory, "ephemeral-storage": pod.disk}
    return {"requests": requests, "limits": limits}


def tmp_volumes(pod: "PodConfig") -> list[Manifest]:
    """Return the volume of /tmp, the only writable directory of a pod; Argo stores artifacts in
    it."""
    return [{"name": "tmp", "emptyDir": {"sizeLimit": pod.disk}}]


def pod_metadata(pod: "PodConfig", labels: Mapping[str, str] = WORKFLOW_LABEL) -> Manifest:
    """Return the metadata of the pods of a job or a Deployment."""
    return {"labels": {**pod.labels, **labels}} | (
        {"annotations": pod.annotations} if pod.annotations else {}
    )


def hardened_container(
    name: str, pod: "PodConfig", args: list[str], **container_fields: object
) -> Manifest:
    """Return a hardened container that runs `python ARGS` with the common environment."""
    return {
        "name": name,
        "image": pod.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python"],
        "args": args,
        "env": POD_ADDRESS,
        "envFrom": environment_sources(),
        "resources": resources(pod),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": TMP_MOUNTS,
        **container_fields,
    }


def affinity(pod: "PodConfig") -> Manifest:
    """Return the affinity that keeps a pod away from nodes with the labels in `avoid`."""
    if not pod.avoid:
        return {}
    excluded_labels = [
        {"key": key, "operator": "NotIn", "values": [value]}
        for key, value in sorted(pod.avoid.items())
    ]
    node_selector = {"nodeSelectorTerms": [{"matchExpressions": excluded_labels}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": node_selector}}


def tolerations(pod: "PodConfig") -> list[Manifest]:
    """Return the pod's tolerations, including how long the pod may stay on a node that does not
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
    labels: Mapping[str, str] = WORKFLOW_LABEL,
    **spec_fields: object,
) -> Manifest:
    """Return a PodSpec whose pods have no access to the Kubernetes API. `labels`: labels of the
    pods."""
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
        "volumes": tmp_volumes(pod),
        **spec_fields,
    }

    return {key: value for key, value in spec.items() if value not in ({}, [], "")}


def workflow_labels(name: str) -> dict[str, str]:
    """Return the labels by which commands find the workflows of the pipeline `name`."""
    return {**PART_OF_REKINDLE, NAME_LABEL: name}
