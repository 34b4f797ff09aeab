"""Workers on on-demand nodes, which replace workers on spot nodes while these are missing
(`cluster.pods.train.on_demand_after_minutes`).

The workers are pods of a Deployment without replicas, which the coordinator of the job scales
(training/membership/account/on_demand.py). The trained weights do not depend on when workers join
or leave.
"""

from rekindle.blocks.jobs.members import (
    ON_DEMAND_ROLE,
    MemberCommands,
    name_on_demand_deployment,
)
from rekindle.blocks.jobs.worker_deployment import build_worker_deployment
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.kubernetes_names import ON_DEMAND_CAPACITY, REKINDLE_CAPACITY
from rekindle.training.spec import TrainConfig


def on_demand_deployment(
    job_name: str,
    train_config: TrainConfig,
    cluster: ClusterConfig,
    commands: MemberCommands,
    coordinator_host: str,
) -> Manifest:
    """Return the Deployment of the workers that replace workers of the job on spot nodes.

    `coordinator_host`: host name of the coordinator, with {0} in place of the job's name.
    """
    worker_pod = _move_to_on_demand_nodes(cluster.pod("train"))
    cluster = cluster.model_copy(update={"pods": cluster.pods | {"train": worker_pod}})
    return build_worker_deployment(
        job_name,
        name_on_demand_deployment(job_name),
        ON_DEMAND_ROLE,
        0,
        train_config,
        cluster,
        commands,
        coordinator_host,
        {REKINDLE_CAPACITY: ON_DEMAND_CAPACITY},
    )


def _move_to_on_demand_nodes(worker_pod: PodConfig) -> PodConfig:
    """Return the settings of a worker that runs only on other nodes than the preemptible ones."""
    changed_fields = {
        # the presets are already applied, and would select preemptible nodes again
        "preset": [],
        "tolerations": [
            toleration
            for toleration in worker_pod.tolerations
            if toleration.get("key") not in worker_pod.preemptible
        ],
        "notice": "",
        "on_demand_after_minutes": None,
    }
    return worker_pod.on_demand().model_copy(update=changed_fields)
