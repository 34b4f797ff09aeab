"""All pods of a job at once, or none: what `cluster.gang` means for the objects of a job (presets.yaml, `gang`).

Which gang scheduler the training operator uses is a flag of the operator; a job only says its part, and runs without.
"""

from typing import Any

from rekindle.blocks.pod import OF_WORKFLOW, Manifest
from rekindle.blocks.presets import presets
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError


def metadata(name: str, cluster: ClusterConfig) -> Manifest:
    """The metadata of a job's object; a queue in its labels holds the job back until there is room for all of it."""
    return {"name": name, "labels": OF_WORKFLOW | fields("labels", cluster, cluster.queue_priority)}


def queued(cluster: ClusterConfig) -> Manifest:
    """The metadata that tell the queue of pods, where no operator says who schedules them.

    Source: Volcano, pkg/controllers/podgroup (a Job's pods); Kubeflow Trainer, plugins/volcano (a runtime's template).
    """
    annotations = fields("annotations", cluster)
    return {"annotations": annotations} if annotations else {}


def check_job(name: str, cluster: ClusterConfig) -> None:
    """Raises ConfigError where a plain Job cannot take part."""
    if why := presets()["gang"].get(cluster.gang, {}).get("no_job"):
        raise ConfigError(
            f"Job {name}: cluster.gang is {cluster.gang}, and {why}. Set it to volcano or kueue, or build this "
            'Job from a ClusterConfig with gang="": its pods wait for no other ones.'
        )


def fields(part: str, cluster: ClusterConfig, priority: str = "") -> dict[str, Any]:
    """What the gang scheduler's preset has for this part of a job's objects."""
    values = presets()["gang"].get(cluster.gang, {}).get(part, {})
    known = {"queue": cluster.queue, "priority": priority}
    filled = {key: text.format(**known) if isinstance(text, str) else text for key, text in values.items()}
    return {key: value for key, value in filled.items() if value != ""}
