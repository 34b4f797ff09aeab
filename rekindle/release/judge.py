"""Judges a candidate, and the champion beside it, on the workload's test examples, by the function that serves.

Leaves predictions.jsonl in the report: a sample of the examples with the candidate's predictions, which `verify`
replays and of which the server's example request is the first.
"""

import json
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rekindle import user_code
from rekindle.errors import CodeError, DataError, RekindleError
from rekindle.gate import Difference, Evaluation, Gate, Metric
from rekindle.release import predictor
from rekindle.release.bootstrap import Rows, paired_bootstrap
from rekindle.release.files import model_description, record_predictions
from rekindle.release.validation import parse
from rekindle.release.watch.reference import record_reference
from rekindle.workload import dataset_facts, digest_of

REPLAYED = 1000  # examples that `verify` can replay, at most


@dataclass(frozen=True)
class Examples:
    """The test rows of a dataset."""

    instances: list[dict[str, Any]]  # as a client sends them
    truths: list[Any]
    groups: list[Any] | None  # rows of one group are not independent of each other


def evaluate(
    workload: Any, candidate: Path, champion: Path | None, dataset: Path, report: Path, gate: Gate
) -> Evaluation:
    """Metrics of the models in `candidate` and `champion` on the test examples of `dataset`. Raises DataError.

    The candidate belongs to `dataset`; the directory of the champion holds the dataset.json that it was trained with.
    """
    examples, warnings, incomparable = read_examples(workload, dataset), list[str](), ""
    if champion and digest_of(champion) != digest_of(dataset):
        examples, warnings, incomparable = unseen(workload, examples, dataset_facts(champion))
    predictions = {"candidate": predict(workload, candidate, dataset_facts(dataset), examples.instances)}
    if champion and not incomparable:
        try:
            predictions["champion"] = predict(workload, champion, dataset_facts(champion), examples.instances)
        except (DataError, CodeError, RuntimeError) as error:  # another shape, other classes
            incomparable = f"{error}"
    if hasattr(workload, "baseline"):
        predictions["baseline"] = baseline(workload, dataset, examples.instances)
    arrays = {name: as_array(values) for name, values in predictions.items()}
    truths = as_array(examples.truths)
    metrics = {name: {m.name: value(m, array, truths) for m in workload.metrics} for name, array in arrays.items()}
    difference = compare(workload.metrics[0], arrays, truths, examples.groups, gate) if "champion" in arrays else None
    _write_report(report, examples.instances, predictions["candidate"])
    record_reference(report, predictions["candidate"], [*map(workload.Instance.model_validate, examples.instances)])
    return Evaluation(metrics, len(examples.truths), [], difference, incomparable, warnings)


def read_examples(workload: Any, dataset: Path) -> Examples:
    """The workload's examples, each a valid instance. Raises DataError."""
    rows = list(workload.examples(dataset))
    if not rows:
        raise DataError("the dataset has no test examples: nothing can be judged. Give more data.")
    for index, (instance, *_) in enumerate(rows):
        try:
            parse(workload.Instance, json.dumps(instance).encode())
        except (DataError, TypeError) as error:
            raise DataError(
                f"`examples` gives {workload.__name__} a test row {index} that no client could send: {error} It must "
                "yield what `Instance` accepts, and the truth beside it."
            ) from error
    grouped = len(rows[0]) > 2
    return Examples([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows] if grouped else None)


def unseen(workload: Any, examples: Examples, facts: dict[str, Any]) -> tuple[Examples, list[str], str]:
    """The examples that a champion trained on a dataset with these `facts` has not seen, warnings, and why it cannot be
    compared if it has seen all."""
    if not hasattr(workload, "seen"):
        return examples, ["the champion was trained on other data, and may have seen some of the test rows"], ""
    kept = [row for row, instance in enumerate(examples.instances) if not workload.seen(facts, instance)]
    count = len(examples.instances)
    if not kept or len(kept) == count:
        return examples, [], "" if kept else f"it was trained on all {count:,} of them."
    groups = [examples.groups[row] for row in kept] if examples.groups else None
    part = Examples([examples.instances[row] for row in kept], [examples.truths[row] for row in kept], groups)
    return (
        part,
        [f"{count - len(kept):,} of {count:,} test rows were in the champion's training: they judge nothing"],
        "",
    )


def predict(workload: Any, folder: Path, facts: dict[str, Any], instances: list[dict[str, Any]]) -> list[Any]:
    """What a server of the model in `folder` would answer. Raises DataError if its files do not fit the workload."""
    import torch

    torch.set_num_threads(1)  # as a server does by default: small layers on several threads of a busy machine crawl
    model = predictor.open_model(workload, folder, model_description(folder), facts)
    parsed = [workload.Instance.model_validate(instance) for instance in instances]
    with told("`predict` failed on the test rows"):
        return check_json(predictor.predict(workload, model, parsed, facts))


def check_json(predictions: list[Any]) -> list[Any]:
    """The predictions. Raises CodeError that names the type of one that is not JSON."""
    for prediction in predictions:
        try:
            json.dumps(prediction)
        except (TypeError, ValueError) as error:
            raise CodeError(
                f"`predict` gave a prediction that is not JSON ({error}): it must give numbers, text, lists and "
                "objects; `.tolist()` and `.item()` make them of a tensor."
            ) from error
    return predictions


@contextmanager
def told(where: str) -> Iterator[None]:
    """Raise an exception of the workload as an error with its place: a CodeError, if it would come again."""
    try:
        yield
    except RekindleError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise user_code.as_error(error, where) from error


def baseline(workload: Any, dataset: Path, instances: list[dict[str, Any]]) -> list[Any]:
    """The predictions of the workload's simple model. Raises DataError if it gives too few."""
    with told("`baseline` failed whose `instances` are dicts"):
        predictions = list(workload.baseline(dataset, instances))
    if len(predictions) != len(instances):
        raise DataError(
            f"`baseline` gave {len(predictions)} predictions for {len(instances)} instances: give one each."
        )
    return predictions


def as_array(values: list[Any]) -> Any:
    """The values as a NumPy array if they are numbers (or equal shapes of them), else the list."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        return values
    return array if array.dtype.kind in "biuf" else values


def value(metric: Metric, predictions: Any, truths: Any) -> float:
    """The metric of these predictions."""
    assert metric.function, "a workload without `evaluate` gives each metric a function"
    with told(f"the metric {metric.name} cannot be computed"):
        return float(metric.function(predictions, truths))


def compare(
    metric: Metric, predictions: dict[str, Any], truths: Any, groups: list[Any] | None, gate: Gate
) -> Difference:
    """Candidate minus champion, by a paired bootstrap."""
    assert metric.function
    function = metric.function

    def difference(rows: Rows) -> float:
        drawn = truths[rows] if isinstance(truths, np.ndarray) else [truths[row] for row in rows]
        values = [
            function(array[rows] if isinstance(array, np.ndarray) else [array[row] for row in rows], drawn)
            for array in (predictions["candidate"], predictions["champion"])
        ]
        return values[0] - values[1]

    result = paired_bootstrap(difference, len(truths), groups, gate.resamples, gate.confidence)
    return Difference(metric.name, *result)


def _write_report(report: Path, instances: list[dict[str, Any]], predictions: list[Any]) -> None:
    report.mkdir(parents=True, exist_ok=True)
    sample = sorted(random.Random(0).sample(range(len(instances)), min(REPLAYED, len(instances))))
    record_predictions(report, ((instances[row], predictions[row]) for row in sample))
