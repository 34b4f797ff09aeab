"""Compares the predictions of a server with the predictions of the evaluation."""

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.common.wording import truncate
from rekindle.release.model_client import ModelClient, RequestTooLarge
from rekindle.release.release_files import read_prediction_lines

INSTANCES_PER_REQUEST = 20
# number of threads that send requests at the same time
CLIENT_COUNT = 8
# requests with their expected predictions
ReplayedRequests = Iterable[tuple[dict[str, Any], list[Any]]]


@dataclass
class PredictionComparison:
    """Counts of differences between served predictions and the offline predictions of the
    evaluation."""

    tolerance: float
    # number of instances that were compared
    replayed: int = 0
    # number of instances whose predictions differ by more than the tolerance
    differing: int = 0
    # number of instances in requests that the server rejected because of their size
    too_large: int = 0
    max_difference: float = 0.0
    # text that shows the instance with the largest difference, and both predictions
    worst: str = ""
    # number of unstable instances, whose predictions differ by more than the tolerance if they are
    # sent alone and with other requests
    unstable: int = 0
    # text that shows the first unstable instance, and both predictions
    example: str = ""
    # True if two predictions for the same request differ
    random: bool = False

    def add(
        self,
        request: dict[str, Any],
        served_predictions: list[Any],
        expected_predictions: list[Any],
    ) -> None:
        """Compare the answer to a request with the expected predictions, and add the result to the
        counts. Raises ValueError if the numbers of served and expected predictions differ."""
        for instance, served_prediction, offline_prediction in zip(
            request["instances"], served_predictions, expected_predictions, strict=True
        ):
            difference = compute_difference(served_prediction, offline_prediction)
            self.replayed += 1
            if difference > self.tolerance:
                self.differing += 1

            if difference > self.max_difference:
                self.max_difference = difference
                value_texts = (
                    truncate(to_json(json_value), 200)
                    for json_value in (instance, served_prediction, offline_prediction)
                )
                self.worst = "{}: served {}, offline {}".format(*value_texts)

    def add_repetition(
        self, request: dict[str, Any], single_predictions: list[Any], batched_predictions: list[Any]
    ) -> bool:
        """Compare the predictions of a request sent alone and sent together with others; return
        True if they agree."""
        earlier_unstable_count = self.unstable
        for instance, single_prediction, batched_prediction in zip(
            request["instances"], single_predictions, batched_predictions, strict=True
        ):
            if compute_difference(single_prediction, batched_prediction) > self.tolerance:
                self.unstable += 1
                value_texts = (
                    truncate(to_json(json_value), 200)
                    for json_value in (instance, single_prediction, batched_prediction)
                )
                self.example = self.example or "{}: alone {}, with others {}".format(*value_texts)
        return self.unstable == earlier_unstable_count


def compute_difference(served_value: Any, offline_value: Any) -> float:
    """Return the largest difference between corresponding numbers in two JSON values. The result is
    infinite if the values differ in anything except numbers.

    For numbers with absolute values above 1, the difference is relative.
    """
    match served_value, offline_value:
        case (bool() | None | str(), _) | (_, bool() | None | str()):
            if served_value == offline_value and type(served_value) is type(offline_value):
                return 0.0
            return math.inf
        case (int() | float(), int() | float()):
            relative_difference = abs(served_value - offline_value) / max(
                1.0, abs(served_value), abs(offline_value)
            )
            if math.isnan(relative_difference):
                return math.inf
            return relative_difference
        case (list(), list()) if len(served_value) == len(offline_value):
            return max(map(compute_difference, served_value, offline_value), default=0.0)
        case (dict(), dict()) if served_value.keys() == offline_value.keys():
            return max(
                (compute_difference(served_value[key], offline_value[key]) for key in served_value),
                default=0.0,
            )

    return math.inf


def compare_predictions(
    model_client: ModelClient,
    replayed_requests: ReplayedRequests,
    tolerance: float,
    are_independent: bool = False,
) -> PredictionComparison:
    """Send the requests to the servers one after the other, then several requests at the same time.
    Compare the answers with each other and with the expected predictions.

    `are_independent` is True if the instances of a request do not influence each other, so that
    each instance is sent alone. Raises DataError if a server rejects a request or answers without
    predictions, and RekindleError if the servers do not answer in time.
    """
    comparison = PredictionComparison(tolerance)
    replayed_requests = list(replayed_requests)

    def send(request: dict[str, Any]) -> list[Any] | None:
        try:
            return model_client.predict(request)
        except RequestTooLarge:
            return None

    def send_alone(request: dict[str, Any]) -> list[Any] | None:
        if are_independent:
            row_requests = [
                request | {"instances": [instance]} for instance in request["instances"]
            ]
        else:
            row_requests = [request]

        row_answers = [send(row_request) for row_request in row_requests]
        if None in row_answers:
            return None
        return [prediction for row_answer in row_answers for prediction in row_answer or ()]

    requests = [request for request, _ in replayed_requests]
    answers_alone = [send_alone(request) for request in requests]
    with ThreadPoolExecutor(CLIENT_COUNT) as thread_pool:
        answers_together = list(thread_pool.map(send, requests))

    for (request, expected_predictions), single_predictions, batched_predictions in zip(
        replayed_requests, answers_alone, answers_together, strict=True
    ):
        if single_predictions is None or batched_predictions is None:
            comparison.too_large += len(expected_predictions)
            continue

        comparison.add(
            request,
            max(
                single_predictions,
                batched_predictions,
                key=lambda predictions: compute_difference(predictions, expected_predictions),
            ),
            expected_predictions,
        )
        if (
            not comparison.add_repetition(request, single_predictions, batched_predictions)
            and not comparison.random
        ):
            comparison.random = (
                compute_difference(send_alone(request), single_predictions) > tolerance
            )

    return comparison


def read_numerics(report_folder: Path) -> str:
    """Return the numerics (see `device.describe_numerics`) of the machine that wrote the report; ""
    if servers need not return the same bits. A server with equal numerics must return the same
    bits. Raises DataError.
    """
    for prediction_line in read_prediction_lines(report_folder):
        return prediction_line.numerics
    return ""


def read_predictions(
    report_folder: Path, row_count: int
) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield requests from the start of the report until at least `row_count` test rows are
    covered or the report ends. Raises DataError."""
    for prediction_line in read_prediction_lines(report_folder):
        yield prediction_line.request, prediction_line.predictions
        row_count -= len(prediction_line.predictions)
        if row_count <= 0:
            return
