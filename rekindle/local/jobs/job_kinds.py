"""Lists the kinds of objects that can run locally: the kinds of argolocal, training jobs, JobSets
and TrainJobs."""

from argolocal.controllers.controller import Controller
from argolocal.controllers.controller_kinds import Kinds
from argolocal.manifest.training_jobs import JOB_KINDS
from rekindle.local.jobs.job_set_controller import JobSets, TrainJobs
from rekindle.local.jobs.model_services import ModelDeployments, ModelServices
from rekindle.local.jobs.training_job import TrainingJobs


def create_kinds() -> Kinds:
    kind_registry = Kinds()
    kind_registry.register(ModelDeployments)
    kind_registry.register(ModelServices)
    kind_registry.register(TrainingJobs, *JOB_KINDS)
    kind_registry.register(JobSets)
    kind_registry.register(TrainJobs)
    kind_registry.register(Controller, "TrainingRuntime")
    return kind_registry
