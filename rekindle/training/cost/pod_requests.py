"""The pods of a manifest: their resource requests and node selection."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from argolocal.errors import ConfigError
from argolocal.language import yaml_text
from argolocal.language.quantity import parse_quantity
from argolocal.manifest.types import Manifest
from rekindle.documents import is_valid
from rekindle.training.cost.applied_objects import AppliedPod, TrainingRuntime, TrainJob

GIB = 1 << 30
# fields that contain the number of pods of a job or a Deployment
COUNT_FIELDS = ("replicas", "parallelism")
MAX_PODS = 2**31 - 1  # largest number of replicas in Kubernetes
MAX_AMOUNT = 2.0**63  # largest amount of a quantity in Kubernetes
# kinds of Kubeflow Trainer
TRAIN_JOB = "TrainJob"
TRAINING_RUNTIME = "TrainingRuntime"
# kinds of objects whose pods run longer than the step that applies them, or start later
SERVER_KINDS = (
    *(
        "Deployment",
        "StatefulSet",
        "DaemonSet",
        "ReplicaSet",
        "ReplicationController",
        "Rollout",
        "Service",
    ),
    *("InferenceService", "CronJob"),
)
TRAINING_NODES_JOB = (
    "node"  # name of the Job in a TrainingRuntime that runs numNodes pods, as set by the TrainJob
)
QUEUE = re.compile(r"""["']?kueue\.x-k8s\.io/queue-name["']?\s*:\s*["']?([\w.-]+)""")
# resources that are a GPU, another accelerator, or a part of one. Source: device plugins of NVIDIA
# (gpu, gpu.shared, mig-1g.5gb; pgpu), AMD (gpu, cpx_nps4), Intel (i915, xe; gaudi of Habana),
# Google (tpu), AWS (neuron, neuroncore, neurondevice; vgpu), Huawei (Ascend910, npu), Cambricon
# (mlu), Hygon (dcu), Qualcomm (qaic)
ACCELERATOR = re.compile(
    r"[^/]+/(([vp]?gpu|mig-[^/]+|i915|xe|tpu|npu|mlu|dcu|qaic|neuron(core|device)?)(\.shared)?"
    r"|gaudi\d*|[a-z]px_nps\d|ascend\d+[a-z]*(-\d+c)?)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Pod:
    """The resource requests of a pod (`gib`: memory in GiB), and its node selection."""

    cpus: float = 0.0
    gib: float = 0.0
    # labels that the node of the pod must have
    labels: Mapping[str, str] = field(default_factory=dict)
    # tolerations as pairs (key of the taint, "" for all taints; tolerated value, "" for Exists)
    tolerations: tuple[tuple[str, str], ...] = ()
    # GPUs and other devices by resource name
    devices: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        selection = [f"{key}={value}" for key, value in sorted(self.labels.items())]
        return f"a pod with {', '.join([*selection, *self.devices]) or 'no node selection'}"

    def resource_seconds(self, seconds: float) -> tuple[float, float, float]:
        """Return the CPU-seconds, GiB-seconds and GPU-seconds of this pod."""
        return self.cpus * seconds, self.gib * seconds, self.gpus * seconds

    @property
    def gpus(self) -> float:
        """Number of GPUs and parts of GPUs."""
        return count_gpus(self.devices)

    @property
    def requests(self) -> dict[str, float]:
        """Amounts by resource name: numbers of pods, cores, bytes and devices."""
        return {"pods": 1.0, "cpu": self.cpus, "memory": self.gib * GIB, **self.devices}


@dataclass(frozen=True)
class Replicas:
    """Equal pods of a template. `role`: name of their part of a job, such as Worker."""

    role: str
    count: int
    pod: Pod
    command: tuple[str, ...] = ()  # command and arguments of the containers
    queue: str = ""  # LocalQueue of Kueue
    is_executor: bool = False  # True for Argo's pod that applies an object


def read_pod(spec: Manifest, containers: list[Manifest] | None = None) -> Pod:
    """Read the pod of a PodSpec. As in Kubernetes, the request of a resource is its limit if only a
    limit is set."""
    totals: dict[str, float] = {}
    for container in spec.get("containers") or [] if containers is None else containers:
        resources = container.get("resources") or {}
        for name, amount in {
            **(resources.get("limits") or {}),
            **(resources.get("requests") or {}),
        }.items():
            totals[name] = totals.get(name, 0.0) + quantity_or_zero(amount)

    devices = {name: count for name, count in totals.items() if "/" in name and count}
    tolerations = [
        (t.get("key") or "", str(t.get("value", ""))) for t in spec.get("tolerations") or []
    ]
    labels = {
        **_required_labels(spec),
        **{str(k): str(v) for k, v in (spec.get("nodeSelector") or {}).items()},
    }

    return Pod(
        totals.get("cpu", 0.0), totals.get("memory", 0.0) / GIB, labels, (*tolerations,), devices
    )


def count_gpus(resources: Mapping[str, float]) -> float:
    """Count the GPUs and other accelerators, or parts of them, among `resources`."""
    return sum(count for name, count in resources.items() if ACCELERATOR.fullmatch(name))


def read_template_pod(template: Manifest) -> Pod | None:
    """Read the pod of a template; None for a template without containers."""
    main = [template[kind] for kind in ("container", "script") if template.get(kind)]
    main += (template.get("containerSet") or {}).get("containers") or []
    if main:
        return read_pod(template, [*main, *(template.get("sidecars") or [])])
    return None


def list_template_replicas(
    template: Manifest, runtimes: Mapping[str, list[Replicas]]
) -> list[Replicas]:
    """Return all pods that a template creates: its own pod, or Argo's executor pod and the pods of
    the object that it applies.

    `runtimes`: pods of the TrainingRuntimes, by name.
    """
    own = read_template_pod(template)
    if own:
        return [Replicas("", 1, own)]
    if "resource" not in template:
        return []

    executor = read_pod(template, [{"resources": _executor_resources(template)}])
    creates = template["resource"].get("action") in ("apply", "create")

    return [
        Replicas("", 1, executor, is_executor=True),
        *(list_object_replicas(template, runtimes) if creates else ()),
    ]


def list_object_replicas(
    template: Manifest, runtimes: Mapping[str, list[Replicas]] | None = None
) -> list[Replicas]:
    """Return the pods of the object that a template applies, such as a training job or a
    Deployment.

    With `runtimes`, the pods of a TrainingRuntime count for the TrainJob that uses it. A number
    that is a template tag counts as 0.
    """
    result = [replicas for item in _objects(template) for replicas in _replicas_of(item, runtimes)]
    queue = QUEUE.search(read_object_text(template))
    if queue:
        return [replace(item, queue=queue[1]) for item in result]
    return result


def list_applied_jobs(
    template: Manifest, runtimes: Mapping[str, list[Replicas]]
) -> Iterator[tuple[str, tuple[Replicas, ...]]]:
    """Yield the kind and the pods of each job, of any kind, that a template applies."""
    if (template.get("resource") or {}).get("action") not in ("apply", "create"):
        return
    for item in _objects(template):
        kind = str(item.get("kind")) if isinstance(item, Mapping) else ""
        replicas = tuple(_replicas_of(item, runtimes))
        if kind and replicas and kind not in SERVER_KINDS:
            yield kind, replicas


def list_training_runtimes(templates: Iterable[Manifest]) -> dict[str, list[Replicas]]:
    """Return the pods of the TrainingRuntimes that the templates apply, by the runtime's name."""
    objects = [item for template in templates for item in _objects(template)]
    runtimes = [
        item
        for item in objects
        if isinstance(item, Mapping)
        and item.get("kind") == TRAINING_RUNTIME
        and is_valid(TrainingRuntime, item)
    ]
    return {item["metadata"]["name"]: [*_replicas(item, "", 1)] for item in runtimes}


