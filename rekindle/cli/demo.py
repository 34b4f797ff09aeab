"""The command group `rekindle demo`."""

import click

from argolocal.cli.options import FiniteNumber, make_output_option
from argolocal.cli.output import run_output
from argolocal.common.homes import require_home as home
from rekindle import project
from rekindle.cli.group import commands


@commands.group
def demo() -> None:
    """Show that a training run survives the death of its processes.

    Example:
      rekindle demo chaos --workers 4
    """


@demo.command
@click.option(
    "--workers", type=click.IntRange(1, 16), default=3, show_default=True, help="Number of workers."
)
@click.option(
    "--seconds-between",
    type=FiniteNumber(0),
    default=3,
    show_default=True,
    help="Time between attacks, in seconds.",
)
@click.option(
    "--steps",
    type=click.IntRange(20),
    default=1500,
    show_default=True,
    help="Number of training steps.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the random choice of attacks."
)
@make_output_option("text", "json")
def chaos(workers: int, seconds_between: float, steps: int, seed: int, as_json: bool) -> int:
    """Watch a training run survive attacks.

    A small model is trained twice: once undisturbed, once while its workers, their launchers and
    the coordinator are killed, frozen and terminated. Exit codes: 0 the weights of both trainings
    have the same sha256, 1 they differ, 130 stopped by Ctrl-C.

    Example:
      rekindle demo chaos --workers 4
    """
    from rekindle.demo.chaos import DemoOptions, run_demo

    project.use_reference()

    with run_output(as_json):
        return run_demo(home(), DemoOptions(workers, seconds_between, steps, seed), as_json=as_json)
