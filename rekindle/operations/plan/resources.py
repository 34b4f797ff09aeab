"""CPU, memory and GPUs that the pods of each task request, their cost, and their use over time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rekindle.operations.plan.tasks import Task
from rekindle.operations.plan.timing import Span
from rekindle.training.cost import pod_requests
from rekindle.training.cost.pod_requests import Replicas
from rekindle.training.cost.prices import Prices


@dataclass(frozen=True)
class ResourceSeconds:
    """The resource requests of a task, multiplied by its duration in seconds. `cost` is None if the
    prices are unknown."""

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


def task_pods(task: Task, runtimes: Mapping[str, list[Replicas]]) -> list[Replicas]:
    """Return the pods of a task. A loop has its pods once per item; if the number of items is
    unknown, it counts as one.

    `runtimes`: pods of the TrainingRuntimes, by name.
    """
    items = 1 if task.items is None else task.items
    found = pod_requests.list_template_replicas(task.template, runtimes) if items else []
    return [replace(item, count=item.count * items) for item in found]


def totals(replicas: Iterable[Replicas]) -> dict[str, float]:
    """Add up the requests of all pods, by resource name."""
    result: dict[str, float] = {}
    for item in replicas:
        for name, value in item.pod.requests.items():
            result[name] = result.get(name, 0.0) + item.count * value
    return result


def resource_seconds(
    replicas: Iterable[Replicas], seconds: float, prices: Prices | None
) -> ResourceSeconds:
    """Return the resource requests of pods, multiplied by `seconds`. As in the cost of a run, the
    pods of Argo itself are free."""
    result = ResourceSeconds(cost=0.0 if prices else None)

    for item in replicas:
        cpu, gib, gpu = (item.count * value for value in item.pod.resource_seconds(seconds))
        if prices and not item.is_executor:
            cost = item.count * prices.pod_cost(item.pod, seconds)
        else:
            cost = None
        result += ResourceSeconds(cpu, gib, gpu, cost)

    return result


def peak(
    requested: Mapping[str, Mapping[str, float]], spans: Mapping[str, Span]
) -> dict[str, float]:
    """Return the largest amount of each resource that the tasks request at the same time.
    `requested`, `spans`: requests and time span of each task, by its path."""
    changes = [(span.start, 1, path) for path, span in spans.items()]
    changes += [(span.end, -1, path) for path, span in spans.items()]

    current: dict[str, float] = {}
    result: dict[str, float] = {}
    for _, sign, path in sorted(changes):
        for name, value in requested.get(path, {}).items():
            current[name] = current.get(name, 0.0) + sign * value
            result[name] = max(result.get(name, 0.0), round(current[name], 6))

    return result
