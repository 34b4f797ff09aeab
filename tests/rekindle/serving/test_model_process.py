"""Requests that are predicted together do not affect each other."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import BaseModel, Field

from rekindle.serving.model_process import answer_batch


class Instance(BaseModel):
    x: float


class Request(BaseModel):
    instances: list[Instance] = Field(min_length=1)


class Doubling:
    """A predictor that returns twice the number; it fails for a batch with a negative number, and
    returns infinity for large numbers."""

    Request = Request

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def example(self) -> dict[str, Any]:
        return {"instances": [{"x": 1}]}

    def predict(self, requests: Sequence[Request]) -> list[list[Any]]:
        self.sizes.append(len(requests))
        if any(instance.x < 0 for request in requests for instance in request.instances):
            raise ValueError("a negative number")
        return [[2 * instance.x for instance in request.instances] for request in requests]


@pytest.mark.parametrize(
    ("wrong", "status"), [("-1", 500), ("1e308", 500), ('"a"', 422), ("]", 422)]
)
def test_an_invalid_request_fails_alone_and_other_requests_stay_in_one_batch(
    wrong: str, status: int
) -> None:
    predictor = Doubling()
    values = [str(x) for x in range(16)]
    values[5] = wrong
    bodies = [f'{{"instances": [{{"x": {value}}}]}}'.encode() for value in values]
    answers = answer_batch(predictor, bodies, 10).answers
    assert [answer.status for answer in answers] == [status if x == 5 else 200 for x in range(16)]

    assert [json.loads(answers[x].body)["predictions"] for x in (0, 4, 6, 15)] == [
        [0.0],
        [8.0],
        [12.0],
        [30.0],
    ]

    assert predictor.sizes == ([15] if status == 422 else [16, 8, 4, 4, 2, 1, 1, 2, 8])
