"""The workload steps/digits.py with a fault in its predictions.

Possible faults are `errors` (1 % of the requests fail), `slow` (a delay of SLOW_SECONDS) and
`unsteady` (random probabilities).
"""

import os
import random
import time
from typing import Any, Literal
from zlib import crc32

from steps import digits
from steps.digits import Data, Instance, dataset, examples, loss, metrics, prepare

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
    fault: Literal["", "errors", "slow", "unsteady"] = ""


def model(section: Model, facts: dict[str, Any]) -> Any:
    network: Any = digits.model(section, facts)
    network.fault = section.fault
    return network


def predict(model: Any, instances: list[Instance], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Predict like steps.digits, but with the fault that the model's config selects.

    Images of the test split never cause errors, because their first pixel is 0.
    """
    predictions = digits.predict(model, instances, facts)
    if model.fault == "slow":
        time.sleep(float(os.environ["SLOW_SECONDS"]))

    corner_pixels = (instance.pixels[0][0] for instance in instances)
    if model.fault == "errors" and any(
        corner_pixel > 0 and crc32(repr(corner_pixel).encode()) % 100 == 0
        for corner_pixel in corner_pixels
    ):
        raise ValueError("an unexpected rare case")

    if model.fault == "unsteady":
        for prediction in predictions:
            prediction["probabilities"][0] += random.random()

    return predictions
