"""The kinds of jobs for elastic training, by `cluster.backend`."""

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.blocks.jobs import job_set, kubeflow, pytorch_job, train_job
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

ManifestBuilder = Callable[[str, TrainConfig, ClusterConfig, list[str]], Manifest]


@dataclass(frozen=True)
class Backend:
    """A kind of job, and its conditions of success and failure."""

    kind: str
    job: ManifestBuilder
    success: Callable[[ClusterConfig], str]
    failure: tuple[str, ...]
    host: str  # host name of the coordinator; {0} is the job's name
    # maximum length of a job's name: the names of the job's pods are longer, and limited to 63
    # characters
    max_name_length: int = 45
    runtime: ManifestBuilder | None = None  # object that must be applied before the job


BACKENDS = {
    "pytorchjob": Backend(
        "PyTorchJob",
        pytorch_job.pytorch_job,
        lambda _: pytorch_job.SUCCESS,
        kubeflow.FAILURE,
        pytorch_job.HOST,
        max_name_length=53,
    ),
    "jobset": Backend(
        "JobSet", job_set.job_set, lambda _: job_set.SUCCESS, job_set.FAILURE, job_set.HOST
    ),
    "trainjob": Backend(
        "TrainJob",
        train_job.train_job,
        train_job.success_condition,
        train_job.FAILURE,
        train_job.HOST,
        runtime=train_job.training_runtime,
    ),
}
ELASTIC_KINDS = frozenset(backend.kind for backend in BACKENDS.values())
