"""The pods of a manifest: their resource requests and node selection."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from argolocal.errors import ConfigError
from argolocal.language import yaml_text
from argolocal.language.quantity import parse_quantity
from argolocal.manifest.object_labels import REPLICA_TYPE_LABEL
from argolocal.manifest.types import Manifest
from rekindle.documents import is_valid
from rekindle.training.cost.applied_objects import AppliedPod, TrainingRuntime, TrainJob

GIB_BYTES = 1 << 30
DISK_RESOURCE = "ephemeral-storage"
# fields that contain the number of pods of a job or a Deployment
REPLICA_COUNT_FIELDS = ("replicas", "parallelism")
# largest number of replicas in Kubernetes
MAX_PODS = 2**31 - 1
# largest amount of a quantity in Kubernetes
MAX_AMOUNT = 2.0**63
# kinds of objects of Kubeflow Trainer
TRAIN_JOB_KIND = "TrainJob"
TRAINING_RUNTIME_KIND = "TrainingRuntime"
# kinds of objects whose pods run longer than the step that applies them, or start later
SERVER_KINDS = (
    "Deployment",
    "StatefulSet",
    "DaemonSet",
    "ReplicaSet",
    "ReplicationController",
    "Rollout",
    "Service",
    "InferenceService",
    "CronJob",
)
# name of the Job in a TrainingRuntime whose number of pods is numNodes of the TrainJob
TRAINING_NODES_JOB_NAME = "node"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_PATTERN = re.compile(r"""["']?kueue\.x-k8s\.io/queue-name["']?\s*:\s*["']?([\w.-]+)""")
# matches resources that are a GPU, another accelerator, or a part of an accelerator. Source: the
# device plugins of NVIDIA (gpu, gpu.shared, mig-1g.5gb; pgpu), AMD (gpu, cpx_nps4), Intel (i915,
# xe; gaudi of Habana), Google (tpu), AWS (neuron, neuroncore, neurondevice; vgpu), Huawei
# (Ascend910, npu), Cambricon (mlu), Hygon (dcu), Qualcomm (qaic)
ACCELERATOR_PATTERN = re.compile(
    r"[^/]+/(([vp]?gpu|mig-[^/]+|i915|xe|tpu|npu|mlu|dcu|qaic|neuron(core|device)?)(\.shared)?"
    r"|gaudi\d*|[a-z]px_nps\d|ascend\d+[a-z]*(-\d+c)?)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class PodRequests:
    """The resource requests of a pod (`gib`: memory in GiB), and its node selection."""

    cpus: float = 0.0
    gib: float = 0.0
    # labels that the node of the pod must have
    labels: Mapping[str, str] = field(default_factory=dict)
    # tolerations as pairs (key of the taint, "" for all taints; tolerated value, "" for Exists)
    tolerations: tuple[tuple[str, str], ...] = ()
    # GPUs and other devices by resource name
    devices: Mapping[str, float] = field(default_factory=dict)
    # requested local disk (ephemeral-storage) in bytes
    disk_bytes: float = 0.0

    def __str__(self) -> str:
        label_texts = [
            f"{label_key}={label_value}" for label_key, label_value in sorted(self.labels.items())
        ]
        return f"a pod with {', '.join([*label_texts, *self.devices]) or 'no node selection'}"

    def compute_resource_seconds(self, duration_seconds: float) -> tuple[float, float, float]:
        """Return the CPU-seconds, GiB-seconds and GPU-seconds of this pod."""
        return (
            self.cpus * duration_seconds,
            self.gib * duration_seconds,
            self.gpus * duration_seconds,
        )

    @property
    def gpus(self) -> float:
        """Number of GPUs and parts of GPUs."""
        return count_gpus(self.devices)

    @property
    def requests(self) -> dict[str, float]:
        """Amounts by resource name: numbers of pods, cores, bytes and devices."""
        disk_request = {DISK_RESOURCE: self.disk_bytes} if self.disk_bytes else {}
        return {
            "pods": 1.0,
            "cpu": self.cpus,
            "memory": self.gib * GIB_BYTES,
            **disk_request,
            **self.devices,
        }


@dataclass(frozen=True)
class PodReplicas:
    """Equal pods of a template. `role`: name of the pods' role in their job, such as Worker."""

    role: str
    count: int
    pod: PodRequests
    # command and arguments of the containers
    command: tuple[str, ...] = ()
    # LocalQueue of Kueue
    queue: str = ""
    # True for Argo's pod that applies an object
    is_executor: bool = False


