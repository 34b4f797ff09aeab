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
    workflows = cluster.list_objects(WORKFLOWS)
    workflows.sort(key=lambda workflow: workflow["metadata"]["creationTimestamp"], reverse=True)
    runs = [_run(add_waiting(cluster, _decompress(workflow))) for workflow in workflows]
    schedules = [_cron(cron) for cron in cluster.list_objects(CRON_WORKFLOWS)]
    empty = f"no runs in namespace {cluster.namespace} yet: `rekindle submit CONFIG` starts a run"
    return show_tables({"runs": runs, "schedules": schedules}, as_json, empty)


def run(cluster: Cluster, name: str, as_json: bool, show_all: bool = False) -> str:
    """Return the steps of a run, without internal steps unless `show_all`. Raises ConfigError if
    the run does not exist."""
    workflow = add_waiting(cluster, read_run(cluster, name))
    if as_json:
        return to_json(as_object(cluster, workflow), indent=2)

    status = workflow.get("status") or {}
    manifest = {"metadata": workflow["metadata"], "spec": spec_of(workflow)}
    lines = [steps_table(name, status, manifest, show_all)]

    if is_offloaded(workflow):
        lines += ["", f"its steps are stored in Argo's database: `argo get {name}`"]
    if status.get("phase") not in COMPLETED:
        lines += queue.describe_waiting(cluster, name)

    return "\n".join(lines)


def _decompress(workflow: Object) -> Object:
    """Return the workflow with its nodes, or without nodes if they are malformed."""
    try:
        return decompress_nodes(workflow)
    except RekindleError as error:
        say(f"warning: {error}")
        return workflow


def _run(workflow: Object) -> dict[str, str]:
    metadata = workflow["metadata"]
    status = workflow.get("status") or {}
    phase = status.get("phase") or (metadata.get("labels") or {}).get(PHASE) or "Pending"
    return run_row(metadata["name"], status, phase, metadata["creationTimestamp"])


def _cron(cron: Object) -> Object:
    spec = cron["spec"]
    status = cron.get("status") or {}
    last = status.get("lastScheduledTime")
    return {
        "schedule": cron["metadata"]["name"],
        "at": " | ".join(spec.get("schedules") or [spec.get("schedule", "")]),
        "timezone": spec.get("timezone") or "",
        "suspended": bool(spec.get("suspend")),
        "running": len(status.get("active") or []),
        "last": f"{format_duration(time.time() - timestamp(last))} ago" if last else "never",
    }
