"""Evaluates the candidate and the champion on the workload's test examples, with the same predictor as in serving.

The report contains a sample of the examples with the candidate's predictions. `verify` replays this sample, and its
first row becomes the server's example request.
"""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle import project
from rekindle.content.dataset import verify_dataset
from rekindle.content.weights import read_description, verify_weights
from rekindle.errors import CodeError, DataError, RekindleError
from rekindle.gate import Difference, Evaluation, Gate, Metric
from rekindle.release.bootstrap import Rows, paired_bootstrap, weighted_bootstrap
from rekindle.release.config import MAX_BATCH
from rekindle.release.examples import Examples
from rekindle.workload import compares, dataset_facts, digest_of

Parts = dict[str, NDArray[np.bool_]]  # name of a part → mask of its rows


def evaluate(
    workload: Any,
    candidate: Path,
    champion: Path | None,
    dataset: Path,
    report: Path,
    gate: Gate,
    max_batch: int = MAX_BATCH,
) -> Evaluation:
    """Compute the metrics of `candidate` and `champion` on the test examples of `dataset`. Raises DataError.

    The candidate was trained on `dataset`; the champion's directory contains the dataset.json of its own dataset. Both
    models predict the rows in the same batches, of `max_batch` rows in their order.
    """
    verify_dataset(dataset)
    verify_weights(candidate)
    all_examples = read_examples(workload, dataset)
    examples, warnings, incomparable = all_examples, list[str](), ""
    if champion and digest_of(champion) != digest_of(dataset):
        examples, warnings, incomparable = exclude_seen(workload, all_examples, dataset, dataset_facts(champion))
    all_examples.max_batch = examples.max_batch = max_batch
    other_predictions: dict[str, Any] = {}
    if champion and not incomparable:
        try:
            other_predictions["champion"] = score(examples, champion, champion)
        # for example, the champion expects inputs of another shape, or other classes
        except (DataError, CodeError, RuntimeError) as error:
            examples, warnings, incomparable = all_examples, [], f"{error}"
    if examples.baseline is not None:
        other_predictions["baseline"] = examples.baseline
    predictions = {"candidate": score(examples, candidate, dataset)} | other_predictions
    arrays = {name: to_array(values) for name, values in predictions.items()}
    truths, parts = to_array(examples.truths), split_parts(examples)
    by_part = {name: compute_metrics(workload.metrics, arrays, truths, rows) for name, rows in parts.items()}
    metrics = {
        model: {metric.name: mean(part[model][metric.name] for part in by_part.values()) for metric in workload.metrics}
        for model in arrays
    }
    named_parts = [{"name": name, "rows": int(parts[name].sum())} | values for name, values in by_part.items() if name]
    differences = {
        name: compute_difference(workload.metrics[0], arrays["candidate"], arrays[name], truths, parts, examples, gate)
        for name in other_predictions
    }
    warnings = examples.warnings + warnings
    report.mkdir(parents=True, exist_ok=True)
    with convert_errors("the report cannot be written"):
        evaluation = Evaluation(
            metrics,
            rows=len(examples),
            parts=named_parts,
            difference=differences.get("champion"),
            baseline_difference=differences.get("baseline"),
            chosen=getattr(read_description(candidate), "chosen", None),
            incomparable=incomparable,
            warnings=warnings,
        )
        return examples.report(report, predictions, evaluation)


def read_examples(
    workload: Any, dataset: Path, champion: dict[str, Any] | None = None, max_rows: int | None = None
) -> Examples:
    """Return the workload's examples; with a champion's facts, only the rows that the champion has not seen. Raises
    DataError.

    `max_rows`: number of rows to read, if the examples are yielded one by one.
    """
    result = workload.examples(dataset, champion) if compares(workload) else workload.examples(dataset)
    examples = result if isinstance(result, Examples) else Examples.of(islice(result, max_rows))
    if not len(examples) and champion is None:
        raise DataError("the dataset does not contain test examples for the evaluation. Provide more data.")
    return examples


