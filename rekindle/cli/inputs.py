"""Reads what a command line names: a config, manifests, NAME=VALUE pairs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rekindle.errors import ConfigError


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
        return _read(manifest)
    loaded = config_of(config, sets)
    on_valid_config(loaded.config)
    from rekindle.render import render_manifest

    return render_manifest(loaded.config), []


def check_source(config: Any) -> None:
    """Raises ConfigError if the data is a path that this machine, or its pods, do not have."""
    config.data.check_source()


def files_of(path: Path) -> list[Path]:
    """The file itself, or the manifests in a folder (at least one). Raises ConfigError."""
    if not path.is_dir():
        return [path]
    if files := sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml", ".json")):
        return files
    raise ConfigError(f"{path} has no file that ends with .yaml, .yml or .json: give a folder of manifests.")


def objects_of(file: Path) -> list[dict[str, Any]]:
    """The objects in a YAML or JSON file (at least one). Raises ConfigError."""
    from argolocal.language.yaml_text import read_text
    from argolocal.manifest.read import documents

    try:
        if objects := documents(read_text(file)):
            return objects
        raise ConfigError("it contains no object: give a YAML or JSON manifest.")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): give a YAML or JSON manifest.") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from argolocal.manifest.read import split

    objects = [manifest for file in files_of(path) for manifest in objects_of(file)]
    try:
        return split(objects)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def pairs_of(items: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise click.UsageError(f"-p {item}: it must be NAME=VALUE.")
        pairs[name] = value
    return pairs
