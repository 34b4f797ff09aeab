"""Lists the kinds of objects that can run locally: the kinds of argolocal, training jobs, JobSets
and TrainJobs."""

from argolocal.controllers.controller import Controller
from argolocal.controllers.controller_kinds import Kinds
from argolocal.manifest.training_jobs import JOBS
from rekindle.local.jobs.job_set_controller import JobSets, TrainJobs
from rekindle.local.jobs.model_services import ModelDeployments, ModelServices
from rekindle.local.jobs.training_job import TrainingJobs


def kinds() -> Kinds:
    registry = Kinds()
    registry.register(ModelDeployments)
    registry.register(ModelServices)
    registry.register(TrainingJobs, *JOBS)
    registry.register(JobSets)
    registry.register(TrainJobs)
    registry.register(Controller, "TrainingRuntime")
    return registry
