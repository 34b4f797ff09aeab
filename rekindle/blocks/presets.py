"""Presets of presets.yaml by name: spot nodes, GPU sharing, spreading, gang scheduling."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import suggest_similar


@cache
def read_presets() -> dict[str, dict[str, Any]]:
    """Return the content of presets.yaml: the sections `pods`, `gang` and `refused`, each a mapping
    from names to entries."""
    return yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())


def find_preset(preset_name: str, config_key: str, available_presets: Mapping[str, Any]) -> Any:
    """Return the preset called `preset_name`. Raises ValueError with a suggestion if the preset
    does not exist; the message names `config_key`, the config key that selects the preset."""
    if preset_name not in available_presets:
        refusal_reason = read_presets()["refused"].get(preset_name)
        if refusal_reason:
            raise ValueError(f"{config_key} is {preset_name}: {refusal_reason}")
        hint = (
            suggest_similar(preset_name, set(available_presets))
            or f" Available: {', '.join(available_presets)}."
        )
        raise ValueError(f'{config_key} is "{preset_name}": this preset does not exist.{hint}')
    return available_presets[preset_name]


def merge_mappings(*mapping_layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings: later values override earlier ones, nested mappings are merged, lists are
    concatenated."""
    merged_mapping: dict[str, Any] = {}

    for mapping_layer in mapping_layers:
        for key, value in mapping_layer.items():
            earlier_value = merged_mapping.get(key)
            if isinstance(earlier_value, list) and isinstance(value, list):
                value = earlier_value + [
                    list_item for list_item in value if list_item not in earlier_value
                ]

            merged_mapping[key] = (
                earlier_value | value
                if isinstance(earlier_value, dict) and isinstance(value, dict)
                else value
            )

    return merged_mapping
