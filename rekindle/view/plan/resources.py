"""CPU, memory and GPUs that the pods of each task request, and their use over time."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from argolocal.errors import ArgolocalError
from argolocal.language.quantity import quantity
from argolocal.manifest.read import documents
from rekindle.view.plan.tasks import Task
from rekindle.view.plan.timing import Span

GIB = 1 << 30
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
COUNTS = ("replicas", "parallelism", "numNodes")  # fields of objects with the number of their pods


@dataclass(frozen=True)
class PodRequest:
    """Equal pods of a task: number and requests of one pod, by resource name, in cores, bytes and devices."""

    count: int
    resources: dict[str, float]
    selector: dict[str, str] = field(default_factory=dict)
    queue: str = ""  # Kueue's LocalQueue

    @property
    def total(self) -> dict[str, float]:
        return {name: self.count * value for name, value in self.resources.items()}


@dataclass(frozen=True)
class ResourceSeconds:
    """Requests of a task × its time."""

    cpu_seconds: float = 0.0
    gib_seconds: float = 0.0
    gpu_seconds: float = 0.0

    def __add__(self, other: "ResourceSeconds") -> "ResourceSeconds":
        return ResourceSeconds(
            self.cpu_seconds + other.cpu_seconds,
            self.gib_seconds + other.gib_seconds,
            self.gpu_seconds + other.gpu_seconds,
        )


def pods_of(task: Task) -> list[PodRequest]:
    """Return the pods of a task: its own pod, and the pods of the object that it creates.

    Each item of a loop counts; an unknown number of items counts as one. Pods whose manifest is not known count 0.
    """
    template, count = task.template, 1 if task.items is None else task.items
    if not template or count == 0:
        return []
    body = _pod_spec(template)
    own = [PodRequest(count, _requests(body), body.get("nodeSelector") or {})] if body.get("containers") else []
    resource = template.get("resource") or {}
    if resource.get("action") not in ("apply", "create"):
        return own
    try:
        objects = documents(resource.get("manifest") or "")
    except (ArgolocalError, ValueError):
        return own
    return own + [
        PodRequest(count * n, _requests(spec), spec.get("nodeSelector") or {}, q) for n, q, spec in _walk(objects)
    ]


def totals(pods: Iterable[PodRequest]) -> dict[str, float]:
    """Add up the requests of all pods, by resource name."""
    result: dict[str, float] = {}
    for pod in pods:
        for name, value in pod.total.items():
            result[name] = result.get(name, 0.0) + value
    return result


def gpus(requests: Mapping[str, float]) -> float:
    """Return the number of GPUs and parts of GPUs."""
    return sum(value for name, value in requests.items() if "/" in name and ("gpu" in name or "/mig-" in name))


def resource_seconds(requests: Mapping[str, float], seconds: float) -> ResourceSeconds:
    memory = requests.get("memory", 0.0) / GIB
    return ResourceSeconds(requests.get("cpu", 0.0) * seconds, memory * seconds, gpus(requests) * seconds)


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


def _pod_spec(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod of a template, with its podSpecPatch, as far as resources are concerned."""
    main = template.get("container") or template.get("script")
    containers = [main] if main else list((template.get("containerSet") or {}).get("containers") or [])
    if "resource" in template:
        containers = [{"name": "main"}]
    containers = [*containers, *(template.get("sidecars") or [])] if containers else []
    try:
        patch = json.loads(template.get("podSpecPatch") or "{}")
    except ValueError:  # a patch in YAML, or with tags
        patch = {}
    patches = {c.get("name"): c.get("resources") for c in patch.get("containers") or [] if c.get("resources")}
    containers = [
        c | {"resources": (c.get("resources") or {}) | patches[n]} if (n := c.get("name") or "main") in patches else c
        for c in containers
    ]
    return {
        "containers": containers,
        "initContainers": template.get("initContainers") or [],
        "nodeSelector": template.get("nodeSelector") or {},
    }


def _requests(spec: Mapping[str, Any]) -> dict[str, float]:
    """Return the requests of a pod: the sum of its containers, or more if an init container needs more."""
    result: dict[str, float] = {"pods": 1.0}
    for container in spec.get("containers") or []:
        for name, value in _of_container(container).items():
            result[name] = result.get(name, 0.0) + value
    for container in spec.get("initContainers") or []:
        for name, value in _of_container(container).items():
            result[name] = max(result.get(name, 0.0), value)
    return result


def _of_container(container: Mapping[str, Any]) -> dict[str, float]:
    resources = container.get("resources") or {}
    values = (resources.get("limits") or {}) | (resources.get("requests") or {})  # a limit is the default request
    result = {}
    for name, text in values.items():
        try:
            result[name] = float(quantity(text))
        except ValueError:  # a template tag
            continue
    return result


def _walk(value: Any, count: int = 1, queue: str = "") -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield number, queue and spec of all pods that an object creates: replicas of jobs, of Deployments, ..."""
    if isinstance(value, list):
        for item in value:
            yield from _walk(item, count, queue)
    elif isinstance(value, dict):
        labels = (value.get("metadata") or {}).get("labels") if isinstance(value.get("metadata"), dict) else None
        queue = str((labels or {}).get(QUEUE_LABEL) or queue)
        if isinstance(value.get("containers"), list):
            yield count, queue, value
            return
        for name in COUNTS:
            if isinstance(number := value.get(name), int) and not isinstance(number, bool):
                count *= number
        for child in value.values():
            yield from _walk(child, count, queue)
