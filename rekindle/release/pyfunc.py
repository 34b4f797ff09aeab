"""A release as an MLflow model, for notebooks and `mlflow models serve`.

    model = mlflow.pyfunc.load_model("models:/demo@champion")     # with the environment that `rekindle env` prints
    model.predict(frame, params={"history": history.to_json(orient="records")})

`frame` has a row per instance and a column per field. Other keys of a request are params, as JSON. Requests are
validated and predicted by the same code as in the server.
"""

import json
import platform
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from rekindle.content.hashes import file_sha256
from rekindle.errors import DataError
from rekindle.release.files import INPUT_EXAMPLE, MLFLOW_FILES, MLMODEL, REMEDY, SERVING_EXAMPLE, verify_release
from rekindle.release.predictor import open_predictor, warning
from rekindle.release.validation import parse
from rekindle.sections import resolve
from rekindle.workload import Predictor

if TYPE_CHECKING:
    from pandas import DataFrame

INSTANCES = "instances"
# type in a JSON schema → type of MLflow
MLFLOW_TYPES = {"integer": "long", "number": "double", "string": "string", "boolean": "boolean"}
PYTHON_TYPES = {int: "long", float: "double", str: "string", bool: "boolean"}


class Model:
    """The object that MLflow's pyfunc calls."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def predict(self, frame: "DataFrame", params: dict[str, str] | None = None) -> list[Any]:
        """Return the predictions of all rows; missing values are omitted. Raises DataError for an invalid request."""
        import pandas
        from pandas.api.types import is_scalar

        rows = frame.to_dict("records")
        instances = [
            {key: value for key, value in row.items() if not (is_scalar(value) and pandas.isna(value))} for row in rows
        ]
        request = {INSTANCES: instances} | {name: json.loads(text) for name, text in (params or {}).items() if text}
        body = json.dumps(request, default=_to_json_value).encode()
        parsed = parse(self.predictor.Request, body)
        if sentence := warning(self.predictor, parsed):
            warnings.warn(sentence, stacklevel=2)
        return self.predictor.predict([parsed])[0]


def _load_pyfunc(release: str) -> Model:
    """Load a release from its folder (called by MLflow). Raises DataError if a file was changed since the release."""
    folder = Path(release)
    record = verify_release(folder, "", release)
    if MLMODEL not in record.files:
        raise DataError(
            f"{release} was released by an earlier version of Rekindle, whose hash does not cover the file {MLMODEL} "
            f"that MLflow executes. {REMEDY}"
        )
    return Model(open_predictor(Path(release)))


def write_mlmodel(release: Path) -> dict[str, str]:
    """Write the MLmodel file of a release, its signature and input example; return {file: sha256}.

    The file does not have the `run_id` of the run, so that the same release has the same hash; the version in MLflow
    has it. Raises DataError if the release cannot predict.
    """
    predictor = open_predictor(release)
    example = predictor.example()
    [predictions] = predictor.predict([parse(predictor.Request, json.dumps(example).encode())])
    instances = example[INSTANCES]
    columns = list(dict.fromkeys(key for instance in instances for key in instance))
    example_table = {"columns": columns, "data": [[instance.get(key) for key in columns] for instance in instances]}
    inputs, params = signature(predictor.Request)
    model = {
        "flavors": {"python_function": {"loader_module": __name__, "python_version": platform.python_version()}},
        "signature": {
            "inputs": json.dumps(inputs),
            "outputs": json.dumps([{**type_of(predictions[0]), "required": True}]),
            "params": json.dumps(params) if params else None,
        },
        "saved_input_example_info": {
            "artifact_path": INPUT_EXAMPLE,
            "serving_input_path": SERVING_EXAMPLE,
            "type": "dataframe",
            "pandas_orient": "split",
        },
    }
    (release / MLMODEL).write_text(yaml.safe_dump(model, sort_keys=False))
    (release / INPUT_EXAMPLE).write_text(json.dumps(example_table))
    (release / SERVING_EXAMPLE).write_text(json.dumps({"dataframe_split": example_table}))
    return {name: file_sha256(release / name) for name in sorted(MLFLOW_FILES)}


def signature(request: type[BaseModel]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return MLflow's columns and params of a request."""
    schema = request.model_json_schema()
    definitions, properties = schema.get("$defs", {}), schema["properties"]
    instance = resolve(resolve(properties[INSTANCES], definitions)["items"], definitions)
    columns = _fields(instance, definitions)
    params = [
        {"name": name, "type": "string", "default": "", "shape": None} for name in properties if name != INSTANCES
    ]
    return [{"name": name, **column} for name, column in columns.items()], params


def type_of(prediction: Any) -> dict[str, Any]:
    """Return MLflow's type of a JSON value, such as a prediction of the release's example."""
    match prediction:
        case [first, *_]:
            return {"type": "array", "items": type_of(first)}
        case {**values} if values:
            return {"type": "object", "properties": {k: type_of(v) | {"required": True} for k, v in values.items()}}
    return {"type": PYTHON_TYPES.get(type(prediction), "any")}


def _fields(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    required = schema.get("required", [])
    fields = schema.get("properties", {}).items()
    return {name: _type(field, definitions) | {"required": name in required} for name, field in fields}


def _type(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Convert a JSON schema to MLflow's type; to `any` if MLflow lacks the type, such as a union of number and text."""
    schema = resolve(schema, definitions)
    match schema.get("type"):
        case "array" if "items" in schema:
            return {"type": "array", "items": _type(schema["items"], definitions)}
        case "object" if schema.get("properties"):
            return {"type": "object", "properties": _fields(schema, definitions)}
        case str(kind) if kind in MLFLOW_TYPES and "format" not in schema:  # a time may be text or a pandas timestamp
            return {"type": MLFLOW_TYPES[kind]}
    return {"type": "any"}


def _to_json_value(value: Any) -> Any:
    """Convert a NumPy or pandas value to a JSON value."""
    return value.isoformat() if hasattr(value, "isoformat") else value.tolist()
