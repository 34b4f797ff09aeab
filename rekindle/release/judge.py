"""Judges a candidate, and the champion beside it, on the workload's test examples, by the function that serves.

Leaves a sample of the examples with the candidate's predictions in the report, which `verify` replays and of which the
server's example request is the first.
"""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle import user_code
from rekindle.errors import CodeError, DataError, RekindleError
from rekindle.gate import Difference, Evaluation, Gate, Metric
from rekindle.release.bootstrap import Rows, paired_bootstrap, weighted_bootstrap
from rekindle.release.examples import Examples
from rekindle.workload import compares, dataset_facts, digest_of

Parts = dict[str, NDArray[np.bool_]]  # by name: which rows are in it


def evaluate(
    workload: Any, candidate: Path, champion: Path | None, dataset: Path, report: Path, gate: Gate
) -> Evaluation:
    """Metrics of the models in `candidate` and `champion` on the test examples of `dataset`. Raises DataError.

    The candidate belongs to `dataset`; the directory of the champion holds the dataset.json that it was trained with.
    """
    every = read_examples(workload, dataset)
    examples, warnings, incomparable = every, list[str](), ""
    if champion and digest_of(champion) != digest_of(dataset):
        examples, warnings, incomparable = unseen(workload, every, dataset, dataset_facts(champion))
    beside: dict[str, Any] = {}
    if champion and not incomparable:
        try:
            beside["champion"] = scored(examples, champion, champion)
        except (DataError, CodeError, RuntimeError) as error:  # another shape, other classes
            examples, warnings, incomparable = every, [], f"{error}"
    if examples.baseline is not None:
        beside["baseline"] = examples.baseline
    predictions = {"candidate": scored(examples, candidate, dataset)} | beside
    arrays = {name: as_array(values) for name, values in predictions.items()}
    truths, parts = as_array(examples.truths), parts_of(examples)
    by_part = {name: figures(workload.metrics, arrays, truths, rows) for name, rows in parts.items()}
    metrics = {
        model: {metric.name: mean(part[model][metric.name] for part in by_part.values()) for metric in workload.metrics}
        for model in arrays
    }
    shown = [{"name": name, "rows": int(parts[name].sum())} | values for name, values in by_part.items() if name]
    difference = compare(workload.metrics[0], arrays, truths, parts, examples, gate) if "champion" in arrays else None
    warnings = examples.warnings + warnings
    report.mkdir(parents=True, exist_ok=True)
    with told("the report cannot be written"):
        evaluation = Evaluation(metrics, len(examples), shown, difference, incomparable, warnings)
        return examples.report(report, predictions, evaluation)


def read_examples(workload: Any, dataset: Path, champion: dict[str, Any] | None = None) -> Examples:
    """The workload's examples; with the facts of a champion's dataset, those that it has not seen. Raises DataError."""
    given = workload.examples(dataset, champion) if compares(workload) else workload.examples(dataset)
    examples = given if isinstance(given, Examples) else Examples.of(given)
    if not len(examples) and champion is None:
        raise DataError("the dataset has no test examples: nothing can be judged. Give more data.")
    return examples


def unseen(workload: Any, examples: Examples, dataset: Path, facts: dict[str, Any]) -> tuple[Examples, list[str], str]:
    """The examples that a champion trained on a dataset with these `facts` has not seen, warnings, and why it cannot be
    compared if it has seen all."""
    if not compares(workload):
        return examples, ["the champion was trained on other data, and may have seen some of the test rows"], ""
    try:
        kept, count = read_examples(workload, dataset, facts), len(examples)
    except DataError as error:
        return examples, [], f"{error}"
    if not len(kept):
        return examples, [], f"it was trained on all {count:,} of them."
    if len(kept) == count or kept.warnings != examples.warnings:
        return kept, [], ""
    left_out = f"{count - len(kept):,} of {count:,} test rows were in the champion's training: they judge nothing"
    return kept, [left_out], ""


def scored(examples: Examples, model: Path, origin: Path) -> Any:
    """The predictions of a model, one for each example. Raises DataError or CodeError."""
    with told("`predict` failed on the test rows"):
        predictions = examples.score(model, origin)
    if len(predictions) != len(examples):
        raise DataError(f"`score` gave {len(predictions)} predictions for {len(examples)} test rows: give one each.")
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


def as_array(values: Any) -> Any:
    """The values as a NumPy array if they are numbers (or equal shapes of them), else the list."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        return values
    return array if array.dtype.kind in "biuf" else values


def parts_of(examples: Examples) -> Parts:
    """The parts in the order of their names; one without a name if the examples have none."""
    if examples.parts is None:
        return {"": np.ones(len(examples), bool)}
    names, place = np.unique(np.asarray(examples.parts), return_inverse=True)
    return {str(name): place == number for number, name in enumerate(names)}


def chosen(values: Any, rows: Any) -> Any:
    """The values of some rows, by their numbers or by a mask."""
    return values[rows] if isinstance(values, np.ndarray) else [values[row] for row in np.arange(len(values))[rows]]


def figures(metrics: Any, predictions: dict[str, Any], truths: Any, rows: Any) -> dict[str, dict[str, float]]:
    """The metrics of each model on some of the rows."""
    truths = chosen(truths, rows)
    return {
        name: {metric.name: value(metric, chosen(array, rows), truths) for metric in metrics}
        for name, array in predictions.items()
    }


def mean(values: Iterable[float]) -> float:
    """The mean over the parts."""
    return float(np.mean([*values]))


def value(metric: Metric, predictions: Any, truths: Any) -> float:
    """The metric of these predictions."""
    assert metric.function, "workload.load refuses a metric without one"
    with told(f"the metric {metric.name} cannot be computed"):
        return float(metric.function(predictions, truths))


def compare(
    metric: Metric, predictions: dict[str, Any], truths: Any, parts: Parts, examples: Examples, gate: Gate
) -> Difference:
    """Candidate minus champion, by a paired bootstrap."""
    function, many = metric.function, metric.weighted
    assert function, "workload.load refuses a metric without one"
    pair = predictions["candidate"], predictions["champion"]

    def gap(rows: Rows) -> float:
        ours, theirs = (function(chosen(array, rows), chosen(truths, rows)) for array in pair)
        return ours - theirs

    def difference(rows: Rows) -> float:
        return mean(gap(rows[inside[rows]]) for inside in parts.values())

    def differences(group: Rows, draws: NDArray[np.float32]) -> NDArray[np.float64]:
        assert many
        total = np.zeros(draws.shape[1])
        for inside in parts.values():
            part = chosen(truths, inside), group[inside], draws
            total += many(chosen(pair[0], inside), *part) - many(chosen(pair[1], inside), *part)
        return total / len(parts)

    size, groups, rule = len(examples), examples.groups, (gate.resamples, gate.confidence)
    if many is None:
        return Difference(metric.name, *paired_bootstrap(difference, size, groups, *rule))
    return Difference(metric.name, difference(np.arange(size)), *weighted_bootstrap(differences, size, groups, *rule))
