"""Options and arguments that several commands share."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any

import click

from argolocal.cli.options import NonEmptyPath, make_parameters_option
from argolocal.cli.output import list_long_options
from rekindle.cli.sources import Source
from rekindle.cluster.kubernetes_api import MAX_RETRIES, Cluster

# minimum similarity of an unknown option and a config key, from which on the error recommends the
# key
MIN_SIMILARITY = 0.8

no_cache_option = click.option(
    "--no-cache", is_flag=True, help="Run every step; reuse no results of earlier runs."
)

local_option = click.option(
    "--local", "is_local", is_flag=True, help="Use the server of this machine, not a cluster."
)


@dataclass(frozen=True)
class Target:
    """The values of --namespace and --context. The value of an option that was not given is ""."""

    namespace: str
    context: str

    def connect(self, default_namespace: str = "", max_retries: int = MAX_RETRIES) -> Cluster:
        namespace = self.namespace or default_namespace or None
        return Cluster.connect(self.context or None, namespace, max_retries)

    def require_none(self, option: str) -> None:
        """Raise UsageError if --namespace or --context is given, because `option` excludes a
        cluster."""
        if self.namespace or self.context:
            raise click.UsageError(f"{option} cannot be combined with --namespace or --context.")


def config_options(command_function: Callable[..., Any]) -> Any:
    """Add CONFIG and --set to a command. The command receives their values, and the values of
    `manifest_options`, in its argument `source`."""

    @wraps(command_function)
    def command(
        *,
        config: Path | None,
        sets: tuple[str, ...],
        manifest: Path | None = None,
        parameters: tuple[str, ...] = (),
        **other_options: Any,
    ) -> Any:
        return command_function(source=Source(config, sets, manifest, parameters), **other_options)

    set_option = click.option(
        "--set", "sets", multiple=True, metavar="A.B=C", help="Config value to override."
    )
    return click.argument("config", required=False, type=NonEmptyPath())(set_option(command))


def manifest_options(command_function: Callable[..., Any]) -> Any:
    """Add --manifest and --parameter to a command. Use this decorator below `config_options`."""
    help_text = (
        "Argo Workflow or WorkflowTemplate (YAML or JSON) to run instead of a config: a file, or a"
        " folder with all objects that it needs."
    )
    manifest_option = click.option(
        "--manifest", metavar="FILE", type=NonEmptyPath(), help=help_text
    )
    return manifest_option(make_parameters_option("Workflow parameter.")(command_function))


def cluster_options(command_function: Callable[..., Any]) -> Any:
    """Add --namespace and --context to a command. The command receives their values in its argument
    `target`."""

    @wraps(command_function)
    def command(*, namespace: str, context: str, **other_options: Any) -> Any:
        return command_function(target=Target(namespace, context), **other_options)

    help_text = "Context of the kubeconfig (default: the current context)."
    command = click.option("--context", default="", metavar="NAME", help=help_text)(command)
    help_text = "Namespace on the cluster (default: the namespace of the context)."
    return click.option("-n", "--namespace", default="", metavar="NAME", help=help_text)(command)


def cluster_flag(command_function: Callable[..., Any]) -> Any:
    """Add --cluster, --namespace and --context to a command. The command receives their values in
    its argument `cluster`, which is None if the command acts on this machine."""

    @wraps(command_function)
    def command(*, on_cluster: bool, target: Target, **other_options: Any) -> Any:
        uses_cluster = on_cluster or target.namespace or target.context
        return command_function(cluster=target.connect() if uses_cluster else None, **other_options)

    help_text = "Act on the cluster that kubectl uses; implied by --namespace and --context."
    return click.option("--cluster", "on_cluster", is_flag=True, help=help_text)(
        cluster_options(command)
    )


def add_config_key(error: click.NoSuchOption) -> click.UsageError:
    """Return the error about an unknown option. If the option is a key of the config, such as
    `--workers`, the returned error recommends `--set`."""
    command = error.ctx.command if error.ctx else None
    if not (
        command and any(command_parameter.name == "sets" for command_parameter in command.params)
    ):
        return error

    # Config is imported here, because the import is slow, and only this error message needs Config
    from rekindle.blocks.manifest.config import Config

    path_by_key = {section_name: section_name for section_name in Config.model_fields}
    for section_name, section_field in Config.model_fields.items():
        for inner_key in getattr(section_field.annotation, "model_fields", {}):
            path_by_key.setdefault(inner_key, f"{section_name}.{inner_key}")

    name = error.option_name.lstrip("-").replace("-", "_")
    option_names = list_long_options(error.ctx) if error.ctx else []

    is_misspelt_option = bool(
        get_close_matches(error.option_name, option_names, n=1, cutoff=MIN_SIMILARITY)
    )
    if name not in path_by_key and not is_misspelt_option:
        name = next(iter(get_close_matches(name, path_by_key, n=1, cutoff=MIN_SIMILARITY)), "")
    if name not in path_by_key:
        return error

    command_path = error.ctx.command_path if error.ctx else "rekindle"
    message = (
        f"{error.option_name} is not an option of `{command_path}`: "
        f"a value of the config is set with `--set {path_by_key[name]}=VALUE`."
    )
    return click.UsageError(message, error.ctx)
