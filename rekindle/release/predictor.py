"""Predicts with a released model. Servers, `verify` and notebooks predict with the code of this
module.

    predictor = open_predictor(release)                 # a folder with the files of a release
    request = predictor.Request.model_validate(predictor.example())
    [predictions] = predictor.predict([request])

The workload's `predict` gets up to `max_batch` instances at once, of one or several requests. The
last bits of a prediction can depend on its batch, since the kernels of a network depend on the
shape of their input and on the position of a row. With `max_batch` 1, `predict` gets single
instances, so servers, `verify` and notebooks compute the same bits.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model

from argolocal.common.json_text import describe_non_finite, to_json
from rekindle import families
from rekindle.content.result_files import find_result_path
from rekindle.content.weights import WEIGHTS_FILE, read_description
from rekindle.documents import InvalidDocument, ModelFile, read_json_file
from rekindle.errors import CodeError, DataError
from rekindle.release import device
from rekindle.release.release_files import EXAMPLE_FILE, read_serving_code, read_verdict
from rekindle.workload import Predictor, load, read_dataset_facts

T = TypeVar("T")


def open_predictor(release_folder: Path, max_batch: int = 0) -> Predictor:
    """Return the predictor that the workload defines or, by default, an InstancePredictor, which
    calls the workload's `predict`. Raises DataError.

    `max_batch`: maximum number of instances per call of `predict` (0: as in the evaluation of the
    release).
    """
    model_description = read_description(release_folder)
    predictor = getattr(load(model_description.workload), "predictor", None)
    if predictor:
        return predictor(release_folder)
    return InstancePredictor(
        release_folder, model_description, max_batch or read_evaluated_batch_size(release_folder)
    )


def find_warning(predictor: Predictor, request: object) -> str:
    """Return the warning of the predictor's optional `warn(request)`, or ""."""
    warn_function = getattr(predictor, "warn", None)
    if warn_function:
        return warn_function(request)
    return ""


class InstancePredictor:
    """Calls the workload's `predict` with the released model and up to `max_batch` instances at a
    time."""

    def __init__(self, release_folder: Path, model_description: ModelFile, max_batch: int) -> None:
        self.workload: Any = load(model_description.workload)
        self.Request = make_request_model(self.workload)
        self.release = release_folder
        self.facts = read_dataset_facts(release_folder)
        self.max_batch = max_batch
        self.model = open_model(self.workload, release_folder, model_description, self.facts)
        self.device = place_model(self.model)

    @property
    def numerics(self) -> str:
        """The result of device.describe_numerics; "" for a model that is not a torch.nn.Module."""
        if self.device is None:
            return ""
        return device.describe_numerics(self.device)

    def example(self) -> dict[str, Any]:
        """Return the example request of the release, with one test row. Raises DataError if the
        example request is missing."""
        try:
            return read_json_file(self.release / EXAMPLE_FILE)
        except InvalidDocument as error:
            raise DataError(
                f"{self.release} is not a complete release ({error}). Release the model again."
            ) from error

    def predict(self, requests: Sequence[Any]) -> list[list[Any]]:
        """Return a list of predictions per request. Raises CodeError unless `predict` returns one
        prediction per instance."""
        instances = [instance for request in requests for instance in request.instances]
        prediction_iterator = iter(
            predict(self.workload, self.model, instances, self.facts, self.max_batch)
        )
        return [[next(prediction_iterator) for _ in request.instances] for request in requests]


def make_request_model(workload: Any) -> type[BaseModel]:
    """Return the pydantic model of a request: a list `instances` of the workload's
    Instance."""
    instances_type: Any = list[workload.Instance]
    return create_model("Request", instances=(instances_type, Field(min_length=1)))


