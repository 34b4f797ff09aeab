"""The kinds that run here besides Kubernetes' own: training jobs, JobSets and TrainJobs."""

from argolocal.controllers.base import Controller
from argolocal.controllers.deployment import Services
from argolocal.controllers.kinds import Kinds
from argolocal.manifest.training_jobs import JOBS
from rekindle.local.jobs.job_set import JobSets, TrainJobs
from rekindle.local.jobs.training_job import TrainingJobs


class ModelServices(Services):
    """Services of models, whose port is a setting."""

    hint = " (--set serve.port=...)"


def kinds() -> Kinds:
    """Kubernetes' kinds and these."""
    known = Kinds()
    known.register(ModelServices)
    known.register(TrainingJobs, *JOBS)
    known.register(JobSets)
    known.register(TrainJobs)
    known.register(Controller, "TrainingRuntime")
    return known
