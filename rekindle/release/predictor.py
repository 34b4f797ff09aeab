"""Predictions of a released model, with the same code in servers, `verify` and notebooks.

    predictor = open_predictor(release)                 # a folder with the files of a release
    request = predictor.Request.model_validate(predictor.example())
    [predictions] = predictor.predict([request])

A prediction does not depend on its batch, bit for bit. The kernels of a network can depend on it: on the shape of their
input, or on the position of a row (a linear layer with three outputs, a sigmoid). So `predict` of a workload gets one
instance at a time; a workload can define a faster predictor for its network.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, create_model

from rekindle.errors import CodeError, DataError
from rekindle.release.files import EXAMPLE, model_description
from rekindle.workload import Predictor, dataset_facts, load


def open_predictor(release: Path) -> Predictor:
    """Return the workload's own predictor, or one based on `model`, `Instance` and `predict`. Raises DataError."""
    description = model_description(release)
    predictor = getattr(load(description["workload"]), "predictor", None)
    return predictor(release) if predictor else InstancePredictor(release, description)


class InstancePredictor:
    """Calls the workload's `predict` with the released weights, one instance at a time."""

    def __init__(self, release: Path, description: dict[str, Any]) -> None:
        self.workload: Any = load(description["workload"])
        instances: Any = list[self.workload.Instance]
        self.Request = create_model("Request", instances=(instances, Field(min_length=1)))
        self.release, self.facts = release, dataset_facts(release)
        self.model = open_model(self.workload, release, description, self.facts)

    def example(self) -> dict[str, Any]:
        """Return a request with one of the test rows. Raises DataError if the release does not contain it."""
        try:
            return json.loads((self.release / EXAMPLE).read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{self.release} is not a complete release ({error}). Release the model again.") from error

    def predict(self, requests: Sequence[Any]) -> list[list[Any]]:
        """Return the predictions of each request. Raises CodeError unless `predict` returns one per instance."""
        return [predict(self.workload, self.model, request.instances, self.facts) for request in requests]


def predict(workload: Any, model: Any, instances: Sequence[Any], facts: dict[str, Any]) -> list[Any]:
    """Call the workload's `predict`, one instance at a time. Raises CodeError unless it returns one prediction each."""
    import torch

    predictions = []
    with torch.inference_mode():
        for instance in instances:
            result = workload.predict(model, [instance], facts)
            if not isinstance(result, (list, tuple)):
                raise CodeError(
                    f"`predict` returned {type(result).__name__}: it must return a list with a JSON value for each "
                    "instance, such as tensor.tolist()."
                )
            if len(result) != 1:
                raise CodeError(f"`predict` returned {len(result)} predictions for 1 instance: it must return one.")
            predictions += result
    return predictions


def open_model(workload: Any, folder: Path, description: dict[str, Any], facts: dict[str, Any]) -> Any:
    """Load the trained model in `folder`, in eval mode. Raises DataError if its files do not fit the workload."""
    from pydantic import ValidationError
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        section = workload.Model.model_validate(description["model"])
        weights = load_file(folder / "model.safetensors")
    except (OSError, KeyError, SafetensorError, ValidationError) as error:
        raise _mismatch(folder, description, error) from error
    model = workload.model(section, facts)  # an exception of the workload's code keeps its type and line
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise _mismatch(folder, description, error) from error
    return model.eval()


def _mismatch(folder: Path, description: dict[str, Any], error: Exception) -> DataError:
    return DataError(
        f"{folder} does not contain a model of {description['workload']} ({' '.join(str(error).split())}). "
        "If the workload changed since the training, train again."
    )
