"""Compares what a server answers with the predictions of the evaluation."""

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

TOGETHER = 20  # instances in a request
Replay = Iterable[tuple[dict[str, Any], list[Any]]]  # requests, each with the predictions to expect


@dataclass
class Comparison:
    """Served against offline predictions, so far."""

    tolerance: float
    replayed: int = 0
    differing: int = 0
    too_large: int = 0  # instances in requests that the server refused for their size
    max_difference: float = 0.0
    worst: str = ""  # the instance with the largest difference, and both predictions

    def add(self, request: dict[str, Any], served: list[Any], expected: list[Any]) -> None:
        """The server's answer to one request. Raises ValueError unless it has one prediction for each expected one."""
        for instance, ours, offline in zip(request["instances"], served, expected, strict=True):
            distance = difference(ours, offline)
            self.replayed += 1
            self.differing += distance > self.tolerance
            if distance > self.max_difference:
                self.max_difference = distance
                texts = (_shortened(value) for value in (instance, ours, offline))
                self.worst = "{}: served {}, offline {}".format(*texts)


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of two values' numbers, relative to those above 1; infinite if anything else differs."""
    match ours, theirs:
        case (bool() | None | str(), _) | (_, bool() | None | str()):
            return 0.0 if ours == theirs and type(ours) is type(theirs) else math.inf
        case (int() | float(), int() | float()):
            distance = abs(ours - theirs) / max(1.0, abs(ours), abs(theirs))
            return math.inf if math.isnan(distance) else distance
        case (list(), list()) if len(ours) == len(theirs):
            return max(map(difference, ours, theirs), default=0.0)
        case (dict(), dict()) if ours.keys() == theirs.keys():
            return max((difference(ours[key], theirs[key]) for key in ours), default=0.0)
    return math.inf


def compare(client: ModelClient, replay: Replay, tolerance: float) -> Comparison:
    """Send the requests, each with the predictions to expect. Raises DataError, or RekindleError if nothing serves."""
    comparison = Comparison(tolerance)
    for request, expected in replay:
        try:
            comparison.add(request, client.predict(request), expected)
        except RequestTooLarge:
            comparison.too_large += len(expected)
    return comparison


def recorded(report: Path, count: int) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """The first requests of the report that hold `count` test rows together, or all. Raises DataError."""
    try:
        with gzip.open(report / PREDICTIONS, "rt") as lines:
            for line in map(json.loads, lines):
                yield line["request"], line["predictions"]
                count -= len(line["predictions"])
                if count <= 0:
                    return
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise DataError(
            f"{report / PREDICTIONS} holds no predictions to compare with ({error!r}): let the step evaluate write it."
        ) from error


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
