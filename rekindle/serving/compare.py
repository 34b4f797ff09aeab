"""Compares what a server answers with the scores of the evaluation."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rekindle.serving.client import RequestTooLarge, ScoringClient


@dataclass
class Comparison:
    """Served against offline scores, so far."""

    tolerance: float
    replayed: int = 0
    differing: int = 0
    too_large: int = 0  # transactions in requests that the server refused for their size
    max_difference: float = 0.0
    worst: str = ""  # the transaction with the largest difference, and both scores

    def add(self, scores: list[dict[str, Any]], expected: list[float]) -> None:
        """The server's answer to one request. Raises ValueError unless it has one score for each expected one."""
        for scored, offline in zip(scores, expected, strict=True):
            difference = abs(scored["score"] - offline)
            self.replayed += 1
            self.differing += not difference <= self.tolerance  # NaN differs
            if not (difference <= self.max_difference or math.isnan(self.max_difference)):
                self.max_difference = difference
                self.worst = f"{scored['transaction_id']}, served {scored['score']!r}, offline {offline!r}"


def compare(
    client: ScoringClient, requests: Iterable[tuple[dict[str, Any], list[float]]], tolerance: float
) -> Comparison:
    """Send the requests, each with the scores to expect. Raises DataError, or RekindleError if nothing serves."""
    comparison = Comparison(tolerance)
    for request, expected in requests:
        try:
            comparison.add(client.score(request), expected)
        except RequestTooLarge:
            comparison.too_large += len(expected)
    return comparison