def _replicas_of(item: object, runtimes: Mapping[str, list[Replicas]] | None) -> list[Replicas]:
    """Return the pods of an object; `runtimes`: see `list_object_replicas`."""
    if isinstance(item, Mapping) and runtimes is not None:
        if item.get("kind") == TRAIN_JOB:
            return _train_job_replicas(item, runtimes)
        if item.get("kind") == TRAINING_RUNTIME:
            return []

    return [*_replicas(item, "", 1)]


def _train_job_replicas(job: Manifest, runtimes: Mapping[str, list[Replicas]]) -> list[Replicas]:
    """Return the pods of the TrainJob's runtime; their number is the TrainJob's numNodes."""
    if not is_valid(TrainJob, job):
        return []

    spec = job.get("spec") or {}
    nodes = (spec.get("trainer") or {}).get("numNodes") or 1
    runtime = runtimes.get((spec.get("runtimeRef") or {}).get("name", ""), [])
    if not isinstance(nodes, int):
        nodes = 0  # a template tag

    return [
        replace(item, count=item.count * nodes) if item.role == TRAINING_NODES_JOB else item
        for item in runtime
    ]


def _objects(template: Manifest) -> list[Any]:
    try:
        return yaml_text.parse(read_object_text(template))
    except ConfigError:
        # the text has tags outside of quotes, and is YAML only after Argo has replaced them
        return []


