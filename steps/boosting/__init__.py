"""Example workload: classifies digits with the network of steps/digits.py or with boosted stumps.

    rekindle run configs/trees.yaml

steps/boosting/boost.py trains the stumps in several processes.
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from rekindle import Fitted
from steps import digits
from steps.digits import Data, Instance, dataset, examples, loss, metrics, predict, prepare

if TYPE_CHECKING:
    import torch

__all__ = [
    "Data",
    "Instance",
    "Model",
    "dataset",
    "examples",
    "families",
    "loss",
    "metrics",
    "predict",
    "prepare",
]


class Model(digits.Model):
    rounds: int = Field(60, ge=1, description="number of stumps per digit")


def stumps(section: Model, facts: dict[str, Any]) -> "torch.nn.Module":
    import torch

    class Stumps(torch.nn.Module):
        """One stump per round and digit. A stump has a pixel, a threshold, one score for values up
        to the threshold, and one for larger values."""

        def __init__(self) -> None:
            super().__init__()
            for name in ("pixel", "threshold", "below", "above"):
                self.register_buffer(name, torch.zeros(section.rounds, 10, dtype=torch.float32))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            tensors = dict(self.named_buffers())
            # pixel values that the stumps compare, shape [B, rounds, 10]
            values = images.flatten(1)[:, tensors["pixel"].long()]
            return torch.where(
                values <= tensors["threshold"], tensors["below"], tensors["above"]
            ).sum(1)

    return Stumps()


def fit_stumps(model: Any, samples: Any) -> None:
    import torch

    from steps.boosting.boost import Peers, boost

    images, labels = samples.batch(torch.arange(len(samples)))
    arrays = boost(images, labels, len(model.pixel), Peers(0, 1, []))
    model.load_state_dict({name: torch.from_numpy(values) for name, values in arrays.items()})


families = {"stumps": Fitted(stumps, fit_stumps), "network": digits.model}
