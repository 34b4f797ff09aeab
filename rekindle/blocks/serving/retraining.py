"""Start another run of a pipeline that is scheduled on the cluster, from its WorkflowTemplate."""

from hera.workflows import Resource

from argolocal.manifest.allowed_values import API_VERSION
from rekindle.blocks.container import retries
from rekindle.blocks.pod_settings import labels
from rekindle.blocks.resource import apply


def retraining(pipeline: str) -> Resource:
    """Return a template that starts a run of `pipeline` and does not wait; the run is named like
    scheduled runs.

    The workflow's ServiceAccount needs the permissions of `rekindle platform render --with
    retraining`.
    """
    name = f"{pipeline}-{{{{workflow.creationTimestamp.s}}}}"

    workflow = {
        "apiVersion": API_VERSION,
        "kind": "Workflow",
        "metadata": {"name": name, "labels": labels(pipeline)},
        "spec": {"workflowTemplateRef": {"name": pipeline}},
    }

    return apply("retrain", workflow, flags=["--server-side"], retry=retries(2))
