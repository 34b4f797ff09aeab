"""Commands that create a project and run one of its steps.

rekindle/__main__.py runs `rekindle step` without click, so click can be missing in the images of
steps.
"""

from pathlib import Path

import click

from argolocal.cli.options import NonEmptyPath
from rekindle.cli.group import command, commands
from rekindle.project.template import create


@commands.command(context_settings={"allow_interspersed_args": False})
@click.argument("module")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def step(module: str, flags: tuple[str, ...]) -> int:
    """Run a single step, as its pod does.

    Each input of MODULE is a flag; --output NAME=PATH writes an output to a file. `rekindle step
    MODULE --help` lists all inputs and outputs.

    Example:
      rekindle step steps.prepare --help
    """
    from rekindle.step import main

    return main([module, *flags])


@command
@click.argument("folder", metavar="NAME", type=NonEmptyPath())
@click.option(
    "--workload", type=click.Choice(["only"]), help="Create only one workload and its config."
)
def init(folder: Path, workload: str | None) -> None:
    """Create a project in the folder NAME.

    The project contains a model, a step, a pipeline, a config, tests and a Dockerfile, and can be
    run as it is.

    Example:
      rekindle init power
    """
    for path in create(folder, only_workload=workload == "only"):
        click.echo(path)

    click.echo(
        f"\ncd {folder} && {f'rekindle run configs/{folder.name}.yaml' if workload else 'make run'}"
    )
