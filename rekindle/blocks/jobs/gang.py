"""All pods of a job at once, or none: what `cluster.gang` means for the objects of a job (presets.yaml, `gang`).

Which gang scheduler the training operator uses is a flag of the operator; a job only says its part, and runs without.
"""

from typing import Any

from rekindle.blocks.pod import Manifest
from rekindle.blocks.presets import presets
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.errors import ConfigError


def labels(cluster: ClusterConfig) -> dict[str, str]:
    """Labels of the job's object: a queue that holds it back until there is room for all of it."""
    return _filled("labels", cluster, cluster.queue_priority)


def policy(cluster: ClusterConfig, workers: PodConfig, least: int | None = None) -> Manifest:
    """`runPolicy.schedulingPolicy`; with `least` pods an elastic job begins (else the operator waits for all)."""
    return ({} if least is None else {"minAvailable": least}) | _filled("policy", cluster, workers.priority_class)


def runtime(cluster: ClusterConfig) -> Manifest:
    """`podGroupPolicy` of a TrainingRuntime."""
    return _filled("runtime", cluster, "")


def pods(cluster: ClusterConfig) -> Manifest:
    """Fields of a PodSpec, where no operator says who schedules the pod."""
    return _filled("pods", cluster, "")


def queued(cluster: ClusterConfig) -> Manifest:
    """The metadata that tell the queue of such pods.

    Source: Volcano, pkg/controllers/podgroup (a Job's pods); Kubeflow Trainer, plugins/volcano (a runtime's template).
    """
    annotations = _filled("annotations", cluster, "")
    return {"annotations": annotations} if annotations else {}


def holds_back(cluster: ClusterConfig) -> bool:
    """Whether the queue suspends a job until it is admitted, which its status then says."""
    return bool(labels(cluster))


def check_job(name: str, cluster: ClusterConfig) -> None:
    """Raises ConfigError where a plain Job cannot take part."""
    if why := presets()["gang"].get(cluster.gang, {}).get("no_job"):
        raise ConfigError(
            f"Job {name}: cluster.gang is {cluster.gang}, and {why}. Set it to volcano or kueue, or build this "
            'Job from a ClusterConfig with gang="": its pods wait for no other ones.'
        )


def _filled(part: str, cluster: ClusterConfig, priority: str) -> dict[str, Any]:
    values = presets()["gang"].get(cluster.gang, {}).get(part, {})
    known = {"queue": cluster.queue, "priority": priority}
    filled = {key: text.format(**known) if isinstance(text, str) else text for key, text in values.items()}
    return {key: value for key, value in filled.items() if value != ""}
