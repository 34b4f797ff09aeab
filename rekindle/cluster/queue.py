"""Report why the jobs of a run wait in a queue of Kueue.

    describe_waiting_jobs(cluster, "demo-4k2xp")
    # → ["train waits in the queue research, behind demo-7xk2p-train: insufficient unused quota"]

Source: type Workload of Kueue 0.19 (v1beta2; v1beta1 has the same fields).
"""

from argolocal.common.json_text import to_json
from argolocal.manifest.types import Object
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource

KUEUE_VERSIONS = ("v1beta2", "v1beta1")


QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


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
    """Return True if a template of a workflow, or an object that it applies, names a queue."""
    return QUEUE_LABEL in to_json(workflow_spec)


def describe_waiting_jobs(cluster: Cluster, run_name: str, is_queued: bool = False) -> list[str]:
    """Return a line with Kueue's reason for each job of the run that waits in a queue.

    If the user may not read Workloads, return [], or for a run that is known to be queued
    (`is_queued`) a line with the missing permission.
    """
    try:
        all_workloads = list_kueue_objects(cluster, "workloads")
    except ApiError as error:
        if error.code != 403:
            raise
        return [f"the queue of {run_name} cannot be read: {error}"] if is_queued else []

    queued_workloads = sorted(filter(_is_pending, all_workloads), key=_make_sort_key)
    run_workloads = [
        workload
        for workload in queued_workloads
        if _read_owner_name(workload).startswith(f"{run_name}-")
    ]
    lines = []

    job_workloads = [workload for workload in run_workloads if not _belongs_to_pod(workload)]
    for workload in job_workloads:
        queue_name = workload["spec"].get("queueName", "")
        owners_ahead = [
            _read_owner_name(earlier_workload)
            for earlier_workload in queued_workloads[: queued_workloads.index(workload)]
            if earlier_workload["spec"].get("queueName", "") == queue_name
        ]
        position_text = ""
        if owners_ahead:
            position_text = f", behind {' '.join(owners_ahead[:3])}"
        if len(owners_ahead) > 3:
            position_text += f" and {len(owners_ahead) - 3} more"
        job_name = _read_owner_name(workload).removeprefix(f"{run_name}-")
        lines.append(
            f"{job_name} waits in the queue {queue_name}{position_text}:"
            f" {_read_pending_reason(workload)}"
        )

    pod_workloads = [workload for workload in run_workloads if _belongs_to_pod(workload)]
    if pod_workloads:
        lines.append(
            f"{len(pod_workloads)} more workers wait for idle quota in the queue"
            f" {pod_workloads[0]['spec'].get('queueName', '')}"
        )

    return lines


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
