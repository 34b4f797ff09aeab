"""A release as an MLflow model, for notebooks and `mlflow models serve`.

    # in the environment that `rekindle env` prints
    model = mlflow.pyfunc.load_model("models:/demo@champion")
    model.predict(frame, params={"history": history.to_json(orient="records")})

`frame` has a row per instance and a column per field. All other keys of a request are passed in
`params`, as JSON texts. Requests are validated and predicted with the same code as in a server.
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
from rekindle.release.pyfunc.frames import INSTANCES, FrameConverter
from rekindle.release.release_files import verify_release
from rekindle.release.request_validation import parse
from rekindle.workload import Predictor

if TYPE_CHECKING:
    from pandas import DataFrame

PYTHON_TYPES = {int: "long", float: "double", str: "string", bool: "boolean"}


class Model:
    """The Python model that MLflow's pyfunc calls."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.converter = FrameConverter(predictor.Request)

    def predict(self, frame: "DataFrame", params: dict[str, str] | None = None) -> list[Any]:
        """Return the predictions of all rows. Raises DataError for an invalid request."""
        instances = self.converter.to_instances(frame)
        try:
            others = {name: loads(text) for name, text in (params or {}).items() if text}
            body = to_json({INSTANCES: instances, **others}).encode()
        except (TypeError, ValueError) as error:
            raise DataError(f"the request is not JSON: {error}.") from error
        parsed = parse(self.predictor.Request, body)
        sentence = find_warning(self.predictor, parsed)
        if sentence:
            warnings.warn(sentence, stacklevel=2)
        return self.predictor.predict([parsed])[0]


def _load_pyfunc(release: str) -> Model:
    """Load a release from its folder. MLflow calls this function with only the folder, so the key
    prefix of the release is unknown. Raises DataError if a file differs from release.json."""
    folder = Path(release)
    record = verify_release(folder, "", release)
    if MLMODEL not in record.files:
        raise DataError(
            f"{release} was released by an earlier version of Rekindle, whose hash does not cover"
            f" the file {MLMODEL} that MLflow executes. {REMEDY}"
        )
    return Model(open_predictor(folder))


def write_mlmodel(release: Path) -> dict[str, str]:
    """Write the MLmodel file of a release, with its signature, and the input examples; return
    {file: sha256}.

    MLmodel omits the `run_id`, so that equal releases have equal hashes. The version in MLflow
    records it. Raises DataError if the release cannot predict.
    """
    predictor = open_predictor(release)
    example = predictor.example()
    [predictions] = predictor.predict([parse(predictor.Request, to_json(example).encode())])
    instances = example[INSTANCES]
    columns = list(dict.fromkeys(key for instance in instances for key in instance))
    example_table = {
        "columns": columns,
        "data": [[instance.get(key) for key in columns] for instance in instances],
    }
    inputs, params = make_signature(predictor.Request)

    model = {
        "flavors": {
            "python_function": {
                "loader_module": __name__,
                "python_version": platform.python_version(),
            }
        },
        "signature": {
            "inputs": to_json(inputs),
            "outputs": to_json([{**describe_type(predictions[0]), "required": True}]),
            "params": to_json(params) if params else None,
        },
        "saved_input_example_info": {
            "artifact_path": INPUT_EXAMPLE,
            "serving_input_path": SERVING_EXAMPLE,
            "type": "dataframe",
            "pandas_orient": "split",
        },
    }

    (release / MLMODEL).write_text(yaml.safe_dump(model, sort_keys=False))
    (release / INPUT_EXAMPLE).write_text(to_json(example_table))
    (release / SERVING_EXAMPLE).write_text(to_json({"dataframe_split": example_table}))

    return {name: file_sha256(release / name) for name in sorted(MLFLOW_FILES)}


def make_signature(request: type[BaseModel]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the columns and params of MLflow's signature for a type of request.

    Each column has the type `any`, because MLflow's own validation would convert texts, and would
    reject integers in a double column and missing values in an integer or boolean column.
    """
    converter = FrameConverter(request)
    columns = [
        {"name": name, "type": "any", "required": name in converter.required}
        for name in converter.properties
    ]

    params = [
        {"name": name, "type": "string", "default": "", "shape": None}
        for name in converter.schema["properties"]
        if name != INSTANCES
    ]

    return columns, params


def describe_type(prediction: Any) -> dict[str, Any]:
    """Return MLflow's type of a JSON value, such as a prediction."""
    match prediction:
        case [first, *_]:
            return {"type": "array", "items": describe_type(first)}
        case {**values} if values:
            return {
                "type": "object",
                "properties": {k: describe_type(v) | {"required": True} for k, v in values.items()},
            }
    return {"type": PYTHON_TYPES.get(type(prediction), "any")}
