"""MLflow knows the types of a model's predictions, and shows the warnings of the predictor."""

import json
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from rekindle.release.pyfunc import PyfuncModel, describe_type


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        (0.5, "double (required)"),
        (3, "long (required)"),
        ("seven", "string (required)"),
        (True, "boolean (required)"),
        ([0.1, 0.9], "Array(double) (required)"),
        (
            {"label": "a", "scores": [0.5]},
            "{label: string (required), scores: Array(double) (required)} (required)",
        ),
        (None, "Any (required)"),
    ],
)
def test_the_signature_has_the_type_of_a_prediction(prediction: Any, text: str) -> None:
    from mlflow.types import Schema

    schema = Schema.from_json(json.dumps([{**describe_type(prediction), "required": True}]))
    assert str(schema) == f"[{text}]"


class Instance(BaseModel):
    x: float


class Request(BaseModel):
    instances: list[Instance]


class Doubling:
    Request = Request

    def example(self) -> dict[str, Any]:
        return {"instances": [{"x": 1}]}

    def predict(self, requests: Sequence[Request]) -> list[list[Any]]:
        return [[2 * instance.x for instance in request.instances] for request in requests]

    def warn(self, request: Request) -> str:
        if any(instance.x > 9 for instance in request.instances):
            return "x is above all training rows."
        return ""


def test_the_warning_of_a_predictor_is_a_python_warning() -> None:
    import pandas

    model = PyfuncModel(Doubling())
    with pytest.warns(UserWarning, match="x is above all training rows"):
        assert model.predict(pandas.DataFrame({"x": [1.0, 10.0]})) == [2, 20]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.predict(pandas.DataFrame({"x": [1.0]})) == [2]
