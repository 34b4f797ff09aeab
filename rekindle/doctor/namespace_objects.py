"""Read the objects of a namespace that several checks need."""

from typing import Any

from rekindle.cluster.kubernetes_api import Cluster, Resource

NAMESPACES = Resource("v1", "namespaces", namespaced=False)
SECRETS = Resource("v1", "secrets")
CONFIG_MAPS = Resource("v1", "configmaps")
POD_SECURITY_LABEL = "pod-security.kubernetes.io/enforce"


def read_data(cluster: Cluster, resource: Resource, object_name: str) -> dict[str, Any]:
    """Return the data of a ConfigMap or Secret; {} if the object does not exist."""
    return (cluster.find(resource, object_name) or {}).get("data") or {}


def read_enforced_level(cluster: Cluster) -> str:
    """Return the PodSecurity standard that the namespace enforces; "" if the namespace enforces no
    PodSecurity standard."""
    return (cluster.get(NAMESPACES, cluster.namespace)["metadata"].get("labels") or {}).get(
        POD_SECURITY_LABEL, ""
    )
