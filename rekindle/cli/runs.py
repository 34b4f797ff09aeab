"""Commands that start, resume, show and stop runs, here or on a cluster."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from rekindle.cli.group import HOME, command
from rekindle.cli.inputs import manifest_of, pairs_of
from rekindle.cli.options import Name, cluster_flag, configured, manifest_option, output_option, selected_cluster
from rekindle.cli.output import run_output


@command
@configured
@manifest_option
@click.option("-p", "--parameter", "parameters", multiple=True, metavar="NAME=VALUE", help="A workflow parameter.")
@output_option("text", "json")
@click.option("--yes", is_flag=True, help="Do not ask: the first Ctrl-C stops the run.")
def run(
    config: Path | None,
    sets: tuple[str, ...],
    manifest: Path | None,
    parameters: tuple[str, ...],
    output: str,
    yes: bool,
) -> int:
    """Run a pipeline on this machine.

    It runs the same manifest as a cluster would.

    Exit codes: 0 succeeded, 1 failed, 2 bad usage or config, 3 not released by the gate, 130 stopped by Ctrl-C.

    Example:
      rekindle run configs/demo.yaml --set train.workers=3
      rekindle run --manifest workflow.yaml -p message=hello -o json
    """
    from rekindle.view import foreground

    with run_output(output):
        workflow, beside = manifest_of(config, sets, manifest, lambda: foreground.prefetch(HOME))
        given, as_json, whole = pairs_of(parameters), output == "json", bool(manifest)
        return foreground.run(HOME, workflow, given, as_json=as_json, ask=not yes, whole=whole, beside=beside)


@command
@click.argument("name", required=False, type=Name())
@click.option("-p", "--parameter", "values", multiple=True, metavar="NAME=VALUE",
              help="A value for a suspended step.")  # fmt: skip
@cluster_flag
@output_option("text", "json")
@click.option("--yes", is_flag=True, help="Do not ask: the first Ctrl-C stops the run.")
def resume(name: str | None, values: tuple[str, ...], output: str, yes: bool, **target: Any) -> int:
    """Resume a run, or the suspended steps of a running one.

    The run may have failed, been stopped or been killed. Completed steps are not repeated. NAME is a run that `rekindle
    status` lists (default: the newest that did not succeed). If it is still running, its suspended steps are resumed.
    On a cluster NAME is required: failed steps are retried as by `argo retry`, suspended ones are resumed.

    Example:
      rekindle resume
      rekindle resume approval-7xk2p -p approve=YES
      rekindle resume fraud-4k2xp --cluster
    """
    if cluster := selected_cluster(**target):
        from rekindle.cli import on_cluster

        if values:
            raise click.UsageError("-p is for runs on this machine. On a cluster: argo node set NAME -p NAME=VALUE.")
        return on_cluster.resume(cluster, name, output)
    from rekindle.view import foreground

    with run_output(output):
        return foreground.resume(HOME, name, pairs_of(values), as_json=output == "json", ask=not yes)


@command
@click.argument("name", required=False, type=Name())
@click.option("-w", "--watch", is_flag=True, help="Show the run until it completes; only on a cluster.")
@cluster_flag
@output_option("text", "json")
def status(name: str | None, watch: bool, output: str, **target: Any) -> int:
    """List runs, or the steps of run NAME.

    Without NAME, it also lists services and deployments, on a cluster schedules.

    Example:
      rekindle status
      rekindle status fraud-4k2xp --cluster --watch
    """
    if cluster := selected_cluster(**target):
        from rekindle.cli import on_cluster

        return on_cluster.status(cluster, name, watch, output)
    if watch:
        raise click.UsageError(
            "--watch needs --cluster: a local run is shown in its own terminal; `rekindle logs -f` follows it."
        )
    from rekindle.view import overview

    click.echo(overview.run(HOME, name, output == "json") if name else overview.everything(HOME, output == "json"))
    return 0


@command
@click.argument("name", required=False, type=Name())
@click.argument("step", required=False)
@click.option("-f", "--follow", is_flag=True, help="Follow the logs until the run completes.")
@cluster_flag
@output_option("text", "json")
def logs(name: str | None, step: str | None, follow: bool, output: str, **target: Any) -> None:
    """Print the logs of a run: of its steps and of the replicas of its training.

    NAME defaults to the newest run. STEP selects the steps whose names contain it. With -o json, each line is an
    object.

    Example:
      rekindle logs -f
      rekindle logs fraud-4k2xp train -f --cluster
    """
    if cluster := selected_cluster(**target):
        from rekindle.cli import on_cluster

        return on_cluster.logs(cluster, name, step or "", follow, output)
    from rekindle.view import overview

    overview.logs(HOME, name, step or "", follow, sys.stdout, output == "json")


@command
@click.argument("name", required=False, type=Name())
@output_option("text", "json")
def explain(name: str | None, output: str) -> None:
    """Report what happened during the training of a run.

    Which workers were lost and when, how soon the others continued, how much work was repeated, and where the time
    went. NAME defaults to the newest run; it may still be running.

    Example:
      rekindle explain
    """
    from rekindle.view import explain

    click.echo(explain.explain(HOME, name, output == "json"))


@command
@click.argument("name", required=False, type=Name())
@cluster_flag
@output_option("text", "json")
def stop(name: str | None, output: str, **target: Any) -> None:
    """Stop a run gracefully; its exit steps still run.

    NAME defaults to the newest running run; on a cluster it is required. `rekindle resume` resumes the run.

    Example:
      rekindle stop
      rekindle stop fraud-4k2xp --cluster
    """
    if cluster := selected_cluster(**target):
        from rekindle.cli import on_cluster

        return on_cluster.stop(cluster, name, output)
    from rekindle.local.run import stop
    from rekindle.view import overview

    name = stop(name or overview.newest(HOME, ("Running",)), HOME)
    click.echo(json.dumps({"workflow": name, "phase": "Failed"}) if output == "json" else f"stopped {name}")
