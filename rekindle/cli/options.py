"""Options and arguments that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rekindle.cluster.api import Cluster


class Name(click.ParamType):
    """A non-empty name: with RUN unset, `rekindle stop "$RUN"` must not stop the newest run."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value or self.fail("it is empty: give a name, or omit it.", param, ctx)


class File(click.Path):
    """A non-empty path: an empty one would be the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value or self.fail("it is empty: give a file or folder.", param, ctx), param, ctx)


def configured(function: Any) -> Any:
    """Add CONFIG and --set."""
    setting = click.option("--set", "sets", multiple=True, metavar="A.B=C", help="Override one value of the config.")
    return click.argument("config", required=False, type=File())(setting(function))


def manifest_option(function: Any) -> Any:
    note = "An Argo Workflow or WorkflowTemplate (YAML or JSON) instead of a config, or a folder with all it needs."
    return click.option("--manifest", metavar="FILE", type=File(), help=note)(function)


def output_option(*formats: str) -> Any:
    note = "json: one object on stdout, everything else on stderr." if "text" in formats else None
    choice = click.Choice(formats)
    return click.option("-o", "--output", type=choice, default=formats[0], show_default=True, help=note)


def cluster_options(function: Any) -> Any:
    """Add --namespace and --context ("" if not given)."""
    context = click.option(
        "--context", default="", metavar="NAME", help="Context of the kubeconfig (default: the current one)."
    )
    note = "Namespace on the cluster (default: that of the context)."
    return click.option("-n", "--namespace", default="", metavar="NAME", help=note)(context(function))


def cluster_flag(function: Any) -> Any:
    """Add --cluster, --namespace and --context to a command that acts on this machine without them."""
    note = "Act on the cluster that kubectl uses; implied by --namespace and --context."
    return click.option("--cluster", "on_cluster", is_flag=True, help=note)(cluster_options(function))


def selected_cluster(on_cluster: bool, namespace: str, context: str) -> "Cluster | None":
    """The cluster that the flags select, if any. Raises ConfigError."""
    if not (on_cluster or namespace or context):
        return None
    from rekindle.cluster.api import Cluster

    return Cluster.connect(context or None, namespace or None)
