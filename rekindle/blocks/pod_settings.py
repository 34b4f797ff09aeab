"""Settings that all pods share, as plain data: environment, security, resources, placement.

Pods read addresses and credentials from a ConfigMap and a Secret in the namespace; the manifest
contains no addresses and no credentials.
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
    REKINDLE_CAPACITY,
    REKINDLE_GRACE,
    REKINDLE_IMAGE,
    REKINDLE_NOTICE,
    REKINDLE_TOKEN,
    SPOT_CAPACITY,
    STORE_SECRET,
    TOKEN_SECRET,
)

if TYPE_CHECKING:
    from rekindle.blocks.settings import PodConfig
    from rekindle.release.serve_config import ServeConfig

# a Kubernetes object, or a part of a Kubernetes object, as plain data
Manifest = dict[str, Any]

# id of the user "nonroot" in distroless images; every id except 0 would work
USER_ID = 65532

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
# do not reorder the fields, because the hash that identifies model servers depends on the order of
# the fields
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Patch for the containers that Argo adds to the pod of a step: without it, a namespace that
# enforces the PodSecurity standard `restricted` rejects the pod. The pods of resource templates do
# not have these containers, so EXECUTOR_SECURITY would fail there.
EXECUTOR_SECURITY = {
    "initContainers": [{"name": "init", "securityContext": CONTAINER_SECURITY}],
    "containers": [{"name": "wait", "securityContext": CONTAINER_SECURITY}],
}
# `argo logs` finds the pods of a workflow by this label
WORKFLOW_LABEL = {WORKFLOW: "{{workflow.name}}"}
TMP_MOUNTS = [{"name": "tmp", "mountPath": "/tmp"}]


def environment_sources(secret_name: str = STORE_SECRET) -> list[Manifest]:
    """Return `envFrom` of a container: the ConfigMap with the addresses, and the Secret
    `secret_name` with the credentials. If the Secret does not exist, the pods get access through
    the IAM role of their ServiceAccount."""
    return [
        {"configMapRef": {"name": CONFIG_MAP}},
        {"secretRef": {"name": secret_name, "optional": True}},
    ]


def token_variables(serve_config: "ServeConfig") -> list[Manifest]:
    """Return the environment variable that contains the tokens which a model server accepts."""
    secret_reference = {"name": TOKEN_SECRET, "key": REKINDLE_TOKEN}
    if serve_config.token:
        return [{"name": REKINDLE_TOKEN, "valueFrom": {"secretKeyRef": secret_reference}}]
    return []


def secret_variables(variable_names: Iterable[str]) -> list[Manifest]:
    """Return the environment variables that `program.secrets` names."""
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": PROGRAM_SECRET, "key": name}}}
        for name in dict.fromkeys(variable_names)
    ]


def image_variables(image_name: str) -> list[Manifest]:
    """Return the environment variable that contains the image name of the pod; return [] if this
    name has no digest."""
    if "@" in image_name:
        return [{"name": REKINDLE_IMAGE, "value": image_name}]
    return []


def shutdown_variables(pod_config: "PodConfig") -> list[Manifest]:
    """Return the environment variables for a worker's grace period, for the cloud whose preemption
    notices the worker polls, and for its kind of nodes."""
    variables = {
        REKINDLE_GRACE: str(pod_config.grace_seconds),
        REKINDLE_NOTICE: pod_config.notice,
        REKINDLE_CAPACITY: SPOT_CAPACITY if pod_config.preemptible else "",
    }
    return [
        {"name": name, "value": variable_value}
        for name, variable_value in variables.items()
        if variable_value
    ]


def resource_requirements(pod_config: "PodConfig") -> Manifest:
    """Return the resource requests and limits of a pod. The memory limit equals the memory request.
    Pods have no CPU limit, because a CPU limit would throttle a pod even on an idle node."""
    resource_limits = {"memory": pod_config.memory}
    if pod_config.gpus:
        resource_limits[pod_config.gpu_resource] = str(pod_config.gpus)
    resource_requests = {
        "cpu": pod_config.cpu or "1",
        "memory": pod_config.memory,
        "ephemeral-storage": pod_config.disk,
    }
    return {"requests": resource_requests, "limits": resource_limits}


def tmp_volumes(pod_config: "PodConfig") -> list[Manifest]:
    """Return the volume of /tmp, the only writable directory of a pod; Argo stores artifacts in
    /tmp."""
    return [{"name": "tmp", "emptyDir": {"sizeLimit": pod_config.disk}}]


def pod_metadata(pod_config: "PodConfig", labels: Mapping[str, str] = WORKFLOW_LABEL) -> Manifest:
    """Return the metadata of the pods of a job or a Deployment."""
    return {"labels": {**pod_config.labels, **labels}} | (
        {"annotations": pod_config.annotations} if pod_config.annotations else {}
    )


def hardened_container(
    container_name: str, pod: "PodConfig", args: list[str], **container_fields: object
) -> Manifest:
    """Return a hardened container that runs `python ARGS` with the common environment."""
    return {
        "name": container_name,
        "image": pod.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python"],
        "args": args,
        "env": POD_ADDRESS,
        "envFrom": environment_sources(),
        "resources": resource_requirements(pod),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": TMP_MOUNTS,
        **container_fields,
    }


def node_affinity(pod_config: "PodConfig") -> Manifest:
    """Return the affinity that keeps a pod away from nodes with the labels in `avoid`."""
    if not pod_config.avoid:
        return {}
    excluded_labels = [
        {"key": key, "operator": "NotIn", "values": [value]}
        for key, value in sorted(pod_config.avoid.items())
    ]
    node_selector = {"nodeSelectorTerms": [{"matchExpressions": excluded_labels}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": node_selector}}


def pod_tolerations(pod_config: "PodConfig") -> list[Manifest]:
    """Return the pod's tolerations, including how long the pod may stay on a node that does not
    respond."""
    if pod_config.node_lost_seconds is None:
        return pod_config.tolerations

    no_execute_toleration = {
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": pod_config.node_lost_seconds,
    }
    return [
        *pod_config.tolerations,
        {"key": "node.kubernetes.io/not-ready", **no_execute_toleration},
        {"key": "node.kubernetes.io/unreachable", **no_execute_toleration},
    ]


def pod_spec(
    pod_config: "PodConfig",
    service_account: str,
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

    spec_values = {
        "serviceAccountName": service_account,
        "automountServiceAccountToken": False,
        "securityContext": POD_SECURITY,
        "nodeSelector": pod_config.node_selector,
        "affinity": node_affinity(pod_config),
        "tolerations": pod_tolerations(pod_config),
        "topologySpreadConstraints": [
            {"topologyKey": key, **spread_constraint} for key in pod_config.spread
        ],
        "priorityClassName": pod_config.priority_class,
        "containers": containers,
        "volumes": tmp_volumes(pod_config),
        **spec_fields,
    }

    return {key: value for key, value in spec_values.items() if value not in ({}, [], "")}


def workflow_labels(pipeline_name: str) -> dict[str, str]:
    """Return the labels by which commands find the workflows of the pipeline `pipeline_name`."""
    return {**PART_OF_REKINDLE, NAME_LABEL: pipeline_name}
