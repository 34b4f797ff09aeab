"""The commands that act on a cluster, and what those shared with this machine do there."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.cli.shared import (
    Name,
    cluster_options,
    command,
    config_of,
    configured,
    manifest_of,
    manifest_option,
    output_option,
    pairs_of,
    refusals,
)
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle.cluster.api import Cluster


@command
@configured
@manifest_option
@click.option("-p", "--parameter", "parameters", multiple=True, metavar="NAME=VALUE", help="A workflow parameter.")
@click.option("-w", "--watch", is_flag=True, help="Show the run until it is over; Ctrl-C ends only that.")
@click.option("--dry-run", is_flag=True, help="Print what would be sent.")
@click.option("--argo-server", metavar="URL", help="Send it there, not to the Kubernetes API (default: ARGO_SERVER).")
@cluster_options
@output_option("text", "json")
@click.option("--yes", is_flag=True, help="Do not ask: submit even what runs already.")
def submit(
    config: Path | None,
    sets: tuple[str, ...],
    manifest: Path | None,
    parameters: tuple[str, ...],
    watch: bool,
    dry_run: bool,
    argo_server: str | None,
    namespace: str,
    context: str,
    output: str,
    yes: bool,
) -> int:
    """Run a pipeline on a cluster.

    The namespace is that of --namespace, else of the config or manifest, else of the kubectl context. With --watch the
    exit codes are those of `rekindle run`.

    Example:
      rekindle submit configs/cluster.yaml --namespace models --watch
      rekindle submit --manifest workflow.yaml -p message=hello --dry-run
    """
    from rekindle.argo import validate
    from rekindle.cluster import workflows
    from rekindle.cluster.api import Cluster
    from rekindle.cluster.argo_server import ArgoServer

    with refusals(output):
        found, beside = manifest_of(config, sets, manifest)
        for each in validate.check(found, str(config or manifest), beside):
            click.echo(f"warning: {each}", err=True)
        for other in beside:
            click.echo(f"note: {other.get('kind')} beside it is not sent: `kubectl apply` it first", err=True)
        wanted = namespace or (found.get("metadata") or {}).get("namespace") or ""
        server = ArgoServer.configured(argo_server, wanted)
        alone = bool(wanted) and (dry_run or (server is not None and not watch))
        cluster = None if alone else Cluster.connect(context or None, wanted or None)
        wanted = cluster.namespace if cluster else wanted
        workflow = workflows.submission(found, pairs_of(parameters), wanted)
        if dry_run:
            _print(workflow, output)
            return 0
        if server:
            server.namespace = wanted
            if not yes:
                _ask_about(server.equal(workflow))
            server.submit(workflow)
        else:
            assert cluster
            if not yes:
                _ask_about(workflows.equal(cluster, workflow))
            workflows.submit(cluster, workflow)
    return _submitted(workflow, cluster, watch, output)


def _print(workflow: dict[str, Any], output: str) -> None:
    from rekindle.render import to_yaml

    click.echo(json.dumps(workflow, indent=2) if output == "json" else to_yaml(workflow), nl=output == "json")


def _ask_about(running: str | None) -> None:
    """Raises ConfigError, click.Abort."""
    if not running:
        return
    said = f"{running} is running and does the same: equal manifest, equal parameters"
    if not sys.stdin.isatty():
        raise ConfigError(f"{said}. Follow it by `rekindle status {running} --cluster --watch`, or submit with --yes.")
    click.confirm(f"{said}. Submit another run?", abort=True, err=True)


def _submitted(workflow: dict[str, Any], cluster: "Cluster | None", watch: bool, output: str) -> int:
    from rekindle.cluster.workflows import SHA256

    name, namespace = workflow["metadata"]["name"], workflow["metadata"]["namespace"]
    flags = " --cluster" + (cluster.flags if cluster else f" --namespace {namespace}")
    click.echo(f"{name} is submitted to namespace {namespace}", err=output == "json")
    if watch and cluster:
        from rekindle.view import cluster_watch

        return cluster_watch.watch(cluster, name, as_json=output == "json")
    if output == "json":
        sha256 = workflow["metadata"]["annotations"][SHA256]
        told = {"workflow": name, "namespace": namespace, "phase": "Pending", "manifest_sha256": sha256}
        click.echo(json.dumps(told))
    else:
        click.echo(f"watch   rekindle status {name} --watch{flags}\nlogs    rekindle logs {name} -f{flags}")
    return 0


@command
@configured
@click.option(
    "--suspend/--unsuspend", default=None, help="Pause the schedule, or let it run (default: schedule.suspend)."
)
@cluster_options
@output_option("text", "json")
def schedule(
    config: Path | None, sets: tuple[str, ...], suspend: bool | None, namespace: str, context: str, output: str
) -> None:
    """Let a cluster run a pipeline by itself, and say what changes.

    Puts the config's WorkflowTemplate and CronWorkflow in place; runs that have begun are not touched.

    Example:
      rekindle schedule configs/cluster.yaml --namespace models
      rekindle schedule configs/cluster.yaml --suspend
    """
    from rekindle.argo import validate
    from rekindle.cluster import workflows
    from rekindle.cluster.api import Cluster
    from rekindle.render import render_manifest

    loaded = config_of(config, sets)
    template, cron = (render_manifest(loaded.config, kind) for kind in ("template", "cron"))
    if suspend is not None:  # as no other config would: what it runs stays the same
        cron["spec"].pop("suspend", None)
        cron["spec"] |= {"suspend": True} if suspend else {}
    for each in (template, cron):
        for finding in validate.check(each, str(config)):
            click.echo(f"warning: {finding}", err=True)
    cluster = Cluster.connect(context or None, namespace or loaded.config.cluster.namespace or None)
    said = list(workflows.schedule(cluster, template, cron))
    told = {"schedule": cron["metadata"]["name"], "namespace": cluster.namespace, "changes": said}
    click.echo(json.dumps(told) if output == "json" else "\n".join(said))


@command
@click.argument("name", type=Name())
@cluster_options
@click.option("--cluster", "on_cluster", is_flag=True, hidden=True, help="It acts nowhere else.")
@output_option("text", "json")
@click.option("--yes", is_flag=True, help="Do not ask: also what still runs, without its exit steps.")
def delete(name: str, namespace: str, context: str, on_cluster: bool, output: str, yes: bool) -> None:
    """Remove a run from a cluster: its pods, and the training job it applied.

    What it released goes on serving; data, checkpoints and models stay in the object store.

    Example:
      rekindle delete fraud-4k2xp --namespace models
    """
    from rekindle.argo.kinds import COMPLETED
    from rekindle.cluster import workflows
    from rekindle.cluster.api import Cluster

    cluster = Cluster.connect(context or None, namespace or None)
    status = workflows.read(cluster, name).get("status") or {}
    if status.get("phase") not in COMPLETED and not yes:
        said = f"{name} is not over, and its exit steps would not run"
        if not sys.stdin.isatty():
            raise ConfigError(f"{said}: `rekindle stop {name} --cluster{cluster.flags}` first, or delete with --yes.")
        click.confirm(f"{said}. Delete it?", abort=True, err=True)
    workflows.delete(cluster, name)
    told = {"workflow": name, "namespace": cluster.namespace, "deleted": True}
    click.echo(json.dumps(told) if output == "json" else f"deleted {name}")


def status(cluster: "Cluster", name: str | None, watch: bool, output: str) -> int:
    """`rekindle status --cluster`."""
    from rekindle.cluster.workflows import newest
    from rekindle.view import cluster_overview, cluster_watch

    as_json = output == "json"
    if watch:
        return cluster_watch.watch(cluster, name or newest(cluster), as_json=as_json)
    click.echo(cluster_overview.run(cluster, name, as_json) if name else cluster_overview.everything(cluster, as_json))
    return 0


def logs(cluster: "Cluster", name: str | None, step: str, follow: bool, output: str) -> None:
    """`rekindle logs --cluster`."""
    from rekindle.cluster.workflows import newest, read
    from rekindle.view.cluster_logs import Logs

    name = name or newest(cluster)
    read(cluster, name)
    reader = Logs(cluster, name, sys.stdout, step, output == "json")
    if follow:
        reader.follow()
    elif not reader.print():
        click.echo(f"no pod of {name} is left: finished ones are removed; `logs -f` reads while they run.", err=True)


def stop(cluster: "Cluster", name: str | None, output: str) -> None:
    """`rekindle stop --cluster`."""
    from rekindle.cluster import workflows

    name = _named(name, "stop")
    workflows.stop(cluster, name)
    told = {"workflow": name, "namespace": cluster.namespace, "phase": "Stopping"}
    click.echo(json.dumps(told) if output == "json" else f"{name} stops; its exit steps still run")


def resume(cluster: "Cluster", name: str | None, output: str) -> int:
    """`rekindle resume --cluster`."""
    from rekindle.cluster import workflows

    name = _named(name, "resume")
    done = workflows.resume(cluster, name)
    told = {"workflow": name, "namespace": cluster.namespace, "phase": "Running"}
    click.echo(json.dumps(told) if output == "json" else f"{name} {done}")
    return 0


def _named(name: str | None, verb: str) -> str:
    """Others run things in a namespace, too: the newest may not be the one meant."""
    if not name:
        raise click.UsageError(f"{verb} --cluster needs the NAME of a run: `rekindle status --cluster` lists them.")
    return name