def read_pod(pod_spec: Manifest, containers: list[Manifest] | None = None) -> PodRequests:
    """Read the resource requests and the node selection of a PodSpec. As in Kubernetes, the request
    of a resource is the resource's limit if only a limit is set."""
    total_amounts: dict[str, float] = {}
    for container in pod_spec.get("containers") or [] if containers is None else containers:
        resources = container.get("resources") or {}
        for resource_name, resource_amount in {
            **(resources.get("limits") or {}),
            **(resources.get("requests") or {}),
        }.items():
            total_amounts[resource_name] = total_amounts.get(
                resource_name, 0.0
            ) + parse_quantity_or_zero(resource_amount)

    device_counts = {
        resource_name: device_count
        for resource_name, device_count in total_amounts.items()
        if "/" in resource_name and device_count
    }
    toleration_pairs = [
        (toleration.get("key") or "", str(toleration.get("value", "")))
        for toleration in pod_spec.get("tolerations") or []
    ]
    required_labels = {
        **_read_required_labels(pod_spec),
        **{
            str(label_key): str(label_value)
            for label_key, label_value in (pod_spec.get("nodeSelector") or {}).items()
        },
    }

    return PodRequests(
        total_amounts.get("cpu", 0.0),
        total_amounts.get("memory", 0.0) / GIB_BYTES,
        required_labels,
        (*toleration_pairs,),
        device_counts,
        total_amounts.get(DISK_RESOURCE, 0.0),
    )


def count_gpus(amounts_by_resource: Mapping[str, float]) -> float:
    """Count the GPUs and other accelerators, or parts of them, among `amounts_by_resource`."""
    return sum(
        resource_amount
        for resource_name, resource_amount in amounts_by_resource.items()
        if ACCELERATOR_PATTERN.fullmatch(resource_name)
    )


def read_template_pod(template: Manifest) -> PodRequests | None:
    """Read the resource requests and the node selection of a template's pod; None for a template
    without containers."""
    main_containers = [
        template[container_kind]
        for container_kind in ("container", "script")
        if template.get(container_kind)
    ]
    main_containers += (template.get("containerSet") or {}).get("containers") or []
    if main_containers:
        return read_pod(template, [*main_containers, *(template.get("sidecars") or [])])
    return None


def list_template_replicas(
    template: Manifest, training_runtimes: Mapping[str, list[PodReplicas]]
) -> list[PodReplicas]:
    """Return all pods that a template creates: its own pod, or Argo's executor pod and the pods of
    the object that it applies.

    `training_runtimes`: pods of the TrainingRuntimes, by name.
    """
    own_pod = read_template_pod(template)
    if own_pod:
        pod_labels = (template.get("metadata") or {}).get("labels") or {}
        return [PodReplicas("", 1, own_pod, queue=str(pod_labels.get(QUEUE_LABEL, "")))]
    if "resource" not in template:
        return []

    executor_pod = read_pod(template, [{"resources": _read_executor_resources(template)}])
    creates_object = template["resource"].get("action") in ("apply", "create")

    return [
        PodReplicas("", 1, executor_pod, is_executor=True),
        *(list_object_replicas(template, training_runtimes) if creates_object else ()),
    ]


