"""CPU, memory and GPUs that the pods of each task request, their cost, and their use over time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rekindle.operations.plan.tasks import Task
from rekindle.operations.plan.timing import TimeSpan
from rekindle.training.cost import pod_requests
from rekindle.training.cost.pod_requests import PodReplicas
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
        known_costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        return ResourceSeconds(
            self.cpu_seconds + other.cpu_seconds,
            self.gib_seconds + other.gib_seconds,
            self.gpu_seconds + other.gpu_seconds,
            sum(known_costs) if known_costs else None,
        )


def list_task_replicas(task: Task, runtimes: Mapping[str, list[PodReplicas]]) -> list[PodReplicas]:
    """Return the pods of a task. A loop creates its pods once for each item; if the number of items
    is unknown, it counts as one.

    `runtimes`: pods of the TrainingRuntimes, by name.
    """
    item_count = 1 if task.items is None else task.items
    replica_groups = (
        pod_requests.list_template_replicas(task.template, runtimes) if item_count else []
    )
    return [
        replace(replica_group, count=replica_group.count * item_count)
        for replica_group in replica_groups
    ]


def sum_requests(replica_groups: Iterable[PodReplicas]) -> dict[str, float]:
    """Add up the resource requests of all pods, by resource name."""
    total_requests: dict[str, float] = {}
    for replica_group in replica_groups:
        for resource_name, resource_amount in replica_group.pod.requests.items():
            total_requests[resource_name] = (
                total_requests.get(resource_name, 0.0) + replica_group.count * resource_amount
            )
    return total_requests


def compute_resource_seconds(
    replica_groups: Iterable[PodReplicas], duration_seconds: float, prices: Prices | None
) -> ResourceSeconds:
    """Return the resource requests of pods, multiplied by `duration_seconds`. As in the cost of
    a run, the pods of Argo itself are free."""
    resource_usage = ResourceSeconds(cost=0.0 if prices else None)

    for replica_group in replica_groups:
        cpu_seconds, gib_seconds, gpu_seconds = (
            replica_group.count * seconds_per_pod
            for seconds_per_pod in replica_group.pod.compute_resource_seconds(duration_seconds)
        )
        if prices and not replica_group.is_executor:
            group_cost = replica_group.count * prices.compute_pod_cost(
                replica_group.pod, duration_seconds
            )
        else:
            group_cost = None
        resource_usage += ResourceSeconds(cpu_seconds, gib_seconds, gpu_seconds, group_cost)

    return resource_usage


def compute_peak(
    requests_by_task: Mapping[str, Mapping[str, float]], spans_by_task: Mapping[str, TimeSpan]
) -> dict[str, float]:
    """Return the largest amount of each resource that the tasks request at the same time.
    `requests_by_task`, `spans_by_task`: requests and time span of each task, by its path."""
    request_changes = [
        (task_span.start, 1, task_path) for task_path, task_span in spans_by_task.items()
    ]
    request_changes += [
        (task_span.end, -1, task_path) for task_path, task_span in spans_by_task.items()
    ]

    current_requests: dict[str, float] = {}
    peak_requests: dict[str, float] = {}
    for _, change_sign, task_path in sorted(request_changes):
        for resource_name, resource_amount in requests_by_task.get(task_path, {}).items():
            current_requests[resource_name] = (
                current_requests.get(resource_name, 0.0) + change_sign * resource_amount
            )
            peak_requests[resource_name] = max(
                peak_requests.get(resource_name, 0.0), round(current_requests[resource_name], 6)
            )

    return peak_requests
