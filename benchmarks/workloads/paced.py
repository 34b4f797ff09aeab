"""The workload steps/digits.py with micro-batches that take a fixed time.

`model.micro_batch_seconds` is the duration of a micro-batch, in which the process mostly sleeps.
Many workers can therefore train on a few cores, as fast as if each had its own cores. The duration
does not change the weights.
"""

import time
from typing import Any

from pydantic import Field

from steps import digits
from steps.digits import Data, Instance, dataset, examples, metrics, predict, prepare

__all__ = [
    "Data",
    "Instance",
    "Model",
    "dataset",
    "examples",
    "loss",
    "metrics",
    "model",
    "predict",
    "prepare",
]


class Model(digits.Model):
    channels: int = Field(4, ge=1, le=256, description="number of channels")
    micro_batch_seconds: float = Field(
        0.0, ge=0, description="shortest duration of a micro-batch of a training, in seconds"
    )


def model(section: Model, facts: dict[str, Any]) -> Any:
    network: Any = digits.model(section, facts)
    network.micro_batch_seconds = section.micro_batch_seconds
    return network


def loss(model: Any, batch: Any) -> Any:
    """Return the loss of steps.digits after the duration of a micro-batch."""
    time.sleep(model.micro_batch_seconds)
    return digits.loss(model, batch)
