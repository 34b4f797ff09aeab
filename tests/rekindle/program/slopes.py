"""A workload without torch, whose model a program trains: y = slope * x. The result of the program
is a JSON file, or a folder with two files."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from rekindle import DataConfig, Metric, Prepared, Section


class Data(DataConfig): ...


class Model(Section):
    degree: int = 1
    rate: float = Field(0.1, gt=0, description="rate of gradient descent")


class Instance(BaseModel):
    x: float
    # True: the prediction is whether torch was imported
    about: bool = False


def mean_error(predictions: Any, truths: Any) -> float:
    return float(np.mean(np.abs(predictions - truths)))


metrics = (Metric("error", mean_error, better="lower"),)


def prepare(data: Data, out: Path) -> Prepared:
    (out / "test.json").write_text(json.dumps([[float(x), 2.0 * x] for x in range(20)]))
    return Prepared(rows=20, facts={"unit": "m"})


def load(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    if path.is_dir():
        slope = json.loads((path / "deep/weights.json").read_text())["slope"]
        return json.loads((path / "config.json").read_text()) | {"slope": slope}
    return json.loads(path.read_text()) | facts


def examples(path: Path) -> Iterator[tuple[dict[str, Any], float]]:
    for x, y in json.loads((path / "test.json").read_text()):
        yield {"x": x}, y


def predict(model: dict[str, Any], instances: list[Instance], facts: dict[str, Any]) -> list[Any]:
    assert model["unit"] == facts["unit"]
    return [
        "torch" in sys.modules if instance.about else model["slope"] * instance.x
        for instance in instances
    ]
