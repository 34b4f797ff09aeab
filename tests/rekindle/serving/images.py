"""A workload with a small network with BatchNorm over eight pixels. With tanh and softmax, the last
bits of a row's prediction depend on its position in the batch."""

from typing import Any

from pydantic import BaseModel, Field

from rekindle.gate import Metric
from rekindle.sections import Section
from rekindle.workload import DataConfig

Data = DataConfig
prepare = dataset = loss = None
metrics = (Metric("accuracy", lambda predictions, truths: 0.0),)
examples = None


class Model(Section):
    width: int = 5


class Instance(BaseModel):
    pixels: list[float] = Field(min_length=8, max_length=8)


def model(section: Model, facts: dict[str, Any]) -> Any:
    from torch import nn

    head = nn.Linear(13 * section.width, facts["classes"])
    return nn.Sequential(
        nn.Conv1d(1, 13, 4, padding=0), nn.BatchNorm1d(13), nn.Tanh(), nn.Flatten(), head
    )


def predict(model: Any, instances: list[Instance], facts: dict[str, Any]) -> list[Any]:
    import torch

    assert not model.training
    assert torch.is_inference_mode_enabled()
    if facts.get("forgetful"):
        return []
    probabilities = model(torch.tensor([[instance.pixels] for instance in instances])).softmax(1)
    return [dict(enumerate(row)) for row in probabilities.tolist()]
