"""Output that several commands share: results as text or JSON, errors as JSON."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from argolocal.cli import standard_streams
from argolocal.errors import ArgolocalError


def print_result(as_json: bool, result: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(result) if as_json else text)


@contextmanager
def errors_as_json(as_json: bool) -> Iterator[None]:
    """With `-o json`, an error before the run starts is printed as an object as well."""
    try:
        yield
    except ArgolocalError as error:
        if as_json:
            click.echo(json.dumps({"workflow": None, "phase": "Failed", "message": str(error)}))
        raise


@contextmanager
def run_output(as_json: bool) -> Iterator[None]:
    """`errors_as_json` for a command that runs something: a failing stdout does not stop the run."""
    if not as_json:
        standard_streams.ignore_stdout_errors()
    with errors_as_json(as_json):
        yield
