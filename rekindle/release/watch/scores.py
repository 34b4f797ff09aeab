"""Histograms of the numbers in predictions and instances, for the canary and the drift check.

Each number in a prediction is an output with a name such as `probabilities.3`; each number in an
instance is a feature. The value True counts as the number 1. A text counts as two numbers, which
are its length and a hash between 0 and 1. Only the first MAX_OUTPUTS outputs and features of a
model are counted.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any
from zlib import crc32

from prometheus_client.core import HistogramMetricFamily

# maximum number of outputs, and of features, to count
MAX_OUTPUTS = 16
SCORE_METRIC = "rekindle_model_score"
# bounds of the buckets for probabilities
UNIT_EDGES = [1e-4, 1e-3, 0.01, 0.02, *(step / 20 for step in range(1, 20)), 0.98, 0.99, 0.999, 1.0]
LARGE_EDGES = [
    *(float(number) for number in range(2, 11)),
    *(float(f"{10 ** (k / 8):.3g}") for k in range(9, 49)),
]
NEGATIVE_EDGES = [-float(f"{10 ** (k / 4):.3g}") for k in range(24, -1, -1)]
# upper bounds of all buckets except the last
BUCKET_EDGES = (
    *NEGATIVE_EDGES,
    -0.5,
    -0.2,
    -0.1,
    -0.01,
    0.0,
    *UNIT_EDGES,
    *LARGE_EDGES,
)
# numbers that are larger than MAX_NUMBER, which JSON allows, count as MAX_NUMBER
MAX_NUMBER = 1e300
BUCKET_BOUNDS = (*(repr(edge) for edge in BUCKET_EDGES), "+Inf")
ZERO_COUNTS = [0] * len(BUCKET_BOUNDS)
# output or feature → the count of each bucket
Counts = dict[str, list[int]]


def count_numbers(predictions: Iterable[Any]) -> Counts:
    """Count the numbers in predictions (or instances) per bucket, separately for each output (or
    feature)."""
    counts_by_output: Counts = {}
    for prediction in predictions:
        for output_name, number in list_numbers(prediction):
            if output_name not in counts_by_output:
                if len(counts_by_output) == MAX_OUTPUTS:
                    continue
                counts_by_output[output_name] = [*ZERO_COUNTS]
            counts_by_output[output_name][bisect_left(BUCKET_EDGES, number)] += 1
    return counts_by_output


def list_numbers(json_value: object, output_name: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name of the output or feature, number) for each number in a prediction or instance."""
    match json_value:
        case bool() | int() | float():
            yield output_name or "prediction", float(max(-MAX_NUMBER, min(json_value, MAX_NUMBER)))
        case str():
            yield f"{output_name or 'prediction'}.length", float(len(json_value))
            yield f"{output_name or 'prediction'}.hash", crc32(json_value.encode()) / 2**32
        case Mapping():
            for key in json_value:
                yield from list_numbers(json_value[key], f"{output_name}.{key}".lstrip("."))
        case list() | tuple():
            for index, list_item in enumerate(json_value[:MAX_OUTPUTS]):
                yield from list_numbers(list_item, f"{output_name}.{index}".lstrip("."))


class HistogramMetric:
    """A Prometheus histogram per output or feature of a server."""

    def __init__(
        self,
        metric_name: str = SCORE_METRIC,
        description: str = "numbers of the predictions",
        label_name: str = "output",
    ) -> None:
        self.name = metric_name
        self.description = description
        self.label = label_name
        self.version = ""
        self.counts: Counts = {}

    def add(self, counts: Counts) -> None:
        """Add the counts of more predictions or instances to the histograms."""
        for output_name, bucket_counts in counts.items():
            if output_name in self.counts or len(self.counts) < MAX_OUTPUTS:
                self.counts[output_name] = list(
                    map(
                        sum,
                        zip(self.counts.get(output_name, ZERO_COUNTS), bucket_counts, strict=True),
                    )
                )

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric for the Prometheus client. The metric has no sum, as OpenMetrics
        requires for negative numbers."""
        metric_description = f"{self.description}, by {self.label}"
        metric_family = HistogramMetricFamily(
            self.name, metric_description, labels=["version", self.label]
        )
        for output_name, bucket_counts in self.counts.items():
            metric_family.add_metric(
                [self.version, output_name],
                list(zip(BUCKET_BOUNDS, accumulate(bucket_counts), strict=True)),
                None,
            )
        yield metric_family
