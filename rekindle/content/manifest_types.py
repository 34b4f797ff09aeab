"""The types of a workflow's manifest and of the pods in it, with the fields that Rekindle reads.

Only a field whose type contains None may be null. A field with a default value may be missing from
the manifest.

Source: the types are defined by Kubernetes 1.34 and Argo 3.7 (WorkflowSpec).
"""

from pydantic import Field

from rekindle.documents import Document

Scalar = str | int | float | bool
# mapping of texts, such as the name of a resource → its quantity
Amounts = dict[str, str | int | float]
Texts = dict[str, str]


class Resources(Document):
    limits: Amounts | None = None
    requests: Amounts | None = None


class EnvironmentVariable(Document):
    name: str
    value: str | None = None


class Container(Document):
    name: str = ""
    image: str = ""
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[EnvironmentVariable] | None = None
    resources: Resources | None = None


class Toleration(Document):
    key: str | None = None
    value: str = ""


class MatchExpression(Document):
    key: str
    operator: str = ""
    values: list[str] | None = None


class NodeSelectorTerm(Document):
    matchExpressions: list[MatchExpression] | None = None


class NodeSelector(Document):
    nodeSelectorTerms: list[NodeSelectorTerm] | None = None


class NodeAffinity(Document):
    requiredDuringSchedulingIgnoredDuringExecution: NodeSelector | None = None


class Affinity(Document):
    nodeAffinity: NodeAffinity | None = None


class NodeSelection(Document):
    """The fields of a pod or a template that select its node."""

    nodeSelector: Texts | None = None
    tolerations: list[Toleration] | None = None
    affinity: Affinity | None = None


class NamedReference(Document):
    name: str | None = None


class RunnablePodSpec(NodeSelection):
    """A PodSpec with its containers."""

    containers: list[Container] = Field(min_length=1)


class ValueSource(Document):
    default: Scalar | None = None


class Parameter(Document):
    name: str
    value: Scalar | None = None
    default: Scalar | None = None


class Arguments(Document):
    parameters: list[Parameter] | None = None


class Task(Document):
    name: str
    template: str = ""
    arguments: Arguments | None = None
    inline: "Template | None" = None


class Dag(Document):
    tasks: list[Task]


class AppliedObject(Document):
    action: str = ""
    manifest: str | None = None


class ContainerSet(Document):
    containers: list[Container] | None = None


class UnnamedTemplate(NodeSelection):
    inputs: Arguments | None = None
    outputs: Arguments | None = None
    dag: Dag | None = None
    steps: list[list[Task]] | None = None
    container: Container | None = None
    script: Container | None = None
    containerSet: ContainerSet | None = None
    sidecars: list[Container] | None = None
    resource: AppliedObject | None = None
    podSpecPatch: str | None = None


class Template(UnnamedTemplate):
    name: str = ""


class NamedTemplate(UnnamedTemplate):
    name: str = Field(min_length=1)


class WorkflowMetadata(Document):
    labels: Texts | None = None
    annotations: Texts | None = None


class WorkflowSpec(Document):
    entrypoint: str = ""
    onExit: str | None = None
    arguments: Arguments | None = None
    templates: list[NamedTemplate] | None = None
    workflowTemplateRef: NamedReference | None = None
    activeDeadlineSeconds: int | str | None = None
