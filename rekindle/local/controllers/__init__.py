"""The kinds that can be applied here, one controller each; see `base.Controller`."""

from pathlib import Path

from rekindle.local.controllers.base import Controller
from rekindle.local.controllers.deployment import Deployments, Services
from rekindle.local.controllers.frameworks import FRAMEWORKS
from rekindle.local.controllers.job_set import JobSets, TrainJobs
from rekindle.local.controllers.training_job import TrainingJobs
from rekindle.local.pods.interfaces import Cluster

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
