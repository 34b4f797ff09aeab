"""Argo's Task, Template and Node as typed dictionaries, with the fields that this code reads.

Manifests come from users, so nothing is required but what `manifest/schema.py` has checked. Source: Argo's
pkg/apis/workflow/v1alpha1/workflow_types.go.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

Manifest = Mapping[str, Any]  # any Kubernetes object
Find = Callable[[str, str], Manifest | None]  # (kind, name) -> the object
Object = dict[str, Any]  # a part of a manifest that is handed on as it is


class Task(TypedDict, total=False):
    """A task of a DAG, a step or a hook: what calls a template."""

    name: str
    template: str
    templateRef: Object
    inline: "Template"
    arguments: Object
    when: str
    withItems: list[Any]
    withParam: str
    withSequence: Object
    continueOn: dict[str, bool]
    depends: str
    dependencies: list[str]
    hooks: "dict[str, Task]"
    onExit: str
    expression: str  # of a hook


class Template(TypedDict, total=False):
    """One of TEMPLATE_TYPES in kinds.py says what it does."""

    name: str
    inputs: Object
    outputs: Object
    container: Object
    script: Object
    resource: Object
    dag: Object
    steps: list[list[Task]]
    suspend: Object
    containerSet: Object
    http: Object
    data: Object
    sidecars: list[Object]
    initContainers: list[Object]
    volumes: list[Object]
    retryStrategy: Object
    synchronization: Object
    memoize: Object
    daemon: bool
    failFast: bool
    parallelism: int
    timeout: str
    activeDeadlineSeconds: int | str
    terminationGracePeriodSeconds: int
    podSpecPatch: str
    metadata: Object
    metrics: Object
    archiveLocation: Object


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
