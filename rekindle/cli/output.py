"""Output that several commands share: manifests, and the result of checks."""

from dataclasses import asdict
from typing import Any

import click

from argolocal.common.json_text import to_json
from rekindle.errors import Check


def print_manifest(manifest: dict[str, Any], as_json: bool) -> None:
    from rekindle.blocks.manifest.render import to_yaml

    click.echo(to_json(manifest, indent=2) if as_json else to_yaml(manifest), nl=as_json)


def print_checks(check_results: list[Check], as_json: bool) -> int:
    """Print the results of checks, and return exit code 1 if a required check failed, else 0."""
    json_text = to_json([asdict(check_result) for check_result in check_results], indent=2)
    click.echo(json_text if as_json else "\n".join(map(str, check_results)))
    if all(check_result.ok or not check_result.required for check_result in check_results):
        return 0
    return 1
