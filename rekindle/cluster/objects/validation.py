"""Compare the answers of the API server with the types of the objects.

fault = find_fault("pods", pod)     # "metadata.labels: Input should be an object"; "" if none
"""

from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from rekindle.cluster.objects import types
from rekindle.documents import describe_first_error, validate_value

# plural name of a kind in the Kubernetes API → type of the objects of this kind
OBJECT_TYPES: dict[str, type[BaseModel]] = {
    "workflows": types.WorkflowObject,
    "workflowtemplates": types.TemplateObject,
    "clusterworkflowtemplates": types.TemplateObject,
    "cronworkflows": types.CronObject,
    "pods": types.PodObject,
    "events": types.EventObject,
    "pytorchjobs": types.PyTorchJobObject,
    "deployments": types.DeploymentObject,
    "horizontalpodautoscalers": types.AutoscalerObject,
    "services": types.ServiceObject,
    "nodes": types.NodeObject,
    "resourcequotas": types.QuotaObject,
    "configmaps": types.DataObject,
    "secrets": types.DataObject,
    "workloads": types.WorkloadObject,
    "localqueues": types.LocalQueueObject,
    "clusterqueues": types.ClusterQueueObject,
    "cohorts": types.CohortObject,
    "resourceflavors": types.ResourceFlavorObject,
    "version": types.VersionAnswer,
    "apiresources": types.ResourcesAnswer,
    "accessreviews": types.ReviewAnswer,
}
# types of objects that are read without their spec and status
METADATA_TYPES: dict[str, type[BaseModel]] = {"workflows": types.RunObject}
NODES_ADAPTER = TypeAdapter(dict[str, types.WorkflowNode])


def find_fault(plural_kind: str, kubernetes_object: Any, metadata_only: bool = False) -> str:
    """Return a text with the first wrong field of an object and the violated rule; "" if the object
    is valid.

    `metadata_only` is True if the object was read without its spec and status.
    """
    if metadata_only:
        object_model = METADATA_TYPES.get(plural_kind, types.KubernetesObject)
    else:
        object_model = OBJECT_TYPES.get(plural_kind, types.KubernetesObject)

    try:
        validate_value(object_model, kubernetes_object)
    except ValueError as error:
        return str(error)
    return ""


def find_nodes_fault(workflow_nodes: Any) -> str:
    """Return a text with the first wrong field in a workflow's nodes and the violated rule; "" if
    the nodes are valid."""
    try:
        NODES_ADAPTER.validate_python(workflow_nodes)
    except ValidationError as error:
        return describe_first_error(error)
    return ""
