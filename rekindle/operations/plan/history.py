"""Durations of tasks in former runs: from the journals on this machine, or from the Workflows of a
cluster."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argolocal.state.journal import RunFiles
from argolocal.view import runs
from argolocal.view.summary import FINISHED_PHASES, Status, parse_timestamp
from rekindle.blocks.manifest.workflow_origin import pipeline_label, read_parameter
from rekindle.cluster import workflows
from rekindle.cluster.argo_server import ArgoServer
from rekindle.cluster.kubernetes_api import WORKFLOWS, Cluster
from rekindle.content.recorded_manifest import validate_manifest
from rekindle.documents import InvalidDocument
from rekindle.errors import ConfigError, RekindleError
from rekindle.kubernetes_names import NAME_LABEL, WORKLOAD_MODULES
from rekindle.operations.plan.tasks import TaskTree

NoteFunction = Callable[[str], None]

# number of former runs to read; the newest runs are read, because they predict the next run best
MAX_FORMER_RUNS = 10
# types of the nodes that are tasks; DAG and Steps are included, because the plan does not expand a
# template that calls itself
TASK_TYPES = ("Pod", "Retry", "TaskGroup", "HTTP", "DAG", "Steps")
# workflow parameters that differ in each run
RUN_PARAMETERS = {"workflow", "config", "manifest", "created", "scheduled", "task-name", "run_id"}


@dataclass(frozen=True)
class TaskRecord:
    """The execution of a task in a former run."""

    path: str
    seconds: float
    inputs: dict[str, str]


@dataclass(frozen=True)
class FormerRun:
    """An earlier run that has ended. `records`: the successful tasks that were not cached, by path.
    `tree`: all tasks of the run if it trains a model, otherwise None."""

    name: str
    tree: TaskTree | None
    # duration of the run in seconds; 0 unless the run succeeded
    seconds: float
    records: dict[str, TaskRecord]


def read_local_runs(
    home_folder: Path, workflow: Mapping[str, Any], name_prefix: str, add_note: NoteFunction
) -> Iterator[FormerRun]:
    """Yield the newest runs of a pipeline on this machine. `name_prefix`: common prefix of the
    names of the pipeline's runs; `add_note` is called for each malformed run."""
    all_run_names = runs.list_run_names(home_folder) if (home_folder / "runs").is_dir() else []
    yield from _select_newest_runs(
        (
            _read_local_run(home_folder, run_name)
            for run_name in all_run_names
            if run_name.startswith(name_prefix)
        ),
        workflow,
        add_note,
    )


def read_cluster_runs(
    cluster: Cluster, workflow: Mapping[str, Any], name_prefix: str, add_note: NoteFunction
) -> Iterator[FormerRun]:
    """Yield the newest runs of a pipeline in the namespace; if ARGO_SERVER is set, also those in
    Argo's archive.

    Raises RekindleError.
    """
    workflow_labels = workflow["metadata"].get("labels") or {}
    if NAME_LABEL in workflow_labels:
        label_selector = f"{NAME_LABEL}={workflow_labels[NAME_LABEL]}"
    else:
        label_selector = ""

    live_workflows = {
        workflow_object["metadata"]["name"]: workflow_object
        for workflow_object in cluster.list_objects(WORKFLOWS, label_selector, metadata_only=True)
    }
    argo_server = ArgoServer.from_url(None, cluster.namespace)
    if argo_server:
        archived_workflows = {
            workflow_object["metadata"]["name"]: workflow_object
            for workflow_object in argo_server.list_runs(label_selector)
        }
    else:
        archived_workflows = {}

    creation_times = {
        run_name: workflow_object["metadata"]["creationTimestamp"]
        for run_name, workflow_object in (archived_workflows | live_workflows).items()
        if run_name.startswith(name_prefix)
    }
    names_newest_first = sorted(
        creation_times, key=lambda run_name: creation_times[run_name], reverse=True
    )

    yield from _select_newest_runs(
        (
            _fetch_run(cluster, None if run_name in live_workflows else argo_server, run_name)
            for run_name in names_newest_first
        ),
        workflow,
        add_note,
    )


