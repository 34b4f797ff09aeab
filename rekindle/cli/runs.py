"""Commands that start, resume, show and stop runs, here or on a cluster."""

import sys
from typing import TYPE_CHECKING

import click

from argolocal import cli as local
from argolocal.cli.options import (
    RunNameParam,
    ask_option,
    make_output_option,
    make_parameters_option,
    parse_parameter_options,
    queue_option,
)
from argolocal.cli.output import print_result, run_output
from argolocal.common import homes
from argolocal.common.homes import require_home as home
from argolocal.manifest.allowed_values import COMPLETED_PHASES
from rekindle.cli.group import command
from rekindle.cli.options import cluster_flag, config_options, manifest_options, no_cache_option
from rekindle.cli.sources import Source, check_training
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import write_stderr

if TYPE_CHECKING:
    from rekindle.view.pipeline_display import Pipeline

NO_LOGS = (
    "no logs of {}: its pods are deleted, and its logs are not in the object store. Use `logs -f`"
    " during a run."
)


@command
@config_options
@manifest_options
@make_output_option("text", "json")
@ask_option
@no_cache_option
@queue_option
def run(source: Source, as_json: bool, yes: bool, no_cache: bool, is_queued: bool) -> int:
    """Run a pipeline on this machine.

    The manifest is the same as on a cluster.

    Exit codes: 0 succeeded, 1 failed, 2 bad usage or config, 3 not released by the gate, 130
    stopped by Ctrl-C.

    Example:
      rekindle run configs/demo.yaml --set train.workers=3
      rekindle run --manifest workflow.yaml -p message=hello -o json
    """
    if is_queued:
        return queue_here(source, as_json, no_cache)

    from rekindle.view import pipeline_display

    with run_output(as_json):
        pipeline_run = _create_run(source, no_cache)
        # print the full status of a run only if the user gave the manifest
        return pipeline_display.run_here(
            pipeline_run, as_json=as_json, ask=not yes, full_status=bool(source.manifest)
        )


def queue_here(source: Source, as_json: bool, no_cache: bool) -> int:
    """Queue a run for the server of this machine, and print its name. Return the exit code of the
    command."""
    with run_output(as_json):
        pipeline = _create_run(source, no_cache, is_queued=True)
        return local.print_queued(pipeline.local, as_json)


def _create_run(source: Source, no_cache: bool, is_queued: bool = False) -> "Pipeline":
    from rekindle.local.cluster import LocalCluster
    from rekindle.operations import cached_results
    from rekindle.view import pipeline_display

    manifests = source.manifests()
    if manifests.config:
        manifests.config.data.check_source()
        # start the services early, so that they are ready when the first step needs them
        LocalCluster(home()).prefetch()
        check_training(manifests.config, source.scheduled_time())

    workflow = manifests.main_for_this_machine()
    parameter_values = cached_results.add_cached_parameter(
        home(), workflow, parse_parameter_options(source.parameters), not no_cache
    )

    # print the notes of `lint` only for the user's own manifests, because the user cannot change
    # manifests that Rekindle has rendered
    prints_notes = bool(source.manifest)
    return pipeline_display.create_run(
        home(), workflow, parameter_values, manifests.other_objects, prints_notes, is_queued
    )


@command
@click.argument("name", type=RunNameParam())
@click.option(
    "--name", "new_name", type=RunNameParam(), help="Name of the new run (default: a random name)."
)
@make_parameters_option("Workflow parameter to change.")
@make_output_option("text", "json")
@ask_option
@no_cache_option
def rerun(
    name: str,
    new_name: str | None,
    parameters: tuple[str, ...],
    as_json: bool,
    yes: bool,
    no_cache: bool,
) -> int:
    """Start run NAME again, as a new run on this machine.

    The new run has the manifest and the parameters of NAME, and uses the code of the project as it
    is now. The run NAME stays as it is; `resume` continues it instead.

    Example:
      rekindle rerun demo-4k2xp
      rekindle rerun demo-4k2xp --no-cache
    """
    from argolocal.runner import rerun
    from rekindle.operations import cached_results
    from rekindle.view import pipeline_display

    with run_output(as_json):
        rerun_manifest = rerun.read_manifest(home(), name, new_name or "")
        parameter_values = cached_results.add_cached_parameter(
            home(), rerun_manifest, parse_parameter_options(parameters), not no_cache
        )
        pipeline_run = pipeline_display.create_run(home(), rerun_manifest, parameter_values)
        shows_full_status = not pipeline_run.is_rekindle
        return pipeline_display.run_here(
            pipeline_run, as_json=as_json, ask=not yes, full_status=shows_full_status
        )


