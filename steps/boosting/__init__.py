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


def stumps(model_section: Model, dataset_facts: dict[str, Any]) -> "torch.nn.Module":
    import torch

    class Stumps(torch.nn.Module):
        """One stump per round and digit. A stump has a pixel, a threshold, one score for pixel
        values up to the threshold, and one score for larger values."""

        def __init__(self) -> None:
            super().__init__()
            for buffer_name in ("pixel", "threshold", "below", "above"):
                self.register_buffer(
                    buffer_name, torch.zeros(model_section.rounds, 10, dtype=torch.float32)
                )

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            buffers = dict(self.named_buffers())
            # pixel values that the stumps compare, shape [B, rounds, 10]
            pixel_values = images.flatten(1)[:, buffers["pixel"].long()]
            return torch.where(
                pixel_values <= buffers["threshold"], buffers["below"], buffers["above"]
            ).sum(1)

    return Stumps()


def fit_stumps(stumps_model: Any, samples: Any) -> None:
    import torch

    from steps.boosting.boost import Peers, boost

    images, labels = samples.batch(torch.arange(len(samples)))
    stump_arrays = boost(images, labels, len(stumps_model.pixel), Peers(0, 1, []))
    stumps_model.load_state_dict(
        {
            array_name: torch.from_numpy(array_values)
            for array_name, array_values in stump_arrays.items()
        }
    )


families = {"stumps": Fitted(stumps, fit_stumps), "network": digits.model}
