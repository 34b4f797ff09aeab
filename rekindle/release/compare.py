"""Compares the predictions of a server with those of the evaluation."""

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.common.wording import cut
from rekindle.release.model_client import ModelClient, RequestTooLarge
from rekindle.release.release_files import read_prediction_lines

INSTANCES_PER_REQUEST = 20
CLIENTS = 8  # number of threads that send requests at the same time
# requests with their expected predictions
Replay = Iterable[tuple[dict[str, Any], list[Any]]]


@dataclass
class Comparison:
    """Counts of differences between served predictions and the offline predictions of the
    evaluation."""

    tolerance: float
    replayed: int = 0  # number of instances that were compared
    differing: int = 0  # number of instances whose predictions differ by more than the tolerance
    # number of instances in requests that the server rejected because of their size
    too_large: int = 0
    max_difference: float = 0.0
    # text: the instance with the largest difference, and both predictions
    worst: str = ""
    # number of unstable instances: sent alone and with other requests, predictions differ by more
    # than the tolerance
    unstable: int = 0
    # text: the first unstable instance, and both predictions
    example: str = ""
    random: bool = False  # True if two predictions for the same request differ

    def add(self, request: dict[str, Any], served: list[Any], expected: list[Any]) -> None:
        """Add the answer to a request. Raises ValueError if the numbers of served and expected
        predictions differ."""
        for instance, prediction, offline in zip(
            request["instances"], served, expected, strict=True
        ):
            distance = compute_difference(prediction, offline)
            self.replayed += 1
            self.differing += distance > self.tolerance
            if distance > self.max_difference:
                self.max_difference = distance
                texts = (cut(to_json(value), 200) for value in (instance, prediction, offline))
                self.worst = "{}: served {}, offline {}".format(*texts)

    def add_repetition(
        self, request: dict[str, Any], single: list[Any], batched: list[Any]
    ) -> bool:
        """Compare the predictions of a request sent alone and sent together with others; return
        True if they agree."""
        unstable = self.unstable
        for instance, alone, together in zip(request["instances"], single, batched, strict=True):
            if compute_difference(alone, together) > self.tolerance:
                self.unstable += 1
                texts = (cut(to_json(value), 200) for value in (instance, alone, together))
                self.example = self.example or "{}: alone {}, with others {}".format(*texts)
        return self.unstable == unstable


def compute_difference(served: Any, offline: Any) -> float:
    """Return the largest difference between corresponding numbers in two JSON values. It is
    infinite if the values differ in anything else.

    For absolute values above 1, the difference is relative.
    """
    match served, offline:
        case (bool() | None | str(), _) | (_, bool() | None | str()):
            if served == offline and type(served) is type(offline):
                return 0.0
            return math.inf
        case (int() | float(), int() | float()):
            distance = abs(served - offline) / max(1.0, abs(served), abs(offline))
            if math.isnan(distance):
                return math.inf
            return distance
        case (list(), list()) if len(served) == len(offline):
            return max(map(compute_difference, served, offline), default=0.0)
        case (dict(), dict()) if served.keys() == offline.keys():
            return max(
                (compute_difference(served[key], offline[key]) for key in served), default=0.0
            )

    return math.inf


def compare(
    client: ModelClient, replay: Replay, tolerance: float, independent: bool = False
) -> Comparison:
    """Send each request alone, then all requests together; compare the answers with each other and
    with the expected predictions.

    `independent`: the instances of a request do not influence each other, so each one is sent
    alone. Raises DataError if a server rejects a request or answers without predictions, and
    RekindleError if the servers do not answer in time.
    """
    comparison = Comparison(tolerance)
    replay = list(replay)

    def send(request: dict[str, Any]) -> list[Any] | None:
        try:
            return client.predict(request)
        except RequestTooLarge:
            return None

    def send_alone(request: dict[str, Any]) -> list[Any] | None:
        if independent:
            rows = [request | {"instances": [row]} for row in request["instances"]]
        else:
            rows = [request]
        answers = [send(row) for row in rows]
        if None in answers:
            return None
        return [prediction for answer in answers for prediction in answer or ()]

    requests = [request for request, _ in replay]
    answers_alone = [send_alone(request) for request in requests]
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers_together = list(clients.map(send, requests))

    for (request, expected), single, batched in zip(
        replay, answers_alone, answers_together, strict=True
    ):
        if single is None or batched is None:
            comparison.too_large += len(expected)
            continue

        comparison.add(
            request,
            max(single, batched, key=lambda served: compute_difference(served, expected)),
            expected,
        )
        if not comparison.add_repetition(request, single, batched) and not comparison.random:
            comparison.random = compute_difference(send_alone(request), single) > tolerance

    return comparison


def read_numerics(report: Path) -> str:
    """Return what `device.describe_numerics` returned on the machine that wrote the report, or "".
    A server with equal numerics must return the same bits. Raises DataError.
    """
    for line in read_prediction_lines(report):
        return line.numerics
    return ""


def read_predictions(report: Path, count: int) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield requests from the start of the report until at least `count` test rows are covered or
    the report ends. Raises DataError."""
    for line in read_prediction_lines(report):
        yield line.request, line.predictions
        count -= len(line.predictions)
        if count <= 0:
            return
