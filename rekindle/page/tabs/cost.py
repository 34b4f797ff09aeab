"""The tab `cost`: the cost of a run by task, the prices, and the resources that its pods requested
and used."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from argolocal.page.sources import Run
from argolocal.view.summary import parse_timestamp
from rekindle.errors import RekindleError
from rekindle.page.tabs.records import LedgerTab
from rekindle.training.cost import jobs, pod_requests
from rekindle.training.cost.pod_requests import PodReplicas, PodRequests
from rekindle.training.cost.tariff import find_training_pods

if TYPE_CHECKING:
    from rekindle.training.cost.prices import Prices
    from rekindle.view.explain import RunCosts

HOUR_S = 3600.0


@dataclass(frozen=True)
class Use:
    """Resources that a pod of a training used: mean and maximum of busy CPUs, maximum memory in
    GiB, and mean utilization of each GPU in percent."""

    cpus_mean: float
    cpus_max: float
    gib_max: float
    gpu_percent_mean: float | None


@dataclass(frozen=True)
class PodRow:
    """Pods of a task with equal requests. `seconds`: sum of their running times.

    `node_class`: class of nodes in prices.yaml; "" without prices. `use` is None if it is not
    recorded, as for the pods of steps.
    """

    task: str
    role: str
    count: int
    cpus: float
    gib: float
    gpus: float
    seconds: float
    node_class: str
    is_spot: bool
    use: Use | None = None

    @property
    def gpu_hours(self) -> float:
        return round(self.gpus * self.seconds / HOUR_S, 4)


@dataclass(frozen=True)
class TaskCost:
    """The cost of a task."""

    task: str
    amount: float
    percent: float
    text: str


@dataclass(frozen=True)
class PriceRow:
    """The hourly prices of a class of nodes. `kind`: on demand or spot."""

    node_class: str
    kind: str
    cpu_hour: float
    gib_hour: float
    gpu_hour: float


@dataclass(frozen=True)
class RunCost:
    """The cost of a run, its pods and the prices.

    `trainings`: sentences about the cost of each training, by task; `gpu_hours`: total of all pods.
    """

    words: str
    currency: str
    total: float | None
    tasks: list[TaskCost]
    trainings: dict[str, list[str]]
    pods: list[PodRow]
    gpu_hours: float
    prices: list[PriceRow] = field(default_factory=list)
    problem: str = ""


class CostTab(LedgerTab):
    """The tab `cost`."""

    name = "cost"
    title = "Cost"
    content = RunCost

    def build(self, run: Run, query: Mapping[str, str]) -> RunCost:
        from rekindle.view.explain import RunCosts

        if not self.is_shown(run):
            return RunCost("This run trains nothing.", "", None, [], {}, [], 0.0)

        costs = RunCosts(run.name, run.manifest, run.status)
        problem = ""
        reports: dict[str, dict[str, Any]] = {}
        workers: dict[str, dict[str, float]] = {}
        uses: dict[str, Use | None] = {}
        try:
            for task in self.records.facts(run).trainings:
                reports[task], workers[task] = self._training(run, task, costs)
                uses[task] = summarize_use(self.records.summary(run.name, task).usage)
        except RekindleError as error:
            problem = f"The ledgers of the trainings cannot be read: {error}"

        pods = [*list_step_pods(run, costs), *list_workers(workers, uses, costs)]
        gpu_hours = round(sum(pod.gpu_hours for pod in pods), 4)
        trainings = {task: report["words"] for task, report in reports.items() if report["words"]}
        run_cost = costs.of_run(run.status, reports)
        if not run_cost:
            words = "The cost is unknown, because the project lacks prices.yaml."
            return RunCost(words, "", None, [], trainings, pods, gpu_hours, problem=problem)

        return RunCost(
            f"The whole run cost {run_cost['words']}.",
            run_cost["currency"],
            run_cost["total"],
            rank_tasks(run_cost),
            trainings,
            pods,
            gpu_hours,
            [*list_prices(costs.prices, pods)] if costs.prices else [],
            problem,
        )

    def _training(
        self, run: Run, task: str, costs: "RunCosts"
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Return a report of a training's cost, with sentences about it, and the running time of
        each worker in seconds."""
        from rekindle.training.cost.bill import compute_bill, describe_bill

        summary = self.records.summary(run.name, task)
        seconds = {name: summary.compute_alive_seconds(name) for name in summary.intervals}
        tariff = costs.tariffs.get(task)
        if not tariff or not summary.intervals:
            return {"words": []}, seconds
        bill = compute_bill(summary, tariff)
        return {"words": [*describe_bill(bill)], "cost": bill.as_json()}, seconds


