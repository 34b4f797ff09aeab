"""Commands that make a project and run one of its steps.

rekindle/__main__.py runs `rekindle step` without click, which images of steps need not contain.
"""

from pathlib import Path

import click

from argolocal.cli.options import File
from rekindle.cli.group import command, commands
from rekindle.project import create


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


@command
@click.argument("folder", metavar="NAME", type=File())
@click.option("--workload", type=click.Choice(["only"]), help="Make one workload and its config, nothing else.")
def init(folder: Path, workload: str | None) -> None:
    """Make a project of your own in the folder NAME.

    It has a model, a step, a pipeline, a config, tests and an image, and runs at once.

    Example:
      rekindle init power
    """
    for path in create(folder, only_workload=workload == "only"):
        click.echo(path)
    click.echo(f"\ncd {folder} && {f'rekindle run configs/{folder.name}.yaml' if workload else 'make run'}")
