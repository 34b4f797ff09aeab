"""Output that several commands share: errors as JSON, the result of checks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from rekindle.cli import standard_streams
from rekindle.errors import RekindleError


@contextmanager
def errors_as_json(output: str) -> Iterator[None]:
    """With `-o json`, an error before the run starts is printed as an object as well."""
    try:
        yield
    except RekindleError as error:
        if output == "json":
            click.echo(json.dumps({"workflow": None, "phase": "Failed", "message": str(error)}))
        raise


@contextmanager
def run_output(output: str) -> Iterator[None]:
    """`errors_as_json` for a command that runs something: a failing stdout does not stop the run."""
    if output == "text":
        standard_streams.ignore_stdout_errors()
    with errors_as_json(output):
        yield


def print_checks(checks: list[Any], output: str) -> int:
    """Print the results of checks; return exit code 1 if a required one failed."""
    from dataclasses import asdict

    plain = json.dumps([asdict(check) for check in checks], indent=2)
    click.echo(plain if output == "json" else "\n".join(map(str, checks)))
    return 0 if all(check.ok or not check.required for check in checks) else 1
