"""A workload that predicts a number: y = slope * x, judged by its error."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from rekindle import DataConfig, Example, Metric, Prepared, Section


class Data(DataConfig): ...


class Model(Section): ...


class Instance(BaseModel):
    x: float


def rmse(predictions: Any, truths: Any) -> float:
    return float(np.sqrt(np.mean(np.square(predictions - truths))))


metrics = (Metric("rmse", rmse, better="lower"),)


def prepare(data: Data, out: Path) -> Prepared:
    (out / "test.json").write_text(json.dumps([[float(x), 2.0 * x] for x in range(20)]))
    return Prepared(rows=20)


def dataset(path: Path, split: str) -> Any:
    raise NotImplementedError


def model(section: Model, facts: dict[str, Any]) -> Any:
    import torch

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Any) -> Any:
            return x * self.slope

    return Line()


def loss(model: Any, batch: tuple[Any, ...]) -> Any:
    raise NotImplementedError


def examples(path: Path) -> Iterator[Example]:
    for x, y in json.loads((path / "test.json").read_text()):
        yield Example({"x": x}, y, baseline=20.0)


def predict(model: Any, instances: list[Instance], facts: dict[str, Any]) -> list[float]:
    import torch

    return model(torch.tensor([instance.x for instance in instances])).tolist()
