"""Argo's objects as typed dictionaries, with the fields that this code reads.

Manifests come from users, so nothing is required but what `manifest/schema.py` has checked. Source: Argo's
pkg/apis/workflow/v1alpha1/workflow_types.go.
"""

from collections.abc import Callable, Mapping
from typing import Any, Required, TypedDict

Manifest = Mapping[str, Any]  # any Kubernetes object
Find = Callable[[str, str], Manifest | None]  # (kind, name) -> the object


class Inputs(TypedDict, total=False):
    """Of a template; `Arguments` of its caller have the same two lists."""

    parameters: list[dict[str, Any]]
    artifacts: list[dict[str, Any]]


Arguments = Inputs


class Outputs(TypedDict, total=False):
    parameters: list[dict[str, Any]]
    artifacts: list[dict[str, Any]]
    result: str
    exitCode: str


class Reference(TypedDict, total=False):
    """A templateRef, or a workflowTemplateRef (without `template`)."""

    name: Required[str]
    template: str
    clusterScope: bool


class Hook(TypedDict, total=False):
    template: str
    templateRef: Reference
    expression: str
    arguments: Arguments


class Task(TypedDict, total=False):
    """A task of a DAG or a step; `depends` and `dependencies` are a task's alone."""

    name: Required[str]
    template: str
    templateRef: Reference
    inline: "Template"
    arguments: Arguments
    when: str
    withItems: list[Any]
    withParam: str
    withSequence: dict[str, Any]
    continueOn: dict[str, bool]
    depends: str
    dependencies: list[str]
    hooks: dict[str, Hook]
    onExit: str


Step = Task


class Dag(TypedDict, total=False):
    tasks: Required[list[Task]]
    target: str
    failFast: bool


class Template(TypedDict, total=False):
    """One of TEMPLATE_TYPES in kinds.py says what it does."""

    name: str
    inputs: Inputs
    outputs: Outputs
    container: dict[str, Any]
    script: dict[str, Any]
    resource: dict[str, Any]
    dag: Dag
    steps: list[list[Step]]
    suspend: dict[str, Any]
    containerSet: dict[str, Any]
    http: dict[str, Any]
    data: dict[str, Any]
    sidecars: list[dict[str, Any]]
    initContainers: list[dict[str, Any]]
    volumes: list[dict[str, Any]]
    retryStrategy: dict[str, Any]
    synchronization: dict[str, Any]
    memoize: dict[str, Any]
    daemon: bool
    failFast: bool
    parallelism: int
    timeout: str
    activeDeadlineSeconds: int | str
    terminationGracePeriodSeconds: int
    podSpecPatch: str
    metadata: dict[str, Any]
    metrics: dict[str, Any]
    archiveLocation: dict[str, Any]


class Node(TypedDict, total=False):
    """One entry of `status.nodes`."""

    id: Required[str]
    name: Required[str]
    displayName: Required[str]
    type: Required[str]  # a value of NODE_TYPES in kinds.py, or Retry, TaskGroup, StepGroup, Container, Skipped, Plugin
    phase: Required[str]
    startedAt: Required[str]
    finishedAt: Required[str | None]
    templateName: str
    templateRef: Reference
    templateScope: str
    boundaryID: str
    message: str
    nodeFlag: dict[str, bool]
    children: list[str]
    outboundNodes: list[str]
    inputs: Inputs
    outputs: Outputs
    daemoned: bool
    hostNodeName: str
    podIP: str
    memoizationStatus: dict[str, Any]
    synchronizationStatus: dict[str, Any]
