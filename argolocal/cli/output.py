"""The parts of the output that all commands share: results as text or JSON, errors, exit codes."""

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import click

from argolocal.cli import standard_streams
from argolocal.common import exit_codes, homes, program
from argolocal.common.addresses import remove_address_secrets
from argolocal.common.json_text import to_json
from argolocal.common.wording import escape_to_one_line, shorten
from argolocal.errors import ArgolocalError, ConfigError, describe, suggest_similar


def print_result(as_json: bool, result: Mapping[str, object], text: str) -> None:
    click.echo(to_json(result) if as_json else text)


@contextmanager
def print_errors_as_json(as_json: bool) -> Iterator[None]:
    """With `as_json`, print an ArgolocalError that occurs in the block as a JSON object, in the
    same form as the result of a run. The error is raised again, also without `as_json`."""
    try:
        yield
    except ArgolocalError as error:
        if as_json:
            click.echo(
                to_json(
                    {
                        "workflow": None,
                        "phase": "Failed",
                        "message": remove_address_secrets(str(error)),
                    }
                )
            )
        raise


@contextmanager
def run_output(as_json: bool) -> Iterator[None]:
    """Apply `print_errors_as_json` to a command that runs a workflow. With text output, a failed
    write to stdout does not stop the run."""
    if not as_json:
        standard_streams.ignore_stdout_errors()
    with print_errors_as_json(as_json):
        yield


def list_long_options(context: click.Context) -> list[str]:
    """Return the names of a command's long options, such as `--output`."""
    click_options = [
        parameter
        for parameter in context.command.get_params(context)
        if isinstance(parameter, click.Option)
    ]
    return sorted(flag for option in click_options for flag in option.opts if flag.startswith("--"))


def format_usage_message(error: click.ClickException) -> str:
    """Return one line about a wrong command line: the mistake, a hint, and the command that prints
    the help."""
    message = " ".join(error.format_message().split())
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return message
    if isinstance(error, click.NoSuchOption):
        option_names = list_long_options(context)
        hint = (
            suggest_similar(error.option_name, option_names)
            or f" Its options: {', '.join(option_names)}."
        )
        message = f"{error.option_name} is not an option of `{context.command_path}`.{hint}"
    final_punctuation = "" if message.endswith((".", "?", "!")) else "."
    return f"{message}{final_punctuation} See `{context.command_path} --help`."


def run_command(command: Callable[[], object]) -> int:
    """Run a command, print its error, and return its exit code."""
    standard_streams.prepare()

    try:
        exit_code = command()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        exit_code = 2
    except click.ClickException as error:
        _print_error(escape_to_one_line(format_usage_message(error)))
        exit_code = 2
    except click.Abort:
        exit_code = exit_codes.INTERRUPTED
    except ArgolocalError as error:
        _print_error(str(error))
        exit_code = 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        home = str(homes.home_path().resolve())
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not str(error.filename).startswith(
            home
        ):
            _print_error(escape_to_one_line(describe(error)))
            return 1

        remedy = (
            f"free space there, make it writable, or set {program.environment_variable('HOME')} to"
            " another directory"
        )
        path = error.filename or home
        _print_error(
            escape_to_one_line(f"{path}: {error.strerror}. State is kept in {home}: {remedy}.")
        )
        exit_code = 1
    except RecursionError as error:
        _print_error(escape_to_one_line(f"a value is nested too deep: {describe(error)}"))
        exit_code = 1

    if isinstance(exit_code, int):
        return exit_code

    return 0


def _print_error(message: str) -> None:
    click.echo(f"error: {shorten(remove_address_secrets(message))}", err=True)


def announce_page(address: str, open_browser: bool, note: str = "Ctrl-C ends the page.") -> None:
    """Print the address of a page and a note, and open the page in a browser if `open_browser`."""
    click.echo(f"{address}\n{note}")
    if open_browser:
        click.launch(homes.write_redirect_page(homes.home_path(), address))
