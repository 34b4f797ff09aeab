"""The command group `rekindle`, in which every command registers itself."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rekindle.errors import did_you_mean

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
HOME = Path(os.environ.get("REKINDLE_HOME", ".rekindle"))  # runs, services and their data


class Commands(click.Group):
    """Lists commands in the order of their definition and suggests a name for a mistyped one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            ctx.fail(f'"{args[0]}" is not a command.{did_you_mean(args[0], set(self.commands))}')
        return super().resolve_command(ctx, args)


def version(ctx: click.Context, _: click.Parameter, requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        click.echo(f"rekindle {version('rekindle')}")
        ctx.exit()


@click.group(cls=Commands, context_settings=CONTEXT)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=version, help="Show the version.")
def commands() -> None:
    """Train, evaluate, release and serve a model from one manifest, on this machine or on a cluster.

    \b
    Example:
      rekindle run configs/demo.yaml
    """


def command(function: Callable[..., Any]) -> click.Command:
    """Register a command; the lines of the `Example:` block in its docstring stay as they are."""
    function.__doc__ = (function.__doc__ or "").replace("    Example:", "    \b\n    Example:")
    return commands.command(context_settings=CONTEXT)(function)
