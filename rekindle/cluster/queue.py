"""Report why the jobs of a run wait in a queue of Kueue.

    describe_waiting_jobs(cluster, "demo-4k2xp")
    # → ["train waits in the queue research, behind demo-7xk2p-train: insufficient unused quota"]

Source: type Workload of Kueue 0.19 (v1beta2; v1beta1 has the same fields).
"""

from collections import Counter
from dataclasses import dataclass

from argolocal.common.json_text import to_json
from argolocal.manifest.object_labels import REPLICA_TYPE_LABEL
from argolocal.manifest.types import Object
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.training.cost.pod_requests import QUEUE_LABEL

KUEUE_VERSIONS = ("v1beta2", "v1beta1")


def list_kueue_objects(
    cluster: Cluster, plural_kind: str, is_namespaced: bool = True
) -> list[Object]:
    """Return Kueue's objects of a kind; [] if Kueue is not installed. Raises ApiError."""
    for kueue_version in KUEUE_VERSIONS:
        try:
            return cluster.list_objects(
                Resource(f"kueue.x-k8s.io/{kueue_version}", plural_kind, is_namespaced)
            )
        except ApiError as error:
            if error.code != 404:
                raise
    return []


def has_queue(workflow_spec: Object) -> bool:
    """Return True if a template of a workflow, or an object that a template applies, names a queue
    of Kueue."""
    return QUEUE_LABEL in to_json(workflow_spec)


@dataclass(frozen=True)
class WaitingJob:
    """A job that waits in a queue. `job`: name of the job within its run, or its full name if the
    jobs of all runs were requested. `behind`: names of the jobs that are ahead in the queue, as
    NAMESPACE/NAME if a job is in another namespace; `reason`: the reason that Kueue gives.
    `sees_all_namespaces` is False if the user may not read the jobs of other namespaces.
    `extra_pods`: number of harvested workers that wait; if `extra_pods` is set, only `queue` of the
    other fields has a value."""

    job: str
    queue: str
    behind: tuple[str, ...] = ()
    reason: str = ""
    sees_all_namespaces: bool = True
    extra_pods: int = 0

    def __str__(self) -> str:
        if self.extra_pods:
            return f"{self.extra_pods} more workers wait for idle quota in the queue {self.queue}"

        position_text = f", behind {' '.join(self.behind[:3])}" if self.behind else ""
        if len(self.behind) > 3:
            position_text += f" and {len(self.behind) - 3} more"
        return f"{self.job} waits in the queue {self.queue}{position_text}: {self.reason}"


def describe_waiting_jobs(cluster: Cluster, run_name: str, is_queued: bool = False) -> list[str]:
    """Return a line with Kueue's reason for each job of the run that waits in a queue.

    If the user may not read Workloads, return [], or for a run that is known to be queued
    (`is_queued`) a line with the missing permission.
    """
    try:
        return [str(waiting_job) for waiting_job in find_waiting_jobs(cluster, run_name)]
    except ApiError as error:
        if error.code != 403:
            raise
        return [f"the queue of {run_name} cannot be read: {error}"] if is_queued else []


def find_waiting_jobs(cluster: Cluster, run_name: str = "") -> list[WaitingJob]:
    """Return the jobs of the run that wait in a queue, or without `run_name` the waiting jobs of
    the namespace, in Kueue's order. Raises ApiError with the code 403 if the user may not read the
    Workloads of the namespace."""
    pending_workloads = list(filter(_is_pending, list_kueue_objects(cluster, "workloads")))
    name_prefix = f"{run_name}-" if run_name else ""
    run_workloads = sorted(
        (
            workload
            for workload in pending_workloads
            if _read_owner_name(workload).startswith(name_prefix)
        ),
        key=_make_sort_key,
    )
    pod_workloads = [
        workload
        for workload in run_workloads
        if _belongs_to_pod(workload) and not _belongs_to_step(workload)
    ]
    job_workloads = [workload for workload in run_workloads if workload not in pod_workloads]

    waiting_jobs: list[WaitingJob] = []
    if job_workloads:
        others = _list_other_namespaces(cluster)
        competitors = [*pending_workloads, *(others or [])]
        cluster_queues = _map_cluster_queues(cluster)
        for workload in job_workloads:
            job_name = _read_owner_name(workload).removeprefix(name_prefix)
            waiting_jobs.append(
                WaitingJob(
                    job_name,
                    _read_queue_name(workload),
                    _list_owners_ahead(workload, competitors, cluster_queues, cluster.namespace),
                    _read_pending_reason(workload),
                    others is not None,
                )
            )

    pod_counts = Counter(_read_queue_name(workload) for workload in pod_workloads)
    waiting_jobs += [
        WaitingJob("", queue_name, extra_pods=pod_count)
        for queue_name, pod_count in pod_counts.items()
    ]
    return waiting_jobs


