"""Compare a pod with the nodes of a cluster as the Kubernetes scheduler does: labels, taints,
allocatable and free resources."""

from collections.abc import Mapping
from dataclasses import dataclass

from argolocal.manifest.types import Object
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.training.cost.pod_requests import (
    GIB_BYTES,
    PodRequests,
    parse_quantity_or_zero,
    read_pod,
)

NODES = Resource("v1", "nodes", namespaced=False)
ALL_PODS = Resource("v1", "pods", namespaced=False)
REPELLING_EFFECTS = ("NoSchedule", "NoExecute")


@dataclass(frozen=True)
class Obstacle:
    """The reason why no node can run a pod. `may_end` is True if the reason may disappear, for
    example when an autoscaler adds a node or another pod ends."""

    text: str
    may_end: bool


@dataclass(frozen=True)
class Node:
    """A node that accepts new pods. `allocatable`: resources that pods can use, in cores, bytes and
    devices; `free`: these resources minus the requests of the node's pods."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]
    allocatable: Mapping[str, float]
    free: Mapping[str, float]

    def has_labels(self, pod: PodRequests) -> bool:
        return all(self.labels.get(name) == label_value for name, label_value in pod.labels.items())

    def untolerated_taints(self, pod: PodRequests) -> list[str]:
        """Return the taints that keep a pod away from this node."""
        return [
            f"{taint['key']}={taint.get('value', '')}:{taint['effect']}"
            for taint in self.taints
            if taint.get("effect") in REPELLING_EFFECTS and not _is_tolerated(pod, taint)
        ]


def read_nodes(cluster: Cluster, reads_pods: bool) -> list[Node]:
    """Return the nodes that accept pods. Raises ApiError.

    If `reads_pods` is True, the requests of running pods are subtracted from the free resources,
    provided that the user may read the pods of all namespaces.
    """
    requests_by_node = _sum_requests_by_node(cluster) if reads_pods else {}
    nodes = []

    for node_object in cluster.list_objects(NODES):
        node_spec = node_object.get("spec") or {}
        if node_spec.get("unschedulable"):
            continue

        node_name = node_object["metadata"]["name"]
        allocatable = parse_amounts((node_object.get("status") or {}).get("allocatable") or {})
        free_resources = {
            key: resource_amount - requests_by_node.get(node_name, {}).get(key, 0.0)
            for key, resource_amount in allocatable.items()
        }
        node_labels = node_object["metadata"].get("labels") or {}
        nodes.append(
            Node(
                node_name,
                node_labels,
                tuple(node_spec.get("taints") or ()),
                allocatable,
                free_resources,
            )
        )

    return nodes


def find_obstacle(nodes: list[Node], pod: PodRequests) -> Obstacle | None:
    """Return the reason why no node can run the pod now, or None."""
    matching_nodes = [node for node in nodes if node.has_labels(pod)]
    if not matching_nodes:
        label_texts = ", ".join(f"{name}={label_value}" for name, label_value in pod.labels.items())
        absence_text = f"no node has the labels {label_texts}" if label_texts else "no node exists"
        return Obstacle(f"{absence_text}; an autoscaler may add one", may_end=True)

    tolerated_nodes = [node for node in matching_nodes if not node.untolerated_taints(pod)]
    if not tolerated_nodes:
        untolerated_taints = sorted(
            {taint for node in matching_nodes for taint in node.untolerated_taints(pod)}
        )
        return Obstacle(
            "every node has a taint that the pod does not tolerate"
            f" ({', '.join(untolerated_taints)})",
            may_end=False,
        )

    large_enough_nodes = [
        node for node in tolerated_nodes if not list_shortages(pod.requests, node.allocatable)
    ]
    if not large_enough_nodes:
        largest_node = max(tolerated_nodes, key=lambda node: node.allocatable.get("cpu", 0.0))
        shortage_text = ", ".join(list_shortages(pod.requests, largest_node.allocatable))
        return Obstacle(
            f"the pod does not fit into any node ({shortage_text} of {largest_node.name})",
            may_end=False,
        )

    if all(list_shortages(pod.requests, node.free) for node in large_enough_nodes):
        emptiest_node = max(large_enough_nodes, key=lambda node: node.free.get("cpu", 0.0))
        shortage_text = ", ".join(list_shortages(pod.requests, emptiest_node.free))

        return Obstacle(
            f"the pod fits into a node, but other pods use its resources now ({shortage_text} of"
            f" {emptiest_node.name})",
            may_end=True,
        )

    return None


def list_shortages(
    requested_amounts: Mapping[str, float], available_amounts: Mapping[str, float]
) -> list[str]:
    """Return a text for each resource of which less is available than the pod requests.

    A device (a resource whose name contains "/") that is missing in `available_amounts` is not
    available; any other missing resource counts as unlimited.
    """
    return [
        f"{_format_amount(name, requested_amount)} {name} of"
        f" {_format_amount(name, available_amounts.get(name, 0.0))}"
        for name, requested_amount in requested_amounts.items()
        if requested_amount > available_amounts.get(name, 0.0) + 1e-6
        and (name in available_amounts or "/" in name)
    ]


def parse_amounts(amount_texts: Mapping[str, str | float]) -> dict[str, float]:
    return {name: parse_quantity_or_zero(text) for name, text in amount_texts.items()}


def _sum_requests_by_node(cluster: Cluster) -> dict[str, dict[str, float]]:
    try:
        pod_objects = cluster.list_objects(ALL_PODS)
    except ApiError as error:
        if error.code != 403:
            raise
        return {}

    requests_by_node: dict[str, dict[str, float]] = {}
    for pod_object in filter(_uses_its_node, pod_objects):
        node_requests = requests_by_node.setdefault(pod_object["spec"]["nodeName"], {})
        for name, requested_amount in read_pod(pod_object["spec"]).requests.items():
            node_requests[name] = node_requests.get(name, 0.0) + requested_amount

    return requests_by_node


def _uses_its_node(pod_object: Object) -> bool:
    phase = (pod_object.get("status") or {}).get("phase")
    return bool((pod_object.get("spec") or {}).get("nodeName")) and phase not in (
        "Succeeded",
        "Failed",
    )


def _is_tolerated(pod: PodRequests, taint: Mapping[str, str]) -> bool:
    return any(
        key in ("", taint["key"]) and taint_value in ("", taint.get("value", ""))
        for key, taint_value in pod.tolerations
    )


def _format_amount(resource_name: str, amount: float) -> str:
    if resource_name in ("memory", "ephemeral-storage"):
        return f"{amount / GIB_BYTES:.3g}Gi"
    return f"{amount:.3g}"
