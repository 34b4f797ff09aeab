"""Combines the parts of a forecast: tasks, reasons, times, resources and releases of the next
run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from argolocal.manifest import read as manifests
from argolocal.manifest.resolve import make_finder, store_templates
from argolocal.manifest.shape import find_shape_errors
from rekindle import project
from rekindle.cache import lookup
from rekindle.cache.lookup import CacheResult
from rekindle.cluster.kubernetes_api import (
    CLUSTER_WORKFLOW_TEMPLATES,
    WORKFLOW_TEMPLATES,
    Cluster,
    Resource,
)
from rekindle.cluster.kueue.queued_jobs import list_queued_jobs
from rekindle.errors import RekindleError
from rekindle.keys import CACHED_PARAMETER
from rekindle.local.cluster import LocalCluster
from rekindle.operations import cached_results
from rekindle.operations.plan import capacity, history, releases, resources, timing
from rekindle.operations.plan.reasons import Reason, TaskReasons
from rekindle.operations.plan.releases import PlannedRelease
from rekindle.operations.plan.resources import ResourceSeconds
from rekindle.operations.plan.tasks import (
    CONDITIONAL_STATUS,
    EXIT_PATH,
    RUNS_STATUS,
    Task,
    TaskTree,
)
from rekindle.operations.plan.timing import Estimate, TotalEstimate
from rekindle.training.cost.pod_requests import PodReplicas, list_training_runtimes
from rekindle.training.cost.prices import Prices

if TYPE_CHECKING:
    from rekindle.storage import Store

NO_CACHE_REASON = Reason("the cache is not used")
# states of the tasks that may create pods
POD_STATUSES = (RUNS_STATUS, CONDITIONAL_STATUS)
# kinds of objects that a manifest may refer to
REFERENCED_KINDS = {
    "WorkflowTemplate": WORKFLOW_TEMPLATES,
    "ClusterWorkflowTemplate": CLUSTER_WORKFLOW_TEMPLATES,
    "ConfigMap": Resource("v1", "configmaps"),
}


@dataclass(frozen=True)
class TaskForecast:
    """The forecast of one task."""

    task: str
    path: str
    status: str
    reason: Reason
    time: Estimate
    # number of items of the loop; None if the number is known only at run time
    items: int | None
    pods: list[PodReplicas]
    requests: dict[str, float]
    usage: ResourceSeconds


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run. `total`: duration of the run; `unconditional_total`: its duration
    without conditional tasks."""

    name: str
    rows: list[TaskForecast]
    total: TotalEstimate
    unconditional_total: TotalEstimate
    # names of the earlier runs from which the times were estimated
    former_runs: list[str]
    peak: dict[str, float]
    releases: list[PlannedRelease]
    # currency of the costs; empty if the prices are unknown
    currency: str = ""
    shortages: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def unknown_tasks(self) -> list[str]:
        """The tasks that will run for an unknown time."""
        return [
            task_forecast.task
            for task_forecast in self.rows
            if task_forecast.status == RUNS_STATUS and task_forecast.time.seconds is None
        ]

    @property
    def usage(self) -> ResourceSeconds:
        """The total resource usage of all tasks."""
        return sum((task_forecast.usage for task_forecast in self.rows), ResourceSeconds())

    @property
    def unconditional_cost(self) -> float | None:
        """The cost of the tasks that do not depend on conditions; None if the prices are
        unknown."""
        running_costs = (
            task_forecast.usage.cost
            for task_forecast in self.rows
            if task_forecast.status == RUNS_STATUS
        )
        known_costs = [cost for cost in running_costs if cost is not None]
        if known_costs:
            return sum(known_costs)
        return None

    def would_run_anything(self) -> bool:
        """Return True if a task would or may run. Tasks of the exit handler, which every run has,
        do not count."""
        return any(
            task_forecast.status in POD_STATUSES
            for task_forecast in self.rows
            if not task_forecast.task.startswith(EXIT_PATH)
        )


