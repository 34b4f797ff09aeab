"""How many workers train, changed while they do: `rekindle scale`. The result does not depend on it."""

import re
from typing import Any

from rekindle.blocks.presets import presets
from rekindle.errors import ConfigError
from rekindle.release.rollback import Object, Objects

ROLES = "pytorchReplicaSpecs"


def scale_workers(objects: Objects, run: str, task: str, workers: int) -> dict[str, Any]:
    """Have `workers` train in the training `task` of a run; gives what changed.

    The pods beside the job come and go if there are such (cluster.harvest), else those of a PyTorchJob.
    Raises ConfigError if there is no such training, or it cannot have that many.
    """
    name = f"{run}-{task}"
    deployment, job = objects.find("Deployment", name), objects.find("PyTorchJob", name)
    template = _template(deployment or {}, "spec") or _template(job or {}, "spec", ROLES, "Worker")
    if not template:
        raise ConfigError(
            f"run {run} has no training {task} whose workers can change now: it must be running, in a PyTorchJob or "
            "with cluster.harvest; --task names another one."
        )
    least, most, share = (
        _number(template, "min-workers", 1),
        _number(template, "max-workers", workers),
        _share(template),
    )
    if not least <= workers <= most or workers % share:
        raise ConfigError(
            f"{workers} workers: {name} may have {least} (train.min_workers) to {most} (train.max_workers)"
            + (f", in steps of {share}, the GPUs of a pod." if share > 1 else ".")
        )
    if deployment:
        kind, pods = "Deployment", (workers - least) // share
        before, change = deployment["spec"].get("replicas", 1) * share + least, {"replicas": pods}
    elif presets()["gang"]["kueue"]["labels"].keys() & ((job or {})["metadata"].get("labels") or {}):
        raise ConfigError(
            f"{name} waits in a queue of Kueue, which would stop all of it for one worker more: set cluster.harvest, "
            "which makes the workers beyond train.min_workers pods of their own."
        )
    else:
        kind, pods = "PyTorchJob", workers // share
        before = ((job or {})["spec"][ROLES]["Worker"].get("replicas", 1)) * share
        change = {ROLES: {"Worker": {"replicas": pods}}}
    objects.patch(kind, name, {"spec": change})
    return {"workflow": run, "task": task, "workers": workers, "before": before}


def _template(obj: Object, *path: str) -> Object:
    for key in (*path, "template", "spec"):
        obj = obj.get(key) or {}
    return obj


def _number(template: Object, flag: str, default: int) -> int:
    texts = (re.fullmatch(rf"--{flag}=(\d+)", arg) for arg in template["containers"][0].get("args") or [])
    return next((int(match[1]) for match in texts if match), default)


def _share(template: Object) -> int:
    """Workers of a pod."""
    env = {item["name"]: item.get("value") for item in template["containers"][0].get("env") or []}
    gpus = [int(n) for key, n in (template["containers"][0]["resources"].get("limits") or {}).items() if "/" in key]
    return int(env.get("PET_NPROC_PER_NODE") or sum(gpus) or 1)
