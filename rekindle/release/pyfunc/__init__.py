"""A release as an MLflow model, for notebooks and `mlflow models serve`.

    # in the environment that `rekindle env` prints
    model = mlflow.pyfunc.load_model("models:/demo@champion")
    model.predict(frame, params={"history": history.to_json(orient="records")})

The data frame `frame` has a row for each instance, and a column for each field of the instances.
The other keys of a request are passed in `params`, as JSON texts. Requests are validated and
predicted by the same code as in a model server.
"""

import platform
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from argolocal.common.json_text import loads, to_json
from rekindle.content.hashes import file_sha256
from rekindle.content.verified_release import (
    INPUT_EXAMPLE,
    MLFLOW_FILES,
    MLMODEL,
    REMEDY,
    SERVING_EXAMPLE,
)
from rekindle.errors import DataError
from rekindle.release.predictor import find_warning, open_predictor
from rekindle.release.pyfunc.frames import INSTANCES_KEY, FrameConverter
from rekindle.release.release_files import verify_release
from rekindle.release.request_validation import parse_body
from rekindle.workload import Predictor

if TYPE_CHECKING:
    from pandas import DataFrame

PYTHON_TYPES = {int: "long", float: "double", str: "string", bool: "boolean"}


class PyfuncModel:
    """The Python model that MLflow's pyfunc calls."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.converter = FrameConverter(predictor.Request)

    def predict(self, frame: "DataFrame", params: dict[str, str] | None = None) -> list[Any]:
        """Return the predictions of all rows of a data frame. Raises DataError for an invalid
        request."""
        instances = self.converter.to_instances(frame)
        try:
            other_fields = {name: loads(text) for name, text in (params or {}).items() if text}
            request_body = to_json({INSTANCES_KEY: instances, **other_fields}).encode()
        except (TypeError, ValueError) as error:
            raise DataError(f"the request is not JSON: {error}.") from error
        parsed_request = parse_body(self.predictor.Request, request_body)
        warning_sentence = find_warning(self.predictor, parsed_request)
        if warning_sentence:
            warnings.warn(warning_sentence, stacklevel=2)
        return self.predictor.predict([parsed_request])[0]


def _load_pyfunc(release: str) -> PyfuncModel:
    """Load a release from its folder. MLflow calls this function with only the folder, so the key
    prefix of the release is unknown. Raises DataError if a file differs from release.json."""
    release_folder = Path(release)
    release_record = verify_release(release_folder, "", release)
    if MLMODEL not in release_record.files:
        raise DataError(
            f"{release} was released by an earlier version of Rekindle, whose hash does not cover"
            f" the file {MLMODEL} that MLflow executes. {REMEDY}"
        )
    return PyfuncModel(open_predictor(release_folder))


def write_mlmodel(release_folder: Path) -> dict[str, str]:
    """Write the MLmodel file of a release, with its signature, and the input examples; return
    {file: sha256}.

    MLmodel does not contain the `run_id`, so that equal releases have equal hashes; the model
    version in MLflow records it. Raises DataError if the release cannot predict.
    """
    predictor = open_predictor(release_folder)
    example_request = predictor.example()
    [predictions] = predictor.predict(
        [parse_body(predictor.Request, to_json(example_request).encode())]
    )
    instances = example_request[INSTANCES_KEY]
    column_names = list(dict.fromkeys(key for instance in instances for key in instance))
    example_table = {
        "columns": column_names,
        "data": [[instance.get(key) for key in column_names] for instance in instances],
    }
    input_columns, signature_params = make_signature(predictor.Request)

    mlmodel_fields = {
        "flavors": {
            "python_function": {
                "loader_module": __name__,
                "python_version": platform.python_version(),
            }
        },
        "signature": {
            "inputs": to_json(input_columns),
            "outputs": to_json([{**describe_type(predictions[0]), "required": True}]),
            "params": to_json(signature_params) if signature_params else None,
        },
        "saved_input_example_info": {
            "artifact_path": INPUT_EXAMPLE,
            "serving_input_path": SERVING_EXAMPLE,
            "type": "dataframe",
            "pandas_orient": "split",
        },
    }

    (release_folder / MLMODEL).write_text(yaml.safe_dump(mlmodel_fields, sort_keys=False))
    (release_folder / INPUT_EXAMPLE).write_text(to_json(example_table))
    (release_folder / SERVING_EXAMPLE).write_text(to_json({"dataframe_split": example_table}))

    return {
        file_name: file_sha256(release_folder / file_name) for file_name in sorted(MLFLOW_FILES)
    }


def make_signature(
    request_type: type[BaseModel],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the columns and params of MLflow's signature for a type of request.

    Each column has the type `any`, because MLflow's own validation would convert texts, and would
    reject integers in a double column and missing values in an integer or boolean column.
    """
    frame_converter = FrameConverter(request_type)
    signature_columns = [
        {"name": field_name, "type": "any", "required": field_name in frame_converter.required}
        for field_name in frame_converter.properties
    ]

    signature_params = [
        {"name": field_name, "type": "string", "default": "", "shape": None}
        for field_name in frame_converter.schema["properties"]
        if field_name != INSTANCES_KEY
    ]

    return signature_columns, signature_params


def describe_type(prediction: Any) -> dict[str, Any]:
    """Return MLflow's type of a JSON value, such as a prediction."""
    match prediction:
        case [first, *_]:
            return {"type": "array", "items": describe_type(first)}
        case {**values} if values:
            return {
                "type": "object",
                "properties": {
                    field_name: describe_type(field_value) | {"required": True}
                    for field_name, field_value in values.items()
                },
            }
    return {"type": PYTHON_TYPES.get(type(prediction), "any")}
