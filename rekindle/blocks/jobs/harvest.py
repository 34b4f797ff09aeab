"""Workers beside a job, which take what is idle and give it back (`cluster.harvest`): a Deployment of the job's name.

A queue such as Kueue admits and evicts each of its pods alone, while it would stop the whole job for one worker more or
less. They join the job's coordinator as any worker does, so the result does not depend on when they come and go.

Source: Kubernetes apps/v1 DeploymentSpec; Kueue 0.19, plain pods of a Deployment.
"""

from argolocal.manifest.names import JOB_NAME, REPLICA_TYPE
from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.members import labels, share, worker
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError
from rekindle.training.spec import TrainConfig

ROLE = "harvest"
KIND = "deployment"


def beside_harvest(train: TrainConfig, cluster: ClusterConfig) -> TrainConfig:
    """The settings of a job that has only the workers which it cannot do without, if others are harvested.

    Raises ConfigError if there are no others.
    """
    if not cluster.harvest:
        return train
    if train.max_workers <= train.min_workers:
        raise ConfigError(
            f"cluster.harvest is on, and train.max_workers is {train.max_workers}: no worker is beyond "
            f"train.min_workers ({train.min_workers}). Raise the one or lower the other; neither changes the result."
        )
    return train.model_copy(update={"workers": train.min_workers})


def harvest(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str], host: str) -> Manifest:
    """The workers beyond `train.min_workers` of the job `name`, whose coordinator is at `host`, with {0} for the name.

    Raises ConfigError if the workers cannot be shared out among pods.
    """
    gpus, pod = share(train, cluster), cluster.pod("train")
    pod = pod if cluster.gang else pod.model_copy(update={"priority_class": cluster.harvest_priority})
    cluster = cluster.model_copy(
        update={"pods": cluster.pods | {"train": pod}, "queue_priority": cluster.harvest_priority}
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": gang.metadata(name, cluster),
        "spec": {
            "replicas": (train.max_workers - train.min_workers) // gpus,
            "selector": {"matchLabels": {JOB_NAME: name, REPLICA_TYPE: ROLE}},
            "revisionHistoryLimit": 0,
            "template": {
                "metadata": labels(name, ROLE, pod),
                "spec": worker(name, train, cluster, flags, "worker", host.format(name)),
            },
        },
    }
