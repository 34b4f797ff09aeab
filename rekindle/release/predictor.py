"""What answers requests: a released model behind one function, the same for a server, `verify` and a notebook.

    predictor = open_predictor(release)                 # a folder with the files of a release
    request = predictor.Request.model_validate(predictor.example())
    [predictions] = predictor.predict([request])

A prediction does not depend on what it is computed together with, bit for bit. A network's kernels do: they differ with
the shape of their input, even with a row's place in it (a linear layer of three outputs, a sigmoid). So `predict` of a
workload gets one instance at a time; a workload that knows its network can do better with a predictor of its own.
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
    """The workload's own predictor, or one made of its `model`, `Instance` and `predict`. Raises DataError."""
    description = model_description(release)
    own = getattr(load(description["workload"]), "predictor", None)
    return own(release) if own else InstancePredictor(release, description)


class InstancePredictor:
    """The workload's `predict` over the released weights, one instance at a time."""

    def __init__(self, release: Path, description: dict[str, Any]) -> None:
        self.workload: Any = load(description["workload"])
        instances: Any = list[self.workload.Instance]
        self.Request = create_model("Request", instances=(instances, Field(min_length=1)))
        self.release, self.facts = release, dataset_facts(release)
        self.model = open_model(self.workload, release, description, self.facts)

    def example(self) -> dict[str, Any]:
        """A request with one of the rows that the model was judged on. Raises DataError if the release has none."""
        try:
            return json.loads((self.release / EXAMPLE).read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{self.release} is not a whole release ({error}). Release the model again.") from error

    def predict(self, requests: Sequence[Any]) -> list[list[Any]]:
        """The predictions of each request. Raises CodeError if `predict` gives none or several for an instance."""
        return [predict(self.workload, self.model, request.instances, self.facts) for request in requests]


def predict(workload: Any, model: Any, instances: Sequence[Any], facts: dict[str, Any]) -> list[Any]:
    """The workload's `predict`, one instance at a time. Raises CodeError unless each has one prediction."""
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
                raise CodeError(f"{len(result)} predictions came for 1 instance: `predict` must give one for each.")
            predictions += result
    return predictions


def open_model(workload: Any, folder: Path, description: dict[str, Any], facts: dict[str, Any]) -> Any:
    """The trained model in `folder`, in eval mode. Raises DataError if its files do not fit the workload."""
    from pydantic import ValidationError
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        model = workload.model(workload.Model.model_validate(description["model"]), facts)
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, KeyError, RuntimeError, SafetensorError, ValidationError) as error:
        raise DataError(
            f"{folder} holds no model of {description['workload']} ({' '.join(str(error).split())}): "
            "was the workload changed since the training?"
        ) from error
    return model.eval()
