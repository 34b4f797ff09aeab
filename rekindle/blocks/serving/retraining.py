"""Start a run of a pipeline from its WorkflowTemplate on the cluster, for example after drift."""

from hera.workflows import Resource

from argolocal.manifest.allowed_values import API_VERSION
from rekindle.blocks.container import retries
from rekindle.blocks.pod_settings import workflow_labels
from rekindle.blocks.resource import apply


def retraining(pipeline: str) -> Resource:
    """Return a template that starts a run of `pipeline` with a name like that of a scheduled run,
    and does not wait for the end of the run.

    The workflow's ServiceAccount needs the permissions of `rekindle platform render --with
    retraining`.
    """
    name = f"{pipeline}-{{{{workflow.creationTimestamp.s}}}}"

    workflow = {
        "apiVersion": API_VERSION,
        "kind": "Workflow",
        "metadata": {"name": name, "labels": workflow_labels(pipeline)},
        "spec": {"workflowTemplateRef": {"name": pipeline}},
    }

    return apply("retrain", workflow, flags=["--server-side"], retry=retries(2))
