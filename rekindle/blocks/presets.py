"""The presets of presets.yaml: spot nodes, GPU sharing, spreading, gang scheduling; plain data by name.

merged(find("gke-spot", "cluster.pods.train.preset", presets()["pods"]), {"cpu": "4"})
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import did_you_mean


@cache
def presets() -> dict[str, dict[str, Any]]:
    """The file: `pods`, `gang` and what is `refused`, each a mapping by name."""
    return yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())


def find(name: str, where: str, known: Mapping[str, Any]) -> Any:
    """The preset called `name`. Raises ValueError that says what is known."""
    if name not in known:
        if why := presets()["refused"].get(name):
            raise ValueError(f"{where} is {name}: {why}")
        hint = did_you_mean(name, set(known)) or f" Known: {', '.join(known)}."
        raise ValueError(f'{where} is "{name}": there is no such preset.{hint}')
    return known[name]


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping out of several: later values win, mappings are merged, lists add up."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            now = result.get(key)
            if isinstance(now, list) and isinstance(value, list):
                value = now + [item for item in value if item not in now]
            result[key] = now | value if isinstance(now, dict) and isinstance(value, dict) else value
    return result
