"""Commands that act on a cluster, and the `--cluster` variants of the others."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.cli.group import command
from rekindle.cli.inputs import config_of, manifest_of, pairs_of
from rekindle.cli.options import Name, cluster_options, configured, manifest_option, output_option
from rekindle.cli.output import errors_as_json
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle.cluster.api import Cluster


@command
@configured
@manifest_option
@click.option("-p", "--parameter", "parameters", multiple=True, metavar="NAME=VALUE", help="A workflow parameter.")
@click.option("-w", "--watch", is_flag=True, help="Show the run until it completes; Ctrl-C ends only the watch.")
@click.option("--dry-run", is_flag=True, help="Print the Workflow without submitting it.")
@click.option(
    "--argo-server",
    metavar="URL",
    help="Submit to this Argo Server instead of the Kubernetes API (default: ARGO_SERVER).",
)
@cluster_options
@output_option("text", "json")
@click.option("--yes", is_flag=True, help="Do not ask: submit even if the same is already running.")
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

    The namespace comes from --namespace, else from the config or manifest, else from the kubectl context. With --watch,
    the exit codes are those of `rekindle run`.

    Example:
      rekindle submit configs/cluster.yaml --namespace models --watch
      rekindle submit --manifest workflow.yaml -p message=hello --dry-run
    """
    from rekindle.argo import validate
    from rekindle.cluster import workflows
    from rekindle.cluster.api import Cluster
    from rekindle.cluster.argo_server import ArgoServer

    with errors_as_json(output):
        submitted, beside = manifest_of(config, sets, manifest)
        for finding in validate.check(submitted, str(config or manifest), beside):
            click.echo(f"warning: {finding}", err=True)
        for other in beside:
            click.echo(f"note: the {other.get('kind')} next to it is not submitted: `kubectl apply` it first", err=True)
        namespace = namespace or (submitted.get("metadata") or {}).get("namespace") or ""
        server = ArgoServer.configured(argo_server, namespace)
        needs_cluster = not namespace or not (dry_run or (server is not None and not watch))
        cluster = Cluster.connect(context or None, namespace or None) if needs_cluster else None
        namespace = cluster.namespace if cluster else namespace
        workflow = workflows.submission(submitted, pairs_of(parameters), namespace)
        if dry_run:
            _print(workflow, output)
            return 0
        if server:
            server.namespace = namespace
            if not yes:
                _confirm_duplicate(server.equal(workflow))
            server.submit(workflow)
        else:
            assert cluster
            if not yes:
                _confirm_duplicate(workflows.equal(cluster, workflow))
            workflows.submit(cluster, workflow)
    return _submitted(workflow, cluster, watch, output)


def _print(workflow: dict[str, Any], output: str) -> None:
    from rekindle.render import to_yaml

    click.echo(json.dumps(workflow, indent=2) if output == "json" else to_yaml(workflow), nl=output == "json")


def _confirm_duplicate(running: str | None) -> None:
    """Raises ConfigError, click.Abort."""
    if not running:
        return
    message = f"{running} is already running with the same manifest and parameters"
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{message}. Follow it with `rekindle status {running} --cluster --watch`, or submit with --yes."
        )
    click.confirm(f"{message}. Submit another run?", abort=True, err=True)


def _submitted(workflow: dict[str, Any], cluster: "Cluster | None", watch: bool, output: str) -> int:
    from rekindle.cluster.workflows import SHA256

    name, namespace = workflow["metadata"]["name"], workflow["metadata"]["namespace"]
    flags = " --cluster" + (cluster.flags if cluster else f" --namespace {namespace}")
    click.echo(f"{name} was submitted to namespace {namespace}", err=output == "json")
    if watch and cluster:
        from rekindle.view import cluster_watch

        return cluster_watch.watch(cluster, name, as_json=output == "json")
    if output == "json":
        sha256 = workflow["metadata"]["annotations"][SHA256]
        result = {"workflow": name, "namespace": namespace, "phase": "Pending", "manifest_sha256": sha256}
        click.echo(json.dumps(result))
    else:
        click.echo(f"watch   rekindle status {name} --watch{flags}\nlogs    rekindle logs {name} -f{flags}")
    return 0