def read_object_text(template: Manifest) -> str:
    """Return the text of the object that a template applies; "" for another template."""
    return str((template.get("resource") or {}).get("manifest") or "")


def _executor_resources(template: Manifest) -> Manifest:
    """Return the resources of Argo's executor pod, which only a podSpecPatch can set."""
    try:
        patch = json.loads(template.get("podSpecPatch") or "{}")
    # the podSpecPatch is YAML, or contains template tags
    except (ValueError, RecursionError):
        return {}
    if not is_valid(AppliedPod, patch):
        return {}

    containers = patch.get("containers") or []
    return next((c.get("resources") or {} for c in containers if c.get("name") == "main"), {})


def list_manifest_pods(manifest: Manifest) -> Iterator[Pod]:
    """Yield the pods of all templates, and of the objects that they apply."""
    for template in manifest["spec"].get("templates") or []:
        pod = read_template_pod(template)
        if pod:
            yield pod
        yield from (replicas.pod for replicas in list_object_replicas(template))


def _replicas(value: object, role: str, count: int) -> Iterator[Replicas]:
    if isinstance(value, list):
        for item in value:
            yield from _replicas(item, role, count)

    if not isinstance(value, Mapping):
        return

    containers = value.get("containers")
    if isinstance(containers, list):
        # what the API server would reject creates no pods
        if not is_valid(AppliedPod, value):
            return

        command = tuple(
            str(word)
            for c in containers
            for key in ("command", "args")
            for word in c.get(key) or []
        )
        yield Replicas(role, count, read_pod(value), command)
        return

    for name in COUNT_FIELDS:
        number = value.get(name, 1)
        if isinstance(number, int):
            count *= number

    # what the API server would reject creates no pods
    if not 0 <= count <= MAX_PODS:
        return

    if "replicas" in value and "name" in value:
        role = str(value["name"])

    for key, item in value.items():
        yield from _replicas(item, key if re.match("[A-Z]", str(key)) else role, count)


def _required_labels(spec: Manifest) -> dict[str, str]:
    """Return the labels that every alternative of the required node affinity prescribes."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get(
        "nodeSelectorTerms"
    ) or []

    alternatives = [
        {
            (rule["key"], str(rule["values"][0]))
            for rule in term.get("matchExpressions") or []
            if rule.get("operator") == "In" and len(rule.get("values") or []) == 1
        }
        for term in terms
    ]
    if alternatives:
        return dict(set.intersection(*alternatives))

    return {}


def quantity_or_zero(text: str | float) -> float:
    """Convert a Kubernetes quantity to a number; return 0 for a text that is not a quantity, or for
    an amount that the API server would reject."""
    try:
        amount = float(parse_quantity(text))
    except (ValueError, OverflowError):  # a template tag: known only when the pod starts
        return 0.0

    if 0 <= amount <= MAX_AMOUNT:
        return amount
    return 0.0
