"""A workload that evaluates the result of ddp.py: a linear layer that predicts four sines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from rekindle import DataConfig, Metric, Prepared, Section

FEATURES = 16


class Data(DataConfig):
    source: str = "simulate://0"


class Model(Section): ...


class Instance(BaseModel):
    inputs: list[float]


def error(predictions: Any, truths: Any) -> float:
    return float(np.abs(np.array(predictions) - np.array(truths)).mean())


metrics = (Metric("error", error, better="lower"),)


def prepare(data: Data, out: Path) -> Prepared:
    rows = np.random.default_rng(0).standard_normal((20, FEATURES)).tolist()
    (out / "test.json").write_text(json.dumps(rows))
    return Prepared(rows=len(rows))


def examples(path: Path) -> Iterator[tuple[dict[str, Any], float]]:
    for inputs in json.loads((path / "test.json").read_text()):
        yield {"inputs": inputs}, float(np.sin(inputs[0]))


def load(path: Path, facts: dict[str, Any]) -> Any:
    import torch

    model = torch.nn.Linear(FEATURES, 4)
    model.load_state_dict(torch.load(path))
    return model


def predict(model: Any, instances: list[Instance], facts: dict[str, Any]) -> list[float]:
    import torch

    with torch.no_grad():
        return model(torch.tensor([instance.inputs for instance in instances]))[:, 0].tolist()
