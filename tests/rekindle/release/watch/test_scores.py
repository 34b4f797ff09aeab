"""Predictions of any form are converted to numbers for the canary and for drift."""

from prometheus_client import CollectorRegistry, generate_latest

from rekindle.release.watch.scores import (
    BUCKET_EDGES,
    MAX_OUTPUTS,
    HistogramMetric,
    count_numbers,
    list_numbers,
)


def test_numbers_are_counted_in_predictions_of_every_form() -> None:
    digit = {"digit": 7, "probabilities": [0.25, 0.75], "sure": True}
    names = ["digit", "probabilities.0", "probabilities.1", "sure"]
    assert list(list_numbers(digit)) == list(zip(names, [7.0, 0.25, 0.75, 1.0], strict=True))
    assert list(list_numbers(-3.5)) == [("prediction", -3.5)]
    (_, length), (name, hashed) = list_numbers("cat")
    assert length == 3.0
    assert name == "prediction.hash"
    assert 0 <= hashed < 1
    assert list(list_numbers(None)) == []
    assert list(list_numbers(10**400)) == [("prediction", 1e300)]
    assert (
        len(count_numbers([list(range(1000)), {str(key): key for key in range(1000)}]))
        == MAX_OUTPUTS
    )


def test_prometheus_reads_a_complete_histogram() -> None:
    assert list(BUCKET_EDGES) == sorted(set(BUCKET_EDGES))
    scores = HistogramMetric()
    registry = CollectorRegistry()
    scores.version = "3"
    registry.register(scores)
    scores.add(count_numbers([0.004, 0.3, 5.0]))
    scores.add(count_numbers([1e9, -2.0, 0.3]))
    lines = generate_latest(registry).decode().splitlines()
    labels = 'output="prediction",version="3"'
    for bound, count in (("0.0", 1), ("0.3", 4), ("+Inf", 6)):
        assert f'rekindle_model_score_bucket{{le="{bound}",{labels}}} {count}.0' in lines
