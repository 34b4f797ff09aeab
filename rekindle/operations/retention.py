"""Apply retention: at the end of each run on this machine, and for `rekindle prune` on this machine
or a cluster. `rekindle/release/retention` decides which runs and releases are removed."""

import fcntl
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from argolocal.common import homes
from argolocal.common.json_text import to_json
from argolocal.manifest.allowed_values import COMPLETED_PHASES
from argolocal.state.journal import JOURNAL_FILE, MANIFEST_FILE, Busy, RunFiles
from argolocal.view import runs
from argolocal.view.summary import parse_timestamp
from rekindle.blocks.manifest import workflow_origin
from rekindle.blocks.manifest.provenance import BACKFILL
from rekindle.blocks.settings import ClusterConfig
from rekindle.cache.lookup import reused_tasks
from rekindle.cluster import workflows
from rekindle.cluster.cluster_objects import ClusterObjects
from rekindle.cluster.errors import MalformedObject
from rekindle.cluster.kubernetes_api import WORKFLOWS, Cluster
from rekindle.errors import ConfigError, RekindleError, write_stderr
from rekindle.kubernetes_names import CONFIG_MAP, NAME_LABEL, REKINDLE_SELECTOR, STORE_SECRET
from rekindle.local.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects
from rekindle.local.services.services import ADDRESS_VARIABLES
from rekindle.names import RunName, TaskReference
from rekindle.release import promotion
from rekindle.release.retention import listing, removal
from rekindle.release.retention.cluster_retention import compute_resumable_seconds
from rekindle.release.retention.decision import NO_LIMITS, Removal, Run, RunRemoval, choose_removals
from rekindle.release.serve_config import VERSION_ANNOTATION, RetentionConfig
from rekindle.sections import parse_section
from rekindle.storage import Store

# lifetime of a claim (which reserves a cached result for a new run) on this machine; longer than
# the time from the look-up in the cache to the start of the run
CLAIM_SECONDS = 7200.0
# seconds after its end during which a run of another machine may be resumed
RESUMABLE_SECONDS = compute_resumable_seconds(ClusterConfig.model_validate({}).model_dump())
# limit of `rekindle prune` on this machine for pipelines without limits
DEFAULT_KEEP_RUNS = 5
# matches texts that may contain RUN/TASK; a match begins at the start of a word, so that the search
# takes linear time
PATH_PATTERN = re.compile(r"(?<![\w.-])[\w.-]+(?:/[\w.-]+)+", re.ASCII)
# folder in REKINDLE_HOME for run folders that are being deleted
REMOVED_FOLDER = "removed"
# returns the RUN/TASK of all artifacts that an address in data.source covers
SourceLookup = Callable[[str], frozenset[str]]


@dataclass
class RetentionScope:
    """This machine or a namespace, with its runs and the limits of each pipeline.

    `shared` is True if other machines or namespaces may use the same MLflow and object store.
    `needed`: the tasks (RUN/TASK) whose artifacts a malformed workflow may use.
    """

    store: Store
    host: removal.RunHost
    objects: ClusterObjects | LocalObjects
    runs: dict[str, Run] = field(default_factory=dict)
    limits: dict[str, RetentionConfig] = field(default_factory=dict)
    shared: bool = True
    removes_releases: bool = True
    needed: set[str] = field(default_factory=set)

    def plan(self, pipeline_names: Iterable[str]) -> tuple[Removal, listing.ListingContext]:
        """Decide which runs and releases of `pipeline_names` to remove. Raises StorageError,
        TrackingError."""
        claim_seconds = RESUMABLE_SECONDS if self.shared else CLAIM_SECONDS
        list_served_versions = self._find_served_versions if self.removes_releases else None
        needed_tasks = frozenset(self.needed)
        listing_context = listing.ListingContext(
            self.runs, claim_seconds, RESUMABLE_SECONDS, list_served_versions, needed_tasks
        )
        current_listing = listing.read_listing(self.store, pipeline_names, listing_context)

        limits_by_pipeline = {
            pipeline_name: pipeline_limits
            for pipeline_name, pipeline_limits in self.limits.items()
            if pipeline_name in pipeline_names
        }
        find_inputs = listing.make_inputs_function(self.store, current_listing.releases)
        return choose_removals(
            current_listing, limits_by_pipeline, time.time(), find_inputs
        ), listing_context

    def _find_served_versions(self, model_name: str) -> set[str] | None:
        """Return the versions that Deployments serve, and those that a rollback can restore; None
        if they are unknown."""
        malformed_objects = list[object]()
        deployments = self.objects.deployments(model_name, malformed_objects.append)
        if malformed_objects:
            return None

        served_versions = set[str]()
        for deployment in deployments:
            deployment_annotations = deployment["metadata"].get("annotations") or {}
            if deployment_annotations.get(VERSION_ANNOTATION):
                served_versions.add(deployment_annotations[VERSION_ANNOTATION])

        if self.shared:
            return served_versions | promotion.list_retained_versions(model_name)
        return served_versions


