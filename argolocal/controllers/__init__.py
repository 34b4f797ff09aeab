"""The kinds that can be applied here, one controller each; see `base.Controller`."""

from pathlib import Path

from argolocal.controllers.base import Controller
from argolocal.controllers.deployment import Deployments, Services
from argolocal.pods.interfaces import Cluster
from rekindle.local.jobs.frameworks import FRAMEWORKS
from rekindle.local.jobs.job_set import JobSets, TrainJobs
from rekindle.local.jobs.training_job import TrainingJobs

JOBS = tuple(FRAMEWORKS)
# only stored
PLAIN = ("ConfigMap", "Secret", "HorizontalPodAutoscaler", "PodDisruptionBudget", "HTTPRoute", "TrainingRuntime")
KINDS = (*JOBS, "JobSet", "TrainJob", "Deployment", "Service", *PLAIN)


def controllers(cluster: Cluster, run: Path) -> dict[str, Controller]:
    """A controller for each kind; the logs and directories of jobs' pods go below `run`."""
    sets = JobSets(cluster, run)
    plain = {kind: Controller(cluster, kind) for kind in PLAIN}
    return {
        **{kind: TrainingJobs(cluster, run, kind) for kind in JOBS},
        "JobSet": sets,
        "TrainJob": TrainJobs(cluster, sets),
        "Deployment": Deployments(cluster),
        "Service": Services(cluster),
        **plain,
    }
