"""Commands for schedules, on a cluster or on this machine."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from argolocal import cli as local
from argolocal.cli.options import NonEmptyName, make_output_option
from argolocal.cli.output import print_result
from argolocal.common.homes import require_home as home
from rekindle.cli.group import command
from rekindle.cli.on_cluster import (
    confirm_duplicate,
    print_warnings,
    refuse_inadmissible,
    report_submission,
)
from rekindle.cli.options import Target, cluster_options, config_options, local_option
from rekindle.cli.sources import Source

# argument of `rekindle schedule` that prints the schedules
LIST_ARGUMENT = Path("list")


@command
@config_options
@click.option(
    "--suspend/--unsuspend",
    default=None,
    help="Suspend or resume the schedule (default: schedule.suspend).",
)
@cluster_options
@local_option
@make_output_option("text", "json")
def schedule(
    source: Source, suspend: bool | None, target: Target, is_local: bool, as_json: bool
) -> None:
    """Schedule a pipeline on a cluster or on this machine.

    The command applies the WorkflowTemplate and the CronWorkflow of the config to a cluster, or
    with --local to this machine, whose `rekindle server` starts the runs. It prints the changes.
    Runs that have started are not affected. On this machine, a run that was missed because the
    machine was off starts later, unless the config sets schedule.deadline_minutes and this time is
    over.

    With --local, CONFIG may be the name of a schedule: then --suspend or --unsuspend changes
    nothing else. A config replaces the whole schedule, so give all options --set again.

    `rekindle schedule list` prints the schedules of this machine, or of the cluster that
    --namespace or --context names: their last and next time, and why a time was missed.

    Example:
      rekindle schedule configs/cluster.yaml --namespace models
      rekindle schedule configs/demo.yaml --local
      rekindle schedule demo --local --suspend
      rekindle schedule configs/cluster.yaml --suspend
      rekindle schedule list
    """
    if is_local:
        target.require_none("--local")
    if source.config == LIST_ARGUMENT and not LIST_ARGUMENT.exists():
        _print_schedules(target, as_json)
        return
    if is_local and suspend is not None and _is_stored_name(source):
        _set_suspended(str(source.config), suspend, as_json)
        return

    from rekindle.blocks.manifest.render import render_manifest

    loaded = source.load()
    template, cron = (render_manifest(loaded.config, kind) for kind in ("template", "cron"))

    # the flags `--suspend` and `--unsuspend` change only the CronWorkflow, not the WorkflowTemplate
    if suspend is not None:
        cron["spec"].pop("suspend", None)
    if suspend:
        cron["spec"]["suspend"] = True

    if not is_local:
        # on one machine, the names of images stand for programs of the machine, so the tags of
        # images do not matter
        for manifest in (template, cron):
            print_warnings(manifest, source.config)

    if is_local:
        changes = _store_schedule(loaded, template, cron)
        namespace = None
    else:
        from rekindle.cluster import workflows

        cluster = target.connect(loaded.config.cluster.namespace)
        refuse_inadmissible(cluster, template)
        changes = list(workflows.apply_schedule(cluster, template, cron))
        namespace = cluster.namespace

    result = {"schedule": cron["metadata"]["name"], "namespace": namespace, "changes": changes}
    print_result(as_json, result, "\n".join(changes))


def _is_stored_name(source: Source) -> bool:
    """Return True if the argument is not a file, but the name of a schedule of this machine."""
    from argolocal.state.stored_objects import StoredObjects

    if source.config is None or source.sets or source.config.exists():
        return False
    return StoredObjects(home()).find("CronWorkflow", str(source.config)) is not None


def _set_suspended(name: str, is_suspended: bool, as_json: bool) -> None:
    """Suspend or resume a stored schedule of this machine, and print the change."""
    from rekindle.local.cluster import LocalCluster
    from rekindle.operations import local_schedules

    local_schedules.set_suspended(LocalCluster(home()), name, is_suspended)
    change = f"CronWorkflow {name} {'suspended' if is_suspended else 'resumed'}"
    print_result(as_json, {"schedule": name, "namespace": None, "changes": [change]}, change)


def _store_schedule(loaded: Any, template: dict[str, Any], cron: dict[str, Any]) -> list[str]:
    """Store the schedule of a config on this machine. Return lines that describe the changes; if no
    server runs, one line says how to start it."""
    from argolocal.server.server_lock import find_server
    from rekindle.local.cluster import LocalCluster
    from rekindle.local.jobs.model_services import allow_any_port
    from rekindle.operations import local_schedules

    if "serve.port" not in loaded.origins:
        template = allow_any_port(template)
    cron = local_schedules.prepare_cron(cron, "schedule.deadline_minutes" in loaded.origins)
    changes = local_schedules.store_schedule(LocalCluster(home()), template, cron)
    if not find_server(home()):
        changes.append("no server runs on this machine: `rekindle server` starts the runs")
    return changes


def _print_schedules(target: Target, as_json: bool) -> None:
    from argolocal.view.runs import show_tables

    is_on_cluster = bool(target.namespace or target.context)
    rows, notes = _list_on_cluster(target) if is_on_cluster else _list_here()
    empty_text = "no schedules: `rekindle schedule CONFIG --local` stores one on this machine"
    click.echo(show_tables({"schedules": rows}, as_json, empty_text))
    for note in notes:
        click.echo(note, err=True)


def _list_here() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the schedules of this machine, and notes."""
    from argolocal.server.cron.listing import list_rows
    from argolocal.server.server_lock import find_server
    from rekindle.page.home_schedules import NO_SERVER

    rows = [asdict(row) for row in list_rows(home(), time.time())]
    return rows, [] if find_server(home()) else [NO_SERVER]


