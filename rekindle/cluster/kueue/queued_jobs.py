"""The jobs and pods of a manifest that wait in a queue of Kueue.

    list_queued_jobs(read_templates(manifest))
    # → [QueuedJob("prepare", "Pod", "research"), QueuedJob("train", "JobSet", "research")]

Kueue admits all pods of a job together, but each pod of a workflow or of a Deployment on its own.
Source: the integrations of Kueue 0.19 in pkg/controller/jobs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from argolocal.manifest.types import Manifest
from rekindle.training.cost.pod_requests import (
    QUEUE_LABEL,
    QUEUE_PATTERN,
    PodReplicas,
    list_applied_objects,
    list_template_replicas,
    list_training_runtimes,
    read_object_text,
    read_template_pod,
)

PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
KIND_PATTERN = re.compile(r"""["']?\bkind["']?\s*:\s*["']?(\w+)""")
# kinds of objects whose pods Kueue admits one by one
SINGLE_POD_KINDS = ("Pod", "Deployment", "ReplicaSet")


@dataclass(frozen=True)
class QueuedJob:
    """Pods that Kueue admits together. `name`: name of the template that creates the pods."""

    name: str
    kind: str
    queue: str
    priority_class: str = ""
    pod_sets: tuple[PodReplicas, ...] = ()

    def sum_requests(self) -> dict[str, float]:
        """Return the amounts that all pods request together, by resource name."""
        total_amounts: dict[str, float] = {}
        for pod_set in self.pod_sets:
            for resource_name, amount in pod_set.pod.requests.items():
                total_amounts[resource_name] = (
                    total_amounts.get(resource_name, 0.0) + pod_set.count * amount
                )
        return total_amounts


def read_templates(manifest: Mapping[str, object]) -> dict[str, Manifest]:
    """Return the templates of a Workflow, WorkflowTemplate or CronWorkflow, by name."""
    spec = manifest.get("spec")
    if isinstance(spec, Mapping) and "workflowSpec" in spec:
        spec = spec["workflowSpec"]
    if not isinstance(spec, Mapping):
        return {}
    return {str(template.get("name")): template for template in spec.get("templates") or []}


def list_queued_jobs(templates: Mapping[str, Manifest]) -> list[QueuedJob]:
    """Return the jobs and pods that wait in a queue of Kueue because of a template. The keys of
    `templates` become the names of the returned jobs."""
    training_runtimes = list_training_runtimes(templates.values())
    return [
        queued_job
        for name, template in templates.items()
        for queued_job in _list_jobs_of_template(name, template, training_runtimes)
    ]


def list_unqueued_steps(templates: Mapping[str, Manifest]) -> list[str]:
    """Return the names of the templates whose own pods do not wait in a queue although another
    template has a queue."""
    if not list_queued_jobs(templates):
        return []
    return [
        name
        for name, template in templates.items()
        if read_template_pod(template) and QUEUE_LABEL not in _read_labels(template)
    ]


def _list_jobs_of_template(
    template_name: str, template: Manifest, training_runtimes: Mapping[str, list[PodReplicas]]
) -> Iterator[QueuedJob]:
    pod_labels = _read_labels(template)
    if QUEUE_LABEL in pod_labels:
        pod_sets = tuple(list_template_replicas(template, training_runtimes))
        yield _make_job(template_name, "Pod", pod_labels, pod_sets)
        return

    applied_objects = list(list_applied_objects(template, training_runtimes))
    for applied_object, pod_sets in applied_objects:
        object_labels = _read_labels(applied_object)
        if QUEUE_LABEL in object_labels:
            yield _make_job(template_name, str(applied_object.get("kind")), object_labels, pod_sets)

    # an object text with tags outside of quotes is not YAML, so the pods of the object are unknown
    object_text = read_object_text(template)
    queue_match = QUEUE_PATTERN.search(object_text)
    kind_match = KIND_PATTERN.search(object_text)
    if not applied_objects and queue_match and kind_match:
        yield QueuedJob(template_name, kind_match[1], queue_match[1])


def _make_job(
    job_name: str, job_kind: str, labels: Mapping[str, str], pod_sets: tuple[PodReplicas, ...]
) -> QueuedJob:
    if job_kind in SINGLE_POD_KINDS:
        pod_sets = tuple(replace(pod_set, count=1) for pod_set in pod_sets if pod_set.count)
    return QueuedJob(
        job_name, job_kind, labels[QUEUE_LABEL], labels.get(PRIORITY_LABEL, ""), pod_sets
    )


def _read_labels(labelled_object: Manifest) -> dict[str, str]:
    """Return the labels of an object or of the pods of a template."""
    metadata = labelled_object.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    if not isinstance(labels, Mapping):
        return {}
    return {str(key): str(value) for key, value in labels.items()}
