"""The kinds of jobs for elastic training, by `cluster.backend`."""

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.blocks.jobs import job_set, kubeflow, pytorch_job, train_job
from rekindle.blocks.jobs.members import MemberCommands
from rekindle.blocks.jobs.program_job import ProgramJob
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.kubernetes_names import PROGRAM_IN_JOB_MODULES, PROGRAM_MODULES, MemberModules
from rekindle.training.spec import TrainConfig

ManifestBuilder = Callable[[str, TrainConfig, ClusterConfig, MemberCommands], Manifest]


@dataclass(frozen=True)
class Backend:
    """A kind of job, and its conditions of success and failure."""

    kind: str
    job: ManifestBuilder
    success: Callable[[ClusterConfig], str]
    failure: tuple[str, ...]
    # host name of the coordinator, with {0} for the job's name; "" if workers cannot join later
    host: str = ""
    # maximum length of a job's name; the names of its pods are longer, and limited to 63 characters
    max_name_length: int = 45
    # function that builds an object which must be applied before the job, such as a TrainingRuntime
    runtime: ManifestBuilder | None = None
    # modules of the pods that run a training program
    program: MemberModules = PROGRAM_MODULES


BACKENDS = {
    "pytorchjob": Backend(
        "PyTorchJob",
        pytorch_job.build_pytorch_job,
        lambda _: pytorch_job.SUCCESS,
        kubeflow.FAILURE,
        pytorch_job.COORDINATOR_HOST,
        max_name_length=53,
    ),
    "jobset": Backend(
        "JobSet",
        job_set.build_job_set,
        lambda _: job_set.SUCCESS,
        job_set.FAILURE,
        job_set.COORDINATOR_HOST,
    ),
    "trainjob": Backend(
        "TrainJob",
        train_job.train_job,
        train_job.success_condition,
        train_job.FAILURE,
        train_job.COORDINATOR_HOST,
        runtime=train_job.training_runtime,
    ),
}


def program_backend(job: ProgramJob) -> Backend:
    """Return the backend that runs a training program in a job of another framework."""
    return Backend(
        job.kind,
        job.manifest,
        lambda _: kubeflow.FRAMEWORKS[job.kind].success,
        kubeflow.FAILURE,
        max_name_length=50,
        program=PROGRAM_IN_JOB_MODULES,
    )
