"""The jobs that an elastic training can run in, by `cluster.backend`: each is one file of blocks.

backend = BACKENDS[cluster.backend]
backend.job(name, train, cluster, flags), backend.success(cluster), backend.failure
"""

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.blocks.jobs import job_set, kubeflow, pytorch_job, train_job
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

Maker = Callable[[str, TrainConfig, ClusterConfig, list[str]], Manifest]


@dataclass(frozen=True)
class Backend:
    """A kind of job, and the conditions under which it has succeeded or failed."""

    kind: str
    job: Maker
    success: Callable[[ClusterConfig], str]
    failure: tuple[str, ...]
    host: str  # where its coordinator is found; {0} is the job
    longest: int = 45  # characters of a job's name: its pods' names are longer, and at most 63
    runtime: Maker | None = None  # what must be there before the job


BACKENDS = {
    "pytorchjob": Backend(
        "PyTorchJob",
        pytorch_job.pytorch_job,
        lambda _: pytorch_job.SUCCESS,
        kubeflow.FAILURE,
        pytorch_job.HOST,
        longest=53,
    ),
    "jobset": Backend("JobSet", job_set.job_set, lambda _: job_set.SUCCESS, job_set.FAILURE, job_set.HOST),
    "trainjob": Backend(
        "TrainJob",
        train_job.train_job,
        train_job.success,
        train_job.FAILURE,
        train_job.HOST,
        runtime=train_job.runtime,
    ),
}
ELASTIC = frozenset(backend.kind for backend in BACKENDS.values())
