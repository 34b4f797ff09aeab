"""Combines the parts of a forecast: tasks, reasons, times, resources and releases of the next
run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from argolocal.manifest import read as manifests
from argolocal.manifest.allowed_values import API_VERSION
from argolocal.manifest.resolve import make_finder, store_templates
from argolocal.manifest.shape import shape_errors
from rekindle import project
from rekindle.cache import lookup
from rekindle.cache.lookup import CacheResult
from rekindle.cluster.kubernetes_api import WORKFLOW_TEMPLATES, Cluster, Resource
from rekindle.errors import RekindleError
from rekindle.keys import CACHED
from rekindle.local.cluster import LocalCluster
from rekindle.operations import cached_results
from rekindle.operations.plan import capacity, history, releases, resources, timing
from rekindle.operations.plan.reasons import Reason, Reasons
from rekindle.operations.plan.releases import PlannedRelease
from rekindle.operations.plan.resources import ResourceSeconds
from rekindle.operations.plan.tasks import CONDITIONAL, EXIT_PATH, RUNS, Task, Tree
from rekindle.operations.plan.timing import Estimate, Total
from rekindle.training.cost.pod_requests import Replicas, list_training_runtimes
from rekindle.training.cost.prices import Prices

if TYPE_CHECKING:
    from rekindle.storage import Store

NO_CACHE = Reason("the cache is not used")
# kinds of objects that a manifest may refer to
REFERENCED_KINDS = {
    "WorkflowTemplate": WORKFLOW_TEMPLATES,
    "ClusterWorkflowTemplate": Resource(API_VERSION, "clusterworkflowtemplates", namespaced=False),
    "ConfigMap": Resource("v1", "configmaps"),
}


@dataclass(frozen=True)
class Row:
    """The forecast of one task."""

    task: str
    path: str
    status: str
    reason: Reason
    time: Estimate
    items: int | None  # number of loop items; None if this number is known only at run time
    pods: list[Replicas]
    requests: dict[str, float]
    usage: ResourceSeconds


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run. `total`: duration of the run; `unconditional_total`: its duration
    without conditional tasks."""

    name: str
    rows: list[Row]
    total: Total
    unconditional_total: Total
    former_runs: list[str]  # names of the runs that the times come from
    peak: dict[str, float]
    releases: list[PlannedRelease]
    currency: str = ""  # currency of the costs; empty if the prices are unknown
    shortages: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def unknown_tasks(self) -> list[str]:
        """The tasks that will run for an unknown time."""
        return [row.task for row in self.rows if row.status == RUNS and row.time.seconds is None]

    @property
    def usage(self) -> ResourceSeconds:
        """The total resource usage of all tasks."""
        return sum((row.usage for row in self.rows), ResourceSeconds())

    @property
    def unconditional_cost(self) -> float | None:
        """Return the cost of the tasks that do not depend on conditions; None if the prices are
        unknown."""
        running = (row.usage.cost for row in self.rows if row.status == RUNS)
        costs = [cost for cost in running if cost is not None]
        if costs:
            return sum(costs)
        return None

    def runs_anything(self) -> bool:
        """Return True if a task would or may run. Tasks of the exit handler, which every run has,
        do not count."""
        return any(
            row.status in (RUNS, CONDITIONAL)
            for row in self.rows
            if not row.task.startswith(EXIT_PATH)
        )


class Sources:
    """The sources of a forecast: the home of this machine, or a cluster; the object store, if it
    can be read."""

    def __init__(self, home: Path, cluster: Cluster | None) -> None:
        self.home = home
        self.cluster = cluster
        self.notes = list[str]()
        self.store: Store | None = None

        try:
            self.store = cached_results.readable_store(home, on_cluster=cluster is not None)
        except RekindleError as error:
            self.notes.append(f"the object store cannot be read: {error}")

        if cluster and not self.store and not self.notes:
            self.notes.append("S3_BUCKET is not set, so cached results and ledgers are unknown")

    def former_runs(self, workflow: Mapping[str, Any], name_prefix: str) -> list[history.FormerRun]:
        note = self.notes.append
        if not self.cluster:
            return list(history.read_local_runs(self.home, workflow, name_prefix, note))

        try:
            return list(history.read_cluster_runs(self.cluster, workflow, name_prefix, note))
        except RekindleError as error:
            self.notes.append(f"former runs cannot be read: {error}")
            return []

    def object_finder(self, objects: Iterable[Mapping[str, Any]]) -> Any:
        """Return a function that finds an object by kind and name: in `objects`, else in the
        cluster or, without a cluster, in argolocal's home folder."""
        find = make_finder(objects)

        def find_anywhere(kind: str, name: str) -> Any:
            found = find(kind, name)
            if found:
                return found

            if not self.cluster:
                return LocalCluster(self.home).find(kind, name)
            if kind in REFERENCED_KINDS:
                return self.cluster.find(REFERENCED_KINDS[kind], name)
            return None

        return find_anywhere

    def look_up(
        self, manifest: Mapping[str, Any], parameters: Mapping[str, str]
    ) -> list[CacheResult]:
        if not self.store or any(shape_errors(manifest)) or not lookup.has_reuse(manifest):
            return []

        on_cluster = self.cluster is not None
        if not on_cluster:
            cached_results.set_bucket()

        def open_store(name: str) -> "Store":
            return cast("Store", cached_results.readable_store(self.home, bucket=name))

        open_bucket = None if on_cluster else open_store

        try:
            return lookup.look_up(
                manifest,
                parameters,
                self.store,
                on_cluster=on_cluster,
                open_bucket=open_bucket,
                read_only=True,
            )
        except RekindleError as error:
            self.notes.append(f"the cache cannot be read: {error}")
            return []

    def champion(self, model: str) -> releases.Champion:
        if self.cluster:
            return releases.cluster_champion(self.cluster, model)
        return releases.local_champion(self.home, model)


