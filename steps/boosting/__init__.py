"""Example workload: the network of steps/digits.py or boosted stumps classify digits; both have the same metrics.

    rekindle run configs/trees.yaml

`model.rounds: 0` selects the network. steps/boosting/boost.py trains the stumps.
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from steps import digits
from steps.digits import Data, Instance, dataset, examples, loss, metrics, predict, prepare

if TYPE_CHECKING:
    import torch

__all__ = ["Data", "Instance", "Model", "dataset", "examples", "loss", "metrics", "model", "predict", "prepare"]


class Model(digits.Model):
    rounds: int = Field(0, ge=0, description="number of boosted stumps per digit; 0: use the network instead of stumps")


def model(section: Model, facts: dict[str, Any]) -> "torch.nn.Module":
    import torch

    class Stumps(torch.nn.Module):
        """A stump per round and digit: a pixel, a threshold, and scores for values below and above it."""

        def __init__(self) -> None:
            super().__init__()
            for name in ("pixel", "threshold", "below", "above"):
                self.register_buffer(name, torch.zeros(section.rounds, 10, dtype=torch.float32))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            tensors = dict(self.named_buffers())
            values = images.flatten(1)[:, tensors["pixel"].long()]  # shape [B, rounds, 10]
            return torch.where(values <= tensors["threshold"], tensors["below"], tensors["above"]).sum(1)

    return Stumps() if section.rounds else digits.model(section, facts)
