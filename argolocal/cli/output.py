"""Output that all commands share: results as text or JSON, errors, the exit code."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from argolocal.cli import standard_streams
from argolocal.common import homes, program
from argolocal.common.json_text import to_json
from argolocal.common.wording import shorten
from argolocal.errors import ArgolocalError, ConfigError, describe, did_you_mean


def print_result(as_json: bool, result: dict[str, Any], text: str) -> None:
    click.echo(to_json(result) if as_json else text)


@contextmanager
def errors_as_json(as_json: bool) -> Iterator[None]:
    """Print an error that occurs before the run starts; with `-o json`, print it as a JSON object,
    too."""
    try:
        yield
    except ArgolocalError as error:
        if as_json:
            click.echo(to_json({"workflow": None, "phase": "Failed", "message": str(error)}))
        raise


@contextmanager
def run_output(as_json: bool) -> Iterator[None]:
    """Apply `errors_as_json` to a command that runs a workflow; the workflow continues if stdout
    cannot be written."""
    if not as_json:
        standard_streams.ignore_stdout_errors()
    with errors_as_json(as_json):
        yield


def options_of(context: click.Context) -> list[str]:
    """Return the long options of a command."""
    options = [
        each for each in context.command.get_params(context) if isinstance(each, click.Option)
    ]
    return sorted(name for option in options for name in option.opts if name.startswith("--"))


def usage_message(error: click.ClickException) -> str:
    """Return one line about a wrong command line: the mistake, the nearest option, and where the
    help is."""
    message = " ".join(error.format_message().split())
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return message
    if isinstance(error, click.NoSuchOption):
        names = options_of(context)
        hint = did_you_mean(error.option_name, names) or f" Its options: {', '.join(names)}."
        message = f"{error.option_name} is not an option of `{context.command_path}`.{hint}"
    end = "" if message.endswith((".", "?", "!")) else "."
    return f"{message}{end} See `{context.command_path} --help`."


def exit_code(command: Callable[[], Any]) -> int:
    """Run a command and return its exit code."""
    standard_streams.prepare()

    try:
        code = command()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = 2
    except click.ClickException as error:
        click.echo(f"error: {shorten(usage_message(error))}", err=True)
        code = 2
    except click.Abort:
        code = 130
    except ArgolocalError as error:
        click.echo(f"error: {shorten(str(error))}", err=True)
        code = 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        home = str(homes.path().resolve())
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not str(error.filename).startswith(
            home
        ):
            click.echo(f"error: {shorten(describe(error))}", err=True)
            return 1

        remedy = (
            f"free space there, make it writable, or set {program.variable('HOME')} to another"
            " directory"
        )
        click.echo(
            f"error: {error.filename or home}: {error.strerror}. State is kept in {home}:"
            f" {remedy}.",
            err=True,
        )

        code = 1
    except RecursionError as error:
        click.echo(f"error: a value is nested too deep: {shorten(describe(error))}", err=True)
        code = 1

    if isinstance(code, int):
        return code

    return 0
