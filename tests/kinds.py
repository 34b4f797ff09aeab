"""One of every kind of object in pipelines/blocks, as small as it can be: what the schemas and the cluster judge.

kinds()["TFJob"].manifest
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.blocks import (
    volume,
)
from rekindle.blocks.jobs import (
    jax_job,
    job,
    mpi_job,
    paddle_job,
    pytorch_job,
    search,
    tf_job,
    train_job,
    xgboost_job,
)
from rekindle.blocks.jobs.replicas import Replica
from rekindle.blocks.serving import (
    autoscaler,
    deployment,
    disruption_budget,
    inference_service,
    service,
)
from rekindle.blocks.settings import ClusterConfig
from rekindle.serving.config import ServeConfig
from rekindle.training.spec import TrainConfig

PASS, FAIL = "pass", "raise SystemExit(3)"
SMALL = {"cpu": "10m", "memory": "64Mi"}
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """An object, and the conditions that say how it ended; none for what is only there."""

    manifest: Manifest
    success: str = ""
    failure: tuple[str, ...] = ()


def kinds(name: str = "kind", lead: str = PASS, worker: str = PASS, **cluster: Any) -> dict[str, Kind]:
    """By kind (or KIND/VERSION): those that lead run the Python code `lead`, the others `worker`."""
    image = os.environ.get("REKINDLE_TEST_PYTHON", "python:3.11-slim")
    pods = {each: SMALL for each in ("train", "coordinator", "serve")}
    config = ClusterConfig.model_validate({"image": image, "pods": pods, "retries": 1, **cluster})
    pod, code = config.pod("train"), ["-c", lead]
    alone = config.model_copy(update={"gang": ""}) if config.gang == "coscheduling" else config  # takes no plain Job
    first, others = Replica(pod, code), Replica(pod, ["-c", worker], count=2)
    serve = ServeConfig.model_validate({})
    training = pytorch_job.pytorch_job(name, TrainConfig.model_validate({"workers": 2}), config, [])
    _commands(training["spec"]["pytorchReplicaSpecs"], {"Master": lead, "Worker": worker})
    found = {
        "PyTorchJob": Kind(training, pytorch_job.SUCCESS, pytorch_job.FAILURE),
        "TFJob": Kind(tf_job.tf_job(name, {"Chief": first, "Worker": others}, config), tf_job.SUCCESS, tf_job.FAILURE),
        "TFJob/dynamic": Kind(
            tf_job.tf_job(name, {"Chief": first, "Worker": others}, config, dynamic=True),
            tf_job.SUCCESS,
            tf_job.FAILURE,
        ),
        "XGBoostJob": Kind(
            xgboost_job.xgboost_job(name, {"Master": first, "Worker": others}, config),
            xgboost_job.SUCCESS,
            xgboost_job.FAILURE,
        ),
        "PaddleJob": Kind(
            paddle_job.paddle_job(name, {"Master": first, "Worker": others}, config),
            paddle_job.SUCCESS,
            paddle_job.FAILURE,
        ),
        "JAXJob": Kind(jax_job.jax_job(name, others, config), jax_job.SUCCESS, jax_job.FAILURE),
        "MPIJob": Kind(mpi_job.mpi_job(name, first, pod, 2, config), mpi_job.SUCCESS, mpi_job.FAILURE),
        "MPIJob/v2beta1": Kind(mpi_job.mpi_job_v2(name, first, pod, 2, config), mpi_job.SUCCESS, mpi_job.FAILURE),
        "TrainingRuntime": Kind(train_job.training_runtime(name, pod, config)),
        "TrainJob": Kind(train_job.train_job(name, name, code, config, nodes=2), train_job.SUCCESS, train_job.FAILURE),
        "Job": Kind(job.job(name, pod, code, alone), job.SUCCESS, job.FAILURE),
        "Job/search": Kind(
            search.search(name, pod, code, alone, trials=3, tolerated=1), search.success(), search.FAILURE
        ),
        "InferenceService": Kind(
            inference_service.inference_service(name, serve, config, ["--model=m"], canary=10, idle=True),
            inference_service.SUCCESS,
            inference_service.FAILURE,
        ),
        "Deployment": Kind(
            deployment.deployment(name, serve, config, ["--model=m"]), deployment.SUCCESS, deployment.FAILURE
        ),
        "Service": Kind(service.service(name, 8080)),
        "HorizontalPodAutoscaler": Kind(autoscaler.autoscaler(name, serve)),
        "PodDisruptionBudget": Kind(disruption_budget.disruption_budget(name)),
        "PersistentVolumeClaim": Kind(volume.volume_claim(name, "1Gi")),
    }
    return {key: Kind(_filled(one.manifest, name), one.success, one.failure) for key, one in found.items()}


def pod_specs(value: Any) -> list[Manifest]:
    """Every pod that an object makes."""
    if isinstance(value, list):
        return [spec for each in value for spec in pod_specs(each)]
    if not isinstance(value, dict):
        return []
    own = [value] if "containers" in value else []
    return own + [spec for each in value.values() for spec in pod_specs(each)]


def _commands(replicas: Mapping[str, Manifest], code: Mapping[str, str]) -> None:
    for role, text in code.items():
        (container,) = replicas[role]["template"]["spec"]["containers"]
        container["args"] = ["-c", text]


def _filled(manifest: Manifest, name: str) -> Manifest:
    """As Argo fills tags in, for a workflow called as the object."""
    return json.loads(json.dumps(manifest).replace("{{workflow.name}}", name))