def rank_tasks(run_cost: Mapping[str, Any]) -> list[TaskCost]:
    """Return the costs of the tasks, the largest first."""
    from rekindle.training.cost.bill import format_amount

    total = run_cost["total"] or 1.0
    ranked = sorted(run_cost["steps"].items(), key=lambda item: -item[1])
    return [
        TaskCost(task, amount, round(100 * amount / total, 1), format_amount(amount))
        for task, amount in ranked
        if amount
    ]


def list_step_pods(run: Run, costs: "RunCosts") -> Iterator[PodRow]:
    """Yield the pods of the steps, and of the jobs of other frameworks, by task."""
    templates = jobs.collect_templates(run.status, costs.manifest)
    # all attempts and loop items of a task request the same resources
    rows: dict[str, tuple[PodRequests, int, float]] = {}
    for node in list((run.status.get("nodes") or {}).values()):
        template = jobs.find_template(node, templates)
        if node.get("type") != "Pod" or not template or not node.get("startedAt"):
            continue
        pod = pod_requests.read_template_pod(template)
        if not pod:
            continue
        seconds = max(
            0.0, jobs.find_end_time(node, run.status) - parse_timestamp(node["startedAt"])
        )
        path = jobs.parse_task_path(node)
        _, count, earlier_seconds = rows.get(path, (pod, 0, 0.0))
        rows[path] = pod, count + 1, earlier_seconds + seconds

    for task, (pod, count, seconds) in rows.items():
        yield _make_row(task, PodReplicas("", count, pod), seconds, costs.prices)

    for job in costs.jobs:
        for replicas in job.replicas:
            yield _make_row(job.task, replicas, replicas.count * job.seconds, costs.prices)


def summarize_use(usage: Mapping[str, Mapping[str, float]]) -> Use | None:
    """Combine the recorded use of a training's pods: averages weighted by running time, and maxima.
    Return None if no use of the pods is recorded."""
    pods = list(usage.values())
    seconds = sum(pod["seconds"] for pod in pods)
    if not seconds:
        return None

    def average(name: str) -> float:
        return round(sum(pod.get(name, 0.0) * pod["seconds"] for pod in pods) / seconds, 3)

    has_gpus = any("gpu_percent_mean" in pod for pod in pods)
    return Use(
        average("cpu_cores_mean"),
        max(pod.get("cpu_cores_max", 0.0) for pod in pods),
        round(max(pod.get("memory_bytes_max", 0.0) for pod in pods) / pod_requests.GIB_BYTES, 3),
        average("gpu_percent_mean") if has_gpus else None,
    )


def list_workers(
    workers: Mapping[str, Mapping[str, float]],
    uses: Mapping[str, Use | None],
    costs: "RunCosts",
) -> Iterator[PodRow]:
    """Yield the worker pods of each training. `workers`: running time of each worker in seconds, by
    task."""
    for task, seconds in workers.items():
        pods, _ = find_training_pods(costs.manifest, task)
        if pods and seconds:
            # use the pod requests of the last role, as TrainingTariff does for workers of unknown
            # roles
            replicas = PodReplicas("worker", len(seconds), [*pods.values()][-1])
            row = _make_row(task, replicas, sum(seconds.values()), costs.prices)
            yield replace(row, use=uses.get(task))


def _make_row(task: str, replicas: PodReplicas, seconds: float, prices: "Prices | None") -> PodRow:
    pod = replicas.pod
    return PodRow(
        task,
        replicas.role,
        replicas.count,
        round(pod.cpus, 3),
        round(pod.gib, 3),
        pod.gpus,
        round(seconds, 3),
        prices.classify(pod) if prices else "",
        bool(prices and prices.is_spot(pod)),
    )


def list_prices(prices: "Prices", pods: list[PodRow]) -> Iterator[PriceRow]:
    """Yield the prices of the node classes that the pods use."""
    used = dict.fromkeys((pod.node_class, pod.is_spot) for pod in pods)
    for node_class, is_spot in used:
        class_prices = prices.classes[node_class]
        rate = class_prices.spot if is_spot else class_prices.on_demand
        if rate:
            kind = "spot" if is_spot else "on demand"
            yield PriceRow(node_class, kind, rate.cpu_hour, rate.gib_hour, rate.gpu_hour)
