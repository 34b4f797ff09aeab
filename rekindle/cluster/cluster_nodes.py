"""Compare a pod with the nodes of a cluster as the Kubernetes scheduler does: labels, taints,
allocatable and free resources."""

from collections.abc import Mapping
from dataclasses import dataclass

from argolocal.manifest.types import Object
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.training.cost.pod_requests import GIB, Pod, quantity_or_zero, read_pod

NODES = Resource("v1", "nodes", namespaced=False)
ALL_PODS = Resource("v1", "pods", namespaced=False)
REPELLING_EFFECTS = ("NoSchedule", "NoExecute")


@dataclass(frozen=True)
class Obstacle:
    """The reason why no node can run a pod. `may_end`: True if the reason may disappear, for
    example when an autoscaler adds a node or another pod ends."""

    text: str
    may_end: bool


@dataclass(frozen=True)
class Node:
    """A node that accepts new pods. `free`: the allocatable resources of the node minus the
    requests of its pods."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]
    allocatable: Mapping[str, float]
    free: Mapping[str, float]

    def has_labels(self, pod: Pod) -> bool:
        return all(self.labels.get(name) == value for name, value in pod.labels.items())

    def untolerated_taints(self, pod: Pod) -> list[str]:
        """Return the taints that keep a pod away from this node."""
        return [
            f"{taint['key']}={taint.get('value', '')}:{taint['effect']}"
            for taint in self.taints
            if taint.get("effect") in REPELLING_EFFECTS and not _tolerates(pod, taint)
        ]


def read_nodes(cluster: Cluster, with_pods: bool) -> list[Node]:
    """Return the nodes that accept pods. Raises ApiError.

    If `with_pods` is True, the requests of running pods are subtracted from the free resources,
    provided that the user may read the pods of all namespaces.
    """
    requested = _requests_by_node(cluster) if with_pods else {}
    nodes = []

    for item in cluster.list_objects(NODES):
        spec = item.get("spec") or {}
        if spec.get("unschedulable"):
            continue

        name = item["metadata"]["name"]
        allocatable = parse_amounts((item.get("status") or {}).get("allocatable") or {})
        free = {
            key: value - requested.get(name, {}).get(key, 0.0) for key, value in allocatable.items()
        }
        labels = item["metadata"].get("labels") or {}
        nodes.append(Node(name, labels, tuple(spec.get("taints") or ()), allocatable, free))

    return nodes


def find_obstacle(nodes: list[Node], pod: Pod) -> Obstacle | None:
    """Return the reason why no node can run the pod now, or None."""
    selected = [node for node in nodes if node.has_labels(pod)]
    if not selected:
        labels = ", ".join(f"{name}={value}" for name, value in pod.labels.items())
        absence = f"no node has the labels {labels}" if labels else "no node exists"
        return Obstacle(f"{absence}; an autoscaler may add one", may_end=True)

    tolerated = [node for node in selected if not node.untolerated_taints(pod)]
    if not tolerated:
        taints = sorted({taint for node in selected for taint in node.untolerated_taints(pod)})
        return Obstacle(
            f"every node has a taint that the pod does not tolerate ({', '.join(taints)})",
            may_end=False,
        )

    large = [node for node in tolerated if not list_shortages(pod.requests, node.allocatable)]
    if not large:
        largest = max(tolerated, key=lambda node: node.allocatable.get("cpu", 0.0))
        shortage = ", ".join(list_shortages(pod.requests, largest.allocatable))
        return Obstacle(
            f"the pod does not fit into any node ({shortage} of {largest.name})", may_end=False
        )

    if all(list_shortages(pod.requests, node.free) for node in large):
        emptiest = max(large, key=lambda node: node.free.get("cpu", 0.0))
        shortage = ", ".join(list_shortages(pod.requests, emptiest.free))

        return Obstacle(
            f"the pod fits into a node, but other pods use its resources now ({shortage} of"
            f" {emptiest.name})",
            may_end=True,
        )

    return None


def list_shortages(needed: Mapping[str, float], available: Mapping[str, float]) -> list[str]:
    """Return a text for each resource of which less is available than the pod requests.

    A device (a name with "/") that is missing in `available` is unavailable; any other missing
    resource counts as unlimited.
    """
    return [
        f"{_format_amount(name, value)} {name} of {_format_amount(name, available.get(name, 0.0))}"
        for name, value in needed.items()
        if value > available.get(name, 0.0) + 1e-6 and (name in available or "/" in name)
    ]


def parse_amounts(texts: Mapping[str, str | float]) -> dict[str, float]:
    return {name: quantity_or_zero(text) for name, text in texts.items()}


def _requests_by_node(cluster: Cluster) -> dict[str, dict[str, float]]:
    try:
        pods = cluster.list_objects(ALL_PODS)
    except ApiError as error:
        if error.code != 403:
            raise
        return {}

    result: dict[str, dict[str, float]] = {}
    for pod in filter(_uses_its_node, pods):
        requested = result.setdefault(pod["spec"]["nodeName"], {})
        for name, value in read_pod(pod["spec"]).requests.items():
            requested[name] = requested.get(name, 0.0) + value

    return result


def _uses_its_node(pod: Object) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    return bool((pod.get("spec") or {}).get("nodeName")) and phase not in ("Succeeded", "Failed")


def _tolerates(pod: Pod, taint: Mapping[str, str]) -> bool:
    return any(
        key in ("", taint["key"]) and value in ("", taint.get("value", ""))
        for key, value in pod.tolerations
    )


def _format_amount(name: str, value: float) -> str:
    if name in ("memory", "ephemeral-storage"):
        return f"{value / GIB:.3g}Gi"
    return f"{value:.3g}"
