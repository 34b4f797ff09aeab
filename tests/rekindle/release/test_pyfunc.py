"""MLflow knows the types of a model's predictions."""

import json
from typing import Any

import pytest

from rekindle.release.pyfunc import type_of


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        (0.5, "double (required)"),
        (3, "long (required)"),
        ("seven", "string (required)"),
        (True, "boolean (required)"),
        ([0.1, 0.9], "Array(double) (required)"),
        ({"label": "a", "scores": [0.5]}, "{label: string (required), scores: Array(double) (required)} (required)"),
        (None, "Any (required)"),
    ],
)
def test_the_signature_has_the_type_of_a_prediction(prediction: Any, text: str) -> None:
    from mlflow.types import Schema

    schema = Schema.from_json(json.dumps([{**type_of(prediction), "required": True}]))
    assert str(schema) == f"[{text}]"
