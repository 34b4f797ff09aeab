"""Reads what a command line names: a config, or manifests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def config_of(file: Path | None, sets: tuple[str, ...]) -> Any:
    """The config in a file with its overrides, and the origin of each value."""
    from rekindle.config import load_config

    if file is None:
        raise click.UsageError("give a config file, such as configs/demo.yaml.")
    return load_config(file, sets)


def manifest_of(
    config: Path | None,
    sets: tuple[str, ...],
    manifest: Path | None,
    on_valid_config: Callable[[Any], None] = lambda config: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The manifest, and the other objects in its file or folder: templates it refers to, ConfigMaps, Secrets.

    It is read from a file, or rendered from a config; `on_valid_config` gets the config before it is rendered.
    """
    if manifest and (config or sets):
        raise click.UsageError("give a config or --manifest FILE, not both (--set changes a config, -p a manifest).")
    if manifest:
        from argolocal.manifest.read import read_files

        return read_files(manifest)
    loaded = config_of(config, sets)
    on_valid_config(loaded.config)
    from rekindle.render import render_manifest

    return render_manifest(loaded.config), []


def check_source(config: Any) -> None:
    """Raises ConfigError if the data is a path that this machine, or its pods, do not have."""
    config.data.check_source()
