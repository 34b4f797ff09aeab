"""`rekindle step` in the help. rekindle/__main__.py runs it without click, which images of steps need not contain."""

import click

from rekindle.cli.group import commands


@commands.command(context_settings={"allow_interspersed_args": False})
@click.argument("module")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def step(module: str, flags: tuple[str, ...]) -> int:
    """Run a single step, as its pod does.

    Each input of MODULE is a flag; --output NAME=PATH writes an output to a file. `rekindle step MODULE --help` lists
    both.

    Example:
      rekindle step steps.prepare --help
    """
    from rekindle.step import main

    return main([module, *flags])
