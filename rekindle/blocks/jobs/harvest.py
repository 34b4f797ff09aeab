"""Extra elastic workers on idle capacity (`cluster.harvest`), as a Deployment with the job's name.

A queue such as Kueue admits and evicts each pod of the Deployment individually, whereas the pods of
a job are admitted or evicted only together. The extra workers join the job's coordinator like other
workers, so the trained weights do not depend on the times at which extra workers join or leave.

Source: the admission of the pods is defined by Kueue 0.19 (plain pods of a Deployment).
"""

from rekindle.blocks.jobs.members import MemberCommands, count_pods
from rekindle.blocks.jobs.worker_deployment import build_worker_deployment
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError
from rekindle.kubernetes_names import REKINDLE_HARVESTED
from rekindle.training.spec import TrainConfig

HARVEST_ROLE = "harvest"


def limit_to_minimum(train_config: TrainConfig, cluster: ClusterConfig) -> TrainConfig:
    """Return the training settings of the job, which has only `train.min_workers` workers if
    `cluster.harvest` is set.

    Raises ConfigError if no workers remain for the Deployment.
    """
    if not cluster.harvest:
        return train_config

    if train_config.max_workers <= train_config.min_workers:
        raise ConfigError(
            f"cluster.harvest is on, but train.max_workers is {train_config.max_workers}: it must"
            f" exceed train.min_workers ({train_config.min_workers}). Raise train.max_workers or"
            " lower train.min_workers; neither changes the result."
        )

    return train_config.model_copy(update={"workers": train_config.min_workers})


def harvest_deployment(
    job_name: str,
    train_config: TrainConfig,
    cluster: ClusterConfig,
    commands: MemberCommands,
    coordinator_host: str,
) -> Manifest:
    """Return the Deployment of the extra workers, which join the `train.workers` workers of the
    job.

    `coordinator_host`: host name of the coordinator, with {0} in place of the job's name. Raises
    ConfigError if the numbers of workers are not multiples of the number of GPUs per pod.
    """
    pod_counts = count_pods(train_config, cluster)
    worker_pod = cluster.pod("train")
    if not cluster.gang:
        worker_pod = worker_pod.model_copy(update={"priority_class": cluster.harvest_priority})

    cluster = cluster.model_copy(
        update={
            "pods": cluster.pods | {"train": worker_pod},
            "queue_priority": cluster.harvest_priority,
        }
    )

    return build_worker_deployment(
        job_name,
        job_name,
        HARVEST_ROLE,
        pod_counts.max_pods - pod_counts.pods,
        train_config,
        cluster,
        commands,
        coordinator_host,
        {REKINDLE_HARVESTED: "yes"},
    )
