"""Report the jobs of a namespace that wait in queues of Kueue."""

from collections.abc import Iterator

from rekindle.cluster.kubernetes_api import Cluster
from rekindle.cluster.queue import find_waiting_jobs
from rekindle.errors import Check

MAX_LISTED_JOBS = 10


def check_waiting_jobs(cluster: Cluster) -> Iterator[Check]:
    """Yield a warning for each job that waits, in Kueue's order: its queue, the jobs ahead of it,
    and Kueue's reason."""
    waiting_jobs = find_waiting_jobs(cluster)
    if not waiting_jobs:
        yield Check("waiting jobs", True, "no job of the namespace waits in a queue of Kueue")
        return

    for waiting_job in waiting_jobs[:MAX_LISTED_JOBS]:
        yield _make_warning(str(waiting_job))
    other_count = len(waiting_jobs) - MAX_LISTED_JOBS
    if other_count > 0:
        yield _make_warning(f"{other_count} more jobs wait behind them in the queues")


def _make_warning(detail: str) -> Check:
    remedy = "No change is needed: Kueue admits a job when its queue has room for it."
    return Check("waiting jobs", False, detail, remedy, required=False)