def _list_other_namespaces(cluster: Cluster) -> list[Object] | None:
    """Return the waiting Workloads of the other namespaces; None if the user may not read them."""
    try:
        all_workloads = list_kueue_objects(cluster, "workloads", is_namespaced=False)
    except ApiError as error:
        if error.code != 403:
            raise
        return None

    return [
        workload
        for workload in all_workloads
        if _is_pending(workload) and _read_namespace(workload, cluster) != cluster.namespace
    ]


def _map_cluster_queues(cluster: Cluster) -> dict[tuple[str, str], str]:
    """Return the ClusterQueue of each readable LocalQueue, by the namespace and the name of the
    LocalQueue. LocalQueues of several namespaces may share a ClusterQueue."""
    try:
        local_queues = list_kueue_objects(cluster, "localqueues", is_namespaced=False)
    except ApiError as error:
        if error.code != 403:
            raise
        return {}

    return {
        (_read_namespace(local_queue, cluster), local_queue["metadata"]["name"]): str(
            local_queue["spec"]["clusterQueue"]
        )
        for local_queue in local_queues
    }


def _list_owners_ahead(
    workload: Object,
    competitors: list[Object],
    cluster_queues: dict[tuple[str, str], str],
    namespace: str,
) -> tuple[str, ...]:
    """Return the owners of the waiting Workloads that Kueue considers before `workload`, in the
    LocalQueue of `workload` and in other LocalQueues with the same ClusterQueue."""
    own_queue = namespace, _read_queue_name(workload)
    own_cluster_queue = cluster_queues.get(own_queue)

    owners_ahead: list[str] = []
    for competitor in sorted(competitors, key=_make_sort_key):
        if _make_sort_key(competitor) >= _make_sort_key(workload) or competitor is workload:
            continue
        other_namespace = competitor["metadata"].get("namespace") or namespace
        other_queue = other_namespace, _read_queue_name(competitor)
        has_same_cluster_queue = (
            own_cluster_queue is not None and cluster_queues.get(other_queue) == own_cluster_queue
        )
        if other_queue == own_queue or has_same_cluster_queue:
            prefix = "" if other_namespace == namespace else f"{other_namespace}/"
            owners_ahead.append(prefix + _read_owner_name(competitor))
    return tuple(dict.fromkeys(owners_ahead))


def _read_namespace(kueue_object: Object, cluster: Cluster) -> str:
    return str(kueue_object["metadata"].get("namespace") or cluster.namespace)


def _read_queue_name(workload: Object) -> str:
    return str(workload["spec"].get("queueName", ""))


def _find_condition(workload: Object, condition_type: str) -> Object:
    conditions = (workload.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == condition_type), {})


def _is_pending(workload: Object) -> bool:
    return all(
        _find_condition(workload, name).get("status") != "True" for name in ("Admitted", "Finished")
    )


def _read_pending_reason(workload: Object) -> str:
    return (
        _find_condition(workload, "QuotaReserved").get("message")
        or "Kueue has not processed it yet"
    )


def _make_sort_key(workload: Object) -> tuple[int, str]:
    return -workload["spec"].get("priority", 0), workload["metadata"]["creationTimestamp"]


def _read_owner_name(workload: Object) -> str:
    return next((owner["name"] for owner in workload["metadata"].get("ownerReferences") or []), "")


def _belongs_to_pod(workload: Object) -> bool:
    return any(
        owner["kind"] == "Pod" for owner in workload["metadata"].get("ownerReferences") or []
    )


def _belongs_to_step(workload: Object) -> bool:
    """Return True if a Workload of Kueue is the pod of a step. (The pods of harvested workers have
    a role in a job.)"""
    pod_sets = workload["spec"].get("podSets") or []
    if not pod_sets:
        return False
    pod_metadata = (pod_sets[0].get("template") or {}).get("metadata") or {}
    return REPLICA_TYPE_LABEL not in (pod_metadata.get("labels") or {})
