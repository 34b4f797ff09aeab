"""PaddlePaddle: Workers alone train collectively, with a Master it is a parameter server.

Source: Kubeflow training operator 1.9, PaddleJobSpec, paddlepaddle/paddlepaddle_controller.go and envvar.go.
"""

from collections.abc import Mapping

from rekindle.blocks.jobs.replicas import FAILED, Framework, Replica, Role, training_job
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig

SUCCESS = "status.completionTime"  # the Master's end, or without one that of all workers
FAILURE = FAILED

PADDLE_JOB = Framework(
    kind="PaddleJob",
    replicas="paddleReplicaSpecs",
    container="paddle",
    roles={"Master": Role(most=1), "Worker": Role(least=1)},
    lead="Master",
)


def paddle_job(name: str, replicas: Mapping[str, Replica], cluster: ClusterConfig) -> Manifest:
    """Containers run `-m paddle.distributed.launch`, which reads PADDLE_MASTER, PADDLE_NNODES and PADDLE_JOB_ID."""
    return training_job(PADDLE_JOB, name, replicas, cluster)
