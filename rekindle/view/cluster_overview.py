"""Show the runs and schedules in a namespace of a cluster: the tables of `rekindle status
--cluster`."""

import time

from argolocal.common.json_text import to_json
from argolocal.common.wording import format_duration
from argolocal.manifest.object_labels import PHASE_LABEL
from argolocal.manifest.types import Object
from argolocal.view.runs import show_tables
from argolocal.view.summary import parse_timestamp
from rekindle.cluster.kubernetes_api import CRON_WORKFLOWS, WORKFLOWS, Cluster
from rekindle.cluster.waiting_pods import add_waiting_reasons, describe_queue
from rekindle.cluster.workflows import decompress_nodes, get_effective_spec, is_offloaded, read_run
from rekindle.errors import RekindleError, write_stderr
from rekindle.view.cluster_watch import describe_run
from rekindle.view.overview import build_run_row, format_steps_table


def format_overview(cluster: Cluster, as_json: bool) -> str:
    """Return two tables: the runs, newest first, and the schedules."""
    workflow_objects = cluster.list_objects(WORKFLOWS)
    workflow_objects.sort(
        key=lambda workflow_object: workflow_object["metadata"]["creationTimestamp"], reverse=True
    )
    run_rows = [
        _build_run_row(add_waiting_reasons(cluster, _decompress_nodes(workflow_object)))
        for workflow_object in workflow_objects
    ]
    schedule_rows = [
        _build_schedule_row(cron_workflow) for cron_workflow in cluster.list_objects(CRON_WORKFLOWS)
    ]
    empty_message = (
        f"no runs in namespace {cluster.namespace} yet: `rekindle submit CONFIG` starts a run"
    )
    return show_tables({"runs": run_rows, "schedules": schedule_rows}, as_json, empty_message)


def format_run(cluster: Cluster, run_name: str, as_json: bool, shows_all: bool = False) -> str:
    """Return the steps of a run, without internal steps unless `shows_all`. Raises ConfigError if
    the run does not exist."""
    workflow = add_waiting_reasons(cluster, read_run(cluster, run_name))
    if as_json:
        return to_json(describe_run(cluster, workflow), indent=2)

    workflow_status = workflow.get("status") or {}
    manifest = {"metadata": workflow["metadata"], "spec": get_effective_spec(workflow)}
    output_lines = [format_steps_table(run_name, workflow_status, manifest, shows_all)]

    if is_offloaded(workflow):
        output_lines += ["", f"its steps are stored in Argo's database: `argo get {run_name}`"]
    output_lines += describe_queue(cluster, workflow)

    return "\n".join(output_lines)


def _decompress_nodes(workflow: Object) -> Object:
    """Return the workflow with its nodes, or without nodes if the nodes are malformed."""
    try:
        return decompress_nodes(workflow)
    except RekindleError as error:
        write_stderr(f"warning: {error}")
        return workflow


def _build_run_row(workflow: Object) -> dict[str, str]:
    workflow_metadata = workflow["metadata"]
    workflow_status = workflow.get("status") or {}
    run_phase = (
        workflow_status.get("phase")
        or (workflow_metadata.get("labels") or {}).get(PHASE_LABEL)
        or "Pending"
    )
    return build_run_row(
        workflow_metadata["name"],
        workflow_status,
        run_phase,
        workflow_metadata["creationTimestamp"],
    )


def _build_schedule_row(cron_workflow: Object) -> Object:
    cron_spec = cron_workflow["spec"]
    cron_status = cron_workflow.get("status") or {}
    last_scheduled_time = cron_status.get("lastScheduledTime")
    return {
        "schedule": cron_workflow["metadata"]["name"],
        "at": " | ".join(cron_spec.get("schedules") or [cron_spec.get("schedule", "")]),
        "timezone": cron_spec.get("timezone") or "",
        "suspended": bool(cron_spec.get("suspend")),
        "running": len(cron_status.get("active") or []),
        "last": f"{format_duration(time.time() - parse_timestamp(last_scheduled_time))} ago"
        if last_scheduled_time
        else "never",
    }
