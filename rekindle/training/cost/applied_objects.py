"""The types of the objects that a template applies, with the fields that their cost depends on.

The types accept values that YAML reads as numbers in place of texts.
"""

from rekindle.content.manifest_types import Amounts, Scalar
from rekindle.documents import Document


class AppliedResources(Document):
    limits: Amounts | None = None
    requests: Amounts | None = None


class AppliedContainer(Document):
    name: str = ""
    command: list[Scalar] | None = None
    args: list[Scalar] | None = None
    resources: AppliedResources | None = None


class AppliedToleration(Document):
    key: str | None = None
    value: Scalar = ""


class AppliedExpression(Document):
    key: str
    operator: str = ""
    values: list[Scalar] | None = None


class AppliedTerm(Document):
    matchExpressions: list[AppliedExpression] | None = None


class AppliedTerms(Document):
    nodeSelectorTerms: list[AppliedTerm] | None = None


class AppliedNodeAffinity(Document):
    requiredDuringSchedulingIgnoredDuringExecution: AppliedTerms | None = None


class AppliedAffinity(Document):
    nodeAffinity: AppliedNodeAffinity | None = None


class AppliedPod(Document):
    containers: list[AppliedContainer] | None = None
    nodeSelector: dict[str, Scalar] | None = None
    tolerations: list[AppliedToleration] | None = None
    affinity: AppliedAffinity | None = None


class NamedMetadata(Document):
    name: str


class TrainingRuntime(Document):
    metadata: NamedMetadata


class RuntimeReference(Document):
    name: str = ""


class Trainer(Document):
    numNodes: int | str | None = None


class TrainJobSpec(Document):
    trainer: Trainer | None = None
    runtimeRef: RuntimeReference | None = None


class TrainJob(Document):
    spec: TrainJobSpec | None = None
