"""The types of Argo's objects, which are plain data: a task and a template have the fields of schema.py.

Manifests come from users, so nothing is required but what `manifest/schema.py` has checked. Source: Argo's
pkg/apis/workflow/v1alpha1/workflow_types.go.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

Manifest = Mapping[str, Any]  # any Kubernetes object
Find = Callable[[str, str], Manifest | None]  # (kind, name) -> the object
Object = dict[str, Any]  # a part of a manifest that is handed on as it is
Task = Object  # a task of a DAG, a step or a hook: what calls a template
Template = Object  # one of TEMPLATE_TYPES in kinds.py says what it does


class Node(TypedDict, total=False):
    """One entry of `status.nodes`."""

    id: str
    name: str
    displayName: str
    type: str  # a value of NODE_TYPES in kinds.py, or Retry, TaskGroup, StepGroup, Container, Skipped, Plugin
    phase: str
    startedAt: str
    finishedAt: Any  # None until the node is complete
    templateName: str
    templateRef: Object
    templateScope: str
    boundaryID: str
    message: str
    nodeFlag: dict[str, bool]
    children: list[str]
    outboundNodes: list[str]
    inputs: Object
    outputs: Any  # None if it has none
    daemoned: bool
    hostNodeName: str
    podIP: str
    memoizationStatus: Object
    synchronizationStatus: Object
