"""Evaluates the candidate and the champion on the workload's test rows, with the predictor that
servers use.

The report contains a sample of the test rows with the candidate's predictions. The step `verify`
sends this sample to the servers, and its first row becomes the server's example request.
"""

import math
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from argolocal.common.json_text import describe_not_finite
from rekindle.content.dataset import verify_dataset
from rekindle.content.weights import read_description, verify_weights
from rekindle.errors import CodeError, DataError, RekindleError, in_one_line, to_number
from rekindle.gate import Difference, Evaluation, Gate, Metric
from rekindle.project import user_exceptions
from rekindle.release.bootstrap import Rows, paired_bootstrap, weighted_bootstrap
from rekindle.release.examples import Examples
from rekindle.release.serve_config import MAX_BATCH
from rekindle.workload import dataset_facts, read_dataset_digest, takes_champion_facts

Parts = dict[str, NDArray[np.bool_]]  # name of a part of the test rows → mask of its rows
PartMetrics = dict[str, dict[str, float]]  # name of a part → metrics by name


class Scored(NamedTuple):
    """The predictions of a model, and its metrics on each part of the test rows."""

    predictions: Any
    metrics: PartMetrics


class NotFinite(DataError):
    """A metric is NaN or infinite."""


def evaluate(
    workload: Any,
    candidate: Path,
    champion: Path | None,
    dataset: Path,
    report: Path,
    gate: Gate,
    max_batch: int = MAX_BATCH,
) -> Evaluation:
    """Compute the metrics of `candidate` and `champion` on the test rows of `dataset`, and write
    the report. Raises DataError.

    The candidate was trained on `dataset`; the directory `champion` contains the dataset.json of
    the champion's dataset. Both models predict the rows in the same batches of up to `max_batch`
    rows.
    """
    verify_dataset(dataset)
    verify_weights(candidate)
    all_examples = read_examples(workload, dataset)
    examples = all_examples
    warnings = list[str]()
    incomparable = ""

    if champion and read_dataset_digest(champion) != read_dataset_digest(dataset):
        examples, warnings, incomparable = exclude_seen_rows(
            workload, all_examples, dataset, dataset_facts(champion)
        )

    all_examples.max_batch = examples.max_batch = max_batch

    others: dict[str, Scored] = {}

    if champion and not incomparable:
        try:
            others["champion"] = compute_finite_metrics(
                workload, score(examples, champion, champion), examples
            )
        # the champion cannot predict these rows, for example because it expects inputs of another
        # shape
        except (DataError, CodeError, RuntimeError) as error:
            examples = all_examples
            warnings = []
            incomparable = f"{error}"

    if examples.baseline is not None:
        try:
            others["baseline"] = compute_finite_metrics(workload, examples.baseline, examples)
        except NotFinite as error:
            warnings = [*warnings, f"the baseline is not compared: {error}"]

    candidate_scores = compute_finite_metrics(
        workload, score(examples, candidate, dataset), examples
    )

    differences = {
        name: compute_difference(workload.metrics[0], candidate_scores, other, examples, gate)
        for name, other in others.items()
    }
    scored = {"candidate": candidate_scores, **others}
    predictions = {name: model.predictions for name, model in scored.items()}
    warnings = examples.warnings + warnings
    report.mkdir(parents=True, exist_ok=True)

    with convert_errors("the report cannot be written"):
        evaluation = Evaluation(
            {name: average_parts(model.metrics) for name, model in scored.items()},
            rows=len(examples),
            parts=describe_named_parts(scored, examples),
            difference=differences.get("champion"),
            baseline_difference=differences.get("baseline"),
            chosen=read_description(candidate).chosen or None,
            incomparable=incomparable,
            warnings=warnings,
        )

        evaluation = examples.report(report, predictions, evaluation)

    problem = describe_not_finite({"metrics": evaluation.metrics, "parts": evaluation.parts})
    if problem:
        raise NotFinite(f"`report` returned an evaluation whose {problem}. Leave such numbers out.")

    return evaluation


def read_examples(
    workload: Any,
    dataset: Path,
    champion: dict[str, Any] | None = None,
    max_rows: int | None = None,
) -> Examples:
    """Return the workload's test rows; given `champion` (the facts of its dataset), only rows that
    the champion was not trained on. Raises DataError.

    `max_rows`: maximum number of rows to read, if the workload yields them one by one.
    """
    if takes_champion_facts(workload):
        result = workload.examples(dataset, champion)
    else:
        result = workload.examples(dataset)

    if not isinstance(result, Iterable | Examples):
        raise DataError(
            f"`examples` returned {in_one_line(result)}: it must yield (instance, truth) for each"
            " test row."
        )

    if isinstance(result, Examples):
        examples = result
    else:
        examples = Examples.of(islice(result, max_rows))

    if not len(examples) and champion is None:
        raise DataError(
            "the dataset does not contain test examples for the evaluation. Provide more data."
        )

    return examples


def exclude_seen_rows(
    workload: Any, examples: Examples, dataset: Path, facts: dict[str, Any]
) -> tuple[Examples, list[str], str]:
    """Return three values: the test rows that the champion was not trained on, warnings, and the
    reason why it cannot be compared ("" if it can)."""
    if not takes_champion_facts(workload):
        return (
            examples,
            ["the champion was trained on other data, and may have seen some of the test rows"],
            "",
        )

    try:
        unseen_examples = read_examples(workload, dataset, facts)
        count = len(examples)
    except DataError as error:
        return examples, [], f"{error}"

    if not len(unseen_examples):
        return examples, [], f"it was trained on all {count:,} test rows."
    if len(unseen_examples) == count or unseen_examples.warnings != examples.warnings:
        return unseen_examples, [], ""

    warning = (
        f"{count - len(unseen_examples):,} of {count:,} test rows are excluded: the champion was"
        " trained on them"
    )
    return unseen_examples, [warning], ""


