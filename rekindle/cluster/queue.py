"""What the jobs of a run wait for in the queue of a shared cluster.

    waiting(cluster, "demo-4k2xp")
    # → ["train waits in the queue research, behind demo-7xk2p-train: insufficient unused quota for cpu ..."]

Source: Kueue 0.19, Workload (v1beta2; v1beta1 has the same fields).
"""

from rekindle.cluster.api import Cluster, Object, Resource
from rekindle.cluster.errors import ApiError

VERSIONS = ("v1beta2", "v1beta1")


def workloads(cluster: Cluster) -> list[Object]:
    """Those of the namespace; none where there is no Kueue, or they may not be read."""
    for version in VERSIONS:
        try:
            return cluster.list_objects(Resource(f"kueue.x-k8s.io/{version}", "workloads"))
        except ApiError as error:
            if error.code == 403:
                return []
            if error.code != 404:
                raise
    return []


def waiting(cluster: Cluster, run: str) -> list[str]:
    """A line for each job of the run that its queue holds back, in the words of Kueue."""
    queued = sorted((work for work in workloads(cluster) if _pending(work)), key=_rank)
    own = [work for work in queued if _owner(work).startswith(f"{run}-")]
    lines = []
    for work in [work for work in own if not _of_pod(work)]:
        queue = work["spec"]["queueName"]
        before = [_owner(other) for other in queued[: queued.index(work)] if other["spec"]["queueName"] == queue]
        behind = f", behind {' '.join(before[:3])}" if before else ""
        behind += f" and {len(before) - 3} more" if len(before) > 3 else ""
        lines.append(f"{_owner(work).removeprefix(f'{run}-')} waits in the queue {queue}{behind}: {_reason(work)}")
    if pods := [work for work in own if _of_pod(work)]:
        lines.append(f"{len(pods)} more workers wait for idle quota in the queue {pods[0]['spec']['queueName']}")
    return lines


def _condition(work: Object, kind: str) -> Object:
    conditions = (work.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _pending(work: Object) -> bool:
    return all(_condition(work, kind).get("status") != "True" for kind in ("Admitted", "Finished"))


def _reason(work: Object) -> str:
    return _condition(work, "QuotaReserved").get("message") or "Kueue has not looked at it yet"


def _rank(work: Object) -> tuple[int, str]:
    return -work["spec"].get("priority", 0), work["metadata"]["creationTimestamp"]


def _owner(work: Object) -> str:
    return next((owner["name"] for owner in work["metadata"].get("ownerReferences") or []), "")


def _of_pod(work: Object) -> bool:
    return any(owner["kind"] == "Pod" for owner in work["metadata"].get("ownerReferences") or [])
