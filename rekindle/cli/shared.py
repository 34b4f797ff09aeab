"""What the commands share: options, the group, reading a config or a manifest."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.cli import streams
from rekindle.errors import ConfigError, RekindleError, did_you_mean

if TYPE_CHECKING:
    from rekindle.cluster.api import Cluster

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
HOME = Path(os.environ.get("REKINDLE_HOME", ".rekindle"))  # runs, services and their data of this directory's user


class Name(click.ParamType):
    """A name that is given: `rekindle stop "$RUN"` with no RUN would mean another run than its user does."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value or self.fail("it is empty: name one, or leave it out.", param, ctx)


class File(click.Path):
    """A path that is given: an empty one would be the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value or self.fail("it is empty: give a file or folder.", param, ctx), param, ctx)


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
    function.__doc__ = (function.__doc__ or "").replace("    Example:", "    \b\n    Example:")
    return commands.command(context_settings=CONTEXT)(function)


def configured(function: Any) -> Any:
    """CONFIG and --set."""
    setting = click.option("--set", "sets", multiple=True, metavar="A.B=C", help="Override one value of the config.")
    return click.argument("config", required=False, type=File())(setting(function))


def manifest_option(function: Any) -> Any:
    note = "An Argo Workflow or WorkflowTemplate (YAML or JSON) instead of a config; a folder has what it needs, too."
    return click.option("--manifest", metavar="FILE", type=File(), help=note)(function)


def output_option(*formats: str) -> Any:
    note = "json: one object on stdout, all else on stderr." if "text" in formats else None
    choice = click.Choice(formats)
    return click.option("-o", "--output", type=choice, default=formats[0], show_default=True, help=note)


def cluster_options(function: Any) -> Any:
    """--namespace and --context, as `namespace` and `context` ("": not given)."""
    where = click.option("--context", default="", metavar="NAME", help="Of the kubeconfig (default: its current one).")
    note = "Namespace of the cluster (default: that of the context)."
    return click.option("-n", "--namespace", default="", metavar="NAME", help=note)(where(function))


def cluster_flag(function: Any) -> Any:
    """--cluster, --namespace and --context of a command that acts on this machine without them."""
    note = "Act on the cluster that kubectl uses; implied by the next two."
    return click.option("--cluster", "on_cluster", is_flag=True, help=note)(cluster_options(function))


def meant(on_cluster: bool, namespace: str, context: str) -> "Cluster | None":
    """The cluster that the flags mean, if they mean one. Raises ConfigError."""
    if not (on_cluster or namespace or context):
        return None
    from rekindle.cluster.api import Cluster

    return Cluster.connect(context or None, namespace or None)


def told(checks: list[Any], output: str) -> int:
    """What a doctor found; the exit code says whether anything required is missing."""
    from dataclasses import asdict

    plain = json.dumps([asdict(each) for each in checks], indent=2)
    click.echo(plain if output == "json" else "\n".join(map(str, checks)))
    return 0 if all(each.ok or not each.required for each in checks) else 1


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


@contextmanager
def refusals(output: str) -> Iterator[None]:
    """What does not even start is an object, too."""
    try:
        yield
    except RekindleError as error:
        if output == "json":
            click.echo(json.dumps({"workflow": None, "phase": "Failed", "message": str(error)}))
        raise


@contextmanager
def going_on(output: str) -> Iterator[None]:
    """`refusals`, of a command that does more than to print: it goes on where its text cannot be shown."""
    if output == "text":
        streams.steady()
    with refusals(output):
        yield


def config_of(file: Path | None, sets: tuple[str, ...]) -> Any:
    """The config of a file with its overrides, and where each value came from."""
    from rekindle.config import load_config

    if file is None:
        raise click.UsageError("give a config file, such as configs/demo.yaml.")
    return load_config(file, sets)


def manifest_of(
    config: Path | None, sets: tuple[str, ...], manifest: Path | None, meanwhile: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The manifest as plain data: read from a file, or rendered from a checked config (`meanwhile` is called first).

    And what else its file or folder holds: templates it refers to, ConfigMaps, Secrets.
    """
    if manifest and (config or sets):
        raise click.UsageError("give a config or --manifest FILE, not both (--set changes a config, -p a manifest).")
    if manifest:
        return _read(manifest)
    loaded = config_of(config, sets)
    meanwhile()
    from rekindle.render import render_manifest

    return render_manifest(loaded.config), []


def files_of(path: Path) -> list[Path]:
    """The file itself, or the manifests in a folder, at least one. Raises ConfigError."""
    if not path.is_dir():
        return [path]
    if found := sorted(each for each in path.iterdir() if each.suffix in (".yaml", ".yml", ".json")):
        return found
    raise ConfigError(f"{path} has no file that ends with .yaml, .yml or .json: give a folder of manifests.")


def objects_of(file: Path) -> list[dict[str, Any]]:
    """The objects in a YAML or JSON file, at least one. Raises ConfigError."""
    from rekindle.argo.manifest.read import documents

    try:
        if found := documents(file.read_text()):
            return found
        raise ConfigError("it holds no object: give a YAML or JSON manifest.")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): give a YAML or JSON manifest.") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from rekindle.argo.manifest.read import split

    found = [each for file in files_of(path) for each in objects_of(file)]
    try:
        return split(found)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def pairs_of(items: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise click.UsageError(f"-p {item}: it must be NAME=VALUE.")
        pairs[name] = value
    return pairs