def score(examples: Examples, model: Path, dataset: Path) -> Any:
    """Return the predictions of a model, one per test row. Raises DataError or CodeError."""
    with convert_errors("`predict` failed on the test rows"):
        predictions = examples.score(model, dataset)
    if len(predictions) != len(examples):
        raise DataError(
            f"`score` returned {len(predictions)} predictions for {len(examples)} test rows."
        )
    return predictions


@contextmanager
def convert_errors(where: str) -> Iterator[None]:
    """Convert exceptions of the workload's code to errors with their location, of type CodeError if
    a retry cannot help."""
    try:
        yield
    except RekindleError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise user_exceptions.as_error(error, where) from error


def to_array(values: object) -> Any:
    """Convert numbers, or nested lists of numbers, to a NumPy array; return other values
    unchanged."""
    try:
        array = np.asarray(values)
    except ValueError:  # the lists have different lengths
        return values
    if array.dtype.kind in "biuf":
        return array
    return values


def split_parts(examples: Examples) -> Parts:
    """Return the parts of the test rows by name. If the workload defines no parts, return one part
    with an empty name."""
    if examples.parts is None:
        return {"": np.ones(len(examples), bool)}
    names, numbers = np.unique(np.asarray(examples.parts), return_inverse=True)
    return {str(name): numbers == number for number, name in enumerate(names)}


def select_rows(values: Any, rows: Any) -> Any:
    """Return the values of the rows that are selected by row numbers or by a mask."""
    if isinstance(values, np.ndarray):
        return values[rows]
    return [values[row] for row in np.arange(len(values))[rows]]


def compute_metrics(
    metrics: Sequence[Metric], predictions: object, examples: Examples
) -> PartMetrics:
    """Compute the metrics of a model on each part of the test rows."""
    array = to_array(predictions)
    all_truths = to_array(examples.truths)
    result: PartMetrics = {}
    for name, rows in split_parts(examples).items():
        selected_predictions = select_rows(array, rows)
        truths = select_rows(all_truths, rows)
        result[name] = {
            metric.name: compute_metric(metric, selected_predictions, truths) for metric in metrics
        }
    return result


def compute_finite_metrics(workload: Any, predictions: object, examples: Examples) -> Scored:
    """Compute the metrics of a model on each part. Raises NotFinite if a metric is NaN or
    infinite."""
    by_part = compute_metrics(workload.metrics, predictions, examples)
    for part_name, values in by_part.items():
        for name, value in values.items():
            if not math.isfinite(value):
                if part_name:
                    rows = f'the test rows of the part "{part_name}"'
                else:
                    rows = "the test rows"

                raise NotFinite(
                    f"the metric {name} is {value} on {rows}: it must be a finite number. Let the"
                    " metric's function return a number for such rows, or leave them out of"
                    " `examples`."
                )

    return Scored(predictions, by_part)


def describe_named_parts(scored: dict[str, Scored], examples: Examples) -> list[dict[str, Any]]:
    """Return, for each named part, its name, its number of rows, and the metrics of each model."""
    return [
        {"name": name, "rows": int(rows.sum())}
        | {model: scored[model].metrics[name] for model in scored}
        for name, rows in split_parts(examples).items()
        if name
    ]


def average_parts(by_part: PartMetrics) -> dict[str, float]:
    """Return the mean of each metric over the parts."""
    names = next(iter(by_part.values()))
    return {name: compute_mean(values[name] for values in by_part.values()) for name in names}


def compute_mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))


def compute_metric(metric: Metric, predictions: object, truths: object) -> float:
    """Compute one metric of predictions. Raises CodeError if the result is not a number."""
    assert metric.function, "workload.load rejects a metric without a function"
    with convert_errors(f"the metric {metric.name} cannot be computed"):
        result = metric.function(predictions, truths)
    value = to_number(result)
    if value is None:
        raise CodeError(
            f"the metric {metric.name} is {in_one_line(result)}: its function must return a number."
        )
    return value


def compute_difference(
    metric: Metric, candidate: Scored, other: Scored, examples: Examples, gate: Gate
) -> Difference:
    """Return the difference of `metric` between two models, with the interval of a paired
    bootstrap."""
    models = [to_array(model.predictions) for model in (candidate, other)]
    truths = to_array(examples.truths)
    parts = split_parts(examples)
    function = metric.function
    weighted = metric.weighted
    assert function, "workload.load rejects a metric without a function"

    def difference_in_part(rows: Rows) -> float:
        a, b = (function(select_rows(array, rows), select_rows(truths, rows)) for array in models)
        return a - b

    def difference(rows: Rows) -> float:
        return compute_mean(difference_in_part(rows[mask[rows]]) for mask in parts.values())

    def differences(group: Rows, draws: NDArray[np.float32]) -> NDArray[np.float64]:
        assert weighted
        total = np.zeros(draws.shape[1])
        for mask in parts.values():
            arguments = select_rows(truths, mask), group[mask], draws
            a, b = (weighted(select_rows(array, mask), *arguments) for array in models)
            total += a - b
        return total / len(parts)

    size = len(examples)
    groups = examples.groups
    settings = (gate.resamples, gate.confidence)

    if weighted is None:
        return Difference(metric.name, *paired_bootstrap(difference, size, groups, *settings))

    interval = weighted_bootstrap(differences, size, groups, *settings)
    return Difference(metric.name, difference(np.arange(size)), *interval)
