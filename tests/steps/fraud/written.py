"""A dataset directory as plain arrays, read without the product's own reader."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steps.fraud.data.shards import ARRAYS


class Written:
    """The facts and, by name, every shard's array."""

    def __init__(self, path: Path) -> None:
        self.facts: dict[str, Any] = json.loads((path / "dataset.json").read_text())
        numbers = range(len(self.facts["shards"]))
        self.parts = {name: [np.load(path / "shards" / f"{name}-{n:05d}.npy") for n in numbers] for name in ARRAYS}

    def __len__(self) -> int:
        return self.facts["rows"]

    def column(self, name: str) -> NDArray[Any]:
        return np.concatenate(self.parts[name])
