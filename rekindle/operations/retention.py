"""Apply retention: at the end of each run on this machine, and for `rekindle prune` on this machine
or a cluster. `rekindle/release/retention` decides what is removed."""

import fcntl
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from argolocal.common import homes
from argolocal.common.json_text import to_json
from argolocal.manifest.allowed_values import COMPLETED
from argolocal.state.journal import JOURNAL_FILE, MANIFEST_FILE, Busy, RunFiles
from argolocal.view import runs
from argolocal.view.summary import timestamp
from rekindle.blocks.manifest import workflow_origin
from rekindle.blocks.manifest.provenance import BACKFILL
from rekindle.blocks.settings import ClusterConfig
from rekindle.cache.lookup import reused_tasks
from rekindle.cluster import workflows
from rekindle.cluster.cluster_objects import ClusterObjects
from rekindle.cluster.errors import MalformedObject
from rekindle.cluster.kubernetes_api import WORKFLOWS, Cluster
from rekindle.errors import ConfigError, RekindleError, say
from rekindle.kubernetes_names import CONFIG_MAP, NAME_LABEL, REKINDLE_SELECTOR, STORE_SECRET
from rekindle.local.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects
from rekindle.local.services.services import ADDRESS_VARIABLES
from rekindle.names import RunName, TaskReference
from rekindle.release import promotion
from rekindle.release.retention import listing, removal
from rekindle.release.retention.cluster_retention import compute_resumable_s
from rekindle.release.retention.decision import NO_LIMITS, Removal, Run, RunRemoval, choose_removals
from rekindle.release.serve_config import VERSION_ANNOTATION, RetentionConfig
from rekindle.sections import parse_section
from rekindle.storage import Store

# lifetime of a claim (which reserves a cached result for a new run) on this machine; longer than
# the time from the look-up in the cache to the start of the run
CLAIM_S = 7200.0
# how long after its end a run of another machine may be resumed
RESUMABLE_S = compute_resumable_s(ClusterConfig.model_validate({}).model_dump())
DEFAULT_KEEP_RUNS = 5  # limit of `rekindle prune` on this machine for pipelines without limits
# texts that may contain RUN/TASK; they begin with a word, so that the search takes O(n)
PATHS = re.compile(r"(?<![\w.-])[\w.-]+(?:/[\w.-]+)+", re.ASCII)
REMOVED_FOLDER = "removed"  # folder in the home for run folders that are being deleted


@dataclass
class Place:
    """This machine or a namespace, with its runs and the limits of each pipeline.

    `shared`: True if other machines or namespaces may use the same MLflow and object store.
    `needed`: RUN/TASK of artifacts that malformed workflows may refer to.
    """

    store: Store
    host: removal.Host
    objects: ClusterObjects | LocalObjects
    runs: dict[str, Run] = field(default_factory=dict)
    limits: dict[str, RetentionConfig] = field(default_factory=dict)
    shared: bool = True
    removes_releases: bool = True
    needed: set[str] = field(default_factory=set)

    def plan(self, pipelines: Iterable[str]) -> tuple[Removal, listing.Context]:
        """Decide which runs and releases of `pipelines` to remove. Raises StorageError,
        TrackingError."""
        claim_s = RESUMABLE_S if self.shared else CLAIM_S
        targets = self._served_versions if self.removes_releases else None
        needed = frozenset(self.needed)
        context = listing.Context(self.runs, claim_s, RESUMABLE_S, targets, needed)
        found = listing.read(self.store, pipelines, context)

        limits = {name: limit for name, limit in self.limits.items() if name in pipelines}
        inputs = listing.make_inputs_function(self.store, found.releases)
        return choose_removals(found, limits, time.time(), inputs), context

    def _served_versions(self, model: str) -> set[str] | None:
        """Return the versions that Deployments serve, and those that a rollback can restore; None
        if they are unknown."""
        malformed = list[object]()
        deployments = self.objects.deployments(model, malformed.append)
        if malformed:
            return None

        versions = set[str]()
        for deployment in deployments:
            annotations = deployment["metadata"].get("annotations") or {}
            if annotations.get(VERSION_ANNOTATION):
                versions.add(annotations[VERSION_ANNOTATION])

        if self.shared:
            return versions | promotion.list_retained_versions(model)
        return versions


class Machine:
    """The runs in a home."""

    def __init__(self, home: Path) -> None:
        self.home = home

    @contextmanager
    def hold(self, run: str) -> Iterator[bool]:
        """Lock the run, so that it cannot be resumed."""
        files = RunFiles(self.home, run)
        if not files.root.exists():
            yield True
            return

        try:
            files.lock()
        except Busy:
            yield False
            return

        try:
            yield True
        finally:
            files.close()

    def remove(self, run: str) -> None:
        """Remove the folder of the run. The folder is moved first, since a partly deleted folder
        would look like another run."""
        files = RunFiles(self.home, run)
        if files.is_own_folder():
            (self.home / REMOVED_FOLDER).mkdir(exist_ok=True)
            target = Path(tempfile.mkdtemp(dir=self.home / REMOVED_FOLDER))
            files.root.replace(target / run)
            shutil.rmtree(target)


