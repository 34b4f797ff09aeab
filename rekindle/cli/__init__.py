"""The command `rekindle`: parses arguments, calls one function, prints its result.

    rekindle --help

Expensive packages are imported only by the commands that need them.
"""

import os
from typing import Any

import click

from argolocal.cli.output import run_command
from rekindle import project
from rekindle.blocks.manifest import variables

# importing these modules registers the commands in the command group `rekindle`
from rekindle.cli import (  # noqa: F401
    checks,
    demo,
    images,
    on_cluster,
    platform,
    projects,
    runs,
    schedules,
    services,
)
from rekindle.cli.group import commands
from rekindle.cli.history import backfill, reproduce, sweep  # noqa: F401
from rekindle.cli.options import add_config_key
from rekindle.errors import RekindleError
from rekindle.project import user_exceptions


def main() -> int:
    """Run a command and return its exit code."""
    return run_command(_run_command)


def _run_command() -> Any:
    variables.check_process_settings(os.environ)
    os.environ[project.PATH_VARIABLE] = os.pathsep.join(map(os.path.abspath, project.search_path()))
    try:
        return commands.main(standalone_mode=False)
    except click.NoSuchOption as error:
        raise add_config_key(error) from error
    except Exception as error:
        if isinstance(
            error, (RekindleError, click.ClickException)
        ) or not user_exceptions.is_raised_by_project(error):
            raise
        raise user_exceptions.convert_exception(error) from error
