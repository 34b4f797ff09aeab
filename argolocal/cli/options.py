"""Options and arguments that several commands share."""

import math
from pathlib import Path
from typing import Any

import click

from argolocal.common.checked_names import RunName, format_untrusted

ask_option = click.option("--yes", is_flag=True, help="Do not ask: the first Ctrl-C stops the run.")


port_option = click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port of the page (default: the first free port from 7070).",
)
open_option = click.option("--open", "open_browser", is_flag=True, help="Open it in a browser.")


queue_option = click.option(
    "--queue", "is_queued", is_flag=True, help="Queue the run for the server of this home."
)
parallelism_option = click.option(
    "--parallelism",
    type=click.IntRange(1),
    metavar="N",
    help="Number of runs at the same time (default: the number of cores).",
)
print_unit_option = click.option(
    "--print-unit",
    type=click.Choice(["user", "system"]),
    help="Print a unit of systemd that runs the server, and exit.",
)


class NonEmptyName(click.ParamType):
    """A name that must not be empty, so that `argolocal stop "$RUN"` does not stop the newest run
    if the variable RUN is not set."""

    name = "text"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        return value or self.fail("the name is empty: pass a name, or omit it.", param, ctx)


class RunNameParam(NonEmptyName):
    """The name of a run."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        name = super().convert(value, param, ctx)
        return RunName.parse_or_none(name) or self.fail(
            f"{format_untrusted(name)} is not {RunName.KIND}: {RunName.RULE}.", param, ctx
        )


class FiniteNumber(click.FloatRange):
    """A finite number in a range. Unlike click's FloatRange, this class rejects NaN."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if math.isfinite(number):
            return number
        return self.fail(f"{value} is not a finite number.", param, ctx)


class NonEmptyPath(click.Path):
    """A path that must not be empty, because an empty path would stand for the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("the path is empty: pass a file or folder.", param, ctx)
        return super().convert(value, param, ctx)


def make_parameters_option(help_text: str) -> Any:
    return click.option(
        "-p", "--parameter", "parameters", multiple=True, metavar="NAME=VALUE", help=help_text
    )


def make_output_option(*formats: str) -> Any:
    """Add the option --output; the command receives the boolean `as_json`."""
    if "text" in formats:
        help_text = "json: one object on stdout, everything else on stderr."
    else:
        help_text = None

    return click.option(
        "-o",
        "--output",
        "as_json",
        type=click.Choice(formats),
        default=formats[0],
        show_default=True,
        help=help_text,
        callback=lambda context, parameter, value: value == "json",
    )


def parse_parameter_options(assignments: tuple[str, ...]) -> dict[str, str]:
    """Return the values of the options `--parameter NAME=VALUE` by name."""
    values_by_name = {}
    for assignment in assignments:
        name, equals_sign, value = assignment.partition("=")
        if not equals_sign or not name:
            raise click.UsageError(f"-p {assignment}: it must be NAME=VALUE.")
        values_by_name[name] = value
    return values_by_name
