"""Compares the pods of a run with the nodes of a cluster, the ResourceQuotas of the namespace, and
the quotas of Kueue.

The quotas are defined by Kubernetes 1.30 (ResourceQuota) and Kueue 0.19 (ClusterQueue and Cohort in
v1beta2; v1beta1 has other names for the cohort).
"""

import math
from collections.abc import Iterator, Mapping

from argolocal.manifest.types import Object
from rekindle.cluster.cluster_nodes import find_obstacle, list_shortages, parse_amounts, read_nodes
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.cluster.queue import KUEUE_VERSIONS, list_kueue_objects
from rekindle.operations.plan.resources import sum_requests
from rekindle.training.cost.pod_requests import PodReplicas, parse_quantity_or_zero

QUOTA_RESOURCE = Resource("v1", "resourcequotas")


def find_shortages(
    cluster: Cluster,
    replicas_by_task: Mapping[str, list[PodReplicas]],
    peak_requests: Mapping[str, float],
) -> list[str]:
    """Return sentences about pods that do not fit into the cluster, and about failed comparisons.
    `replicas_by_task`: pods of each task."""
    shortage_sentences: list[str] = []
    shortage_functions = {
        "nodes": _find_node_shortages,
        "quotas": _find_quota_shortages,
        "queue": _find_queue_shortages,
    }
    for subject, shortage_function in shortage_functions.items():
        try:
            shortage_sentences += shortage_function(cluster, replicas_by_task, peak_requests)
        except ApiError as error:
            shortage_sentences.append(f"not compared with the {subject} of the cluster: {error}")

    return list(dict.fromkeys(shortage_sentences))


def _find_node_shortages(
    cluster: Cluster,
    replicas_by_task: Mapping[str, list[PodReplicas]],
    peak_requests: Mapping[str, float],
) -> Iterator[str]:
    cluster_nodes = read_nodes(cluster, reads_pods=False)
    for task_name, replicas in replicas_by_task.items():
        for pod_requests in (replica_group.pod for replica_group in replicas):
            pod_obstacle = find_obstacle(cluster_nodes, pod_requests)
            if pod_obstacle:
                yield f"{task_name}: {pod_obstacle.text}"

    total_capacity: dict[str, float] = {}
    for cluster_node in cluster_nodes:
        for resource_name, resource_amount in cluster_node.allocatable.items():
            total_capacity[resource_name] = total_capacity.get(resource_name, 0.0) + resource_amount

    shortage = list_shortages(peak_requests, total_capacity)
    if shortage:
        yield f"the peak of the run exceeds all nodes together: {', '.join(shortage)}"


def _find_quota_shortages(
    cluster: Cluster,
    replicas_by_task: Mapping[str, list[PodReplicas]],
    peak_requests: Mapping[str, float],
) -> Iterator[str]:
    for quota_object in cluster.list_objects(QUOTA_RESOURCE):
        quota_status = quota_object.get("status") or {}
        hard_limits = parse_amounts(
            quota_status.get("hard") or quota_object["spec"].get("hard") or {}
        )
        used_amounts = parse_amounts(quota_status.get("used") or {})
        free_amounts = {
            resource_name.removeprefix("requests."): hard_limits[resource_name]
            - used_amounts.get(resource_name, 0.0)
            for resource_name in hard_limits
        }

        shortage = list_shortages(
            peak_requests,
            {
                resource_name: free_amounts[resource_name]
                for resource_name in peak_requests
                if resource_name in free_amounts
            },
        )
        if shortage:
            quota_name = quota_object["metadata"]["name"]
            yield (
                f"the peak of the run exceeds the unused part of the ResourceQuota {quota_name}:"
                f" {', '.join(shortage)}"
            )