class MachineHost:
    """The runs in REKINDLE_HOME."""

    def __init__(self, home_folder: Path) -> None:
        self.home = home_folder

    @contextmanager
    def hold(self, run_name: str) -> Iterator[bool]:
        """Lock the run, so that the run cannot be resumed. Yield False if the run is active."""
        run_files = RunFiles(self.home, run_name)
        if not run_files.root.exists():
            yield True
            return

        try:
            run_files.lock()
        except Busy:
            yield False
            return

        try:
            yield True
        finally:
            run_files.close()

    def remove(self, run_name: str) -> None:
        """Remove the folder of the run. The folder is moved first, since a partly deleted folder
        would look like another run."""
        run_files = RunFiles(self.home, run_name)
        if run_files.is_own_folder():
            (self.home / REMOVED_FOLDER).mkdir(exist_ok=True)
            target_folder = Path(tempfile.mkdtemp(dir=self.home / REMOVED_FOLDER))
            run_files.root.replace(target_folder / run_name)
            shutil.rmtree(target_folder)


class NamespaceHost:
    """The workflows in a namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @contextmanager
    def hold(self, run_name: str) -> Iterator[bool]:
        """Yield True if the workflow has ended, or does not exist. The workflow is read again,
        because on a cluster nothing prevents a user from resuming the workflow. A malformed
        workflow counts as active."""
        try:
            workflow = self.cluster.find(WORKFLOWS, run_name)
        except MalformedObject as error:
            write_stderr(f"warning: {run_name} is kept: {error}")
            yield False
            return
        yield not workflow or (workflow.get("status") or {}).get("phase") in COMPLETED_PHASES

    def remove(self, run_name: str) -> None:
        """Delete the workflow. A malformed workflow, or a workflow of the same name that Rekindle
        did not create, is kept."""
        try:
            workflow = self.cluster.find(WORKFLOWS, run_name)
        except MalformedObject as error:
            write_stderr(f"warning: the workflow {run_name} is kept: {error}")
            return
        if workflow and workflow_origin.is_rekindle_manifest(workflow):
            workflows.delete_run(self.cluster, run_name)


def apply_limits_after_run(home_folder: Path, workflow: Mapping[str, Any]) -> None:
    """Apply the limits in the config of a completed run to its pipeline on this machine. Errors are
    printed instead of raised."""
    pipeline_limits = _read_limits(workflow)
    pipeline_name = workflow_origin.pipeline_label(workflow)
    if pipeline_limits == NO_LIMITS or not pipeline_name:
        return

    try:
        with _hold_lock(home_folder):
            retention_scope = _make_local_scope(home_folder)
            retention_scope.limits = {pipeline_name: pipeline_limits}
            planned_removal, listing_context = retention_scope.plan([pipeline_name])
            planned_removal = removal.limit_removal(planned_removal)
            removed_names = removal.apply_removal(
                retention_scope.store, planned_removal, retention_scope.host, listing_context
            )
    except (RekindleError, OSError) as error:
        write_stderr(f"old runs are not removed: {error}")
        return

    if removed_names or planned_removal.releases:
        kept_tasks_by_run = [
            run_removal.kept_tasks
            for run_removal in planned_removal.runs
            if run_removal.run.name in removed_names
        ]
        write_stderr(
            f"removed {describe_counts(kept_tasks_by_run, len(planned_removal.releases))} (config"
            " section retention)"
        )


def describe_counts(kept_tasks_by_run: Iterable[Collection[str]], release_count: int) -> str:
    """Return the numbers of removed runs and releases in words. `kept_tasks_by_run`: for each
    removed run, the tasks with kept artifacts."""
    partial_removals = [bool(run_tasks) for run_tasks in kept_tasks_by_run]
    count_texts = [
        f"{removed_count} {counted_noun}{'s' * (removed_count != 1)}"
        for counted_noun, removed_count in (
            ("run", len(partial_removals)),
            ("release", release_count),
        )
    ]
    if any(partial_removals):
        count_texts[0] += f" ({sum(partial_removals)} in part)"

    return " and ".join(count_texts)


def prune_runs(
    home_folder: Path,
    cluster: Cluster | None,
    limit_options: Mapping[str, float | None],
    *,
    should_delete: bool,
) -> dict[str, list[dict[str, Any]]]:
    """Return the runs and releases that exceed the limits; with `should_delete`, remove them.

    The limits of a pipeline are in the config of its newest run; `limit_options` override them.
    """
    with nullcontext() if cluster else _hold_lock(home_folder):
        retention_scope = (
            _make_cluster_scope(cluster) if cluster else _make_local_scope(home_folder)
        )
        given_limits = {
            limit_name: limit_value
            for limit_name, limit_value in limit_options.items()
            if limit_value is not None
        }

        # the option keep_runs also counts the runs of `rekindle backfill`
        if "keep_runs" in given_limits:
            retention_scope.runs = {
                run_name: replace(run, counted=True)
                for run_name, run in retention_scope.runs.items()
            }

        for pipeline_name, pipeline_limits in retention_scope.limits.items():
            has_no_limits = pipeline_limits == NO_LIMITS and not retention_scope.shared
            default_limits = {"keep_runs": DEFAULT_KEEP_RUNS} if has_no_limits else {}
            retention_scope.limits[pipeline_name] = pipeline_limits.model_copy(
                update=default_limits | given_limits
            )

        planned_removal, listing_context = retention_scope.plan(retention_scope.limits)
        run_rows = list(
            filter(
                None,
                (
                    _make_run_row(home_folder, retention_scope.store, run_removal)
                    for run_removal in planned_removal.runs
                ),
            )
        )
        release_rows = [
            {
                "release": f"{surplus_release.model}@{surplus_release.version}",
                "bytes": _sum_bytes(retention_scope.store, surplus_release.prefix),
            }
            for surplus_release in planned_removal.releases
        ]

        if should_delete:
            removed_names = removal.apply_removal(
                retention_scope.store, planned_removal, retention_scope.host, listing_context
            )
            run_rows = [run_row for run_row in run_rows if run_row["run"] in removed_names]

    return {"runs": run_rows, "releases": release_rows}


def _make_run_row(
    home_folder: Path, object_store: Store, run_removal: RunRemoval
) -> dict[str, Any]:
    run_name = run_removal.run.name
    run_folder = RunFiles(home_folder, run_name).root

    size_bytes = sum(
        size_bytes
        for _, size_bytes in removal.list_own_artifacts(
            object_store, run_removal, run_removal.kept_tasks
        )
    )
    if not run_removal.kept_tasks:
        size_bytes += sum(path.lstat().st_size for path in run_folder.rglob("*"))

    is_record_removed = not run_removal.kept_tasks and (
        run_folder.exists() or not run_removal.keep_mlflow
    )
    if not size_bytes and not is_record_removed:
        return {}

    run_phase = "Succeeded" if run_removal.run.succeeded else "Failed"
    return {
        "run": run_name,
        "phase": run_phase,
        "bytes": size_bytes,
        "kept": ", ".join(sorted(run_removal.kept_tasks)),
    }


def _sum_bytes(object_store: Store, key_prefix: str) -> int:
    return sum(object_entry.size for object_entry in object_store.list(key_prefix))


@contextmanager
def _hold_lock(home_folder: Path) -> Iterator[None]:
    """Hold the lock that lets only one process of this machine remove runs."""
    homes.create_home(home_folder)
    with (home_folder / "retention.lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def _make_local_scope(home_folder: Path) -> RetentionScope:
    """Return the retention scope of this machine. Also set the environment variables of the
    services for this process, and delete run folders whose removal was interrupted."""
    local_cluster = LocalCluster(home_folder)
    service_addresses = local_cluster.configmap(CONFIG_MAP)
    os.environ.update(service_addresses | local_cluster.secret(STORE_SECRET))

    retention_scope = RetentionScope(
        local_cluster.store(), MachineHost(home_folder), LocalObjects(local_cluster)
    )
    is_own_store = _is_embedded(local_cluster, "s3", service_addresses)
    is_own_mlflow = _is_embedded(local_cluster, "mlflow", service_addresses)
    retention_scope.shared = not (is_own_store and is_own_mlflow)
    # if machines share an object store but have separate MLflow servers, the releases of other
    # machines are unknown on this machine
    retention_scope.removes_releases = is_own_store or not is_own_mlflow
    find_source_tasks = listing.make_source_lookup(retention_scope.store)

    shutil.rmtree(home_folder / REMOVED_FOLDER, ignore_errors=True)

    for run_name in runs.list_run_names(home_folder):
        run_files = RunFiles(home_folder, run_name)
        try:
            workflow = run_files.workflow()
            run_status = runs.load_status(home_folder, run_name)
        except ConfigError as error:
            write_stderr(f"{run_name} is kept: {error}")
            continue

        if not run_files.is_own_folder():
            write_stderr(
                f"{run_name} is kept: {run_files.root} is a link, or its manifest has another name"
            )
            continue

        if run_status["phase"] == "Running":
            end_seconds = None
        else:
            end_seconds = _find_last_change(home_folder, run_name, run_status)

        retention_scope.runs[run_name] = _make_run(
            find_source_tasks, run_name, workflow, end_seconds, run_status["phase"]
        )
        # runs are listed newest first, so the limits of the newest run are set first
        retention_scope.limits.setdefault(
            retention_scope.runs[run_name].pipeline, _read_limits(workflow)
        )

    return retention_scope


def _is_embedded(
    local_cluster: LocalCluster, service_name: str, service_addresses: Mapping[str, str]
) -> bool:
    """Return True if pods use the embedded service `service_name`, not another server."""
    service_record = local_cluster.services.find(service_name)
    return bool(
        service_record and service_record.url == service_addresses[ADDRESS_VARIABLES[service_name]]
    )


def _make_cluster_scope(cluster: Cluster) -> RetentionScope:
    retention_scope = RetentionScope(
        Store.from_env().short_retries(), NamespaceHost(cluster), ClusterObjects(cluster)
    )
    find_source_tasks = listing.make_source_lookup(retention_scope.store)
    keep_malformed = partial(_keep_malformed_run, retention_scope)
    found_workflows = cluster.list_objects(
        WORKFLOWS, REKINDLE_SELECTOR, on_malformed=keep_malformed
    )
    found_workflows.sort(
        key=lambda workflow: workflow["metadata"]["creationTimestamp"], reverse=True
    )

    for workflow in found_workflows:
        run_name = workflow["metadata"]["name"]
        try:
            run = _parse_cluster_run(find_source_tasks, run_name, workflow)
            pipeline_limits = _read_limits(workflow)
        except RekindleError as error:
            write_stderr(f"warning: {run_name} is kept: {error}")
            keep_malformed(workflow)
            continue

        retention_scope.runs[run_name] = run
        retention_scope.limits.setdefault(run.pipeline, pipeline_limits)

    return retention_scope


def _parse_cluster_run(
    find_source_tasks: SourceLookup, run_name: str, workflow: Mapping[str, Any]
) -> Run:
    """Return the run of a workflow. Raises InvalidDocument."""
    workflow_status = workflow.get("status") or {}
    workflow_phase = workflow_status.get("phase") or "Pending"
    # a completed workflow without an end time is malformed, so treat it as an active run
    finish_time_text = workflow_status.get("finishedAt")
    end_seconds = (
        parse_timestamp(finish_time_text)
        if workflow_phase in COMPLETED_PHASES and finish_time_text
        else None
    )
    return _make_run(find_source_tasks, run_name, workflow, end_seconds, workflow_phase)


def _keep_malformed_run(retention_scope: RetentionScope, workflow: object) -> None:
    """Keep the run of a malformed workflow, and all artifacts to which it may refer.

    The limits of the workflow are unknown, so the limits of an older run of the pipeline must not
    be applied.
    """
    retention_scope.needed |= find_references(to_json(workflow, default=str))
    workflow_metadata = workflow.get("metadata") if isinstance(workflow, dict) else None
    if not isinstance(workflow_metadata, dict):
        return

    run_name = RunName.parse_or_none(workflow_metadata.get("name"))
    workflow_labels = workflow_metadata.get("labels")
    name_label = workflow_labels.get(NAME_LABEL) if isinstance(workflow_labels, dict) else None
    pipeline_name = (
        name_label if isinstance(name_label, str) else (run_name or "").rpartition("-")[0]
    )

    if run_name:
        retention_scope.runs[run_name] = Run(run_name, pipeline_name, ended=None, succeeded=False)
    if pipeline_name:
        retention_scope.limits.setdefault(pipeline_name, NO_LIMITS)


def find_references(searched_text: str) -> set[str]:
    """Return every part of a text that may be a RUN/TASK."""
    references = set[str]()
    for found_path in PATH_PATTERN.findall(searched_text):
        path_names = found_path.split("/")
        candidate_references = (
            f"{run_name}/{task_name}" for run_name, task_name in itertools.pairwise(path_names)
        )
        references.update(filter(TaskReference.matches, candidate_references))
    return references


def _find_last_change(home_folder: Path, run_name: str, run_status: Mapping[str, Any]) -> float:
    """Return the time when a run ended; if its runner was killed, the time of the last event."""
    finish_time_text = run_status.get("finishedAt")
    if finish_time_text:
        return parse_timestamp(finish_time_text)

    file_names = (MANIFEST_FILE, JOURNAL_FILE)
    changed_files = [
        file for file in RunFiles(home_folder, run_name).root.glob("*") if file.name in file_names
    ]
    return max(file.stat().st_mtime for file in changed_files)


def _make_run(
    find_source_tasks: SourceLookup,
    run_name: str,
    workflow: Mapping[str, Any],
    end_seconds: float | None,
    run_phase: str,
) -> Run:
    pipeline_name = workflow_origin.read_pipeline_name(workflow)
    is_counted = not workflow_origin.read_parameter(workflow, BACKFILL)
    # MLflow does not know the data of a run before the end of its step `prepare`
    data_section = _read_config(workflow).get("data")
    data_source = data_section.get("source") if isinstance(data_section, dict) else None
    used_tasks = frozenset(reused_tasks(workflow).values()) | find_source_tasks(
        data_source if isinstance(data_source, str) else ""
    )
    workflow_uid = str(workflow["metadata"].get("uid") or "")
    return Run(
        run_name,
        pipeline_name,
        end_seconds,
        run_phase == "Succeeded",
        is_counted,
        used_tasks,
        uid=workflow_uid,
    )


def _read_limits(workflow: Mapping[str, Any]) -> RetentionConfig:
    """Return the section `retention` of a run's config."""
    return parse_section(
        RetentionConfig, _read_config(workflow).get("retention") or {}, "retention"
    )


def _read_config(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run, which may be in the WorkflowTemplate of the run."""
    run_config = workflow_origin.read_config(workflow)
    stored_spec = (workflow.get("status") or {}).get("storedWorkflowTemplateSpec")
    if run_config or not stored_spec:
        return run_config
    return workflow_origin.read_config({"metadata": workflow["metadata"], "spec": stored_spec})