def list_object_replicas(
    template: Manifest, training_runtimes: Mapping[str, list[PodReplicas]] | None = None
) -> list[PodReplicas]:
    """Return the pods of the object that a template applies, such as a training job or a
    Deployment.

    With `training_runtimes`, the pods of a TrainingRuntime count for the TrainJob that uses it. A
    number that is a template tag counts as 0.
    """
    object_replicas = [
        pod_replicas
        for applied_object in _parse_applied_objects(template)
        for pod_replicas in _list_replicas_of_object(applied_object, training_runtimes)
    ]
    queue_match = QUEUE_PATTERN.search(read_object_text(template))
    if queue_match:
        return [replace(pod_replicas, queue=queue_match[1]) for pod_replicas in object_replicas]
    return object_replicas


def list_applied_jobs(
    template: Manifest, training_runtimes: Mapping[str, list[PodReplicas]]
) -> Iterator[tuple[str, tuple[PodReplicas, ...]]]:
    """Yield the kind and the pods of each job, of any kind, that a template applies."""
    for applied_object, object_replicas in list_applied_objects(template, training_runtimes):
        object_kind = str(applied_object.get("kind"))
        if object_replicas and object_kind not in SERVER_KINDS:
            yield object_kind, object_replicas


def list_applied_objects(
    template: Manifest, training_runtimes: Mapping[str, list[PodReplicas]]
) -> Iterator[tuple[Manifest, tuple[PodReplicas, ...]]]:
    """Yield each object that a template applies, with its pods."""
    if (template.get("resource") or {}).get("action") not in ("apply", "create"):
        return
    for applied_object in _parse_applied_objects(template):
        if isinstance(applied_object, Mapping):
            object_replicas = _list_replicas_of_object(applied_object, training_runtimes)
            yield dict(applied_object), tuple(object_replicas)


def list_training_runtimes(templates: Iterable[Manifest]) -> dict[str, list[PodReplicas]]:
    """Return the pods of the TrainingRuntimes that the templates apply, by the runtime's name."""
    applied_objects = [
        applied_object
        for template in templates
        for applied_object in _parse_applied_objects(template)
    ]
    training_runtimes = [
        applied_object
        for applied_object in applied_objects
        if isinstance(applied_object, Mapping)
        and applied_object.get("kind") == TRAINING_RUNTIME_KIND
        and is_valid(TrainingRuntime, applied_object)
    ]
    return {
        applied_object["metadata"]["name"]: [*_find_replicas(applied_object, "", 1)]
        for applied_object in training_runtimes
    }


def _list_replicas_of_object(
    applied_object: object, training_runtimes: Mapping[str, list[PodReplicas]] | None
) -> list[PodReplicas]:
    """Return the pods of an object; `training_runtimes` is described at `list_object_replicas`."""
    if isinstance(applied_object, Mapping) and training_runtimes is not None:
        if applied_object.get("kind") == TRAIN_JOB_KIND:
            return _list_train_job_replicas(applied_object, training_runtimes)
        if applied_object.get("kind") == TRAINING_RUNTIME_KIND:
            return []

    return [*_find_replicas(applied_object, "", 1)]


def _list_train_job_replicas(
    train_job: Manifest, training_runtimes: Mapping[str, list[PodReplicas]]
) -> list[PodReplicas]:
    """Return the pods of the TrainJob's runtime; the number of these pods is the TrainJob's
    numNodes."""
    if not is_valid(TrainJob, train_job):
        return []

    job_spec = train_job.get("spec") or {}
    node_count = (job_spec.get("trainer") or {}).get("numNodes") or 1
    runtime_replicas = training_runtimes.get((job_spec.get("runtimeRef") or {}).get("name", ""), [])
    if not isinstance(node_count, int):
        # a template tag
        node_count = 0

    return [
        replace(pod_replicas, count=pod_replicas.count * node_count)
        if pod_replicas.role == TRAINING_NODES_JOB_NAME
        else pod_replicas
        for pod_replicas in runtime_replicas
    ]


def _parse_applied_objects(template: Manifest) -> list[Any]:
    try:
        return yaml_text.parse(read_object_text(template))
    except ConfigError:
        # the text has template tags outside of quotes, and is YAML only after Argo has replaced the
        # tags
        return []


