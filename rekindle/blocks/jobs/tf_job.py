"""TensorFlow. Its containers find the others in TF_CONFIG.

Source: Kubeflow training operator 1.9, TFJobSpec, tensorflow/tfjob_controller.go, tensorflow/tensorflow.go.
"""

from collections.abc import Mapping

from rekindle.blocks.jobs.replicas import FAILED, Framework, Replica, Role, check, training_job
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError

SUCCESS = "status.completionTime"  # the Chief's end, or without one that of worker 0: there is no one count to look at
FAILURE = FAILED

TF_JOB = Framework(
    kind="TFJob",
    replicas="tfReplicaSpecs",
    container="tensorflow",
    roles={"Chief": Role(most=1), "Worker": Role(), "PS": Role(), "Evaluator": Role(most=1)},
    lead="Chief",
)


def tf_job(
    name: str, replicas: Mapping[str, Replica], cluster: ClusterConfig, all_workers: bool = False, dynamic: bool = False
) -> Manifest:
    """Done when the Chief is; without one, when worker 0 is, or with `all_workers` every worker.

    The operator takes a worker that is deleted (a drain, a preemption with notice) for one that failed, and the job
    with it. `dynamic` workers may go and come back; each then knows only itself and the parameter servers.
    """
    check(TF_JOB, name, replicas)
    if not replicas.keys() & {"Chief", "Worker"}:
        raise ConfigError(f"TFJob {name} has neither a Chief nor a Worker: nothing would end it. Give it one.")
    more = {"successPolicy": "AllWorkers"} if all_workers else {}
    return training_job(TF_JOB, name, replicas, cluster, **more, **({"enableDynamicWorker": True} if dynamic else {}))
