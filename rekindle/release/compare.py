"""Compares the answers of a server with the predictions of the evaluation."""

import gzip
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import DataError
from rekindle.release.client import ModelClient, RequestTooLarge
from rekindle.release.files import PREDICTIONS

INSTANCES_PER_REQUEST = 20
Replay = Iterable[tuple[dict[str, Any], list[Any]]]  # requests, each with its expected predictions


@dataclass
class Comparison:
    """Result of comparing served with offline predictions."""

    tolerance: float
    replayed: int = 0  # number of instances
    differing: int = 0  # number of instances beyond the tolerance
    too_large: int = 0  # number of instances in requests that the server rejected because of their size
    max_difference: float = 0.0
    worst: str = ""  # the instance with the largest difference, and both predictions

    def add(self, request: dict[str, Any], served: list[Any], expected: list[Any]) -> None:
        """Add the answer to a request. Raises ValueError if the number of predictions differs."""
        for instance, prediction, offline in zip(request["instances"], served, expected, strict=True):
            distance = difference(prediction, offline)
            self.replayed += 1
            self.differing += distance > self.tolerance
            if distance > self.max_difference:
                self.max_difference = distance
                texts = (_shorten(value) for value in (instance, prediction, offline))
                self.worst = "{}: served {}, offline {}".format(*texts)


def difference(served: Any, offline: Any) -> float:
    """Return the largest difference of numbers in two JSON values, relative above 1; infinite if the rest differs."""
    match served, offline:
        case (bool() | None | str(), _) | (_, bool() | None | str()):
            return 0.0 if served == offline and type(served) is type(offline) else math.inf
        case (int() | float(), int() | float()):
            distance = abs(served - offline) / max(1.0, abs(served), abs(offline))
            return math.inf if math.isnan(distance) else distance
        case (list(), list()) if len(served) == len(offline):
            return max(map(difference, served, offline), default=0.0)
        case (dict(), dict()) if served.keys() == offline.keys():
            return max((difference(served[key], offline[key]) for key in served), default=0.0)
    return math.inf


def compare(client: ModelClient, replay: Replay, tolerance: float) -> Comparison:
    """Send the requests and compare the answers. Raises DataError, or RekindleError if no server answers."""
    comparison = Comparison(tolerance)
    for request, expected in replay:
        try:
            comparison.add(request, client.predict(request), expected)
        except RequestTooLarge:
            comparison.too_large += len(expected)
    return comparison


def read_predictions(report: Path, count: int) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield the report's first requests with at least `count` test rows in total, or all. Raises DataError."""
    try:
        with gzip.open(report / PREDICTIONS, "rt") as lines:
            for line in map(json.loads, lines):
                yield line["request"], line["predictions"]
                count -= len(line["predictions"])
                if count <= 0:
                    return
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise DataError(
            f"{report / PREDICTIONS} does not contain predictions ({error!r}): run the step evaluate again."
        ) from error


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
