"""Errors of a request name their location in the request, for any schema of a workload."""

import json
import tracemalloc
from typing import Any

import pytest
from pydantic import BaseModel, Field

from rekindle.errors import DataError
from rekindle.release.request_validation import LARGE_BODY_BYTES, parse_body


class Point(BaseModel):
    x: float
    y: float = 0


class Instance(BaseModel):
    points: list[Point]
    location: dict[str, float] = {}
    name: str | None = None
    count: int = 0


class Request(BaseModel):
    instances: list[Instance] = Field(min_length=1)


def parse_instance(**instance: Any) -> Request:
    return parse_body(
        Request,
        json.dumps({"instances": [{"points": []}, {"points": [{"x": 1}], **instance}]}).encode(),
    )


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        (
            {"points": [{"x": 1}, {"x": "2"}]},
            "instances[1].points[1].x is '2': input should be a valid number.",
        ),
        ({"points": [{"x": 1}, {"x": True}]}, "instances[1].points[1].x is True: "),
        ({"points": [{"x": "NaN"}]}, "instances[1].points[0].x is 'NaN': "),
        (
            {"points": [{"x": float("nan")}]},
            "instances[1].points[0].x is nan: it must be a finite number.",
        ),
        (
            {"location": {"lat": float("-inf")}},
            "instances[1].location.lat is -inf: it must be a finite number.",
        ),
        (
            {"points": [{"xx": 1}]},
            "instances[1].points[0] has the unknown key 'xx'. Did you mean \"x\"?",
        ),
        ({"points": [{"y": 1}]}, "instances[1].points[0].x is missing: it is required."),
        ({"cuont": 1}, "instances[1] has the unknown key 'cuont'. Did you mean \"count\"?"),
        (
            {"count": 10**19},
            "instances[1].count is 10000000000000000000: it must fit into 64 bits.",
        ),
        ({"count": 1.5}, "instances[1].count is 1.5: input should be a valid integer."),
        ({"name": ["x" * 100]}, "instances[1].name is ['xxx"),
    ],
)
def test_an_error_has_its_location(instance: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        parse_instance(**instance)
    assert message in str(error.value)


@pytest.mark.parametrize("number", [b"1e400", b"-1e400", b"1" + b"0" * 400])
def test_a_number_that_is_too_large_is_rejected(number: bytes) -> None:
    with pytest.raises(DataError, match=r"instances\[0\].points\[0\].x is .*: it must"):
        parse_body(Request, b'{"instances": [{"points": [{"x": %s}]}]}' % number)


def test_text_that_looks_like_a_huge_number_is_accepted() -> None:
    for instance in (
        {"name": "NaN 1e999 " + "9" * 40},
        {"count": -(2**63)},
        {"location": {"x": 1.2345678901234567890e10}},
    ):
        assert parse_instance(**instance).instances[1]


def test_the_message_of_many_errors_is_short() -> None:
    with pytest.raises(DataError, match="There are 995 more errors") as error:
        parse_instance(points=[{}] * 1000)
    assert len(str(error.value)) < 1000


INSTANCE_COUNT = 1 << 20
KEYS = ",".join(f'"{number}": ""' for number in range(INSTANCE_COUNT >> 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            '"points": [' + "1," * INSTANCE_COUNT + "1]",
            "instances[0].points[0] is 1: input should be",
        ),
        (
            '"points": [' + "[[{}]]," * (INSTANCE_COUNT >> 1) + "1]",
            "instances[0].points[0] is [[{}]]: input should be",
        ),
        ('"points": [], "location": {' + KEYS + "}", "instances[0].location."),
        (KEYS, "the request has the unknown key '0' in one of its objects."),
    ],
    ids=["values", "lists", "dictionary", "keys"],
)
def test_a_body_full_of_errors_costs_no_more_than_a_valid_body(fields: str, message: str) -> None:
    body = b'{"instances": [{' + fields.encode() + b"}]}"
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as error:
            parse_body(Request, body)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(body)
    finally:
        tracemalloc.stop()
    assert str(error.value).startswith(message)
    assert "more errors" not in str(error.value)


class Either(BaseModel):
    instances: list[Instance | Point]


@pytest.mark.slow
def test_a_large_request_is_parsed_like_a_small_one() -> None:
    rows = [
        {"points": [{"x": 1.5, "y": 2}], "location": {"a": 1.0}, "name": "x", "count": 3},
        {"x": 1, "y": 2},
    ]
    body = json.dumps({"instances": rows * LARGE_BODY_BYTES}).encode()
    request = parse_body(Either, body)
    assert request == Either.model_validate_json(body, strict=True)
    assert [type(instance) for instance in request.instances[:2]] == [Instance, Point]
    with pytest.raises(DataError, match=r"has the unknown key .cuont.|more errors"):
        parse_body(Either, body.replace(b'"count"', b'"cuont"', 1))