class ForecastSources:
    """The sources of a forecast, which are the REKINDLE_HOME of this machine or a cluster and, if
    it can be read, the object store. `notes` are sentences about sources that cannot be read."""

    def __init__(self, home_folder: Path, cluster: Cluster | None) -> None:
        self.home = home_folder
        self.cluster = cluster
        self.notes = list[str]()
        self.store: Store | None = None

        try:
            self.store = cached_results.open_readable_store(
                home_folder, is_on_cluster=cluster is not None
            )
        except RekindleError as error:
            self.notes.append(f"the object store cannot be read: {error}")

        if cluster and not self.store and not self.notes:
            self.notes.append("S3_BUCKET is not set, so cached results and ledgers are unknown")

    def former_runs(self, workflow: Mapping[str, Any], name_prefix: str) -> list[history.FormerRun]:
        add_note = self.notes.append
        if not self.cluster:
            return list(history.read_local_runs(self.home, workflow, name_prefix, add_note))

        try:
            return list(history.read_cluster_runs(self.cluster, workflow, name_prefix, add_note))
        except RekindleError as error:
            self.notes.append(f"former runs cannot be read: {error}")
            return []

    def make_object_finder(self, manifest_objects: Iterable[Mapping[str, Any]]) -> Any:
        """Return a function that finds an object by kind and name: in `manifest_objects`, else
        in the cluster or, without a cluster, in argolocal's home folder."""
        find_in_manifest = make_finder(manifest_objects)

        def find_anywhere(object_kind: str, object_name: str) -> Any:
            found_object = find_in_manifest(object_kind, object_name)
            if found_object:
                return found_object

            if not self.cluster:
                return LocalCluster(self.home).find(object_kind, object_name)
            if object_kind in REFERENCED_KINDS:
                return self.cluster.find(REFERENCED_KINDS[object_kind], object_name)
            return None

        return find_anywhere

    def look_up_results(
        self, manifest: Mapping[str, Any], workflow_parameters: Mapping[str, str]
    ) -> list[CacheResult]:
        if (
            not self.store
            or any(find_shape_errors(manifest))
            or not lookup.has_reusable_tasks(manifest)
        ):
            return []

        is_on_cluster = self.cluster is not None
        if not is_on_cluster:
            cached_results.set_bucket_variable()

        def open_store(bucket_name: str) -> "Store":
            return cast("Store", cached_results.open_readable_store(self.home, bucket=bucket_name))

        open_bucket = None if is_on_cluster else open_store

        try:
            return lookup.look_up_tasks(
                manifest,
                workflow_parameters,
                self.store,
                is_on_cluster=is_on_cluster,
                open_bucket=open_bucket,
                is_read_only=True,
            )
        except RekindleError as error:
            self.notes.append(f"the cache cannot be read: {error}")
            return []

    def champion(self, model_name: str) -> releases.Champion:
        if self.cluster:
            return releases.find_cluster_champion(self.cluster, model_name)
        return releases.find_local_champion(self.home, model_name)


def forecast_run(
    forecast_sources: ForecastSources,
    manifest: Mapping[str, Any],
    workflow_parameters: Mapping[str, str],
    other_objects: Iterable[Mapping[str, Any]] = (),
    is_cache_used: bool = True,
) -> Forecast:
    """Forecast the run of a manifest with `workflow_parameters`. `other_objects`: the other
    objects in the manifest's files, such as WorkflowTemplates. Raises ConfigError if the
    manifest is invalid."""
    find_object = forecast_sources.make_object_finder(other_objects)
    workflow = manifests.build_workflow(
        manifest, workflow_parameters, find_object, is_for_this_machine=not forecast_sources.cluster
    )
    workflow = store_templates(workflow, find_object, lambda spec, path: None)

    if is_cache_used and CACHED_PARAMETER not in workflow_parameters:
        cache_results = forecast_sources.look_up_results(manifest, workflow_parameters)
    else:
        cache_results = []

    results_by_task = {cache_result.task: cache_result for cache_result in cache_results}
    task_tree = TaskTree(
        workflow, lookup.cached_parameter(manifest, cache_results) if cache_results else ""
    )
    run_name_prefix = _get_run_name_prefix(manifest)

    has_running_tasks = any(task.status in POD_STATUSES for task in task_tree.leaves())
    if has_running_tasks:
        former_runs = forecast_sources.former_runs(workflow, run_name_prefix)
    else:
        former_runs = []

    task_estimator = timing.TaskEstimator(
        task_tree, former_runs, forecast_sources.store, not forecast_sources.cluster
    )
    task_reasons = TaskReasons(
        task_tree,
        results_by_task,
        forecast_sources.store,
        run_name_prefix,
        bool(forecast_sources.cluster),
    )
    time_estimates = {task.path: task_estimator.estimate(task) for task in task_tree.leaves()}
    overhead_seconds = timing.compute_overhead(task_tree, former_runs)

    prices = Prices.load(project.current_root())
    training_runtimes = list_training_runtimes(task_tree.templates.values())

    task_forecasts = [
        _make_task_forecast(
            task,
            resources.list_task_replicas(task, training_runtimes),
            time_estimates[task.path],
            task_reasons.explain(parent_task, task)
            if is_cache_used or task.status != RUNS_STATUS
            else NO_CACHE_REASON,
            prices,
        )
        for parent_task, task in _list_leaves_with_parents(task_tree)
    ]

    requests_by_path = {
        task_forecast.path: task_forecast.requests
        for task_forecast in task_forecasts
        if task_forecast.status in POD_STATUSES
    }
    peak_requests = resources.compute_peak(
        requests_by_path, timing.compute_pod_spans(task_tree, time_estimates)
    )

    return Forecast(
        name=run_name_prefix.rstrip("-"),
        rows=task_forecasts,
        total=timing.compute_total(
            task_tree, time_estimates, overhead_seconds, includes_conditional=True
        ),
        unconditional_total=timing.compute_total(
            task_tree, time_estimates, overhead_seconds, includes_conditional=False
        ),
        former_runs=[former_run.name for former_run in former_runs],
        peak=peak_requests,
        releases=releases.plan_releases(task_tree, forecast_sources.champion),
        currency=prices.currency if prices else "",
        shortages=_find_shortages(
            forecast_sources.cluster, task_forecasts, peak_requests, task_tree
        ),
        notes=forecast_sources.notes,
    )