class Namespace:
    """The workflows in a namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @contextmanager
    def hold(self, run: str) -> Iterator[bool]:
        """Yield True if the workflow has not been resumed. Check again, because a cluster has no
        lock against a resume; a malformed workflow counts as active."""
        try:
            workflow = self.cluster.find(WORKFLOWS, run)
        except MalformedObject as error:
            say(f"warning: {run} is kept: {error}")
            yield False
            return
        yield not workflow or (workflow.get("status") or {}).get("phase") in COMPLETED

    def remove(self, run: str) -> None:
        """Delete the workflow. A malformed workflow, or a workflow of the same name that Rekindle
        did not create, is kept."""
        try:
            workflow = self.cluster.find(WORKFLOWS, run)
        except MalformedObject as error:
            say(f"warning: the workflow {run} is kept: {error}")
            return
        if workflow and workflow_origin.is_rekindle(workflow):
            workflows.delete_run(self.cluster, run)


def end_of_run(home: Path, workflow: Mapping[str, Any]) -> None:
    """Apply the limits in the config of a completed run to its pipeline on this machine. Print
    errors instead of raising them."""
    limits = _read_limits(workflow)
    pipeline = workflow_origin.pipeline_label(workflow)
    if limits == NO_LIMITS or not pipeline:
        return

    try:
        with _locked(home):
            place = _make_local_place(home)
            place.limits = {pipeline: limits}
            plan, context = place.plan([pipeline])
            plan = removal.limit_removal(plan)
            names = removal.remove(place.store, plan, place.host, context)
    except (RekindleError, OSError) as error:
        say(f"old runs are not removed: {error}")
        return

    if names or plan.releases:
        kept_tasks = [item.kept_tasks for item in plan.runs if item.run.name in names]
        say(f"removed {describe_counts(kept_tasks, len(plan.releases))} (config section retention)")


def describe_counts(kept_tasks: Iterable[Collection[str]], releases: int) -> str:
    """Return the numbers of removed runs and releases in words. `kept_tasks`: for each removed run,
    the tasks with kept artifacts."""
    partial_removals = [bool(tasks) for tasks in kept_tasks]
    texts = [
        f"{n} {noun}{'s' * (n != 1)}"
        for noun, n in (("run", len(partial_removals)), ("release", releases))
    ]
    if any(partial_removals):
        texts[0] += f" ({sum(partial_removals)} in part)"

    return " and ".join(texts)


def prune(
    home: Path, cluster: Cluster | None, options: Mapping[str, float | None], *, delete: bool
) -> dict[str, list[dict[str, Any]]]:
    """Return the runs and releases that exceed the limits; with `delete`, remove them.

    The limits of a pipeline are in the config of its newest run; `options` override them.
    """
    with nullcontext() if cluster else _locked(home):
        place = _make_cluster_place(cluster) if cluster else _make_local_place(home)
        replaced = {name: value for name, value in options.items() if value is not None}

        # the option keep_runs also counts the runs of `rekindle backfill`
        if "keep_runs" in replaced:
            place.runs = {name: replace(run, counted=True) for name, run in place.runs.items()}

        for pipeline, limits in place.limits.items():
            unset = limits == NO_LIMITS and not place.shared
            defaults = {"keep_runs": DEFAULT_KEEP_RUNS} if unset else {}
            place.limits[pipeline] = limits.model_copy(update=defaults | replaced)

        plan, context = place.plan(place.limits)
        rows = list(filter(None, (_row(home, place.store, item) for item in plan.runs)))
        releases = [
            {"release": f"{r.model}@{r.version}", "bytes": _size(place.store, r.prefix)}
            for r in plan.releases
        ]

        if delete:
            removed_names = removal.remove(place.store, plan, place.host, context)
            rows = [row for row in rows if row["run"] in removed_names]

    return {"runs": rows, "releases": releases}


def _row(home: Path, store: Store, item: RunRemoval) -> dict[str, Any]:
    name = item.run.name
    root = RunFiles(home, name).root

    size = sum(size for _, size in removal.list_own_artifacts(store, item, item.kept_tasks))
    if not item.kept_tasks:
        size += sum(path.lstat().st_size for path in root.rglob("*"))

    is_record_removed = not item.kept_tasks and (root.exists() or not item.keep_mlflow)
    if not size and not is_record_removed:
        return {}

    phase = "Succeeded" if item.run.succeeded else "Failed"
    return {"run": name, "phase": phase, "bytes": size, "kept": ", ".join(sorted(item.kept_tasks))}


def _size(store: Store, prefix: str) -> int:
    return sum(entry.size for entry in store.list(prefix))


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Hold the lock that lets only one process of this machine remove runs."""
    homes.make(home)
    with (home / "retention.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_local_place(home: Path) -> Place:
    local = LocalCluster(home)
    addresses = local.configmap(CONFIG_MAP)
    os.environ.update(addresses | local.secret(STORE_SECRET))

    place = Place(local.store(), Machine(home), LocalObjects(local))
    own_store = _is_embedded(local, "s3", addresses)
    own_mlflow = _is_embedded(local, "mlflow", addresses)
    place.shared = not (own_store and own_mlflow)
    # with a shared object store but separate MLflow servers, releases of other homes are unknown
    # here
    place.removes_releases = own_store or not own_mlflow

    shutil.rmtree(home / REMOVED_FOLDER, ignore_errors=True)

    for name in runs.run_names(home):
        files = RunFiles(home, name)
        try:
            workflow = files.workflow()
            status = runs.load_status(home, name)
        except ConfigError as error:
            say(f"{name} is kept: {error}")
            continue

        if not files.is_own_folder():
            say(f"{name} is kept: {files.root} is a link, or its manifest has another name")
            continue

        if status["phase"] == "Running":
            ended = None
        else:
            ended = _last_change(home, name, status)

        place.runs[name] = _run(name, workflow, ended, status["phase"])
        # runs are listed newest first, so these are the limits of the newest run
        place.limits.setdefault(place.runs[name].pipeline, _read_limits(workflow))

    return place


def _is_embedded(local: LocalCluster, service: str, addresses: Mapping[str, str]) -> bool:
    record = local.services.find(service)
    return bool(record and record.url == addresses[ADDRESS_VARIABLES[service]])


def _make_cluster_place(cluster: Cluster) -> Place:
    place = Place(Store.from_env().short_retries(), Namespace(cluster), ClusterObjects(cluster))
    keep = partial(_keep_malformed, place)
    found = cluster.list_objects(WORKFLOWS, REKINDLE_SELECTOR, on_malformed=keep)
    found.sort(key=lambda workflow: workflow["metadata"]["creationTimestamp"], reverse=True)

    for workflow in found:
        name = workflow["metadata"]["name"]
        try:
            run = _cluster_run(name, workflow)
            limits = _read_limits(workflow)
        except RekindleError as error:
            say(f"warning: {name} is kept: {error}")
            keep(workflow)
            continue

        place.runs[name] = run
        place.limits.setdefault(run.pipeline, limits)

    return place


def _cluster_run(name: str, workflow: Mapping[str, Any]) -> Run:
    """Return the run of a workflow. Raises InvalidDocument."""
    status = workflow.get("status") or {}
    phase = status.get("phase") or "Pending"
    # a completed workflow without an end time is malformed, so treat it as an active run
    finished = status.get("finishedAt")
    ended = timestamp(finished) if phase in COMPLETED and finished else None
    return _run(name, workflow, ended, phase)


def _keep_malformed(place: Place, workflow: object) -> None:
    """Keep the run of a malformed workflow, and all artifacts to which it may refer.

    The limits of the workflow are unknown, so the limits of an older run of the pipeline must not
    be applied.
    """
    place.needed |= find_references(to_json(workflow, default=str))
    metadata = workflow.get("metadata") if isinstance(workflow, dict) else None
    if not isinstance(metadata, dict):
        return

    name = RunName.or_none(metadata.get("name"))
    labels = metadata.get("labels")
    label = labels.get(NAME_LABEL) if isinstance(labels, dict) else None
    pipeline = label if isinstance(label, str) else (name or "").rpartition("-")[0]

    if name:
        place.runs[name] = Run(name, pipeline, ended=None, succeeded=False)
    if pipeline:
        place.limits.setdefault(pipeline, NO_LIMITS)


def find_references(text: str) -> set[str]:
    """Return each RUN/TASK that a text may contain."""
    references = set[str]()
    for path in PATHS.findall(text):
        names = path.split("/")
        candidates = (f"{run}/{task}" for run, task in itertools.pairwise(names))
        references.update(filter(TaskReference.matches, candidates))
    return references


def _last_change(home: Path, name: str, status: Mapping[str, Any]) -> float:
    """Return the time when a run ended; if its runner was killed, the time of the last event."""
    finished = status.get("finishedAt")
    if finished:
        return timestamp(finished)

    names = (MANIFEST_FILE, JOURNAL_FILE)
    files = [file for file in RunFiles(home, name).root.glob("*") if file.name in names]
    return max(file.stat().st_mtime for file in files)


def _run(name: str, workflow: Mapping[str, Any], ended: float | None, phase: str) -> Run:
    pipeline = workflow_origin.pipeline_of(workflow)
    counted = not workflow_origin.read_parameter(workflow, BACKFILL)
    uses = frozenset(reused_tasks(workflow).values())
    uid = str(workflow["metadata"].get("uid") or "")
    return Run(name, pipeline, ended, phase == "Succeeded", counted, uses, uid=uid)


def _read_limits(workflow: Mapping[str, Any]) -> RetentionConfig:
    """Return the section `retention` of a run's config, which may be in the WorkflowTemplate of the
    run."""
    stored_spec = (workflow.get("status") or {}).get("storedWorkflowTemplateSpec")
    config = workflow_origin.read_config(workflow)
    if not config and stored_spec:
        config = workflow_origin.read_config(
            {"metadata": workflow["metadata"], "spec": stored_spec}
        )
    return parse_section(RetentionConfig, config.get("retention") or {}, "retention")
