"""A workload whose predictions depend on the other instances of the batch, or on chance, if the
data says so."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rekindle import DataConfig, Metric, Prepared, Section


class Data(DataConfig): ...


class Model(Section): ...


class Instance(BaseModel):
    x: float


metrics = (
    Metric(
        "error", lambda predictions, truths: float(abs(predictions - truths).mean()), better="lower"
    ),
)
dataset = loss = None


def prepare(data: Data, out: Path) -> Prepared:
    (out / "test.json").write_text(json.dumps([0.1 * x for x in range(40)]))
    return Prepared(rows=40, facts={"fault": data.source.removeprefix("fault://")})


def model(section: Model, facts: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 3))


def examples(path: Path) -> Iterator[tuple[dict[str, Any], list[float]]]:
    for x in json.loads((path / "test.json").read_text()):
        yield {"x": x}, [x, x, x]


def predict(model: Any, instances: list[Instance], facts: dict[str, Any]) -> list[Any]:
    import torch

    model.train(facts["fault"] == "train mode")
    outputs = model(torch.tensor([[instance.x] for instance in instances]))
    return (outputs - outputs.mean(0) if facts["fault"] == "neighbours" else outputs).tolist()