def _select_newest_runs(
    candidate_runs: Iterable[tuple[str, Any, Status] | None],
    workflow: Mapping[str, Any],
    add_note: NoteFunction,
) -> Iterator[FormerRun]:
    run_count = 0
    pipeline_identity = _get_pipeline_identity(workflow)
    for candidate_run in candidate_runs:
        if not candidate_run or candidate_run[2].get("phase") not in FINISHED_PHASES:
            continue
        if _get_pipeline_identity(candidate_run[1]) != pipeline_identity:
            continue

        try:
            parsed_run = parse_former_run(*candidate_run)
        except InvalidDocument as error:
            add_note(f"the run {candidate_run[0]} is not compared: {error}")
            continue

        if parsed_run.records:
            yield parsed_run
            run_count += 1
            if run_count == MAX_FORMER_RUNS:
                return


def _read_local_run(home_folder: Path, run_name: str) -> tuple[str, Any, Status] | None:
    run_files = RunFiles(home_folder, run_name)
    try:
        return run_name, run_files.workflow(), run_files.load()[0]
    except ConfigError:
        # the files of the run are damaged
        return None


def _fetch_run(
    cluster: Cluster, argo_server: ArgoServer | None, run_name: str
) -> tuple[str, Any, Status] | None:
    try:
        if argo_server:
            workflow = workflows.decompress_nodes(argo_server.read(run_name))
        else:
            workflow = workflows.read_run(cluster, run_name)
    except RekindleError:
        # the run was deleted since the listing
        return None

    return (
        run_name,
        workflow | {"spec": workflows.get_effective_spec(workflow)},
        workflow.get("status") or {},
    )


def _get_pipeline_identity(workflow: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the name and the module of a pipeline, by which all its runs are recognized."""
    try:
        pipeline_section = json.loads(read_parameter(workflow, "config") or "{}").get("pipeline")
    except (ValueError, AttributeError, RecursionError):
        pipeline_section = None
    return pipeline_label(workflow), pipeline_section


def parse_former_run(
    run_name: str, workflow: Mapping[str, Any], workflow_status: Status
) -> FormerRun:
    """Return the durations and inputs of the tasks of a run. Raises InvalidDocument."""
    validate_manifest(workflow, f"the manifest of {run_name}")
    task_records = {}

    for workflow_node in (workflow_status.get("nodes") or {}).values():
        node_name = str(workflow_node.get("name"))
        is_task = (
            workflow_node.get("phase") == "Succeeded" and workflow_node.get("type") in TASK_TYPES
        )
        # only the names of attempts and of items of a loop have parentheses, such as train(0)
        is_attempt_or_item = workflow_node.get("type") != "TaskGroup" and "(" in str(
            workflow_node.get("displayName")
        )
        if (
            not (is_task and workflow_node.get("startedAt") and workflow_node.get("finishedAt"))
            or is_attempt_or_item
        ):
            continue

        task_path = node_name.removeprefix(run_name).removeprefix(".")
        input_texts = {
            input_parameter["name"]: str(input_parameter.get("value"))
            for input_parameter in (workflow_node.get("inputs") or {}).get("parameters") or []
            if input_parameter["name"] not in RUN_PARAMETERS
        }

        duration_seconds = parse_timestamp(workflow_node["finishedAt"]) - parse_timestamp(
            workflow_node["startedAt"]
        )
        task_records[task_path] = TaskRecord(task_path, duration_seconds, input_texts)

    has_times = workflow_status.get("startedAt") and workflow_status.get("finishedAt")
    if workflow_status.get("phase") == "Succeeded" and has_times:
        duration_seconds = parse_timestamp(workflow_status["finishedAt"]) - parse_timestamp(
            workflow_status["startedAt"]
        )
    else:
        duration_seconds = 0.0

    task_tree = TaskTree(workflow) if _has_training(workflow) else None
    return FormerRun(run_name, task_tree, duration_seconds, task_records)


def _has_training(workflow: Mapping[str, Any]) -> bool:
    workflow_templates = workflow["spec"].get("templates") or []
    return any(
        WORKLOAD_MODULES.launcher in str((workflow_template.get("resource") or {}).get("manifest"))
        for workflow_template in workflow_templates
    )
