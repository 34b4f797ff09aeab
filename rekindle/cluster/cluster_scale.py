"""Change the number of workers of a running training: `rekindle scale`. The trained model does not
depend on the number of workers."""

import re
from typing import Any

from argolocal.common.environment import WHOLE_NUMBER
from argolocal.manifest.types import Object
from rekindle.blocks.presets import read_presets
from rekindle.errors import ConfigError
from rekindle.release.rollback import KubernetesObjects

REPLICAS_FIELD = "pytorchReplicaSpecs"


def scale_workers(objects: KubernetesObjects, run: str, task: str, workers: int) -> dict[str, Any]:
    """Set the number of workers of the training `task` of a run; return the old and the new number.

    Scale the Deployment of extra workers (cluster.harvest) if it exists, otherwise the PyTorchJob.
    Raises ConfigError if the training is not running, or may not have this number of workers.
    """
    name = f"{run}-{task}"
    deployment = objects.find("Deployment", name)
    job = objects.find("PyTorchJob", name)

    template = _pod_spec(deployment or {}, "spec") or _pod_spec(
        job or {}, "spec", REPLICAS_FIELD, "Worker"
    )
    if not template:
        raise ConfigError(
            f"training {task} of run {run} cannot be scaled: it must be running, as a PyTorchJob or"
            " with cluster.harvest. Use --task for another training."
        )

    minimum = _integer_flag(template, "min-workers", 1)
    maximum = _integer_flag(template, "max-workers", workers)

    per_pod = _workers_per_pod(template, {} if deployment else job or {})
    if not minimum <= workers <= maximum or workers % per_pod:
        raise ConfigError(
            f"{workers} workers: {name} may have {minimum} (train.min_workers) to {maximum}"
            " (train.max_workers)"
            + (f", in multiples of {per_pod}, the GPUs of a pod." if per_pod > 1 else ".")
        )

    if deployment:
        kind = "Deployment"
        pods = (workers - minimum) // per_pod
        previous_workers = deployment["spec"].get("replicas", 1) * per_pod + minimum
        change = {"replicas": pods}
    elif read_presets()["gang"]["kueue"]["labels"].keys() & (
        (job or {})["metadata"].get("labels") or {}
    ):
        raise ConfigError(
            f"{name} is queued by Kueue, which would stop the whole job to add a worker: set"
            " cluster.harvest, so that workers beyond train.min_workers are separate pods."
        )
    else:
        kind = "PyTorchJob"
        pods = workers // per_pod
        previous_workers = (
            (job or {})["spec"][REPLICAS_FIELD]["Worker"].get("replicas", 1)
        ) * per_pod
        change = {REPLICAS_FIELD: {"Worker": {"replicas": pods}}}

    objects.patch(kind, name, {"spec": change})
    return {"workflow": run, "task": task, "workers": workers, "before": previous_workers}


def _pod_spec(obj: Object, *path: str) -> Object:
    for key in (*path, "template", "spec"):
        obj = obj.get(key) or {}
    return obj


def _integer_flag(template: Object, flag: str, default: int) -> int:
    matches = (
        re.fullmatch(rf"--{flag}=({WHOLE_NUMBER.pattern})", arg)
        for arg in template["containers"][0].get("args") or []
    )
    return next((int(match[1]) for match in matches if match), default)


def _workers_per_pod(template: Object, job: Object) -> int:
    env = {item["name"]: item.get("value") for item in template["containers"][0].get("env") or []}
    number = str(env.get("PET_NPROC_PER_NODE") or (job.get("spec") or {}).get("nprocPerNode"))
    # any other value, such as the operator's default "auto", means one worker per pod
    if WHOLE_NUMBER.fullmatch(number):
        return max(int(number), 1)
    return 1
