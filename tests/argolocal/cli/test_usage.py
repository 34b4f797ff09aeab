"""The error for a wrong command line is one line: the mistake, the most similar option, and the
command that prints the help."""

import subprocess
import sys

import click
import pytest

from argolocal import cli as argolocal_cli
from argolocal.cli.output import format_usage_message
from rekindle import cli as rekindle_cli
from rekindle.cli.options import add_config_key

PROGRAMS = {"argolocal": argolocal_cli.commands, "rekindle": rekindle_cli.commands}


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        (
            "argolocal",
            "run --paramter x=1",
            '--paramter is not an option of `argolocal run`. Did you mean "--parameter"?',
        ),
        (
            "argolocal",
            "logs -Z",
            "-Z is not an option of `argolocal logs`. Its options: --follow, --help, --output.",
        ),
        ("argolocal", "--hlp", 'Did you mean "--help"?'),
        ("argolocal", "run", "Missing argument 'FILE'."),
        ("argolocal", "run f.yaml -p", "Option '-p' requires an argument."),
        ("argolocal", "list", '"list" is not a command. Did you mean "status"?'),
        ("argolocal", "retry", 'Did you mean "resume"?'),
        ("argolocal", "resubmit", 'Did you mean "rerun"?'),
        ("argolocal", "lnt", '"lnt" is not a command. Did you mean "lint"?'),
        ("rekindle", "status --workers 3", "Its options: --all,"),
        ("rekindle", "logs --folow", 'Did you mean "--follow"?'),
        ("rekindle", "run --worker 3", "`--set train.workers=VALUE`"),
        ("rekindle", "run --no-cach", 'Did you mean "--no-cache"?'),
        ("rekindle", "lint -o jsn", "'jsn' is not one of 'text', 'json'."),
    ],
)
def test_a_wrong_option_is_one_line_with_the_nearest_option(
    program: str, arguments: str, words: str
) -> None:
    with pytest.raises(click.ClickException) as caught:
        PROGRAMS[program].main(arguments.split(), prog_name=program, standalone_mode=False)
    error = caught.value
    if program == "rekindle" and isinstance(error, click.NoSuchOption):
        error = add_config_key(error)
    message = format_usage_message(error)
    assert words in message
    assert "\n" not in message


def test_the_line_is_all_that_the_program_prints() -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from argolocal.cli import main; sys.exit(main())",
        "logs",
        "--folow",
    ]

    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: --folow is not an option of")
    assert result.stderr.count("\n") == 1
