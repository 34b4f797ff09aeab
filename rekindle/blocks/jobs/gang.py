"""Gang scheduling: the fields that `cluster.gang` adds to the objects of a job (presets.yaml,
`gang`).

A flag of the training operator selects the gang scheduler; without the flag, jobs run without gang
scheduling.
"""

from typing import Any

from rekindle.blocks.pod_settings import OF_WORKFLOW, Manifest
from rekindle.blocks.presets import presets
from rekindle.blocks.settings import ClusterConfig


def metadata(name: str, cluster: ClusterConfig) -> Manifest:
    """Return the metadata of a job; a queue in the labels suspends the job until all its pods are
    admitted."""
    return {"name": name, "labels": OF_WORKFLOW | fields("labels", cluster, cluster.queue_priority)}


def queue_metadata(cluster: ClusterConfig) -> Manifest:
    """Return the metadata that name the queue, for pods whose scheduler is not set by an operator.

    Source: Volcano, pkg/controllers/podgroup (a Job's pods); Kubeflow Trainer, plugins/volcano (a
    runtime's template).
    """
    annotations = fields("annotations", cluster)
    if annotations:
        return {"annotations": annotations}
    return {}


def fields(section: str, cluster: ClusterConfig, priority: str = "") -> dict[str, Any]:
    """Return the fields in a section of the gang scheduler's preset: labels, annotations, pods,
    policy or runtime."""
    values = presets()["gang"].get(cluster.gang, {}).get(section, {})
    tag_values = {"queue": cluster.queue, "priority": priority}
    filled_fields = {
        key: text.format(**tag_values) if isinstance(text, str) else text
        for key, text in values.items()
    }
    return {key: value for key, value in filled_fields.items() if value != ""}