@command
@click.argument("name", required=False, type=RunNameParam())
@make_parameters_option("Value for a suspended step.")
@cluster_flag
@make_output_option("text", "json")
@ask_option
def resume(
    name: str | None, parameters: tuple[str, ...], cluster: Cluster | None, as_json: bool, yes: bool
) -> int:
    """Resume a run, or the suspended steps of an active run.

    The run may have failed, been stopped or been killed. Completed steps are not repeated. NAME is
    a run that `rekindle status` lists (default: the newest run that did not succeed). If the run is
    active, its suspended steps are resumed. On a cluster, NAME is required: failed steps are
    retried as by `argo retry`, suspended steps are resumed.

    Example:
      rekindle resume
      rekindle resume approval-7xk2p -p approve=YES
      rekindle resume demo-4k2xp --cluster
    """
    if cluster:
        from rekindle.cluster import workflows

        if parameters:
            raise click.UsageError(
                "-p needs a run on this machine; on a cluster: `argo node set NAME -p NAME=VALUE`."
            )

        outcome = workflows.resume_run(cluster, _require_name(name, "resume"))
        resume_facts = {"workflow": name, "namespace": cluster.namespace, "phase": "Running"}
        print_result(as_json, resume_facts, f"{name} {outcome}")
        return 0

    from rekindle.view import pipeline_display

    with run_output(as_json):
        pipeline_run = pipeline_display.load_run(
            home(), name, parse_parameter_options(parameters), as_json
        )
        if not pipeline_run:
            return 0

        shows_full_status = not pipeline_run.is_rekindle
        return pipeline_display.run_here(
            pipeline_run, as_json=as_json, ask=not yes, full_status=shows_full_status
        )


@command
@click.argument("name", required=False, type=RunNameParam())
@click.option(
    "-w", "--watch", is_flag=True, help="Show the run until it completes; only on a cluster."
)
@click.option("--all", "show_all", is_flag=True, help="Show the internal steps of NAME, too.")
@cluster_flag
@make_output_option("text", "json")
def status(
    name: str | None, watch: bool, show_all: bool, cluster: Cluster | None, as_json: bool
) -> int:
    """List runs, or the steps of run NAME.

    Without NAME, the command also lists services and deployments, or on a cluster the schedules.
    While a run NAME is active on this machine, the command also lists the pid of each of its pods,
    such as the workers of a training.

    Example:
      rekindle status
      rekindle status demo-4k2xp --cluster --watch
    """
    if cluster:
        from rekindle.cluster.workflows import find_newest_run
        from rekindle.view import cluster_overview, cluster_watch

        if watch:
            return cluster_watch.watch_run(
                cluster, name or find_newest_run(cluster), as_json=as_json
            )

        if name:
            click.echo(cluster_overview.format_run(cluster, name, as_json, show_all))
        else:
            click.echo(cluster_overview.format_overview(cluster, as_json))
        return 0

    if watch:
        raise click.UsageError(
            "--watch needs --cluster: a local run is shown in its own terminal; `rekindle logs -f`"
            " follows it."
        )

    from rekindle.view import overview

    if name:
        click.echo(overview.format_run(home(), name, as_json, show_all))
    else:
        click.echo(overview.format_overview(home(), as_json))
    return 0


