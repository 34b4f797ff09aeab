"""Compare the pods of a manifest with the queues and quotas of Kueue before it is submitted.

    check_submission(cluster, {"spec": {"workflowTemplateRef": {"name": "demo"}}, ...})

A run may have its own templates, or the templates of a stored WorkflowTemplate.
"""

from collections.abc import Mapping

from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import (
    CLUSTER_WORKFLOW_TEMPLATES,
    WORKFLOW_TEMPLATES,
    Cluster,
)
from rekindle.cluster.kueue.admission import AdmissionFinding, check_admission
from rekindle.cluster.kueue.queued_jobs import list_queued_jobs, read_templates


def check_submission(cluster: Cluster, manifest: Mapping[str, object]) -> list[AdmissionFinding]:
    """Return the reasons that prevent or delay the admission of the jobs of a Workflow,
    WorkflowTemplate or CronWorkflow. Raises ApiError if the cluster does not answer."""
    templates = read_templates(manifest)
    reference = _read_template_reference(manifest)
    template_name = str(reference.get("name") or "")
    if not template_name:
        return check_admission(cluster, list_queued_jobs(templates))

    is_cluster_scoped = bool(reference.get("clusterScope"))
    resource = CLUSTER_WORKFLOW_TEMPLATES if is_cluster_scoped else WORKFLOW_TEMPLATES
    try:
        stored_template = cluster.find(resource, template_name) or {}
    except ApiError as error:
        if error.code != 403:
            raise
        problem = f"the WorkflowTemplate {template_name} is not compared with queues: {error}"
        return [AdmissionFinding(problem, is_fatal=False)]

    templates = read_templates(stored_template) | templates
    return check_admission(cluster, list_queued_jobs(templates))


def _read_template_reference(manifest: Mapping[str, object]) -> Mapping[str, object]:
    """Return the field `workflowTemplateRef` of a manifest; {} if it is missing."""
    spec = manifest.get("spec")
    if isinstance(spec, Mapping) and "workflowSpec" in spec:
        spec = spec["workflowSpec"]
    reference = spec.get("workflowTemplateRef") if isinstance(spec, Mapping) else None
    return reference if isinstance(reference, Mapping) else {}
