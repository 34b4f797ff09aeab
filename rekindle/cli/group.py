"""The command group `rekindle`: every command registers itself here."""

import click

from argolocal.cli.group import CONTEXT_SETTINGS, Commands

# section of `rekindle --help` → the commands in the section
SECTIONS = {
    "Get started": ("init", "demo", "doctor", "trust"),
    "Run and watch": (
        "run",
        "sweep",
        "resume",
        "rerun",
        "status",
        "logs",
        "explain",
        "stop",
        "down",
        "rollback",
        "prune",
        "server",
    ),
    "Inspect before a run": ("config", "render", "lint", "check", "plan"),
    "Data and results": ("put", "ui", "get", "env", "cache", "reproduce"),
    "Use a cluster": (
        "images",
        "platform",
        "submit",
        "schedule",
        "run-now",
        "backfill",
        "scale",
        "unschedule",
        "delete",
    ),
    "Inside a pod": ("step",),
}


@click.group(cls=Commands, sections=SECTIONS, context_settings=CONTEXT_SETTINGS)
@click.version_option(
    package_name="rekindle", message="rekindle %(version)s", help="Show the version."
)
def commands() -> None:
    """Train, evaluate, release and serve a model from one manifest, on this machine or on a
    cluster.

    \b
    Example:
      rekindle run configs/demo.yaml
    """


command = commands.command
