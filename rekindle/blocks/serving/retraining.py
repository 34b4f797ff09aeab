"""Start a run of a pipeline from its WorkflowTemplate on the cluster, for example after drift."""

from hera.workflows import Resource

from argolocal.manifest.allowed_values import API_VERSION
from rekindle.blocks.container import retries
from rekindle.blocks.pod_settings import workflow_labels
from rekindle.blocks.resource import apply


def build_retraining_template(pipeline_name: str) -> Resource:
    """Return a template that starts a run of `pipeline_name` with a name like the name of a
    scheduled run, and does not wait for the end of the started run.

    The workflow's ServiceAccount needs the permissions of `rekindle platform render --with
    retraining`.
    """
    name = f"{pipeline_name}-{{{{workflow.creationTimestamp.s}}}}"

    workflow_manifest = {
        "apiVersion": API_VERSION,
        "kind": "Workflow",
        "metadata": {"name": name, "labels": workflow_labels(pipeline_name)},
        "spec": {"workflowTemplateRef": {"name": pipeline_name}},
    }

    return apply("retrain", workflow_manifest, flags=["--server-side"], retry=retries(2))