def forecast(
    sources: Sources,
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    other_objects: Iterable[Mapping[str, Any]] = (),
    use_cache: bool = True,
) -> Forecast:
    """Forecast the run of a manifest with `parameters`. `other_objects`: the other objects in the
    manifest's files, such as WorkflowTemplates. Raises ConfigError if the manifest is invalid."""
    find = sources.object_finder(other_objects)
    workflow = manifests.workflow(manifest, parameters, find, for_this_machine=not sources.cluster)
    workflow = store_templates(workflow, find, lambda spec, path: None)

    if use_cache and CACHED not in parameters:
        results = sources.look_up(manifest, parameters)
    else:
        results = []

    by_task = {result.task: result for result in results}
    tree = Tree(workflow, lookup.cached_parameter(manifest, results) if results else "")
    prefix = _run_name_prefix(manifest)

    has_running_tasks = any(task.status in (RUNS, CONDITIONAL) for task in tree.leaves())
    if has_running_tasks:
        former_runs = sources.former_runs(workflow, prefix)
    else:
        former_runs = []

    estimates = timing.Estimates(tree, former_runs, sources.store, not sources.cluster)
    reasons = Reasons(tree, by_task, sources.store, prefix, bool(sources.cluster))
    times = {task.path: estimates.of(task) for task in tree.leaves()}
    overhead_s = timing.overhead(tree, former_runs)

    prices = Prices.load(project.root())
    runtimes = list_training_runtimes(tree.templates.values())

    rows = [
        _row(
            task,
            resources.task_pods(task, runtimes),
            times[task.path],
            reasons.explain(parent, task) if use_cache or task.status != RUNS else NO_CACHE,
            prices,
        )
        for parent, task in _leaves_with_parents(tree)
    ]

    requests = {row.path: row.requests for row in rows if row.status in (RUNS, CONDITIONAL)}
    peak = resources.peak(requests, timing.pod_spans(tree, times))
    pods = {row.task: row.pods for row in rows if row.status in (RUNS, CONDITIONAL)}

    if sources.cluster:
        shortages = capacity.find_shortages(sources.cluster, pods, peak)
    else:
        shortages = []

    return Forecast(
        name=prefix.rstrip("-"),
        rows=rows,
        total=timing.total(tree, times, overhead_s, with_conditional=True),
        unconditional_total=timing.total(tree, times, overhead_s, with_conditional=False),
        former_runs=[former.name for former in former_runs],
        peak=peak,
        releases=releases.plan_releases(tree, sources.champion),
        currency=prices.currency if prices else "",
        shortages=shortages,
        notes=sources.notes,
    )


def _leaves_with_parents(tree: Tree) -> list[tuple[Task, Task]]:
    pending = [(root, root) for root in (tree.root, tree.exit) if root]
    result = []

    while pending:
        parent, task = pending.pop(0)
        pending = [(task, child) for child in task.children.values()] + pending
        if not task.children:
            result.append((parent, task))

    return result


def _row(
    task: Task, pods: list[Replicas], time: Estimate, reason: Reason, prices: Prices | None
) -> Row:
    if task.status not in (RUNS, CONDITIONAL):
        pods = []

    # model servers are excluded, as in the cost of a run, because they continue after the run
    if "kind: Deployment" in str((task.template.get("resource") or {}).get("manifest")):
        charged_pods = []
    else:
        charged_pods = pods

    charged_seconds = max((time.seconds or 0.0) - time.free_seconds, 0.0)
    usage = resources.resource_seconds(charged_pods, charged_seconds, prices)

    return Row(
        task.path or "main",
        task.path,
        task.status,
        reason,
        time,
        task.items,
        pods,
        resources.totals(pods),
        usage,
    )


def _run_name_prefix(manifest: Mapping[str, Any]) -> str:
    """Return the common prefix of the names of a manifest's runs."""
    metadata = manifest.get("metadata") or {}
    if manifest.get("kind") in ("WorkflowTemplate", "CronWorkflow") and metadata.get("name"):
        return f"{metadata['name']}-"
    return str(metadata.get("name") or metadata.get("generateName") or "workflow-")
