"""Compares the pods of a run with a cluster: nodes, ResourceQuotas of the namespace, quotas of
Kueue.

The quotas are defined by Kubernetes 1.30 (ResourceQuota) and Kueue 0.19 (ClusterQueue and Cohort in
v1beta2; v1beta1 has other names for the cohort).
"""

import math
from collections.abc import Iterator, Mapping

from argolocal.manifest.types import Object
from rekindle.cluster.cluster_nodes import find_obstacle, list_shortages, parse_amounts, read_nodes
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.cluster.queue import VERSIONS, list_kueue_objects
from rekindle.operations.plan.resources import totals
from rekindle.training.cost.pod_requests import Replicas, quantity_or_zero

QUOTAS = Resource("v1", "resourcequotas")


def find_shortages(
    cluster: Cluster, pods: Mapping[str, list[Replicas]], peak: Mapping[str, float]
) -> list[str]:
    """Return sentences about pods that do not fit into the cluster, and about failed comparisons.
    `pods`: pods of each task."""
    lines: list[str] = []
    comparisons = {
        "nodes": _node_shortages,
        "quotas": _quota_shortages,
        "queue": _queue_shortages,
    }
    for subject, compare in comparisons.items():
        try:
            lines += compare(cluster, pods, peak)
        except ApiError as error:
            lines.append(f"not compared with the {subject} of the cluster: {error}")

    return list(dict.fromkeys(lines))


def _node_shortages(
    cluster: Cluster, pods: Mapping[str, list[Replicas]], peak: Mapping[str, float]
) -> Iterator[str]:
    nodes = read_nodes(cluster, with_pods=False)
    for task, replicas in pods.items():
        for pod in (item.pod for item in replicas):
            obstacle = find_obstacle(nodes, pod)
            if obstacle:
                yield f"{task}: {obstacle.text}"

    capacity: dict[str, float] = {}
    for node in nodes:
        for name, value in node.allocatable.items():
            capacity[name] = capacity.get(name, 0.0) + value

    shortage = list_shortages(peak, capacity)
    if shortage:
        yield f"the peak of the run exceeds all nodes together: {', '.join(shortage)}"


def _quota_shortages(
    cluster: Cluster, pods: Mapping[str, list[Replicas]], peak: Mapping[str, float]
) -> Iterator[str]:
    for quota in cluster.list_objects(QUOTAS):
        status = quota.get("status") or {}
        hard = parse_amounts(status.get("hard") or quota["spec"].get("hard") or {})
        used = parse_amounts(status.get("used") or {})
        free = {name.removeprefix("requests."): hard[name] - used.get(name, 0.0) for name in hard}

        shortage = list_shortages(peak, {name: free[name] for name in peak if name in free})
        if shortage:
            name = quota["metadata"]["name"]
            yield (
                f"the peak of the run exceeds the unused part of the ResourceQuota {name}:"
                f" {', '.join(shortage)}"
            )


def _queue_shortages(
    cluster: Cluster, pods: Mapping[str, list[Replicas]], peak: Mapping[str, float]
) -> Iterator[str]:
    for task, replicas in pods.items():
        for name in sorted({item.queue for item in replicas if item.queue}):
            needed = totals(item for item in replicas if item.queue == name)
            queue = _find_kueue_object(cluster, "localqueues", name)
            if not queue:
                yield (
                    f"{task}: the LocalQueue {name} does not exist in namespace {cluster.namespace}"
                )
                continue

            cluster_queue = _find_kueue_object(
                cluster, "clusterqueues", queue["spec"]["clusterQueue"], namespaced=False
            )
            if not cluster_queue:
                continue

            shortage = list_shortages(needed, _usable_quota(cluster, cluster_queue, needed))
            if shortage:
                yield (
                    f"{task} exceeds the quota of {cluster_queue['metadata']['name']}:"
                    f" {', '.join(shortage)}"
                )


def _find_kueue_object(
    cluster: Cluster, plural: str, name: str, namespaced: bool = True
) -> Object | None:
    for version in VERSIONS:
        found = cluster.find(Resource(f"kueue.x-k8s.io/{version}", plural, namespaced), name)
        if found:
            return found
    return None


def _usable_quota(cluster: Cluster, queue: Object, needed: Mapping[str, float]) -> dict[str, float]:
    """Return the maximum amount that a ClusterQueue can use of each requested resource, over all
    flavors. Resources that the queue does not limit are left out."""
    result: dict[str, float] = {}
    cohort = _cohort(queue)

    for (flavor, name), resource in _quotas_by_flavor(queue):
        if name not in needed:
            continue

        borrowing_limit = resource.get("borrowingLimit")
        # without a borrowingLimit, the queue may use all quotas of the cohort
        if cohort and borrowing_limit is None:
            amount = _cohort_quota(cluster, cohort, flavor, name)
        else:
            amount = quantity_or_zero(resource.get("nominalQuota") or 0) + quantity_or_zero(
                borrowing_limit or 0
            )

        result[name] = result.get(name, 0.0) + amount

    return result


def _cohort_quota(cluster: Cluster, cohort: str, flavor: str, name: str) -> float:
    """Return the sum of the nominal quotas of a cohort's ClusterQueues; infinity if the sum is
    unknown.

    The sum is unknown if the user may not read the queues, or if a Cohort object refers to the
    cohort, because quotas may then also come from other cohorts.
    """
    try:
        if any(
            cohort in (item["metadata"]["name"], _cohort(item))
            for item in list_kueue_objects(cluster, "cohorts", False)
        ):
            return math.inf

        queues = [
            item
            for item in list_kueue_objects(cluster, "clusterqueues", False)
            if _cohort(item) == cohort
        ]
    except ApiError:
        return math.inf

    resources = [
        found
        for queue in queues
        for key, found in _quotas_by_flavor(queue)
        if key == (flavor, name)
    ]
    return sum(quantity_or_zero(resource.get("nominalQuota") or 0) for resource in resources)


def _cohort(item: Object) -> str:
    """Return the cohort of a ClusterQueue, or the parent of a Cohort; "" without one."""
    spec = item.get("spec") or {}
    keys = ("cohortName", "cohort", "parentName", "parent")
    return next((spec[key] for key in keys if spec.get(key)), "")


def _quotas_by_flavor(queue: Object) -> Iterator[tuple[tuple[str, str], Object]]:
    """Yield each quota of a ClusterQueue with the names of its flavor and resource."""
    for group in queue["spec"].get("resourceGroups") or []:
        for flavor in group.get("flavors") or []:
            for resource in flavor.get("resources") or []:
                yield (flavor["name"], resource["name"]), resource
