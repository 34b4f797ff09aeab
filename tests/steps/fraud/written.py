"""Read a dataset directory as plain arrays, without the reader under test."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.workload import Prepared, prepare, read_dataset_facts
from steps import fraud
from steps.fraud.data.shards import ARRAYS
from steps.fraud.fraud_config import Data


def write(data: Data, path: Path) -> Prepared:
    """Write a dataset directory as the step does."""
    return prepare(fraud, data, path)[0]


class Written:
    """The facts and the arrays of all shards, by name."""

    def __init__(self, path: Path) -> None:
        self.facts: dict[str, Any] = read_dataset_facts(path)
        numbers = range(len(self.facts["shards"]))
        self.parts = {
            name: [np.load(path / "shards" / f"{name}-{n:05d}.npy") for n in numbers]
            for name in ARRAYS
        }

    def __len__(self) -> int:
        return self.facts["rows"]

    def column(self, name: str) -> NDArray[Any]:
        return np.concatenate(self.parts[name])