def _find_queue_shortages(
    cluster: Cluster,
    replicas_by_task: Mapping[str, list[PodReplicas]],
    peak_requests: Mapping[str, float],
) -> Iterator[str]:
    for task_name, replicas in replicas_by_task.items():
        for queue_name in sorted(
            {replica_group.queue for replica_group in replicas if replica_group.queue}
        ):
            needed_amounts = sum_requests(
                replica_group for replica_group in replicas if replica_group.queue == queue_name
            )
            local_queue = _find_kueue_object(cluster, "localqueues", queue_name)
            if not local_queue:
                yield (
                    f"{task_name}: the LocalQueue {queue_name} does not exist in namespace"
                    f" {cluster.namespace}"
                )
                continue

            cluster_queue = _find_kueue_object(
                cluster, "clusterqueues", local_queue["spec"]["clusterQueue"], is_namespaced=False
            )
            if not cluster_queue:
                continue

            shortage = list_shortages(
                needed_amounts, _compute_usable_quota(cluster, cluster_queue, needed_amounts)
            )
            if shortage:
                yield (
                    f"{task_name} exceeds the quota of {cluster_queue['metadata']['name']}:"
                    f" {', '.join(shortage)}"
                )


def _find_kueue_object(
    cluster: Cluster, plural_name: str, object_name: str, is_namespaced: bool = True
) -> Object | None:
    for api_version in KUEUE_VERSIONS:
        kueue_object = cluster.find(
            Resource(f"kueue.x-k8s.io/{api_version}", plural_name, is_namespaced), object_name
        )
        if kueue_object:
            return kueue_object
    return None


def _compute_usable_quota(
    cluster: Cluster, cluster_queue: Object, needed_amounts: Mapping[str, float]
) -> dict[str, float]:
    """Return the maximum amount that a ClusterQueue can use of each requested resource, over all
    flavors. Resources that the queue does not limit are left out."""
    usable_amounts: dict[str, float] = {}
    cohort_name = _get_cohort_name(cluster_queue)

    for (flavor_name, resource_name), resource_quota in _list_flavor_quotas(cluster_queue):
        if resource_name not in needed_amounts:
            continue

        borrowing_limit = resource_quota.get("borrowingLimit")
        # without a borrowingLimit, the queue may use all quotas of the cohort
        if cohort_name and borrowing_limit is None:
            cohort_amount = _sum_cohort_quota(cluster, cohort_name, flavor_name, resource_name)
        else:
            cohort_amount = parse_quantity_or_zero(
                resource_quota.get("nominalQuota") or 0
            ) + parse_quantity_or_zero(borrowing_limit or 0)

        usable_amounts[resource_name] = usable_amounts.get(resource_name, 0.0) + cohort_amount

    return usable_amounts


def _sum_cohort_quota(
    cluster: Cluster, cohort_name: str, flavor_name: str, resource_name: str
) -> float:
    """Return the sum of the nominal quotas of a cohort's ClusterQueues; infinity if the sum is
    unknown.

    The sum is unknown if the user may not read the queues, or if a Cohort object refers to the
    cohort, because quotas may then also come from other cohorts.
    """
    try:
        if any(
            cohort_name in (kueue_object["metadata"]["name"], _get_cohort_name(kueue_object))
            for kueue_object in list_kueue_objects(cluster, "cohorts", False)
        ):
            return math.inf

        cohort_queues = [
            kueue_object
            for kueue_object in list_kueue_objects(cluster, "clusterqueues", False)
            if _get_cohort_name(kueue_object) == cohort_name
        ]
    except ApiError:
        return math.inf

    resource_quotas = [
        queue_quota
        for cohort_queue in cohort_queues
        for quota_key, queue_quota in _list_flavor_quotas(cohort_queue)
        if quota_key == (flavor_name, resource_name)
    ]
    return sum(
        parse_quantity_or_zero(resource_quota.get("nominalQuota") or 0)
        for resource_quota in resource_quotas
    )


def _get_cohort_name(kueue_object: Object) -> str:
    """Return the cohort of a ClusterQueue, or the parent of a Cohort; "" without one."""
    object_spec = kueue_object.get("spec") or {}
    cohort_keys = ("cohortName", "cohort", "parentName", "parent")
    return next((object_spec[key] for key in cohort_keys if object_spec.get(key)), "")


def _list_flavor_quotas(cluster_queue: Object) -> Iterator[tuple[tuple[str, str], Object]]:
    """Yield each quota of a ClusterQueue with the names of its flavor and resource."""
    for resource_group in cluster_queue["spec"].get("resourceGroups") or []:
        for flavor in resource_group.get("flavors") or []:
            for resource_quota in flavor.get("resources") or []:
                yield (flavor["name"], resource_quota["name"]), resource_quota
