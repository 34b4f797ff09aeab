"""Types of Argo's objects, which are dicts and lists here. The fields of these objects are listed
and checked in schema.py.

Source: Argo's pkg/apis/workflow/v1alpha1/workflow_types.go.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

# any Kubernetes object
Manifest = Mapping[str, Any]
# function that returns the object with a given kind and name, or None
Find = Callable[[str, str], Manifest | None]
# a part of a manifest that the function only reads
Data = Mapping[str, Any]
# an object, or a part of a manifest
Object = dict[str, Any]
# a task of a DAG, a step or a hook: it calls a template
Task = Object
# an object with one of the TEMPLATE_TYPES in allowed_values.py
Template = Object


class Node(TypedDict, total=False):
    """An entry of `status.nodes`."""

    id: str
    name: str
    displayName: str
    # a value of NODE_TYPES in allowed_values.py, or Retry, TaskGroup, StepGroup, Container,
    # Skipped, Plugin
    type: str
    phase: str
    startedAt: str
    # None until the node is complete
    finishedAt: Any
    templateName: str
    templateRef: Object
    templateScope: str
    boundaryID: str
    message: str
    nodeFlag: dict[str, bool]
    children: list[str]
    outboundNodes: list[str]
    inputs: Object
    outputs: Any
    progress: str  # progress that the pod has reported, N/M
    daemoned: bool
    hostNodeName: str
    podIP: str
    memoizationStatus: Object
    synchronizationStatus: Object
