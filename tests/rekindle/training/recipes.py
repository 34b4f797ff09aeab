"""The toy workload with its own optimizer, schedule and validation measures."""

from typing import Any

from tests.rekindle.training import toy
from tests.rekindle.training.toy import (
    Data,
    dataset,
    examples,
    loss,
    metrics,
    model,
    predictor,
    prepare,
    splits,
)

__all__ = [
    "Data",
    "dataset",
    "examples",
    "loss",
    "metrics",
    "model",
    "predictor",
    "prepare",
    "splits",
]


class Model(toy.Model):
    optimizer: str = "SGD"


def optimizer(model: Any, train: Any, section: Model) -> Any:
    import torch

    if section.optimizer == "SGD":
        return torch.optim.SGD(
            model.parameters(), lr=train.learning_rate, momentum=0.9, dampening=0.3
        )
    return getattr(torch.optim, section.optimizer)(model.parameters(), lr=train.learning_rate)


def schedule(step: int, total: int) -> float:
    return 1 / (1 + step)


def measures(model: Any, batch: tuple[Any, ...]) -> dict[str, Any]:
    rows, targets = batch
    return {"error": (model(rows) * model.scale - targets).abs().mean()}
