"""What answers requests: a released model behind one function, the same for a server, `verify` and a notebook.

    predictor = open_predictor(release)                 # a folder with the files of a release
    request = predictor.Request.model_validate(predictor.example())
    [predictions] = predictor.predict([request])

A prediction does not depend on what it is computed together with, bit for bit: the kernels of a model differ with the
shape of its input, so it always gets as many instances at a time, the last ones doubled where there are fewer.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, create_model

from rekindle.errors import DataError, RekindleError
from rekindle.serving.release import EXAMPLE, model_card
from rekindle.workload import Predictor, dataset_facts, load

T = TypeVar("T")


def open_predictor(release: Path) -> Predictor:
    """The workload's own predictor, or one made of its `model`, `Instance` and `predict`. Raises DataError."""
    card = model_card(release)
    own = getattr(load(card["workload"]), "predictor", None)
    return own(release) if own else InstancePredictor(release, card)


def in_batches(function: Callable[[list[T]], Sequence[Any]], items: Sequence[T], size: int) -> list[Any]:
    """`function` of all items, exactly `size` at a time. Raises RekindleError unless it gives a result for each.

    With 1 no item can matter to another. With 32, or a multiple, torch's vector loops have no tail, which would be
    computed otherwise (seen with tanh and sigmoid); other sizes are for models whose bits were looked at.
    """
    results: list[Any] = []
    for start in range(0, len(items), size):
        batch = list(items[start : start + size])
        batch_results = function(batch + [batch[-1]] * (size - len(batch)))
        if len(batch_results) != size:
            raise RekindleError(
                f"{len(batch_results)} predictions came for {size} instances: `predict` must give one for each."
            )
        results += batch_results[: len(batch)]
    return results


def split(results: list[T], sizes: Sequence[int]) -> list[list[T]]:
    """Consecutive parts of `results` of these sizes."""
    remaining = iter(results)
    return [[next(remaining) for _ in range(size)] for size in sizes]


class InstancePredictor:
    """The workload's `predict` over the released weights, `batch_size` instances at a time (1 where it names none)."""

    def __init__(self, release: Path, card: dict[str, Any]) -> None:
        self.workload: Any = load(card["workload"])
        self.size: int = getattr(self.workload, "batch_size", 1)
        instances: Any = list[self.workload.Instance]
        self.Request = create_model("Request", instances=(instances, Field(min_length=1)))
        self.facts = dataset_facts(release)
        try:
            self._example: dict[str, Any] = json.loads((release / EXAMPLE).read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{release} is not a whole release ({error!r}). Release the model again.") from error
        self.model = open_model(self.workload, release, card, self.facts)

    def example(self) -> dict[str, Any]:
        """A request with one of the rows that the model was judged on."""
        return self._example

    def predict(self, requests: Sequence[Any]) -> list[list[Any]]:
        """The predictions of each request."""
        import torch

        instances = [instance for request in requests for instance in request.instances]
        with torch.inference_mode():
            predictions = in_batches(self._predict, instances, self.size)
        return split(predictions, [len(request.instances) for request in requests])

    def _predict(self, instances: list[Any]) -> list[Any]:
        return self.workload.predict(self.model, instances, self.facts)


def open_model(workload: Any, folder: Path, card: dict[str, Any], facts: dict[str, Any]) -> Any:
    """The trained model in `folder`, in eval mode. Raises DataError if its files do not fit the workload."""
    from pydantic import ValidationError
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        model = workload.model(workload.Model.model_validate(card["model"]), facts)
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, KeyError, RuntimeError, SafetensorError, ValidationError) as error:
        raise DataError(
            f"{folder} holds no model of {card['workload']} ({type(error).__name__}: {error}): "
            "was the workload changed since the training?"
        ) from error
    return model.eval()
