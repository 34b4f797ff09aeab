"""A minimal object of every kind in rekindle/blocks, for tests of schemas and for tests on a
cluster.

kinds()["TFJob"].manifest
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rekindle.blocks import volume
from rekindle.blocks.jobs import pytorch_job, train_job
from rekindle.blocks.jobs.kubeflow import FAILURE, FRAMEWORKS, Replica, build_training_job
from rekindle.blocks.jobs.members import member_commands
from rekindle.blocks.jobs.program_job import ProgramJob
from rekindle.blocks.serving import autoscaler, model_deployment, service
from rekindle.blocks.settings import ClusterConfig
from rekindle.kubernetes_names import PROGRAM_IN_JOB_MODULES, WORKLOAD_MODULES
from rekindle.release.serve_config import ServeConfig
from rekindle.training.spec import TrainConfig

PASS = "pass"
FAIL = "raise SystemExit(3)"
SMALL_RESOURCES = {"cpu": "10m", "memory": "64Mi"}
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """An object of a kind, and the conditions of its success and its failure, which are empty if
    the object never ends."""

    manifest: Manifest
    success: str = ""
    failure: tuple[str, ...] = ()


def kinds(
    name: str = "kind", lead: str = PASS, worker: str = PASS, **cluster: Any
) -> dict[str, Kind]:
    """Return all objects by their name KIND or KIND/VARIANT. The leading pods of a job run the
    Python code `lead`, and all other pods run `worker`."""
    image = os.environ.get("REKINDLE_TEST_PYTHON", "python:3.11-slim")
    pods = {pod: SMALL_RESOURCES for pod in ("train", "coordinator", "serve")}
    config = ClusterConfig.model_validate({"image": image, "pods": pods, "retries": 1, **cluster})
    pod = config.pod("train")
    lead_arguments = ["-c", lead]
    first_replica = Replica(pod, lead_arguments)
    other_replicas = Replica(pod, ["-c", worker], count=2)
    serve = ServeConfig.model_validate({})
    train = TrainConfig.model_validate({"workers": 2})
    training = pytorch_job.build_pytorch_job(
        name, train, config, member_commands(WORKLOAD_MODULES, [])
    )
    _set_commands(training["spec"]["pytorchReplicaSpecs"], {"Master": lead, "Worker": worker})

    def kubeflow(kind: str, replicas: dict[str, Replica], **spec: Any) -> Kind:
        return Kind(
            build_training_job(kind, name, replicas, config, **spec),
            FRAMEWORKS[kind].success,
            FAILURE,
        )

    objects = {
        "PyTorchJob": Kind(training, pytorch_job.SUCCESS, FAILURE),
        "TFJob": kubeflow("TFJob", {"Chief": first_replica, "Worker": other_replicas}),
        "TFJob/dynamic": kubeflow(
            "TFJob", {"Chief": first_replica, "Worker": other_replicas}, enableDynamicWorker=True
        ),
        "XGBoostJob": kubeflow("XGBoostJob", {"Master": first_replica, "Worker": other_replicas}),
        "PaddleJob": kubeflow("PaddleJob", {"Master": first_replica, "Worker": other_replicas}),
        "JAXJob": kubeflow("JAXJob", {"Worker": other_replicas}),
        "MPIJob": kubeflow("MPIJob", {"Launcher": first_replica, "Worker": other_replicas}),
        "TrainingRuntime": Kind(
            train_job.training_runtime(name, train, config, member_commands(WORKLOAD_MODULES, []))
        ),
        "TrainJob": Kind(
            train_job.train_job(name, train, config, member_commands(WORKLOAD_MODULES, []))
        ),
        "Deployment": Kind(
            model_deployment.build_deployment(name, f"{name}-1", serve, config, ["--model=m"]),
            model_deployment.SUCCESS,
            model_deployment.FAILURE,
        ),
        "Service": Kind(service.build_client_service(name, 8080, f"{name}-1")),
        "HorizontalPodAutoscaler": Kind(autoscaler.build_autoscaler(name, serve, f"{name}-1")),
        "PodDisruptionBudget": Kind(model_deployment.build_disruption_budget(name)),
        "PersistentVolumeClaim": Kind(volume.volume_claim(name, "1Gi")),
    }

    return {
        key: replace(kind, manifest=_fill_tags(kind.manifest, name))
        for key, kind in objects.items()
    }


# kind of a job that runs a program → number of pods by role
PROGRAM_JOBS = {
    "TFJob": {"PS": 2, "Worker": 3, "Chief": 1},
    "XGBoostJob": {"Master": 1, "Worker": 3},
    "PaddleJob": {"Master": 1, "Worker": 2},
    "JAXJob": {"Worker": 4},
    "MPIJob": {"Launcher": 1, "Worker": 2},
}


def program_jobs(name: str = "kind", **cluster: Any) -> dict[str, Manifest]:
    """Return a job of every other framework that runs a program, by kind."""
    config = ClusterConfig.model_validate(cluster)
    commands = member_commands(PROGRAM_IN_JOB_MODULES, [])
    train = TrainConfig.model_validate({})
    jobs = {
        kind: ProgramJob(kind, counts, config.pod("train"), {})
        for kind, counts in PROGRAM_JOBS.items()
    }
    return {
        kind: _fill_tags(job.manifest(name, train, config, commands), name)
        for kind, job in jobs.items()
    }


def pod_specs(value: Any) -> list[Manifest]:
    """Return the specs of all pods in an object."""
    if isinstance(value, list):
        return [spec for item in value for spec in pod_specs(item)]
    if not isinstance(value, dict):
        return []
    specs = [value] if "containers" in value else []
    return specs + [spec for inner_value in value.values() for spec in pod_specs(inner_value)]


def _set_commands(replicas: Mapping[str, Manifest], code: Mapping[str, str]) -> None:
    for role, text in code.items():
        (container,) = replicas[role]["template"]["spec"]["containers"]
        container["args"] = ["-c", text]


def _fill_tags(manifest: Manifest, name: str) -> Manifest:
    """Replace template tags as Argo does, for a workflow with the name of the object."""
    return json.loads(json.dumps(manifest).replace("{{workflow.name}}", name))
