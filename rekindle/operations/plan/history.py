"""Durations of tasks in former runs: from the journals on this machine, or from the Workflows of a
cluster."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argolocal.state.journal import RunFiles
from argolocal.view import runs
from argolocal.view.summary import FINISHED, Status, timestamp
from rekindle.blocks.manifest.workflow_origin import pipeline_label, read_parameter
from rekindle.cluster import workflows
from rekindle.cluster.argo_server import ArgoServer
from rekindle.cluster.kubernetes_api import WORKFLOWS, Cluster
from rekindle.content.recorded_manifest import validate_manifest
from rekindle.documents import InvalidDocument
from rekindle.errors import ConfigError, RekindleError
from rekindle.kubernetes_names import NAME_LABEL, WORKLOAD
from rekindle.operations.plan.tasks import Tree

Note = Callable[[str], None]

# number of former runs to read; only the newest, because they predict the next run best
MAX_RUNS = 10
ATTEMPT_OR_ITEM = re.compile(r"\(\d+(:[^)]*)?\)$")  # suffix of the name of an attempt or loop item
# types of the nodes that are tasks; DAG and Steps are included, because the plan does not expand a
# template that calls itself
TASK_TYPES = ("Pod", "Retry", "TaskGroup", "HTTP", "DAG", "Steps")
# parameters that differ in each run
RUN_PARAMETERS = {"workflow", "config", "manifest", "created", "scheduled", "task-name", "run_id"}


@dataclass(frozen=True)
class Record:
    """The execution of a task in a former run."""

    path: str
    seconds: float
    inputs: dict[str, str]


@dataclass(frozen=True)
class FormerRun:
    """An earlier run that has ended. `records`: the successful tasks that were not cached, by path.
    `tree`: all tasks of the run if it trains a model, otherwise None."""

    name: str
    tree: Tree | None
    seconds: float  # duration of the run; 0 unless it succeeded
    records: dict[str, Record]


def read_local_runs(
    home: Path, workflow: Mapping[str, Any], prefix: str, note: Note
) -> Iterator[FormerRun]:
    """Yield the newest runs of a pipeline on this machine. `prefix`: common prefix of the names of
    the pipeline's runs; `note` is called for each malformed run."""
    names = runs.run_names(home) if (home / "runs").is_dir() else []
    yield from _newest_runs(
        (_read_local_run(home, name) for name in names if name.startswith(prefix)), workflow, note
    )


def read_cluster_runs(
    cluster: Cluster, workflow: Mapping[str, Any], prefix: str, note: Note
) -> Iterator[FormerRun]:
    """Yield the newest runs of a pipeline in the namespace; if ARGO_SERVER is set, also those in
    Argo's archive.

    Raises RekindleError.
    """
    labels = workflow["metadata"].get("labels") or {}
    if NAME_LABEL in labels:
        selector = f"{NAME_LABEL}={labels[NAME_LABEL]}"
    else:
        selector = ""

    live = {
        item["metadata"]["name"]: item
        for item in cluster.list_objects(WORKFLOWS, selector, metadata_only=True)
    }
    server = ArgoServer.from_url(None, cluster.namespace)
    if server:
        archived = {item["metadata"]["name"]: item for item in server.list_runs(selector)}
    else:
        archived = {}

    created = {
        name: item["metadata"]["creationTimestamp"]
        for name, item in (archived | live).items()
        if name.startswith(prefix)
    }
    names = sorted(created, key=lambda name: created[name], reverse=True)

    yield from _newest_runs(
        (_fetch(cluster, None if name in live else server, name) for name in names), workflow, note
    )


def _newest_runs(
    candidates: Iterable[tuple[str, Any, Status] | None], workflow: Mapping[str, Any], note: Note
) -> Iterator[FormerRun]:
    count = 0
    identity = _pipeline_identity(workflow)
    for candidate in candidates:
        if not candidate or candidate[2].get("phase") not in FINISHED:
            continue
        if _pipeline_identity(candidate[1]) != identity:
            continue

        try:
            former = former_run(*candidate)
        except InvalidDocument as error:
            note(f"the run {candidate[0]} is not compared: {error}")
            continue

        if former.records:
            yield former
            count += 1
            if count == MAX_RUNS:
                return


def _read_local_run(home: Path, name: str) -> tuple[str, Any, Status] | None:
    files = RunFiles(home, name)
    try:
        return name, files.workflow(), files.load()[0]
    except ConfigError:
        # the run's files are corrupt
        return None


def _fetch(
    cluster: Cluster, archive: ArgoServer | None, name: str
) -> tuple[str, Any, Status] | None:
    try:
        if archive:
            workflow = workflows.decompress_nodes(archive.read(name))
        else:
            workflow = workflows.read_run(cluster, name)
    except RekindleError:
        # the run was deleted since the listing
        return None

    return name, workflow | {"spec": workflows.spec_of(workflow)}, workflow.get("status") or {}


def _pipeline_identity(workflow: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the name and the module of a pipeline, which are the same for all its runs."""
    try:
        pipeline = json.loads(read_parameter(workflow, "config") or "{}").get("pipeline")
    except (ValueError, AttributeError, RecursionError):
        pipeline = None
    return pipeline_label(workflow), pipeline


def former_run(name: str, workflow: Mapping[str, Any], status: Status) -> FormerRun:
    """Return the durations and inputs of the tasks of a run. Raises InvalidDocument."""
    validate_manifest(workflow, f"the manifest of {name}")
    records = {}

    for node in (status.get("nodes") or {}).values():
        node_name = str(node.get("name"))
        is_task = node.get("phase") == "Succeeded" and node.get("type") in TASK_TYPES
        is_attempt_or_item = node.get("type") != "TaskGroup" and ATTEMPT_OR_ITEM.search(node_name)
        if not (is_task and node.get("startedAt") and node.get("finishedAt")) or is_attempt_or_item:
            continue

        path = node_name.removeprefix(name).removeprefix(".")
        inputs = {
            p["name"]: str(p.get("value"))
            for p in (node.get("inputs") or {}).get("parameters") or []
            if p["name"] not in RUN_PARAMETERS
        }

        seconds = timestamp(node["finishedAt"]) - timestamp(node["startedAt"])
        records[path] = Record(path, seconds, inputs)

    times = status.get("startedAt") and status.get("finishedAt")
    if status.get("phase") == "Succeeded" and times:
        seconds = timestamp(status["finishedAt"]) - timestamp(status["startedAt"])
    else:
        seconds = 0.0

    tree = Tree(workflow) if _has_training(workflow) else None
    return FormerRun(name, tree, seconds, records)


def _has_training(workflow: Mapping[str, Any]) -> bool:
    templates = workflow["spec"].get("templates") or []
    return any(
        WORKLOAD.launcher in str((template.get("resource") or {}).get("manifest"))
        for template in templates
    )
