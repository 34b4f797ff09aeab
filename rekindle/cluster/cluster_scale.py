"""Change the number of workers of a running training (`rekindle scale`). The trained model does not
depend on the number of workers."""

import re
from typing import Any

from argolocal.common.environment import WHOLE_NUMBER
from argolocal.manifest.types import Object
from rekindle.blocks.presets import read_presets
from rekindle.errors import ConfigError
from rekindle.release.rollback import KubernetesObjects

REPLICAS_FIELD = "pytorchReplicaSpecs"


def scale_workers(
    kubernetes_objects: KubernetesObjects, run_name: str, task_name: str, worker_count: int
) -> dict[str, Any]:
    """Set the number of workers of the training `task_name` of a run. Return what `rekindle scale`
    prints: the workflow, the task, and the number of workers now and before.

    The function scales the Deployment of extra workers (cluster.harvest) if this Deployment exists,
    otherwise the PyTorchJob. Raises ConfigError if the training is not running, or may not have
    this number of workers.
    """
    name = f"{run_name}-{task_name}"
    deployment = kubernetes_objects.find("Deployment", name)
    pytorch_job = kubernetes_objects.find("PyTorchJob", name)

    pod_spec = _find_pod_spec(deployment or {}, "spec") or _find_pod_spec(
        pytorch_job or {}, "spec", REPLICAS_FIELD, "Worker"
    )
    if not pod_spec:
        raise ConfigError(
            f"training {task_name} of run {run_name} cannot be scaled: it must be running, as a"
            " PyTorchJob or with cluster.harvest. Use --task for another training."
        )

    min_workers = _read_integer_flag(pod_spec, "min-workers", 1)
    max_workers = _read_integer_flag(pod_spec, "max-workers", worker_count)

    workers_per_pod = _count_workers_per_pod(pod_spec, {} if deployment else pytorch_job or {})
    if not min_workers <= worker_count <= max_workers or worker_count % workers_per_pod:
        raise ConfigError(
            f"{worker_count} workers: {name} may have {min_workers} (train.min_workers) to"
            f" {max_workers} (train.max_workers)"
            + (
                f", in multiples of {workers_per_pod}, the GPUs of a pod."
                if workers_per_pod > 1
                else "."
            )
        )

    if deployment:
        object_kind = "Deployment"
        pod_count = (worker_count - min_workers) // workers_per_pod
        previous_workers = deployment["spec"].get("replicas", 1) * workers_per_pod + min_workers
        replica_change = {"replicas": pod_count}
    elif read_presets()["gang"]["kueue"]["labels"].keys() & (
        (pytorch_job or {})["metadata"].get("labels") or {}
    ):
        raise ConfigError(
            f"{name} is queued by Kueue, which would stop the whole job to add a worker: set"
            " cluster.harvest, so that workers beyond train.min_workers are separate pods."
        )
    else:
        object_kind = "PyTorchJob"
        pod_count = worker_count // workers_per_pod
        previous_workers = (
            (pytorch_job or {})["spec"][REPLICAS_FIELD]["Worker"].get("replicas", 1)
        ) * workers_per_pod
        replica_change = {REPLICAS_FIELD: {"Worker": {"replicas": pod_count}}}

    kubernetes_objects.patch(object_kind, name, {"spec": replica_change})
    return {
        "workflow": run_name,
        "task": task_name,
        "workers": worker_count,
        "before": previous_workers,
    }


def _find_pod_spec(kubernetes_object: Object, *path: str) -> Object:
    for key in (*path, "template", "spec"):
        kubernetes_object = kubernetes_object.get(key) or {}
    return kubernetes_object


def _read_integer_flag(pod_spec: Object, flag_name: str, default_value: int) -> int:
    flag_matches = (
        re.fullmatch(rf"--{flag_name}=({WHOLE_NUMBER.pattern})", argument)
        for argument in pod_spec["containers"][0].get("args") or []
    )
    return next((int(flag_match[1]) for flag_match in flag_matches if flag_match), default_value)


def _count_workers_per_pod(pod_spec: Object, job: Object) -> int:
    variable_values = {
        variable["name"]: variable.get("value")
        for variable in pod_spec["containers"][0].get("env") or []
    }
    worker_count_text = str(
        variable_values.get("PET_NPROC_PER_NODE") or (job.get("spec") or {}).get("nprocPerNode")
    )
    # a number of workers per pod that is not an integer, such as the operator's default "auto",
    # means one worker per pod
    if WHOLE_NUMBER.fullmatch(worker_count_text):
        return max(int(worker_count_text), 1)
    return 1
