"""A PyTorchJob whose Master is the coordinator and whose Workers come and go.

Source: Kubeflow training operator 1.9, PyTorchJobSpec and its status.
"""

from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.kubeflow import replica_spec, run_policy
from rekindle.blocks.jobs.members import coordinator, share, worker
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

SUCCESS = "status.replicaStatuses.Master.succeeded > 0"
HOST = "{0}-master-0"  # of the coordinator


def pytorch_job(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """The job `name` (at most 53 characters: its pods' names are longer); every process is given `flags`, and the
    Secret of that name.

    The Master's exit code is the job's: 0 done, 1-127 failed for good, 128 and above (a signal, a drain) starts it
    again. Workers are started again whatever they end with, for the coordinator decides what cannot go on. A pod with
    several GPUs runs a worker on each. Raises ConfigError if the workers cannot be shared out so.
    """
    gpus = share(train, cluster)
    least = -(-train.min_workers // gpus)
    lead = coordinator(name, cluster, flags, "pytorch")
    others = worker(name, train, cluster, flags, "pytorch")
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": gang.metadata(name, cluster),
        "spec": {
            "runPolicy": run_policy(cluster, cluster.pod("train"), least + 1)  # and the coordinator
            | {"activeDeadlineSeconds": 3600 * cluster.deadline_hours},  # its own counts only while workers train
            **({"nprocPerNode": str(gpus)} if gpus > 1 else {}),
            "elasticPolicy": {"minReplicas": least, "maxReplicas": train.max_workers // gpus},
            "pytorchReplicaSpecs": {
                "Master": replica_spec(1, "ExitCode", cluster.pod("coordinator"), lead),
                "Worker": replica_spec(train.workers // gpus, "OnFailure", cluster.pod("train"), others),
            },
        },
    }
