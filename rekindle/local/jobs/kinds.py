"""Kinds of objects that run locally: the kinds of argolocal, training jobs, JobSets and TrainJobs."""

from argolocal.controllers.base import Controller
from argolocal.controllers.deployment import Services
from argolocal.controllers.kinds import Kinds
from argolocal.manifest.training_jobs import JOBS
from rekindle.local.jobs.job_set import JobSets, TrainJobs
from rekindle.local.jobs.training_job import TrainingJobs


class ModelServices(Services):
    """Services of models, whose port is a setting of the config."""

    hint = " (--set serve.port=...)"


def kinds() -> Kinds:
    registry = Kinds()
    registry.register(ModelServices)
    registry.register(TrainingJobs, *JOBS)
    registry.register(JobSets)
    registry.register(TrainJobs)
    registry.register(Controller, "TrainingRuntime")
    return registry
