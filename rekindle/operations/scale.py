"""Change the number of workers of a training, on this machine or on a cluster (`rekindle
scale`)."""

from pathlib import Path
from typing import Any

from argolocal.view import runs
from rekindle.cluster.cluster_objects import ClusterObjects
from rekindle.cluster.cluster_scale import scale_workers
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects


def scale_training(
    home_folder: Path, cluster: Cluster | None, run_name: str, task_name: str, worker_count: int
) -> dict[str, Any]:
    """Set the number of workers of the training `task_name` of a run.

    Raises ConfigError if the training is not running, or if `worker_count` is not allowed for this
    training.
    """
    if cluster:
        return scale_workers(ClusterObjects(cluster), run_name, task_name, worker_count)

    run_phase = runs.load_status(home_folder, run_name)["phase"]
    if run_phase != "Running":
        raise ConfigError(
            f"run {run_name} is {run_phase}: only a running training can be scaled (`rekindle"
            f" resume {run_name}`)."
        )

    return scale_workers(LocalObjects(LocalCluster(home_folder)), run_name, task_name, worker_count)