def exclude_seen(
    workload: Any, examples: Examples, dataset: Path, facts: dict[str, Any]
) -> tuple[Examples, list[str], str]:
    """Return the examples that the champion has not seen, warnings, and why the champion cannot be compared, or ""."""
    if not compares(workload):
        return examples, ["the champion was trained on other data, and may have seen some of the test rows"], ""
    try:
        unseen_examples, count = read_examples(workload, dataset, facts), len(examples)
    except DataError as error:
        return examples, [], f"{error}"
    if not len(unseen_examples):
        return examples, [], f"it was trained on all {count:,} test rows."
    if len(unseen_examples) == count or unseen_examples.warnings != examples.warnings:
        return unseen_examples, [], ""
    warning = f"{count - len(unseen_examples):,} of {count:,} test rows are excluded: the champion was trained on them"
    return unseen_examples, [warning], ""


def score(examples: Examples, model: Path, dataset: Path) -> Any:
    """Return a model's predictions, one per example. Raises DataError or CodeError."""
    with convert_errors("`predict` failed on the test rows"):
        predictions = examples.score(model, dataset)
    if len(predictions) != len(examples):
        raise DataError(f"`score` returned {len(predictions)} predictions for {len(examples)} test rows.")
    return predictions


@contextmanager
def convert_errors(where: str) -> Iterator[None]:
    """Convert exceptions of the workload to errors with their location: a CodeError, if a retry cannot help."""
    try:
        yield
    except RekindleError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise project.as_error(error, where) from error


def to_array(values: Any) -> Any:
    """Convert numbers, or lists of numbers of equal shape, to a NumPy array; return other values unchanged."""
    try:
        array = np.asarray(values)
    except ValueError:  # the lists have different lengths
        return values
    return array if array.dtype.kind in "biuf" else values


def split_parts(examples: Examples) -> Parts:
    """Return the parts, sorted by name; without parts, a single part with an empty name."""
    if examples.parts is None:
        return {"": np.ones(len(examples), bool)}
    names, numbers = np.unique(np.asarray(examples.parts), return_inverse=True)
    return {str(name): numbers == number for number, name in enumerate(names)}


def select(values: Any, rows: Any) -> Any:
    """Return the values of some rows, given by their numbers or a mask."""
    return values[rows] if isinstance(values, np.ndarray) else [values[row] for row in np.arange(len(values))[rows]]


def compute_metrics(metrics: Any, predictions: dict[str, Any], truths: Any, rows: Any) -> dict[str, dict[str, float]]:
    """Compute the metrics of each model on some of the rows."""
    truths = select(truths, rows)
    return {
        name: {metric.name: compute(metric, select(array, rows), truths) for metric in metrics}
        for name, array in predictions.items()
    }


def mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))


def compute(metric: Metric, predictions: Any, truths: Any) -> float:
    """Compute the metric of these predictions."""
    assert metric.function, "workload.load rejects a metric without a function"
    with convert_errors(f"the metric {metric.name} cannot be computed"):
        return float(metric.function(predictions, truths))


def compute_difference(
    metric: Metric,
    candidate_predictions: Any,
    other_predictions: Any,
    truths: Any,
    parts: Parts,
    examples: Examples,
    gate: Gate,
) -> Difference:
    """Return the difference of `metric` between the predictions, with the interval of a paired bootstrap."""
    function, weighted = metric.function, metric.weighted
    assert function, "workload.load rejects a metric without a function"

    def difference_in_part(rows: Rows) -> float:
        models = (candidate_predictions, other_predictions)
        a, b = (function(select(array, rows), select(truths, rows)) for array in models)
        return a - b

    def difference(rows: Rows) -> float:
        return mean(difference_in_part(rows[mask[rows]]) for mask in parts.values())

    def differences(group: Rows, draws: NDArray[np.float32]) -> NDArray[np.float64]:
        assert weighted
        total = np.zeros(draws.shape[1])
        for mask in parts.values():
            arguments = select(truths, mask), group[mask], draws
            models = (candidate_predictions, other_predictions)
            a, b = (weighted(select(array, mask), *arguments) for array in models)
            total += a - b
        return total / len(parts)

    size, groups, settings = len(examples), examples.groups, (gate.resamples, gate.confidence)
    if weighted is None:
        return Difference(metric.name, *paired_bootstrap(difference, size, groups, *settings))
    interval = weighted_bootstrap(differences, size, groups, *settings)
    return Difference(metric.name, difference(np.arange(size)), *interval)
