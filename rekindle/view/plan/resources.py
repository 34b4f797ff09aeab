"""CPU, memory and GPUs that the pods of each task request, their cost, and their use over time."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from argolocal.errors import ArgolocalError
from argolocal.manifest.read import documents
from rekindle.training.cost import pods as cost_pods
from rekindle.training.cost.pods import GIB, Pod, Replicas
from rekindle.training.cost.prices import Prices
from rekindle.view.plan.tasks import Task
from rekindle.view.plan.timing import Span

RUNTIME, NODE = "TrainingRuntime", "node"  # kind of Kubeflow Trainer, and the name of the Job of its nodes
QUEUE = re.compile(r"""["']?kueue\.x-k8s\.io/queue-name["']?\s*:\s*["']?([\w.-]+)""")


@dataclass(frozen=True)
class PodRequest:
    """Equal pods of a task. `queue`: LocalQueue of Kueue; `is_executor`: Argo's pod that applies an object."""

    count: int
    pod: Pod
    queue: str = ""
    is_executor: bool = False

    @property
    def resources(self) -> dict[str, float]:
        """Requests of one pod by resource name, in cores, bytes and devices."""
        devices = {name: self.pod.gpus / len(self.pod.devices) for name in self.pod.devices}
        return {"pods": 1.0, "cpu": self.pod.cpus, "memory": self.pod.gib * GIB, **devices}


@dataclass(frozen=True)
class ResourceSeconds:
    """Requests of a task × its time; `cost` is missing (None) without prices."""

    cpu_seconds: float = 0.0
    gib_seconds: float = 0.0
    gpu_seconds: float = 0.0
    cost: float | None = None

    def __add__(self, other: "ResourceSeconds") -> "ResourceSeconds":
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        return ResourceSeconds(
            self.cpu_seconds + other.cpu_seconds,
            self.gib_seconds + other.gib_seconds,
            self.gpu_seconds + other.gpu_seconds,
            sum(costs) if costs else None,
        )


def pods_of(task: Task, runtimes: Mapping[str, list[Replicas]]) -> list[PodRequest]:
    """Return the pods of a task: its own pod, and the pods of the object that it applies.

    `runtimes`: the pods of TrainingRuntimes, which a TrainJob creates. Each item of a loop counts; an unknown number of
    items counts as one. Tags in a manifest count as 0.
    """
    template, items = task.template, 1 if task.items is None else task.items
    if items == 0:
        return []
    if own := cost_pods.of_template(template):
        return [PodRequest(items, own)]
    if "resource" not in template:
        return []
    executor = PodRequest(items, cost_pods.of_spec(template, [{"resources": _patched(template)}]), is_executor=True)
    if template["resource"].get("action") not in ("apply", "create"):
        return [executor]
    manifest = str(template["resource"].get("manifest"))
    queue, applied = QUEUE.search(manifest), cost_pods.applied(template)
    if RUNTIME in manifest:
        applied = _of_train_job(manifest, runtimes)
    return [executor, *(PodRequest(items * r.count, r.pod, queue[1] if queue else "") for r in applied)]


def training_runtimes(templates: Iterable[Mapping[str, Any]]) -> dict[str, list[Replicas]]:
    """Return the pods of the TrainingRuntimes that templates apply, by name of the runtime."""
    result = {}
    for template in templates:
        manifest = str((template.get("resource") or {}).get("manifest"))
        if RUNTIME in manifest and (found := _object(manifest, RUNTIME)):
            result[found["metadata"]["name"]] = cost_pods.applied(template)
    return result


def _of_train_job(manifest: str, runtimes: Mapping[str, list[Replicas]]) -> list[Replicas]:
    """Return the pods of a TrainJob: the pods of its runtime, with the job's number of nodes."""
    job = (_object(manifest, "TrainJob") or {}).get("spec") or {}
    nodes = (job.get("trainer") or {}).get("numNodes") or 1
    applied = runtimes.get((job.get("runtimeRef") or {}).get("name", ""), [])
    return [replace(r, count=r.count * nodes) if r.role == NODE else r for r in applied]


def _object(manifest: str, kind: str) -> dict[str, Any] | None:
    try:
        return next((found for found in documents(manifest) if found.get("kind") == kind), None)
    except (ArgolocalError, ValueError):  # tags outside of quotes
        return None


def _patched(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the resources of Argo's pod for an object, which only a podSpecPatch can set."""
    try:
        containers = json.loads(template.get("podSpecPatch") or "{}").get("containers") or []
    except (ValueError, AttributeError):  # a patch in YAML, or with tags
        return {}
    return next((c.get("resources") or {} for c in containers if c.get("name") == "main"), {})


def totals(requests: Iterable[PodRequest]) -> dict[str, float]:
    """Add up the requests of all pods, by resource name."""
    result: dict[str, float] = {}
    for request in requests:
        for name, value in request.resources.items():
            result[name] = result.get(name, 0.0) + request.count * value
    return result


def gpus(resources: Mapping[str, float]) -> float:
    """Return the number of GPUs and parts of GPUs."""
    return sum(value for name, value in resources.items() if "/" in name)


def resource_seconds(requests: Iterable[PodRequest], seconds: float, prices: Prices | None) -> ResourceSeconds:
    """Return the requests of pods for `seconds`. As in the cost of a run, the pods of Argo itself are free."""
    result = ResourceSeconds(cost=0.0 if prices else None)
    for request in requests:
        cpu, gib, gpu = (request.count * value for value in request.pod.resource_seconds(seconds))
        cost = request.count * prices.price(request.pod, seconds) if prices and not request.is_executor else None
        result += ResourceSeconds(cpu, gib, gpu, cost)
    return result


def peak(requests: Mapping[str, Mapping[str, float]], spans: Mapping[str, Span]) -> dict[str, float]:
    """Return the maximum of each resource over the run, if each task (by path) runs in its span."""
    changes = [(span.start, 1, path) for path, span in spans.items()]
    changes += [(span.end, -1, path) for path, span in spans.items()]
    current: dict[str, float] = {}
    result: dict[str, float] = {}
    for _, sign, path in sorted(changes):
        for name, value in requests.get(path, {}).items():
            current[name] = current.get(name, 0.0) + sign * value
            result[name] = max(result.get(name, 0.0), round(current[name], 6))
    return result
