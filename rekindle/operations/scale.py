"""Change the number of workers of a training, on this machine or on a cluster: `rekindle scale`."""

from pathlib import Path
from typing import Any

from argolocal.view import runs
from rekindle.cluster.cluster_objects import ClusterObjects
from rekindle.cluster.cluster_scale import scale_workers
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects


def scale(home: Path, cluster: Cluster | None, run: str, task: str, workers: int) -> dict[str, Any]:
    """Set the number of workers of the training `task` of a run.

    Raises ConfigError if the training is not running, or may not have this number of workers.
    """
    if cluster:
        return scale_workers(ClusterObjects(cluster), run, task, workers)

    phase = runs.load_status(home, run)["phase"]
    if phase != "Running":
        raise ConfigError(
            f"run {run} is {phase}: only a running training can be scaled (`rekindle resume"
            f" {run}`)."
        )

    return scale_workers(LocalObjects(LocalCluster(home)), run, task, workers)
