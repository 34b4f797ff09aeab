"""Presets of presets.yaml by name: spot nodes, GPU sharing, spreading, gang scheduling."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import did_you_mean


@cache
def read_presets() -> dict[str, dict[str, Any]]:
    """Return the content of presets.yaml: the sections `pods`, `gang` and `refused`, each a mapping
    from names to entries."""
    return yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())


def find_preset(name: str, setting: str, available: Mapping[str, Any]) -> Any:
    """Return the preset called `name`; `setting` is the config key that selected it, for errors.

    Raises ValueError with a suggestion if the preset does not exist.
    """
    if name not in available:
        reason = read_presets()["refused"].get(name)
        if reason:
            raise ValueError(f"{setting} is {name}: {reason}")
        hint = did_you_mean(name, set(available)) or f" Available: {', '.join(available)}."
        raise ValueError(f'{setting} is "{name}": this preset does not exist.{hint}')
    return available[name]


def merge_mappings(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings: later values override earlier ones, nested mappings are merged, lists are
    concatenated."""
    result: dict[str, Any] = {}

    for layer in layers:
        for key, value in layer.items():
            earlier_value = result.get(key)
            if isinstance(earlier_value, list) and isinstance(value, list):
                value = earlier_value + [item for item in value if item not in earlier_value]

            result[key] = (
                earlier_value | value
                if isinstance(earlier_value, dict) and isinstance(value, dict)
                else value
            )

    return result
