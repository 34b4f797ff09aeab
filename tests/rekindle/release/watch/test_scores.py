"""Whatever a model predicts, a canary and a drift alarm have numbers to compare."""

from prometheus_client import CollectorRegistry, generate_latest

from rekindle.release.watch.scores import EDGES, OUTPUTS, Scores, counted, numbers


def test_predictions_of_every_shape_are_numbers() -> None:
    digit = {"digit": 7, "probabilities": [0.25, 0.75], "sure": True}
    names = ["digit", "probabilities.0", "probabilities.1", "sure"]
    assert list(numbers(digit)) == list(zip(names, [7.0, 0.25, 0.75, 1.0], strict=True))
    assert list(numbers(-3.5)) == [("prediction", -3.5)]
    (_, length), (name, hashed) = numbers("cat")
    assert (length, name) == (3.0, "prediction.hash") and 0 <= hashed < 1
    assert list(numbers(None)) == []
    assert list(numbers(10**400)) == [("prediction", 1e300)]
    assert len(counted([list(range(1000)), {str(key): key for key in range(1000)}])) == OUTPUTS


def test_what_prometheus_reads_is_a_whole_histogram() -> None:
    assert list(EDGES) == sorted(set(EDGES))
    scores, registry = Scores(), CollectorRegistry()
    scores.version = "3"
    registry.register(scores)
    scores.add(counted([0.004, 0.3, 5.0]))
    scores.add(counted([1e9, -2.0, 0.3]))
    lines = generate_latest(registry).decode().splitlines()
    of = 'output="prediction",version="3"'
    for line in (f'_bucket{{le="0.0",{of}}} 1.0', f'_bucket{{le="0.3",{of}}} 4.0', f'_bucket{{le="+Inf",{of}}} 6.0'):
        assert f"rekindle_model_score{line}" in lines
