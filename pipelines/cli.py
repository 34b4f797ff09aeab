"""The command `rekindle`: parse, call one function, print.

    rekindle --help

Nothing heavy is imported until a command needs it.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from steps.errors import ConfigError, RekindleError, did_you_mean

if TYPE_CHECKING:
    from pipelines.render import Kind

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
HOME = Path(os.environ.get("REKINDLE_HOME", ".rekindle"))  # runs, services and their data of this directory's user


class Commands(click.Group):
    """Commands in the order they are defined, and a hint for a mistyped one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            ctx.fail(f'"{args[0]}" is not a command.{did_you_mean(args[0], set(self.commands))}')
        return super().resolve_command(ctx, args)


def command(function: Callable[..., Any]) -> click.Command:
    """A command whose docstring's `Example:` block keeps its lines."""
    function.__doc__ = (function.__doc__ or "").replace("Example:", "\b\nExample:")
    return commands.command(context_settings=CONTEXT)(function)


def configured(function: Any) -> Any:
    """CONFIG and --set."""
    setting = click.option("--set", "sets", multiple=True, metavar="A.B=C", help="Override one value of the config.")
    return click.argument("config", required=False, type=click.Path(path_type=Path))(setting(function))


def manifest_option(function: Any) -> Any:
    note = "An Argo Workflow or WorkflowTemplate (YAML or JSON) instead of a config."
    return click.option("--manifest", metavar="FILE", type=click.Path(path_type=Path), help=note)(function)


def output_option(*formats: str) -> Any:
    note = "json: one object on stdout, all else on stderr." if "text" in formats else None
    choice = click.Choice(formats)
    return click.option("-o", "--output", type=choice, default=formats[0], show_default=True, help=note)


def version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"rekindle {version('rekindle')}")
        ctx.exit()


@click.group(cls=Commands, context_settings=CONTEXT)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=version, help="Show the version.")
def commands() -> None:
    """Train, judge, release and serve a model: from one manifest, here or on a cluster.

    \b
    Example:
      rekindle run configs/demo.yaml
    """


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
    from pipelines import foreground

    with _refusals(output):
        workflow = _manifest(config, sets, manifest, lambda: foreground.prefetch(HOME))
        given, as_json = _pairs(parameters), output == "json"
        return foreground.run(HOME, workflow, given, as_json=as_json, ask=not yes, whole=bool(manifest))


@command
@click.argument("name", required=False)
@output_option("text", "json")
@click.option("--yes", is_flag=True, help="Do not ask: the first Ctrl-C stops the run.")
def resume(name: str | None, output: str, yes: bool) -> int:
    """Go on with a run that failed, was stopped or killed.

    Finished steps are not done again. NAME is a run of `rekindle status`; without it, the newest that did not succeed.

    Example:
      rekindle resume
    """
    from pipelines import foreground

    with _refusals(output):
        return foreground.resume(HOME, name, as_json=output == "json", ask=not yes)


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
    from pipelines import render as rendering

    manifest = rendering.render(_config(config, sets).config, kind)
    click.echo(json.dumps(manifest, indent=2) if output == "json" else rendering.to_yaml(manifest), nl=output == "json")


@command
@configured
@manifest_option
def lint(config: Path | None, sets: tuple[str, ...], manifest: Path | None) -> int:
    """Check for what Argo would refuse, or worse, accept.

    Example:
      rekindle lint configs/demo.yaml
      rekindle lint --manifest workflow.yaml
    """
    from pipelines import lint as linting

    findings = linting.lint(_manifest(config, sets, manifest))
    for each in findings:
        click.echo(f"{'error' if each.fatal else 'warning'}: {each}", err=True)
    if not findings:
        click.echo("no problem found")
    return 2 if any(each.fatal for each in findings) else 0


@command
@click.argument("name", required=False)
@output_option("text", "json")
def status(name: str | None, output: str) -> None:
    """List runs, services and deployments, or the steps of run NAME.

    Example:
      rekindle status
    """
    from pipelines import overview

    click.echo(overview.run(HOME, name, output == "json") if name else overview.everything(HOME, output == "json"))


