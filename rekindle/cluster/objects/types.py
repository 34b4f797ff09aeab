"""The types of the Kubernetes objects that Rekindle reads. `validation.find_fault` compares an
object of the API server with its type before the object is used.

The types contain only the fields that Rekindle reads. A field that may be null has None in its
type. A field without None in its type may be missing, because the code reads the field with a
default, but must not be null.

Source: the types are defined by Kubernetes 1.34; Argo 3.7, Workflow and CronWorkflow; Kubeflow
training operator 1.9; Kueue 0.19, Workload, LocalQueue, ClusterQueue and Cohort.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from argolocal.view.summary import parse_timestamp
from rekindle.content.manifest_types import (
    Amounts,
    Container,
    NamedReference,
    NodeSelection,
    Parameter,
    RunnablePodSpec,
    Template,
    Texts,
    ValueSource,
    WorkflowMetadata,
    WorkflowSpec,
)
from rekindle.documents import Document, name_field
from rekindle.names import PathName, RunName


def _check_time(time_text: str) -> str:
    if time_text:
        try:
            parse_timestamp(time_text)
        except (ValueError, OverflowError, OSError):
            raise ValueError("it must be a time as 2026-01-31T12:00:00Z") from None
    return time_text


Time = Annotated[str, AfterValidator(_check_time)]


class Owner(Document):
    kind: str
    name: str


class Metadata(Document):
    name: Annotated[str, name_field(PathName)]
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""
    generation: int = 0
    labels: Texts | None = None
    annotations: Texts | None = None
    ownerReferences: list[Owner] | None = None


class CreatedMetadata(Metadata):
    creationTimestamp: Time


class RunMetadata(CreatedMetadata):
    name: Annotated[str, name_field(RunName)]


class KubernetesObject(Document):
    """An object of which only the metadata is read."""

    metadata: Metadata


class CreatedObject(Document):
    metadata: CreatedMetadata


class RunObject(Document):
    metadata: RunMetadata


class Condition(Document):
    type: str
    status: str = ""
    reason: str | None = None
    message: str | None = None


# --- pods and their templates


class Volume(Document):
    configMap: NamedReference | None = None


class PodSpec(NodeSelection):
    nodeName: str | None = None
    containers: list[Container] = Field(default_factory=list)
    volumes: list[Volume] | None = None


class Waiting(Document):
    reason: str | None = None
    message: str | None = None


class Terminated(Document):
    exitCode: int


class ContainerState(Document):
    waiting: Waiting | None = None
    running: dict[str, Any] | None = None
    terminated: Terminated | None = None


class ContainerStatus(Document):
    name: str
    restartCount: int = 0
    state: ContainerState | None = None


class PodStatus(Document):
    phase: str = ""
    conditions: list[Condition] | None = None
    initContainerStatuses: list[ContainerStatus] | None = None
    containerStatuses: list[ContainerStatus] | None = None


class PodObject(CreatedObject):
    spec: PodSpec = Field(default_factory=PodSpec)
    status: PodStatus | None = None


class PodTemplate(Document):
    spec: RunnablePodSpec


class InvolvedObject(Document):
    name: str | None = None


class EventObject(KubernetesObject):
    reason: str | None = None
    message: str | None = None
    lastTimestamp: str | None = None
    involvedObject: InvolvedObject | None = None


# --- workflows


class StoredKey(Document):
    key: str | None = None


class Artifact(Document):
    name: str
    s3: StoredKey | None = None


class NodeInputs(Document):
    parameters: list[Parameter] | None = None
    artifacts: list[Artifact] | None = None


class NodeOutput(Document):
    """An output parameter, whose value Argo always writes as text."""

    name: str
    value: str = ""
    valueFrom: ValueSource | None = None


class NodeOutputs(Document):
    parameters: list[NodeOutput] | None = None
    artifacts: list[Artifact] | None = None
    exitCode: str | None = None


class TemplateReference(Document):
    name: str
    template: str
    clusterScope: bool = False


class WorkflowNode(Document):
    id: str
    name: str
    type: str
    phase: str = ""
    displayName: str = ""
    templateName: str = ""
    templateScope: str = ""
    templateRef: TemplateReference | None = None
    boundaryID: str = ""
    startedAt: Time | None = None
    finishedAt: Time | None = None
    message: str | None = None
    progress: str = ""
    children: list[str] = Field(default_factory=list)
    outboundNodes: list[str] = Field(default_factory=list)
    inputs: NodeInputs | None = None
    outputs: NodeOutputs | None = None


class WorkflowStatus(Document):
    phase: str = ""
    message: str | None = None
    progress: str = ""
    startedAt: Time | None = None
    finishedAt: Time | None = None
    compressedNodes: str | None = None
    offloadNodeStatusVersion: str | None = None
    nodes: dict[str, WorkflowNode] | None = None
    conditions: list[Condition] | None = None
    outputs: NodeOutputs | None = None
    storedWorkflowTemplateSpec: WorkflowSpec | None = None
    storedTemplates: dict[str, Template] | None = None
    taskResultsCompletionStatus: dict[str, bool] | None = None


class WorkflowObject(RunObject):
    spec: WorkflowSpec
    status: WorkflowStatus | None = None


class TemplateObject(KubernetesObject):
    spec: WorkflowSpec


class CronSpec(Document):
    schedule: str = ""
    schedules: list[str] | None = None
    timezone: str | None = None
    suspend: bool | None = None
    workflowSpec: WorkflowSpec | None = None
    workflowMetadata: WorkflowMetadata | None = None


class CronStatus(Document):
    lastScheduledTime: Time | None = None
    active: list[Any] | None = None


class CronObject(KubernetesObject):
    apiVersion: str = ""
    spec: CronSpec
    status: CronStatus | None = None


# --- jobs and servers


class Replicas(Document):
    replicas: int = Field(1, ge=0)
    template: PodTemplate | None = None


class PyTorchJobSpec(Document):
    pytorchReplicaSpecs: dict[str, Replicas]
    nprocPerNode: str | None = None


class PyTorchJobObject(KubernetesObject):
    spec: PyTorchJobSpec


class DeploymentStatus(Document):
    observedGeneration: int = 0
    replicas: int = 0
    readyReplicas: int = 0
    updatedReplicas: int = 0
    availableReplicas: int = 0


class DeploymentObject(KubernetesObject):
    spec: Replicas
    status: DeploymentStatus | None = None


class AutoscalerSpec(Document):
    minReplicas: int = Field(1, ge=0)


class AutoscalerObject(KubernetesObject):
    spec: AutoscalerSpec | None = None


class ServicePort(Document):
    port: int = Field(ge=1, le=65535)


class ServiceSpec(Document):
    selector: Texts = Field(default_factory=dict)
    ports: list[ServicePort] = Field(min_length=1)


class ServiceObject(KubernetesObject):
    spec: ServiceSpec


# --- the cluster


class Taint(Document):
    key: str
    value: str = ""
    effect: str = ""


class NodeSpec(Document):
    unschedulable: bool | None = None
    taints: list[Taint] | None = None


class NodeStatus(Document):
    allocatable: Amounts | None = None


class NodeObject(KubernetesObject):
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class QuotaAmounts(Document):
    hard: Amounts | None = None
    used: Amounts | None = None


class QuotaObject(KubernetesObject):
    spec: QuotaAmounts
    status: QuotaAmounts | None = None


class DataObject(KubernetesObject):
    """A ConfigMap or a Secret."""

    data: Texts | None = None


class VersionAnswer(Document):
    major: str
    minor: str
    gitVersion: str


class ApiResource(Document):
    name: str


class ResourcesAnswer(Document):
    resources: list[ApiResource] | None = None


class ReviewStatus(Document):
    allowed: bool = False


class ReviewAnswer(Document):
    status: ReviewStatus


# --- Kueue


class PodSetTemplate(Document):
    metadata: WorkflowMetadata | None = None


class PodSet(Document):
    template: PodSetTemplate | None = None


class WorkloadSpec(Document):
    queueName: str = ""
    priority: int = 0
    podSets: list[PodSet] | None = None


class WorkloadStatus(Document):
    conditions: list[Condition] | None = None


class WorkloadObject(CreatedObject):
    spec: WorkloadSpec
    status: WorkloadStatus | None = None


class ResourceUsage(Document):
    name: str
    total: str | int | None = None


class FlavorUsage(Document):
    name: str
    resources: list[ResourceUsage] | None = None


class QueueStatus(Document):
    conditions: list[Condition] | None = None
    flavorsReservation: list[FlavorUsage] | None = None
    pendingWorkloads: int = 0


class LocalQueueSpec(Document):
    clusterQueue: Annotated[str, name_field(PathName)]
    stopPolicy: str | None = None


class LocalQueueObject(KubernetesObject):
    spec: LocalQueueSpec
    status: QueueStatus | None = None


class FlavorQuota(Document):
    name: str
    nominalQuota: str | int | None = None
    borrowingLimit: str | int | None = None
    lendingLimit: str | int | None = None


class Flavor(Document):
    name: str
    resources: list[FlavorQuota] | None = None


class ResourceGroup(Document):
    coveredResources: list[str] | None = None
    flavors: list[Flavor] | None = None


class CohortSpec(Document):
    """The names of the cohort in several versions of Kueue, and the quotas of a ClusterQueue."""

    cohortName: str | None = None
    cohort: str | None = None
    parentName: str | None = None
    parent: str | None = None
    resourceGroups: list[ResourceGroup] | None = None


class CohortObject(KubernetesObject):
    spec: CohortSpec | None = None


class SelectorExpression(Document):
    key: str
    operator: str
    values: list[str] | None = None


class Selector(Document):
    matchLabels: Texts | None = None
    matchExpressions: list[SelectorExpression] | None = None


class Preemption(Document):
    withinClusterQueue: str | None = None


class ClusterQueueSpec(CohortSpec):
    namespaceSelector: Selector | None = None
    stopPolicy: str | None = None
    preemption: Preemption | None = None


class ClusterQueueObject(KubernetesObject):
    spec: ClusterQueueSpec
    status: QueueStatus | None = None


class FlavorToleration(Document):
    key: str | None = None
    value: str | None = None


class ResourceFlavorSpec(Document):
    nodeLabels: Texts | None = None
    nodeTaints: list[Taint] | None = None
    tolerations: list[FlavorToleration] | None = None


class ResourceFlavorObject(KubernetesObject):
    spec: ResourceFlavorSpec | None = None


# --- Kueue's configuration, a document in a ConfigMap


class WaitForPods(Document):
    enable: bool = True
    timeout: str | None = None


class Integrations(Document):
    frameworks: list[str] | None = None


class ResourceMapping(Document):
    input: str = ""


class ResourceSettings(Document):
    excludeResourcePrefixes: list[str] | None = None
    transformations: list[ResourceMapping] | None = None


class KueueConfiguration(Document):
    apiVersion: str = ""
    integrations: Integrations | None = None
    managedJobsNamespaceSelector: Selector | None = None
    waitForPodsReady: WaitForPods | None = None
    resources: ResourceSettings | None = None
