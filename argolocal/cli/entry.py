"""Runs a command, and prints what went wrong."""

import errno
from collections.abc import Callable
from typing import Any

import click

from argolocal.cli import standard_streams
from argolocal.common import homes, program
from argolocal.common.wording import shorten
from argolocal.errors import ArgolocalError, ConfigError


def exit_code(command: Callable[[], Any]) -> int:
    """Run a command; returns its exit code."""
    standard_streams.prepare()
    try:
        code = command()
    except click.ClickException as error:
        error.show()
        code = 2
    except click.Abort:
        code = 130
    except ArgolocalError as error:
        click.echo(f"error: {shorten(str(error))}", err=True)
        code = 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        home = str(homes.path().resolve())
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not str(error.filename).startswith(home):
            raise  # a bug: other causes are reported where they occur
        remedy = f"free space there, make it writable, or set {program.variable('HOME')} to another directory"
        click.echo(f"error: {error.filename or home}: {error.strerror}. State is kept in {home}: {remedy}.", err=True)
        code = 1
    return code if isinstance(code, int) else 0
