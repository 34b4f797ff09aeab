"""Show the runs and schedules in a namespace of a cluster: the tables of `rekindle status
--cluster`."""

import time

from argolocal.common.json_text import to_json
from argolocal.common.wording import format_duration
from argolocal.manifest.allowed_values import COMPLETED
from argolocal.manifest.object_labels import PHASE
from argolocal.manifest.types import Object
from argolocal.view.runs import show_tables
from argolocal.view.summary import timestamp
from rekindle.cluster import queue
from rekindle.cluster.kubernetes_api import CRON_WORKFLOWS, WORKFLOWS, Cluster
from rekindle.cluster.waiting_pods import add_waiting
from rekindle.cluster.workflows import decompress_nodes, is_offloaded, read_run, spec_of
from rekindle.errors import RekindleError, say
from rekindle.view.cluster_watch import as_object
from rekindle.view.overview import run_row, steps_table


def everything(cluster: Cluster, as_json: bool) -> str:
    """Return two tables: the runs, newest first, and the schedules."""
    workflow_objects = cluster.list_objects(WORKFLOWS)
    workflow_objects.sort(
        key=lambda workflow_object: workflow_object["metadata"]["creationTimestamp"], reverse=True
    )
    run_rows = [
        _run(add_waiting(cluster, _decompress(workflow_object)))
        for workflow_object in workflow_objects
    ]
    schedule_rows = [_cron(cron_workflow) for cron_workflow in cluster.list_objects(CRON_WORKFLOWS)]
    empty_message = (
        f"no runs in namespace {cluster.namespace} yet: `rekindle submit CONFIG` starts a run"
    )
    return show_tables({"runs": run_rows, "schedules": schedule_rows}, as_json, empty_message)


def run(cluster: Cluster, name: str, as_json: bool, shows_all: bool = False) -> str:
    """Return the steps of a run, without internal steps unless `shows_all`. Raises ConfigError if
    the run does not exist."""
    workflow = add_waiting(cluster, read_run(cluster, name))
    if as_json:
        return to_json(as_object(cluster, workflow), indent=2)

    workflow_status = workflow.get("status") or {}
    manifest = {"metadata": workflow["metadata"], "spec": spec_of(workflow)}
    output_lines = [steps_table(name, workflow_status, manifest, shows_all)]

    if is_offloaded(workflow):
        output_lines += ["", f"its steps are stored in Argo's database: `argo get {name}`"]
    if workflow_status.get("phase") not in COMPLETED:
        output_lines += queue.describe_waiting(cluster, name)

    return "\n".join(output_lines)


def _decompress(workflow: Object) -> Object:
    """Return the workflow with its nodes, or without nodes if they are malformed."""
    try:
        return decompress_nodes(workflow)
    except RekindleError as error:
        say(f"warning: {error}")
        return workflow


def _run(workflow: Object) -> dict[str, str]:
    workflow_metadata = workflow["metadata"]
    workflow_status = workflow.get("status") or {}
    run_phase = (
        workflow_status.get("phase")
        or (workflow_metadata.get("labels") or {}).get(PHASE)
        or "Pending"
    )
    return run_row(
        workflow_metadata["name"],
        workflow_status,
        run_phase,
        workflow_metadata["creationTimestamp"],
    )


def _cron(cron_workflow: Object) -> Object:
    cron_spec = cron_workflow["spec"]
    cron_status = cron_workflow.get("status") or {}
    last_scheduled_time = cron_status.get("lastScheduledTime")
    return {
        "schedule": cron_workflow["metadata"]["name"],
        "at": " | ".join(cron_spec.get("schedules") or [cron_spec.get("schedule", "")]),
        "timezone": cron_spec.get("timezone") or "",
        "suspended": bool(cron_spec.get("suspend")),
        "running": len(cron_status.get("active") or []),
        "last": f"{format_duration(time.time() - timestamp(last_scheduled_time))} ago"
        if last_scheduled_time
        else "never",
    }
