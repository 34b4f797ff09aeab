"""The command `rekindle`: parse, call one function, print.

    rekindle --help

Nothing heavy is imported until a command needs it.
"""

import errno
import os
import sys

import click

from rekindle.cli import local  # noqa: F401 (the commands register themselves, in the order of the help)

# isort: split
from rekindle import project
from rekindle.cli import cluster, images, platform, streams  # noqa: F401
from rekindle.cli.shared import HOME, commands
from rekindle.errors import ConfigError, RekindleError

STOPPED = (129, 130, 143)  # by a terminal that was closed, by Ctrl-C, by SIGTERM


def main() -> None:
    """Run a command; the exit code says how it went."""
    streams.prepare()
    try:
        os.environ.setdefault(project.PATH, os.pathsep.join(project.search_path()))
        code = commands.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = 2
    except (KeyboardInterrupt, click.Abort):
        code = 130
    except RekindleError as error:
        click.echo(f"error: {error}", err=True)
        code = 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        home = str(HOME.resolve())
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not str(error.filename).startswith(home):
            raise  # a bug: all others are named where they occur
        way = "make room there or make it writable, or set REKINDLE_HOME to another directory"
        click.echo(f"error: {error.filename or home}: {error.strerror}. State is kept in {home}: {way}.", err=True)
        code = 1
    if code in STOPPED:  # all is stopped and said; the interpreter would take half a second more to tidy up
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code if isinstance(code, int) else 0)
