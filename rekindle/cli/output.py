"""Output that several commands share: results as text or JSON, errors as JSON, the result of checks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from rekindle.cli import standard_streams
from rekindle.errors import Check, RekindleError


def print_result(as_json: bool, result: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(result) if as_json else text)


def print_manifest(manifest: dict[str, Any], as_json: bool) -> None:
    from rekindle.render import to_yaml

    click.echo(json.dumps(manifest, indent=2) if as_json else to_yaml(manifest), nl=as_json)


@contextmanager
def errors_as_json(as_json: bool) -> Iterator[None]:
    """With `-o json`, an error before the run starts is printed as an object as well."""
    try:
        yield
    except RekindleError as error:
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


def print_checks(checks: list[Check], as_json: bool) -> int:
    """Print the results of checks; return exit code 1 if a required one failed."""
    plain = json.dumps([asdict(check) for check in checks], indent=2)
    click.echo(plain if as_json else "\n".join(map(str, checks)))
    return 0 if all(check.ok or not check.required for check in checks) else 1