@command
@click.argument("name", required=False, type=RunNameParam())
@click.argument("step", default="")
@click.option("-f", "--follow", is_flag=True, help="Follow the logs until the run completes.")
@cluster_flag
@make_output_option("text", "json")
def logs(name: str | None, step: str, follow: bool, cluster: Cluster | None, as_json: bool) -> None:
    """Print the logs of the steps and the training replicas of a run.

    NAME defaults to the newest run on this machine, also if STEP is the only argument. STEP selects
    the steps whose names contain STEP. With -o json, each line is a JSON object. On a cluster, the
    logs of steps whose pods are gone are read from the object store. If lines are missing, stderr
    shows the cause.

    Example:
      rekindle logs -f
      rekindle logs train
      rekindle logs demo-4k2xp train -f --cluster
    """
    if cluster:
        from argolocal.view.summary import check_step
        from rekindle.cluster import workflows
        from rekindle.cluster.waiting_pods import describe_queue
        from rekindle.view.cluster_logs import Logs

        name = name or workflows.find_newest_run(cluster)
        workflow = workflows.read_run(cluster, name)
        check_step(name, step, workflow)
        for line in describe_queue(cluster, workflow):
            click.echo(line, err=True)

        log_reader = Logs(cluster, name, sys.stdout, step, as_json)
        if follow and (workflow.get("status") or {}).get("phase") not in COMPLETED_PHASES:
            log_reader.follow()
        elif not log_reader.print(workflow):
            click.echo(NO_LOGS.format(name), err=True)
            return

        for pod_label, missing_reason in log_reader.missing_lines_reasons.items():
            write_stderr(f"{pod_label}: {missing_reason}")

        return

    click.get_current_context().invoke(
        local.logs, name=name, step=step, follow=follow, as_json=as_json
    )


@command
@click.argument("name", required=False, type=RunNameParam())
@cluster_flag
@make_output_option("text", "json")
def explain(name: str | None, cluster: Cluster | None, as_json: bool) -> None:
    """Report losses and recoveries during the training of a run.

    The report shows which workers were lost and when, how soon the other workers continued, how
    much work was repeated, and where the time went. NAME defaults to the newest run; the run may be
    active. On a cluster, a temporary pod reads the ledger from the object store.

    Example:
      rekindle explain
      rekindle explain demo-4k2xp --cluster
    """
    from rekindle.view import explain as explanation

    if cluster:
        click.echo(explanation.explain_on_cluster(cluster, name, as_json))
    else:
        click.echo(explanation.explain_run(home(), name, as_json))


@command
@click.argument("name", required=False, type=RunNameParam())
@cluster_flag
@make_output_option("text", "json")
def stop(name: str | None, cluster: Cluster | None, as_json: bool) -> None:
    """Stop a run gracefully; its exit steps still run.

    NAME defaults to the newest running run; on a cluster, NAME is required. `rekindle resume`
    resumes the run.

    Example:
      rekindle stop
      rekindle stop demo-4k2xp --cluster
    """
    if cluster:
        from rekindle.cluster import workflows

        workflows.stop_run(cluster, _require_name(name, "stop"))
        stop_facts = {"workflow": name, "namespace": cluster.namespace, "phase": "Stopping"}
        print_result(as_json, stop_facts, f"stopping {name}; its exit steps still run")
        return

    click.get_current_context().invoke(local.stop, name=name, as_json=as_json)


@command
@click.argument("name", type=RunNameParam())
@click.argument("workers", type=click.IntRange(min=1))
@click.option(
    "--task",
    default="train",
    show_default=True,
    help="Training to scale, if the run has several trainings.",
)
@cluster_flag
@make_output_option("text", "json")
def scale(name: str, workers: int, task: str, cluster: Cluster | None, as_json: bool) -> None:
    """Change the number of workers of run NAME while it trains.

    WORKERS must be from train.min_workers to train.max_workers. Workers join and leave without a
    restart of other workers, and the result is the same, bit for bit. The command scales the
    workers of the PyTorchJob or, with cluster.harvest, the Deployment of additional workers.

    Example:
      rekindle scale demo-4k2xp 4
      rekindle scale demo-4k2xp 1 --cluster
    """
    from rekindle.operations.scale import scale_training as scale_run

    worker_counts = scale_run(
        homes.home_path() if cluster else home(), cluster, name, task, workers
    )
    print_result(
        as_json,
        worker_counts,
        f"{name}: changed from {worker_counts['before']} to {workers} workers",
    )


def _require_name(name: str | None, command_verb: str) -> str:
    """Return `name`, the name of a run. Raises UsageError if `name` is empty, because the newest
    run in a shared namespace may belong to another user."""
    if not name:
        raise click.UsageError(
            f"{command_verb} --cluster needs the NAME of a run: `rekindle status --cluster` lists"
            " all runs."
        )
    return name