@command
@click.argument("name", required=False)
@click.argument("step", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run is over.")
def logs(name: str | None, step: str | None, follow: bool) -> None:
    """Print what the steps of a run wrote.

    NAME is the newest run unless given; STEP limits it to the steps whose name contains it.

    Example:
      rekindle logs -f
    """
    from pipelines import overview

    overview.logs(HOME, name, step or "", follow, sys.stdout)


@command
@click.argument("name", required=False)
@output_option("text", "json")
def explain(name: str | None, output: str) -> None:
    """Tell what happened to the training of a run.

    Which workers were lost and when, how soon the others went on, what had to be done again, and where the time went.
    NAME is the newest run unless given; it may still be running.

    Example:
      rekindle explain
    """
    from pipelines import explain as explaining

    click.echo(explaining.explain(HOME, name, output == "json"))


@command
@click.argument("name", required=False)
def stop(name: str | None) -> None:
    """Stop a run in order; its exit steps still run.

    NAME is the newest running one unless given. `rekindle resume` goes on with it.

    Example:
      rekindle stop
    """
    from pipelines import overview
    from pipelines.local import run as local

    click.echo(f"stopped {local.stop(name or overview.newest(HOME, ('Running',)), HOME)}")


@command
def down() -> None:
    """Stop the deployments and the embedded services.

    Data, models and runs stay.

    Example:
      rekindle down
    """
    from pipelines.local.cluster import LocalCluster

    for each in LocalCluster(HOME).down():
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
    rows = list(_config(config, sets).rows())
    if output == "json":
        click.echo(json.dumps({path: {"value": value, "origin": origin} for path, value, origin in rows}, indent=2))
        return
    wide = max(len(path) for path, _, _ in rows)
    for path, value, origin in rows:
        shown = value if isinstance(value, str) else json.dumps(value)
        click.echo(f"{path:{wide}}  {shown:24}  {origin}")


@command
@output_option("text", "json")
def doctor(output: str) -> int:
    """Check that this machine has all that Rekindle needs.

    Each failure comes with its remedy.

    Example:
      rekindle doctor
    """
    from dataclasses import asdict

    from pipelines import doctor as examination

    found = examination.check(HOME)
    click.echo(
        json.dumps([asdict(each) for each in found], indent=2) if output == "json" else "\n".join(map(str, found))
    )
    return 0 if all(each.ok or not each.required for each in found) else 1


@command
@click.option("--open/--no-open", "browser", default=False, help="Open a browser on it.")
def ui(browser: bool) -> None:
    """Print the address of the MLflow UI; start it if need be.

    Example:
      rekindle ui
    """
    from pipelines.local.cluster import LocalCluster

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
    from pipelines.demo import Plan, run

    with _refusals(output):
        return run(HOME, Plan(workers, seconds, steps, seed), as_json=output == "json")


@contextmanager
def _refusals(output: str) -> Iterator[None]:
    """What does not even start is an object, too."""
    try:
        yield
    except RekindleError as error:
        if output == "json":
            click.echo(json.dumps({"workflow": None, "phase": "Failed", "message": str(error)}))
        raise


def _config(file: Path | None, sets: tuple[str, ...]) -> Any:
    from pipelines.config import load_config

    if file is None:
        raise click.UsageError("give a config file, such as configs/demo.yaml.")
    return load_config(file, sets)


def _manifest(
    config: Path | None, sets: tuple[str, ...], manifest: Path | None, meanwhile: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The manifest as plain data: read from a file, or rendered from a checked config (`meanwhile` is called first)."""
    if manifest and (config or sets):
        raise click.UsageError("give a config or --manifest FILE, not both (--set changes a config, -p a manifest).")
    if manifest:
        return _read(manifest)
    loaded = _config(config, sets)
    meanwhile()
    from pipelines import render as rendering

    return rendering.render(loaded.config)


def _read(file: Path) -> dict[str, Any]:
    from pipelines.local.manifest import documents

    try:
        found = documents(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): give a YAML or JSON manifest.") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    if len(found) != 1:
        raise ConfigError(f"{file} holds {len(found)} objects: it must hold one Argo Workflow or WorkflowTemplate.")
    return found[0]


def _pairs(items: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise click.UsageError(f"-p {item}: it must be NAME=VALUE.")
        pairs[name] = value
    return pairs


def main() -> None:
    """Run a command; the exit code says how it went."""
    os.environ.setdefault("REKINDLE_PATH", os.getcwd())  # a workload may be a module of this directory
    try:
        code = commands.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = 2
    except (KeyboardInterrupt, click.Abort):
        code = 130
    except RekindleError as error:
        click.echo(f"error: {error}", err=True)
        code = 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        home = str(HOME.resolve())
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not str(error.filename).startswith(home):
            raise  # a bug: all others are named where they occur
        way = "make room there or make it writable, or set REKINDLE_HOME to another directory"
        click.echo(f"error: {error.filename or home}: {error.strerror}. State is kept in {home}: {way}.", err=True)
        code = 1
    if code in (130, 143):  # all is stopped and said; the interpreter would take half a second more to tidy up
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code if isinstance(code, int) else 0)
