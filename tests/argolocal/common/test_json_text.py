"""JSON that this program writes does not contain NaN or infinity, which other parsers reject. The
error about NaN or infinity names the number."""

import json
import math
from typing import Any

import pytest

from argolocal.common.json_text import describe_non_finite, loads, replace_nan, to_json

NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("number", NOT_FINITE)
def test_a_number_that_is_not_finite_is_located(number: float) -> None:
    with pytest.raises(
        ValueError, match=rf"^parts\[1\]\.rmse is {number}: it must be a finite number$"
    ):
        to_json({"rows": 3, "parts": [{"rmse": 1.0}, {"rmse": number}]})
    with pytest.raises(ValueError, match=rf"^the value is {number}: "):
        to_json(number)


@pytest.mark.parametrize(
    "options", [{}, {"indent": 1}, {"sort_keys": True}, {"separators": (",", ":")}]
)
def test_other_values_are_written_as_python_writes_them(options: dict[str, Any]) -> None:
    value = {"b": [1, 0.1, 1e308, "NaN", None, True], "a": {"é": -0.0}}
    assert to_json(value, **options) == json.dumps(value, **options)


def test_values_that_cannot_be_json_keep_the_reason() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="Circular reference"):
        to_json(circle)
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        to_json({"a": {1}})
    assert describe_non_finite([10**400, math.nan]) == "[1] is nan: it must be a finite number"


def test_an_unknown_number_is_null() -> None:
    value = {"loss": math.nan, "losses": [(1, math.inf), (2, 0.5)], "text": "nan"}
    assert loads(to_json(replace_nan(value))) == {
        "loss": None,
        "losses": [[1, None], [2, 0.5]],
        "text": "nan",
    }


@pytest.mark.parametrize("text", ["NaN", '{"a": [Infinity]}', "[-Infinity]"])
def test_json_from_outside_has_no_nan(text: str) -> None:
    with pytest.raises(ValueError, match="is not a finite number"):
        loads(text)
