"""Compares the pods of a run with the nodes of a cluster, the ResourceQuotas of the namespace, and
the quotas of Kueue.

ResourceQuotas are defined by Kubernetes 1.30; rekindle/cluster/kueue reads the quotas of Kueue.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rekindle.cluster.cluster_nodes import find_obstacle, list_shortages, parse_amounts, read_nodes
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.cluster.kueue.admission import check_admission
from rekindle.cluster.kueue.queued_jobs import QueuedJob
from rekindle.training.cost.pod_requests import PodReplicas

QUOTA_RESOURCE = Resource("v1", "resourcequotas")


def find_shortages(
    cluster: Cluster,
    replicas_by_task: Mapping[str, list[PodReplicas]],
    peak_requests: Mapping[str, float],
    queued_jobs: Sequence[QueuedJob],
) -> list[str]:
    """Return sentences about pods that do not fit into the cluster, and about failed comparisons.
    `replicas_by_task`: pods of each task; `queued_jobs`: jobs and pods that will wait in a queue of
    Kueue."""
    shortage_sentences: list[str] = []
    shortage_functions: dict[str, Callable[[], Iterable[str]]] = {
        "nodes": lambda: _find_node_shortages(cluster, replicas_by_task, peak_requests),
        "quotas": lambda: _find_quota_shortages(cluster, peak_requests),
        "queue": lambda: _find_queue_shortages(cluster, queued_jobs),
    }
    for subject, find_subject_shortages in shortage_functions.items():
        try:
            shortage_sentences += find_subject_shortages()
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


def _find_quota_shortages(cluster: Cluster, peak_requests: Mapping[str, float]) -> Iterator[str]:
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


def _find_queue_shortages(cluster: Cluster, queued_jobs: Sequence[QueuedJob]) -> list[str]:
    return [str(finding) for finding in check_admission(cluster, queued_jobs)]
