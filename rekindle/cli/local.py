"""The commands that need no cluster."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.cli.shared import (
    CONTEXT,
    HOME,
    Commands,
    File,
    Name,
    cluster_flag,
    cluster_options,
    command,
    commands,
    config_of,
    configured,
    files_of,
    going_on,
    manifest_of,
    manifest_option,
    meant,
    objects_of,
    output_option,
    pairs_of,
    told,
)

if TYPE_CHECKING:
    from rekindle.render import Kind


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
    """Run a pipeline here, from the manifest a cluster would run.

    Exit codes: 0 done, 1 failed, 2 bad usage or config, 3 not released by the gate, 130 stopped by Ctrl-C.

    Example:
      rekindle run configs/demo.yaml --set train.workers=3
      rekindle run --manifest workflow.yaml -p message=hello -o json
    """
    from rekindle.view import foreground

    with going_on(output):
        workflow, beside = manifest_of(config, sets, manifest, lambda: foreground.prefetch(HOME))
        given, as_json, whole = pairs_of(parameters), output == "json", bool(manifest)
        return foreground.run(HOME, workflow, given, as_json=as_json, ask=not yes, whole=whole, beside=beside)


@command
@click.argument("name", required=False, type=Name())
@click.option("-p", "--parameter", "values", multiple=True, metavar="NAME=VALUE",
              help="A value that a suspended step waits for.")  # fmt: skip
@cluster_flag
@output_option("text", "json")
@click.option("--yes", is_flag=True, help="Do not ask: the first Ctrl-C stops the run.")
def resume(name: str | None, values: tuple[str, ...], output: str, yes: bool, **where: Any) -> int:
    """Go on with a run that failed, was stopped or killed, or with its suspended steps.

    Finished steps are not done again. NAME is a run of `rekindle status`; without it, the newest that did not succeed.
    Where NAME still runs, its suspended steps go on. On a cluster, NAME is needed, what failed is tried again as by
    `argo retry`, and what is suspended goes on.

    Example:
      rekindle resume
      rekindle resume approval-7xk2p -p approve=YES
      rekindle resume fraud-4k2xp --cluster
    """
    if there := meant(**where):
        from rekindle.cli import cluster

        if values:
            raise click.UsageError("-p is for runs of this machine. On a cluster: argo node set NAME -p NAME=VALUE.")
        return cluster.resume(there, name, output)
    from rekindle.view import foreground

    with going_on(output):
        return foreground.resume(HOME, name, pairs_of(values), as_json=output == "json", ask=not yes)


@command
@configured
@click.option("--kind", type=click.Choice(["workflow", "template", "cron"]), default="workflow", show_default=True,
              help="A run, the reusable template, or its weekly schedule.")  # fmt: skip
@output_option("yaml", "json")
def render(config: Path | None, sets: tuple[str, ...], kind: "Kind", output: str) -> None:
    """Print the Argo manifest of a config. It needs no cluster and no network.

    Example:
      rekindle render configs/demo.yaml | kubectl create -f -
      rekindle render configs/demo.yaml --kind cron -o json
    """
    from rekindle.render import render_manifest, to_yaml

    manifest = render_manifest(config_of(config, sets).config, kind)
    click.echo(json.dumps(manifest, indent=2) if output == "json" else to_yaml(manifest), nl=output == "json")


@command
@click.argument("configs", nargs=-1, type=File())
@click.option("--set", "sets", multiple=True, metavar="A.B=C", help="Override one value of the configs.")
@click.option("--manifest", "manifests", multiple=True, metavar="FILE", type=File(),
              help="Objects of Argo or Kubernetes (YAML or JSON), files or folders of them.")  # fmt: skip
@output_option("text", "json")
def lint(configs: tuple[Path, ...], sets: tuple[str, ...], manifests: tuple[Path, ...], output: str) -> int:
    """Check for what Argo would refuse, or worse, accept.

    Templates of WorkflowTemplates that are among what is given are looked into. Exit codes: 0 all can run (there may be
    warnings), 1 something cannot, 2 bad usage or config.

    Example:
      rekindle lint configs/demo.yaml
      rekindle lint --manifest workflow.yaml --manifest templates/ -o json
    """
    from dataclasses import asdict

    from rekindle.argo import validate as linting

    if not configs and not manifests:
        raise click.UsageError("give a config file, such as configs/demo.yaml, or --manifest FILE.")
    objects = [(str(file), manifest_of(file, sets, None)[0]) for file in configs]
    objects += [(str(file), each) for path in manifests for file in files_of(path) for each in objects_of(file)]
    findings = linting.lint_all(objects)
    if output == "json":
        click.echo(json.dumps([asdict(each) for each in findings], indent=2))
    for each in findings if output == "text" else []:
        click.echo(f"{'error' if each.fatal else 'warning'}: {each}", err=True)
    if not findings and output == "text":
        click.echo("no problem found")
    return 1 if any(each.fatal for each in findings) else 0


@command
@click.argument("name", required=False, type=Name())
@click.option("-w", "--watch", is_flag=True, help="Show the run until it is over; only on a cluster.")
@cluster_flag
@output_option("text", "json")
def status(name: str | None, watch: bool, output: str, **where: Any) -> int:
    """List runs, services and deployments, or the steps of run NAME; on a cluster runs and schedules.

    Example:
      rekindle status
      rekindle status fraud-4k2xp --cluster --watch
    """
    if there := meant(**where):
        from rekindle.cli import cluster

        return cluster.status(there, name, watch, output)
    if watch:
        raise click.UsageError(
            "--watch needs --cluster: a run here is shown where it runs; `rekindle logs -f` follows it."
        )
    from rekindle.view import overview

    click.echo(overview.run(HOME, name, output == "json") if name else overview.everything(HOME, output == "json"))
    return 0


@command
@click.argument("name", required=False, type=Name())
@click.argument("step", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run is over.")
@cluster_flag
@output_option("text", "json")
def logs(name: str | None, step: str | None, follow: bool, output: str, **where: Any) -> None:
    """Print what the steps of a run and the replicas of its training wrote.

    NAME is the newest run unless given; STEP limits it to the steps whose name contains it. JSON is an object a line.

    Example:
      rekindle logs -f
      rekindle logs fraud-4k2xp train -f --cluster
    """
    if there := meant(**where):
        from rekindle.cli import cluster

        return cluster.logs(there, name, step or "", follow, output)
    from rekindle.view import overview

    overview.logs(HOME, name, step or "", follow, sys.stdout, output == "json")


@command
@click.argument("name", required=False, type=Name())
@output_option("text", "json")
def explain(name: str | None, output: str) -> None:
    """Tell what happened to the training of a run.

    Which workers were lost and when, how soon the others went on, what had to be done again, and where the time went.
    NAME is the newest run unless given; it may still be running.

    Example:
      rekindle explain
    """
    from rekindle.view import explain as explaining

    click.echo(explaining.explain(HOME, name, output == "json"))


@command
@click.argument("name", required=False, type=Name())
@cluster_flag
@output_option("text", "json")
def stop(name: str | None, output: str, **where: Any) -> None:
    """Stop a run in order; its exit steps still run.

    NAME is the newest running one unless given; on a cluster it is needed. `rekindle resume` goes on with it.

    Example:
      rekindle stop
      rekindle stop fraud-4k2xp --cluster
    """
    if there := meant(**where):
        from rekindle.cli import cluster

        return cluster.stop(there, name, output)
    from rekindle.local import run as local
    from rekindle.view import overview

    name = local.stop(name or overview.newest(HOME, ("Running",)), HOME)
    click.echo(json.dumps({"workflow": name, "phase": "Failed"}) if output == "json" else f"stopped {name}")


@command
@output_option("text", "json")
def down(output: str) -> None:
    """Stop the deployments and the embedded services.

    Data, models and runs stay.

    Example:
      rekindle down
    """
    from rekindle.local.emulator import LocalCluster

    stopped = LocalCluster(HOME).down()
    if output == "json":
        click.echo(json.dumps({"stopped": stopped}))
    for each in stopped if output == "text" else []:
        click.echo(f"stopped {each}")


@command
@configured
@output_option("text", "json")
def config(config: Path | None, sets: tuple[str, ...], output: str) -> None:
    """Show each value of a config and where it came from.

    A default is overridden by the file, the file by the environment (REKINDLE_TRAIN__WORKERS=3), that by --set.

    Example:
      rekindle config configs/demo.yaml --set train.workers=3
    """
    rows = list(config_of(config, sets).rows())
    if output == "json":
        click.echo(json.dumps({path: {"value": value, "origin": origin} for path, value, origin in rows}, indent=2))
        return
    wide = max(len(path) for path, _, _ in rows)
    for path, value, origin in rows:
        shown = value if isinstance(value, str) else json.dumps(value)
        click.echo(f"{path:{wide}}  {shown:24}  {origin}")


@command
@configured
@click.option("--cluster", is_flag=True, help="Examine a namespace of a cluster instead: `rekindle platform check`.")
@cluster_options
@output_option("text", "json")
def doctor(config: Path | None, sets: tuple[str, ...], cluster: bool, namespace: str, context: str, output: str) -> int:
    """Check that this machine has all that Rekindle needs.

    Each failure comes with its remedy.

    Example:
      rekindle doctor
    """
    if cluster:
        from rekindle.cli.platform import examine

        return examine(config, sets, namespace, context, output)
    from rekindle.view import doctor as examination

    return told(examination.check(HOME), output)


@command
@click.option("--open/--no-open", "browser", default=False, help="Open a browser on it.")
def ui(browser: bool) -> None:
    """Print the address of the MLflow UI; start it if need be.

    Example:
      rekindle ui
    """
    from rekindle.local.emulator import LocalCluster

    url = LocalCluster(HOME).configmap("rekindle")["MLFLOW_TRACKING_URI"]
    click.echo(url)
    if browser:
        click.launch(url)


@commands.group(cls=Commands, context_settings=CONTEXT)
def demo() -> None:
    """See for yourself.

    \b
    Example:
      rekindle demo chaos --workers 4
    """


@demo.command(context_settings=CONTEXT)
@click.option("--workers", type=click.IntRange(1, 16), default=3, show_default=True, help="Processes that train.")
@click.option("--seconds-between", "seconds", type=click.FloatRange(0), default=3, show_default=True,
              help="Between attacks.")  # fmt: skip
@click.option("--steps", type=click.IntRange(20), default=1500, show_default=True, help="Training steps.")
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the victims.")
@output_option("text", "json")
def chaos(workers: int, seconds: float, steps: int, seed: int, output: str) -> int:
    """Watch a training survive attacks.

    A small model is trained twice: once in peace, once while its workers, their launchers and the coordinator are
    killed, stopped and told to go. Exit codes: 0 both have the same sha256, 1 not, 130 stopped by Ctrl-C.

    \b
    Example:
      rekindle demo chaos --workers 4
    """
    from rekindle import project
    from rekindle.demo.chaos import Plan, run

    project.use_reference()
    with going_on(output):
        return run(HOME, Plan(workers, seconds, steps, seed), as_json=output == "json")