def predict(
    workload: Any,
    model: Any,
    instances: Sequence[Any],
    dataset_facts: dict[str, Any],
    max_batch: int = 1,
) -> list[Any]:
    """Call the workload's `predict` with up to `max_batch` instances at a time. Raises CodeError
    unless `predict` returns a list with one prediction per instance."""
    torch_module = device.find_torch()
    predictions = []

    with torch_module.inference_mode() if torch_module else nullcontext():
        for start_index in range(0, len(instances), max_batch):
            instance_batch = list(instances[start_index : start_index + max_batch])
            batch_predictions = workload.predict(model, instance_batch, dataset_facts)
            if not isinstance(batch_predictions, (list, tuple)):
                raise CodeError(
                    f"`predict` returned {type(batch_predictions).__name__}: it must return a list"
                    " with a JSON value for each instance, such as tensor.tolist()."
                )

            if len(batch_predictions) != len(instance_batch):
                raise CodeError(
                    f"`predict` returned {len(batch_predictions)}"
                    f" prediction{'s' * (len(batch_predictions) != 1)} for {len(instance_batch)}"
                    f" instance{'s' * (len(instance_batch) != 1)}: it must return one for each."
                    " With serve.max_batch: 1 it gets one instance at a time."
                )

            predictions += batch_predictions

    return predictions


def check_json_serializable(prediction: T, row_description: str) -> T:
    """Return `prediction` if it can be converted to JSON. `row_description`: description of the
    predicted row for error messages.

    Raises CodeError if the prediction is not JSON, and DataError if it has a number that is NaN or
    infinite.
    """
    try:
        to_json(prediction)
    except (TypeError, ValueError) as error:
        problem_text = describe_non_finite({"prediction": prediction})
        if problem_text:
            raise DataError(
                f"`predict` returned NaN or infinity for {row_description}: {problem_text}."
                " Correct `predict` or the row; if the training diverged, lower"
                " train.learning_rate."
            ) from error

        raise CodeError(
            f"`predict` returned a prediction that is not JSON ({error}): it must return numbers,"
            " text, lists or objects; `.tolist()` and `.item()` convert tensors."
        ) from error

    return prediction


def read_evaluated_batch_size(release_folder: Path) -> int:
    """Return the `max_batch` with which a release was evaluated; 1 if no `max_batch` is recorded.

    Earlier versions of Rekindle recorded `max_batch` only in verdict.json.
    """
    return (
        read_serving_code(release_folder).max_batch or read_verdict(release_folder).max_batch or 1
    )


def open_model(
    workload: Any, model_folder: Path, model_description: ModelFile, dataset_facts: dict[str, Any]
) -> Any:
    """Load the trained model in `model_folder`. Raises DataError if its files do not match the
    workload."""
    if model_description.files:
        return load_program_model(workload, model_folder, model_description, dataset_facts)

    from pydantic import ValidationError
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        model_section = workload.Model.model_validate(model_description.model)
        weights = load_file(model_folder / WEIGHTS_FILE)
    except (OSError, KeyError, SafetensorError, ValidationError) as error:
        raise _make_mismatch_error(model_folder, model_description, error) from error

    # build the model outside of the `try` above, so that exceptions of the workload's code keep
    # their type and line
    model = families.build(workload, model_description.family, model_section, dataset_facts)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise _make_mismatch_error(model_folder, model_description, error) from error

    return model


def load_program_model(
    workload: Any, model_folder: Path, model_description: ModelFile, dataset_facts: dict[str, Any]
) -> Any:
    """Load the result of a training program with the workload's `load`. Raises DataError if the
    workload does not define `load`."""
    load_model = getattr(workload, "load", None)
    if load_model is None:
        raise DataError(
            f"{model_folder} is the result of a program, but {model_description.workload} does not"
            " define load(path, facts): define it, or train again."
        )
    return load_model(find_result_path(model_folder, model_description), dataset_facts)


def place_model(model: Any) -> Any:
    """Set a torch.nn.Module to eval mode, move it to the GPU if the process has one, and return its
    device. Leave any other model unchanged, and return None."""
    torch_module = device.find_torch()
    if torch_module is None or not isinstance(model, torch_module.nn.Module):
        return None

    model.eval()
    target_device = device.pick_device()
    # if the model is not on the CPU, `load` has chosen its devices, for example several GPUs
    if all(model_parameter.device.type == "cpu" for model_parameter in model.parameters()):
        device.move_model(model, target_device)
    return target_device


def _make_mismatch_error(
    model_folder: Path, model_description: ModelFile, error: Exception
) -> DataError:
    return DataError(
        f"{model_folder} does not contain a model of {model_description.workload}"
        f" ({' '.join(str(error).split())}). If the workload changed since the training, train"
        " again."
    )
