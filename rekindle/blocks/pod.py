"""What every pod of ours has in common, as plain data: environment, security, resources, placement.

Addresses and credentials come from a ConfigMap and a Secret of the namespace, never from the manifest.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from argolocal.manifest.names import WORKFLOW

if TYPE_CHECKING:
    from rekindle.blocks.settings import PodConfig

Manifest = dict[str, Any]

CONFIG_MAP, SECRET = "rekindle", "rekindle-s3"
SERVING_SECRET = "rekindle-serving"  # keys of the object store that can read releases, and nothing else
NOBODY = 65532  # the user "nonroot" of distroless images; any number works that is not 0

POD_IP = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": NOBODY,
    "runAsGroup": NOBODY,
    "fsGroup": NOBODY,
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}  # of that PodSecurity standard
CONTAINER_SECURITY = {  # in this order: a hash of it identifies servers
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Argo's own containers in the pod of a step, which a namespace that enforces the PodSecurity standard `restricted`
# refuses as they are. As a patch of a template that has them: a resource template has none, and breaks.
EXECUTOR_SECURITY = {
    "initContainers": [{"name": "init", "securityContext": CONTAINER_SECURITY}],
    "containers": [{"name": "wait", "securityContext": CONTAINER_SECURITY}],
}
# `argo logs` finds the pods of a workflow by this label
OF_WORKFLOW = {WORKFLOW: "{{workflow.name}}"}
MOUNTS = [{"name": "tmp", "mountPath": "/tmp"}]


def environment(secret: str = SECRET) -> list[Manifest]:
    """The addresses and the keys; without that Secret the pods use what their ServiceAccount is granted (IAM)."""
    return [{"configMapRef": {"name": CONFIG_MAP}}, {"secretRef": {"name": secret, "optional": True}}]


def image_digest(image: str) -> list[Manifest]:
    """By what a pod knows the code that it runs, where its image is named by its digest."""
    return [{"name": "REKINDLE_IMAGE", "value": image}] if "@" in image else []


def resources(pod: "PodConfig") -> Manifest:
    """Memory is limited to the request; CPU is not limited, since throttling only makes a pod slow."""
    limits = {"memory": pod.memory}
    if pod.gpus:
        limits[pod.gpu_resource] = str(pod.gpus)
    requests = {"cpu": pod.cpu or "1", "memory": pod.memory, "ephemeral-storage": pod.disk}
    return {"requests": requests, "limits": limits}


def volumes(pod: "PodConfig") -> list[Manifest]:
    """The one place where a pod can write; Argo's artifacts are below it."""
    return [{"name": "tmp", "emptyDir": {"sizeLimit": pod.disk}}]


def metadata(pod: "PodConfig", labels: Mapping[str, str] = OF_WORKFLOW) -> Manifest:
    """The metadata of the pods of a job or a Deployment."""
    return {"labels": {**pod.labels, **labels}} | ({"annotations": pod.annotations} if pod.annotations else {})


def container(name: str, pod: "PodConfig", args: list[str], **more: Any) -> Manifest:
    """A container that runs `python ARGS` with our environment, hardened."""
    return {
        "name": name,
        "image": pod.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python"],
        "args": args,
        "env": POD_IP,
        "envFrom": environment(),
        "resources": resources(pod),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": MOUNTS,
        **more,
    }


def affinity(pod: "PodConfig") -> Manifest:
    """Keeps a pod off the nodes it must avoid; those without the label are none of them."""
    if not pod.avoid:
        return {}
    never = [{"key": key, "operator": "NotIn", "values": [value]} for key, value in sorted(pod.avoid.items())]
    required = {"nodeSelectorTerms": [{"matchExpressions": never}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def tolerations(pod: "PodConfig") -> list[Manifest]:
    """The pod's own, and those that say how long a silent node keeps its pods."""
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": pod.node_lost_seconds}
    taints = [] if pod.node_lost_seconds is None else ["not-ready", "unreachable"]
    return [*pod.tolerations, *({"key": f"node.kubernetes.io/{taint}", **lost} for taint in taints)]


def pod_spec(
    pod: "PodConfig", account: str, containers: list[Manifest], labels: Mapping[str, str] = OF_WORKFLOW, **more: Any
) -> Manifest:
    """A PodSpec around `containers` that needs nothing of the Kubernetes API; `labels` are those of its pods."""
    apart = {"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": dict(labels)}}
    spec = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "securityContext": POD_SECURITY,
        "nodeSelector": pod.node_selector,
        "affinity": affinity(pod),
        "tolerations": tolerations(pod),
        "topologySpreadConstraints": [{"topologyKey": key, **apart} for key in pod.spread],
        "priorityClassName": pod.priority_class,
        "containers": containers,
        "volumes": volumes(pod),
        **more,
    }
    return {key: value for key, value in spec.items() if value not in ({}, [], "")}


def labels(name: str) -> dict[str, str]:
    """Of the workflow of the pipeline `name`: commands know their runs by it."""
    return {"app.kubernetes.io/part-of": "rekindle", "app.kubernetes.io/name": name}
