"""The command `rekindle`: parses arguments, calls one function, prints its result.

    rekindle --help

Expensive packages are imported only by the commands that need them.
"""

import errno
import os

import click

from argolocal.common import homes
from argolocal.common.wording import shorten
from rekindle import project

# commands register themselves on import
from rekindle.cli import checks, demo, images, on_cluster, platform, projects, runs, services, standard_streams  # noqa: F401
from rekindle.cli.group import commands
from rekindle.cli.history import backfill, sweep  # noqa: F401
from rekindle.common import variables
from rekindle.errors import ConfigError, RekindleError


def main() -> int:
    """Run a command; returns its exit code."""
    standard_streams.prepare()
    try:
        variables.check(os.environ)
        os.environ[project.PATH] = os.pathsep.join(map(os.path.abspath, project.search_path()))
        code = commands.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = 2
    except click.Abort:
        code = 130
    except RekindleError as error:
        click.echo(f"error: {shorten(str(error))}", err=True)
        code = 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        home = str(homes.path().resolve())
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not str(error.filename).startswith(home):
            raise  # a bug: other causes are reported where they occur
        remedy = "free space there, make it writable, or set REKINDLE_HOME to another directory"
        click.echo(f"error: {error.filename or home}: {error.strerror}. State is kept in {home}: {remedy}.", err=True)
        code = 1
    return code if isinstance(code, int) else 0