def _find_shortages(
    cluster: Cluster | None,
    task_forecasts: list[TaskForecast],
    peak_requests: Mapping[str, float],
    task_tree: TaskTree,
) -> list[str]:
    """Return sentences about pods that do not fit into the cluster; [] for a run on this
    machine."""
    if not cluster:
        return []

    replicas_by_task = {
        task_forecast.task: task_forecast.pods
        for task_forecast in task_forecasts
        if task_forecast.status in POD_STATUSES
    }
    templates_by_task = {
        task.path or "main": task.template
        for task in task_tree.leaves()
        if task.status in POD_STATUSES and task.items != 0
    }
    return capacity.find_shortages(
        cluster, replicas_by_task, peak_requests, list_queued_jobs(templates_by_task)
    )


def _list_leaves_with_parents(task_tree: TaskTree) -> list[tuple[Task, Task]]:
    pending_pairs = [
        (root_task, root_task) for root_task in (task_tree.root, task_tree.exit) if root_task
    ]
    leaf_pairs = []

    while pending_pairs:
        parent_task, task = pending_pairs.pop(0)
        pending_pairs = [
            (task, child_task) for child_task in task.children.values()
        ] + pending_pairs
        if not task.children:
            leaf_pairs.append((parent_task, task))

    return leaf_pairs


def _make_task_forecast(
    task: Task,
    replica_groups: list[PodReplicas],
    time_estimate: Estimate,
    task_reason: Reason,
    prices: Prices | None,
) -> TaskForecast:
    if task.status not in POD_STATUSES:
        replica_groups = []

    # model servers are not counted, as in the cost of a run, because model servers continue after
    # the run
    if "kind: Deployment" in str((task.template.get("resource") or {}).get("manifest")):
        charged_pods = []
    else:
        charged_pods = replica_groups

    charged_seconds = max((time_estimate.seconds or 0.0) - time_estimate.free_seconds, 0.0)
    resource_usage = resources.compute_resource_seconds(charged_pods, charged_seconds, prices)

    return TaskForecast(
        task.path or "main",
        task.path,
        task.status,
        task_reason,
        time_estimate,
        task.items,
        replica_groups,
        resources.sum_requests(replica_groups),
        resource_usage,
    )


def _get_run_name_prefix(manifest: Mapping[str, Any]) -> str:
    """Return the common prefix of the names of a manifest's runs."""
    workflow_metadata = manifest.get("metadata") or {}
    if manifest.get("kind") in ("WorkflowTemplate", "CronWorkflow") and workflow_metadata.get(
        "name"
    ):
        return f"{workflow_metadata['name']}-"
    return str(
        workflow_metadata.get("name") or workflow_metadata.get("generateName") or "workflow-"
    )
