"""Histograms of the numbers in predictions and instances, for the canary and the drift check.

Each number in a prediction is an output with a name such as `probabilities.3`; each number in an
instance is a feature. True counts as 1. A text counts as two numbers: its length, and a hash
between 0 and 1. Only the first MAX_OUTPUTS outputs and features of a model are counted.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any
from zlib import crc32

from prometheus_client.core import HistogramMetricFamily

MAX_OUTPUTS = 16  # maximum number of outputs, and of features, to count
SCORE_METRIC = "rekindle_model_score"
# bounds for probabilities
UNIT_EDGES = [1e-4, 1e-3, 0.01, 0.02, *(step / 20 for step in range(1, 20)), 0.98, 0.99, 0.999, 1.0]
LARGE_EDGES = [
    *(float(number) for number in range(2, 11)),
    *(float(f"{10 ** (k / 8):.3g}") for k in range(9, 49)),
]
NEGATIVE_EDGES = [-float(f"{10 ** (k / 4):.3g}") for k in range(24, -1, -1)]
EDGES = (
    *NEGATIVE_EDGES,
    -0.5,
    -0.2,
    -0.1,
    -0.01,
    0.0,
    *UNIT_EDGES,
    *LARGE_EDGES,
)  # upper bounds of all buckets except the last
MAX_NUMBER = 1e300  # larger numbers, which JSON allows, count as this number
BUCKET_BOUNDS = (*(repr(edge) for edge in EDGES), "+Inf")
ZERO_COUNTS = [0] * len(BUCKET_BOUNDS)
Counts = dict[str, list[int]]  # output or feature → the count of each bucket


def count_numbers(predictions: Iterable[Any]) -> Counts:
    """Count the numbers in predictions (or instances) per bucket, separately for each output (or
    feature)."""
    counts: Counts = {}
    for prediction in predictions:
        for output, number in list_numbers(prediction):
            if output not in counts:
                if len(counts) == MAX_OUTPUTS:
                    continue
                counts[output] = [*ZERO_COUNTS]
            counts[output][bisect_left(EDGES, number)] += 1
    return counts


def list_numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name of the output or feature, number) for each number in a prediction or instance."""
    match value:
        case bool() | int() | float():
            yield name or "prediction", float(max(-MAX_NUMBER, min(value, MAX_NUMBER)))
        case str():
            yield f"{name or 'prediction'}.length", float(len(value))
            yield f"{name or 'prediction'}.hash", crc32(value.encode()) / 2**32
        case Mapping():
            for key in value:
                yield from list_numbers(value[key], f"{name}.{key}".lstrip("."))
        case list() | tuple():
            for index, item in enumerate(value[:MAX_OUTPUTS]):
                yield from list_numbers(item, f"{name}.{index}".lstrip("."))


class Histograms:
    """A Prometheus histogram per output or feature of a server."""

    def __init__(
        self,
        name: str = SCORE_METRIC,
        description: str = "numbers of the predictions",
        label: str = "output",
    ) -> None:
        self.name = name
        self.description = description
        self.label = label
        self.version = ""
        self.counts: Counts = {}

    def add(self, counts: Counts) -> None:
        """Add the counts of more predictions or instances."""
        for output, buckets in counts.items():
            if output in self.counts or len(self.counts) < MAX_OUTPUTS:
                self.counts[output] = list(
                    map(sum, zip(self.counts.get(output, ZERO_COUNTS), buckets, strict=True))
                )

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric for the Prometheus client. It has no sum, as OpenMetrics requires for
        negative numbers."""
        text = f"{self.description}, by {self.label}"
        family = HistogramMetricFamily(self.name, text, labels=["version", self.label])
        for output, buckets in self.counts.items():
            family.add_metric(
                [self.version, output],
                list(zip(BUCKET_BOUNDS, accumulate(buckets), strict=True)),
                None,
            )
        yield family