def _list_on_cluster(target: Target) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the schedules in a namespace, and notes."""
    from rekindle.page.schedules import ClusterSchedules

    cluster_schedules = ClusterSchedules(target.connect()).read({})
    rows = [
        {
            "schedule": schedule_state.name,
            "at": schedule_state.cron,
            "timezone": schedule_state.timezone,
            "suspended": schedule_state.is_suspended,
            "last": schedule_state.last_time,
            "next": schedule_state.next_times[0] if schedule_state.next_times else None,
            "missed": len(schedule_state.missed),
            "missed_time": schedule_state.missed[0] if schedule_state.missed else None,
            "reason": schedule_state.problem,
        }
        for schedule_state in cluster_schedules.schedules
    ]
    return rows, cluster_schedules.notes


@command
@click.argument("name", type=NonEmptyName())
@click.option(
    "-w",
    "--watch",
    is_flag=True,
    help="Show the run until it completes; only on a cluster.",
)
@cluster_options
@local_option
@make_output_option("text", "json")
@click.option("--yes", is_flag=True, help="Do not ask: start a run even if one is active.")
def run_now(
    name: str, watch: bool, target: Target, is_local: bool, as_json: bool, yes: bool
) -> int:
    """Start a run of a schedule now.

    Like scheduled runs, the run uses the stored WorkflowTemplate. The schedule may be suspended.
    With --local, the server of this machine runs it.

    Example:
      rekindle run-now demo --namespace models --watch
      rekindle run-now demo --local
    """
    if is_local:
        target.require_none("--local")
        return _run_here(name, as_json)

    from rekindle.cluster import workflows

    cluster = target.connect()
    workflow = workflows.build_scheduled_workflow(cluster, name)
    refuse_inadmissible(cluster, workflow)

    if not yes:
        confirm_duplicate(workflows.find_duplicate(cluster, workflow))

    workflows.submit(cluster, workflow)
    return report_submission(workflow, cluster, watch, as_json)


def _run_here(name: str, as_json: bool) -> int:
    from rekindle.local.cluster import LocalCluster
    from rekindle.operations import local_schedules
    from rekindle.view import pipeline_display

    workflow = local_schedules.build_run(LocalCluster(home()), name, int(time.time()))
    pipeline = pipeline_display.create_run(home(), workflow, {}, is_queued=True)
    return local.print_queued(pipeline.local, as_json)


@command
@click.argument("name", type=NonEmptyName())
@cluster_options
@local_option
@make_output_option("text", "json")
def unschedule(name: str, target: Target, is_local: bool, as_json: bool) -> None:
    """Delete a schedule with its WorkflowTemplate.

    Runs of the schedule are kept, and active runs continue. To pause a schedule, use `rekindle
    schedule CONFIG --suspend`.

    Example:
      rekindle unschedule demo --namespace models
      rekindle unschedule demo --local
    """
    if is_local:
        from rekindle.local.cluster import LocalCluster
        from rekindle.operations import local_schedules

        target.require_none("--local")
        local_schedules.delete_schedule(LocalCluster(home()), name)
        namespace = None
    else:
        from rekindle.cluster import workflows

        cluster = target.connect()
        workflows.delete_schedule(cluster, name)
        namespace = cluster.namespace

    result = {"schedule": name, "namespace": namespace, "deleted": True}
    print_result(as_json, result, f"unscheduled {name}")