def read_object_text(template: Manifest) -> str:
    """Return the text of the object that a template applies; "" for a template that applies no
    object."""
    return str((template.get("resource") or {}).get("manifest") or "")


def _read_executor_resources(template: Manifest) -> Manifest:
    """Return the resources of Argo's executor pod, which only a podSpecPatch can set."""
    try:
        pod_spec_patch = json.loads(template.get("podSpecPatch") or "{}")
    # the podSpecPatch is YAML, or contains template tags
    except (ValueError, RecursionError):
        return {}
    if not is_valid(AppliedPod, pod_spec_patch):
        return {}

    patched_containers = pod_spec_patch.get("containers") or []
    return next(
        (
            container.get("resources") or {}
            for container in patched_containers
            if container.get("name") == "main"
        ),
        {},
    )


def list_manifest_pods(manifest: Manifest) -> Iterator[PodRequests]:
    """Yield the pods of all templates, and of the objects that they apply."""
    for template in manifest["spec"].get("templates") or []:
        template_pod = read_template_pod(template)
        if template_pod:
            yield template_pod
        yield from (pod_replicas.pod for pod_replicas in list_object_replicas(template))


def _find_replicas(object_part: object, part_role: str, pod_count: int) -> Iterator[PodReplicas]:
    """Yield the pods in a part of an object. `part_role`: role of this part of the object in a job;
    `pod_count`: number of replicas of this part."""
    if isinstance(object_part, list):
        for list_item in object_part:
            yield from _find_replicas(list_item, part_role, pod_count)

    if not isinstance(object_part, Mapping):
        return

    containers = object_part.get("containers")
    if isinstance(containers, list):
        # an object that the API server would reject creates no pods
        if not is_valid(AppliedPod, object_part):
            return

        command_words = tuple(
            str(command_word)
            for container in containers
            for command_key in ("command", "args")
            for command_word in container.get(command_key) or []
        )
        yield PodReplicas(part_role, pod_count, read_pod(object_part), command_words)
        return

    for count_field in REPLICA_COUNT_FIELDS:
        replica_count = object_part.get(count_field, 1)
        if isinstance(replica_count, int):
            pod_count *= replica_count

    # an object that the API server would reject creates no pods
    if not 0 <= pod_count <= MAX_PODS:
        return

    if "replicas" in object_part and "name" in object_part:
        part_role = str(object_part["name"])
    part_role = part_role or _read_role_label(object_part)

    for field_name, field_value in object_part.items():
        # the keys of replica specs, such as Worker, are roles
        is_role = re.match("[A-Z]", str(field_name))
        yield from _find_replicas(field_value, field_name if is_role else part_role, pod_count)


def _read_role_label(pod_template: Mapping[str, Any]) -> str:
    """Return the role of the pods of a template by their label, such as harvest; "" without it."""
    metadata = pod_template.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    return str(labels.get(REPLICA_TYPE_LABEL, "")) if isinstance(labels, Mapping) else ""


def _read_required_labels(pod_spec: Manifest) -> dict[str, str]:
    """Return the labels that every alternative of the required node affinity prescribes."""
    node_affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    selector_terms = (
        node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    ).get("nodeSelectorTerms") or []

    label_alternatives = [
        {
            (match_expression["key"], str(match_expression["values"][0]))
            for match_expression in selector_term.get("matchExpressions") or []
            if match_expression.get("operator") == "In"
            and len(match_expression.get("values") or []) == 1
        }
        for selector_term in selector_terms
    ]
    if label_alternatives:
        return dict(set.intersection(*label_alternatives))

    return {}


def parse_quantity_or_zero(quantity: str | float) -> float:
    """Convert a Kubernetes quantity to a number; return 0 for a text that is not a quantity, or for
    an amount that the API server would reject."""
    try:
        amount = float(parse_quantity(quantity))
    except (ValueError, OverflowError):
        # the value is a template tag, whose value is known only when the pod starts
        return 0.0

    if 0 <= amount <= MAX_AMOUNT:
        return amount
    return 0.0
