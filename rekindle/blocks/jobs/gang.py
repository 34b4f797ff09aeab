"""Gang scheduling, which starts all pods of a job together. The setting `cluster.gang` adds fields
from the section `gang` of presets.yaml to the objects of a job.

The training operator must be started with its flag for the gang scheduler.
"""

from typing import Any

from rekindle.blocks.pod_settings import WORKFLOW_LABEL, Manifest
from rekindle.blocks.presets import read_presets
from rekindle.blocks.settings import ClusterConfig


def job_metadata(job_name: str, cluster: ClusterConfig) -> Manifest:
    """Return the metadata of a job. A job with the label of a queue is suspended until the queue
    admits all pods of the job."""
    return {
        "name": job_name,
        "labels": WORKFLOW_LABEL | preset_fields("labels", cluster, cluster.queue_priority),
    }


def queue_metadata(cluster: ClusterConfig) -> Manifest:
    """Return the metadata that names the queue, for pods whose scheduler no operator sets.

    Source: the annotations are read by Volcano (pkg/controllers/podgroup, from the pods of a Job)
    and by Kubeflow Trainer (plugins/volcano, from the template of a runtime).
    """
    annotations = preset_fields("annotations", cluster)
    if annotations:
        return {"annotations": annotations}
    return {}


def preset_fields(
    section_name: str, cluster: ClusterConfig, priority_class: str = ""
) -> dict[str, Any]:
    """Return the fields in a section of the gang scheduler's preset: labels, annotations, pods,
    policy or runtime."""
    preset_values = read_presets()["gang"].get(cluster.gang, {}).get(section_name, {})
    tag_values = {"queue": cluster.queue, "priority": priority_class}
    filled_fields = {
        key: text.format(**tag_values) if isinstance(text, str) else text
        for key, text in preset_values.items()
    }
    return {key: filled_value for key, filled_value in filled_fields.items() if filled_value != ""}
