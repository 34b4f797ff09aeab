"""What a client sent wrong is named with its place, whatever the workload's schema forgets."""

import json
import tracemalloc
from typing import Any

import pytest
from pydantic import BaseModel, Field

from rekindle.errors import DataError
from rekindle.release.validation import LARGE, parse


class Point(BaseModel):
    x: float
    y: float = 0


class Instance(BaseModel):
    points: list[Point]
    place: dict[str, float] = {}
    name: str | None = None
    count: int = 0


class Request(BaseModel):
    instances: list[Instance] = Field(min_length=1)


def parsed(**instance: Any) -> Request:
    return parse(Request, json.dumps({"instances": [{"points": []}, {"points": [{"x": 1}], **instance}]}).encode())


@pytest.mark.parametrize(
    ("instance", "says"),
    [
        ({"points": [{"x": 1}, {"x": "2"}]}, "instances[1].points[1].x is '2': input should be a valid number."),
        ({"points": [{"x": 1}, {"x": True}]}, "instances[1].points[1].x is True: "),
        ({"points": [{"x": "NaN"}]}, "instances[1].points[0].x is 'NaN': "),
        ({"points": [{"x": float("nan")}]}, "instances[1].points[0].x is nan: it must be a finite number."),
        ({"place": {"lat": float("-inf")}}, "instances[1].place.lat is -inf: it must be a finite number."),
        ({"points": [{"xx": 1}]}, "instances[1].points[0] has 'xx', which is not known. Did you mean \"x\"?"),
        ({"points": [{"y": 1}]}, "instances[1].points[0].x is missing: it is required."),
        ({"cuont": 1}, "instances[1] has 'cuont', which is not known. Did you mean \"count\"?"),
        ({"count": 10**19}, "instances[1].count is 10000000000000000000: it must fit into 64 bits."),
        ({"count": 1.5}, "instances[1].count is 1.5: input should be a valid integer."),
        ({"name": ["x" * 100]}, "instances[1].name is ['xxx"),
    ],
)
def test_a_fault_is_named_with_its_place(instance: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as error:
        parsed(**instance)
    assert says in str(error.value)


@pytest.mark.parametrize("number", [b"1e400", b"-1e400", b"1" + b"0" * 400])
def test_a_number_that_no_model_can_take_is_refused(number: bytes) -> None:
    with pytest.raises(DataError, match=r"instances\[0\].points\[0\].x is .*: it must"):
        parse(Request, b'{"instances": [{"points": [{"x": %s}]}]}' % number)


def test_what_only_looks_like_a_huge_number_is_taken() -> None:
    for instance in (
        {"name": "NaN 1e999 " + "9" * 40},
        {"count": -(2**63)},
        {"place": {"x": 1.2345678901234567890e10}},
    ):
        assert parsed(**instance).instances[1]


def test_many_faults_do_not_make_an_endless_message() -> None:
    with pytest.raises(DataError, match="There are 995 more faults") as error:
        parsed(points=[{}] * 1000)
    assert len(str(error.value)) < 1000


MANY = 1 << 20
KEYS = ",".join(f'"{at}": ""' for at in range(MANY >> 2))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ('"points": [' + "1," * MANY + "1]", "instances[0].points[0] is 1: input should be"),
        ('"points": [' + "[[{}]]," * (MANY >> 1) + "1]", "instances[0].points[0] is [[{}]]: input should be"),
        ('"points": [], "place": {' + KEYS + "}", "instances[0].place."),
        (KEYS, "the request has '0' in one of its objects, which is not known."),
    ],
    ids=["values", "lists", "dictionary", "keys"],
)
def test_a_body_that_is_nothing_but_faults_costs_no_more_than_one_that_is_right(part: str, says: str) -> None:
    body = b'{"instances": [{' + part.encode() + b"}]}"
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as error:
            parse(Request, body)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(body)
    finally:
        tracemalloc.stop()
    assert str(error.value).startswith(says) and "more faults" not in str(error.value)


class Either(BaseModel):
    instances: list[Instance | Point]


def test_a_large_request_is_taken_like_a_small_one() -> None:
    rows = [{"points": [{"x": 1.5, "y": 2}], "place": {"a": 1.0}, "name": "x", "count": 3}, {"x": 1, "y": 2}]
    body = json.dumps({"instances": rows * LARGE}).encode()
    parsed = parse(Either, body)
    assert parsed == Either.model_validate_json(body, strict=True)
    assert [type(part) for part in parsed.instances[:2]] == [Instance, Point]
    with pytest.raises(DataError, match=r"has .cuont., which is not known|more faults"):
        parse(Either, body.replace(b'"count"', b'"cuont"', 1))