@command
@configured
@click.option("--suspend/--unsuspend", default=None, help="Suspend or resume the schedule (default: schedule.suspend).")
@cluster_options
@output_option("text", "json")
def schedule(
    config: Path | None, sets: tuple[str, ...], suspend: bool | None, namespace: str, context: str, output: str
) -> None:
    """Schedule a pipeline on a cluster, and print what changes.

    Applies the WorkflowTemplate and the CronWorkflow of the config; runs that have started are not affected.

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
    if suspend is not None:  # on the CronWorkflow alone: the template that it runs stays the same
        cron["spec"].pop("suspend", None)
        cron["spec"] |= {"suspend": True} if suspend else {}
    for manifest in (template, cron):
        for finding in validate.check(manifest, str(config)):
            click.echo(f"warning: {finding}", err=True)
    cluster = Cluster.connect(context or None, namespace or loaded.config.cluster.namespace or None)
    changes = list(workflows.schedule(cluster, template, cron))
    result = {"schedule": cron["metadata"]["name"], "namespace": cluster.namespace, "changes": changes}
    click.echo(json.dumps(result) if output == "json" else "\n".join(changes))


@command
@click.argument("name", type=Name())
@cluster_options
@click.option(
    "--cluster", "on_cluster", is_flag=True, hidden=True, help="Accepted for symmetry: it always acts on a cluster."
)
@output_option("text", "json")
@click.option("--yes", is_flag=True, help="Do not ask: delete a running run, too, without its exit steps.")
def delete(name: str, namespace: str, context: str, on_cluster: bool, output: str, yes: bool) -> None:
    """Delete a run from a cluster, with its pods and its training job.

    The released model keeps serving; data, checkpoints and models stay in the object store.

    Example:
      rekindle delete fraud-4k2xp --namespace models
    """
    from rekindle.argo.kinds import COMPLETED
    from rekindle.cluster import workflows
    from rekindle.cluster.api import Cluster

    cluster = Cluster.connect(context or None, namespace or None)
    status = workflows.read(cluster, name).get("status") or {}
    if status.get("phase") not in COMPLETED and not yes:
        message = f"{name} is still running, and its exit steps would not run"
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{message}: `rekindle stop {name} --cluster{cluster.flags}` first, or delete with --yes."
            )
        click.confirm(f"{message}. Delete it?", abort=True, err=True)
    workflows.delete(cluster, name)
    result = {"workflow": name, "namespace": cluster.namespace, "deleted": True}
    click.echo(json.dumps(result) if output == "json" else f"deleted {name}")


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
        click.echo(
            f"{name} has no pods left: completed ones are deleted; `logs -f` reads them while they run.", err=True
        )


def stop(cluster: "Cluster", name: str | None, output: str) -> None:
    """`rekindle stop --cluster`."""
    from rekindle.cluster import workflows

    name = _required(name, "stop")
    workflows.stop(cluster, name)
    result = {"workflow": name, "namespace": cluster.namespace, "phase": "Stopping"}
    click.echo(json.dumps(result) if output == "json" else f"stopping {name}; its exit steps still run")


def resume(cluster: "Cluster", name: str | None, output: str) -> int:
    """`rekindle resume --cluster`."""
    from rekindle.cluster import workflows

    name = _required(name, "resume")
    outcome = workflows.resume(cluster, name)
    result = {"workflow": name, "namespace": cluster.namespace, "phase": "Running"}
    click.echo(json.dumps(result) if output == "json" else f"{name} {outcome}")
    return 0


def _required(name: str | None, verb: str) -> str:
    """Raise UsageError without a name: in a shared namespace the newest run may be someone else's."""
    if not name:
        raise click.UsageError(f"{verb} --cluster needs the NAME of a run: `rekindle status --cluster` lists them.")
    return name
