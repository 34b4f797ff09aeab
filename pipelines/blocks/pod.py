"""What every pod of ours has in common, as plain data: environment, security, resources, placement.

Addresses and credentials come from a ConfigMap and a Secret of the namespace, never from the manifest.
"""

from typing import Any

from pipelines.blocks.cluster import PodConfig

Manifest = dict[str, Any]

CONFIG_MAP, SECRET = "rekindle", "rekindle-s3"
NOBODY = 65532  # the user "nonroot" of distroless images; any number works that is not 0

# without a Secret the pods use what their ServiceAccount is granted (IAM)
ENVIRONMENT = [{"configMapRef": {"name": CONFIG_MAP}}, {"secretRef": {"name": SECRET, "optional": True}}]
POD_IP = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": NOBODY,
    "runAsGroup": NOBODY,
    "fsGroup": NOBODY,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
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
# the one place where a pod can write; Argo's artifacts are below it
VOLUMES = [{"name": "tmp", "emptyDir": {}}]
MOUNTS = [{"name": "tmp", "mountPath": "/tmp"}]


def resources(pod: PodConfig) -> Manifest:
    """Memory is limited to the request; CPU is not limited, since throttling only makes a pod slow."""
    limits = {"memory": pod.memory}
    if pod.gpus:
        limits["nvidia.com/gpu"] = str(pod.gpus)
    return {"requests": {"cpu": pod.cpu, "memory": pod.memory}, "limits": limits}


def container(name: str, pod: PodConfig, args: list[str], **more: Any) -> Manifest:
    """A container that runs `python ARGS` with our environment, hardened."""
    return {
        "name": name,
        "image": pod.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python"],
        "args": args,
        "env": POD_IP,
        "envFrom": ENVIRONMENT,
        "resources": resources(pod),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": MOUNTS,
        **more,
    }


def pod_spec(pod: PodConfig, account: str, containers: list[Manifest], **more: Any) -> Manifest:
    """A PodSpec around `containers` that needs nothing of the Kubernetes API."""
    spec = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "securityContext": POD_SECURITY,
        "nodeSelector": pod.node_selector,
        "tolerations": [*pod.tolerations, *more.pop("tolerations", [])],
        "priorityClassName": pod.priority_class,
        "containers": containers,
        "volumes": VOLUMES,
        **more,
    }
    return {key: value for key, value in spec.items() if value not in ({}, [], "")}
