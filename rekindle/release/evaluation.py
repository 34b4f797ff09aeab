"""Evaluates the candidate and the champion on the workload's test rows, with the predictor that
servers use.

The report of an evaluation contains a sample of the test rows with the candidate's predictions. The
step `verify` sends the sample to the servers, and the first row of the sample becomes the server's
example request.
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

from argolocal.common.json_text import describe_non_finite
from rekindle.content.dataset import verify_dataset
from rekindle.content.weights import read_description, verify_weights
from rekindle.errors import CodeError, DataError, RekindleError, format_in_one_line, to_number
from rekindle.gate import Difference, Evaluation, Gate, Metric
from rekindle.project import user_exceptions
from rekindle.release.bootstrap import RowNumbers, compute_weighted_bootstrap, paired_bootstrap
from rekindle.release.examples import Examples
from rekindle.release.serve_config import DEFAULT_MAX_BATCH
from rekindle.workload import read_dataset_digest, read_dataset_facts, takes_champion_facts

# name of a part of the test rows → mask of its rows
PartMasks = dict[str, NDArray[np.bool_]]
# name of a part → metrics by name
PartMetrics = dict[str, dict[str, float]]


class ScoredModel(NamedTuple):
    """The predictions of a model, and its metrics on each part of the test rows."""

    predictions: Any
    metrics: PartMetrics


class ComparedRows(NamedTuple):
    """The test rows on which the candidate is compared with the champion. If the champion cannot be
    compared, `incomparable_reason` says why, and `examples` are all test rows."""

    examples: Examples
    warnings: list[str]
    incomparable_reason: str


class NotFiniteError(DataError):
    """A metric is NaN or infinite."""


def evaluate(
    workload: Any,
    candidate_folder: Path,
    champion_folder: Path | None,
    dataset_folder: Path,
    report_folder: Path,
    gate: Gate,
    max_batch: int = DEFAULT_MAX_BATCH,
) -> Evaluation:
    """Compute the metrics of `candidate_folder` and `champion_folder` on the test rows of
    `dataset_folder`, and write the report. Raises DataError.

    The candidate was trained on `dataset_folder`; the directory `champion_folder` contains the
    dataset.json of the champion's dataset. Both models predict the rows in the same batches of up
    to `max_batch` rows.
    """
    verify_dataset(dataset_folder)
    verify_weights(candidate_folder)
    all_examples = read_examples(workload, dataset_folder)
    compared_rows = select_compared_rows(workload, all_examples, champion_folder, dataset_folder)
    all_examples.max_batch = max_batch
    compared_rows.examples.max_batch = max_batch

    scores_of_others: dict[str, ScoredModel] = {}

    if champion_folder and not compared_rows.incomparable_reason:
        try:
            predictions = score(compared_rows.examples, champion_folder, champion_folder)
            scores_of_others["champion"] = compute_finite_metrics(
                workload, predictions, compared_rows.examples
            )
        # the champion cannot predict these rows, for example because it expects inputs of another
        # shape
        except (DataError, CodeError, RuntimeError) as error:
            compared_rows = ComparedRows(all_examples, [], f"{error}")

    examples, warnings, incomparable_reason = compared_rows
    if examples.baseline is not None:
        try:
            scores_of_others["baseline"] = compute_finite_metrics(
                workload, examples.baseline, examples
            )
        except NotFiniteError as error:
            warnings = [*warnings, f"the baseline is not compared: {error}"]

    candidate_scores = compute_finite_metrics(
        workload, score(examples, candidate_folder, dataset_folder), examples
    )

    differences = {
        model_name: compute_difference(
            workload.metrics[0], candidate_scores, other_scores, examples, gate
        )
        for model_name, other_scores in scores_of_others.items()
    }
    scores_by_model = {"candidate": candidate_scores, **scores_of_others}
    evaluation = Evaluation(
        {
            model_name: average_parts(scored_model.metrics)
            for model_name, scored_model in scores_by_model.items()
        },
        rows=len(examples),
        parts=describe_named_parts(scores_by_model, examples),
        difference=differences.get("champion"),
        baseline_difference=differences.get("baseline"),
        chosen=read_description(candidate_folder).chosen or None,
        incomparable=incomparable_reason,
        warnings=examples.warnings + warnings,
    )
    return _write_report(examples, report_folder, scores_by_model, evaluation)


def _write_report(
    examples: Examples,
    report_folder: Path,
    scores_by_model: dict[str, ScoredModel],
    evaluation: Evaluation,
) -> Evaluation:
    """Write the report, and return the evaluation, to which the workload's `report` may have added
    fields. Raises NotFiniteError if the workload's `report` has added a number that is not
    finite."""
    report_folder.mkdir(parents=True, exist_ok=True)
    predictions_by_model = {
        model_name: scored_model.predictions for model_name, scored_model in scores_by_model.items()
    }
    with convert_errors("the report cannot be written"):
        evaluation = examples.report(report_folder, predictions_by_model, evaluation)

    problem_text = describe_non_finite({"metrics": evaluation.metrics, "parts": evaluation.parts})
    if problem_text:
        raise NotFiniteError(
            f"`report` returned an evaluation whose {problem_text}. Leave such numbers out."
        )

    return evaluation


def read_examples(
    workload: Any,
    dataset_folder: Path,
    champion_facts: dict[str, Any] | None = None,
    max_rows: int | None = None,
) -> Examples:
    """Return the workload's test rows. With `champion_facts`, the facts of the champion's dataset,
    return only the rows that the champion was not trained on. Raises DataError.

    `max_rows`: maximum number of rows to read, if the workload yields them one by one.
    """
    if takes_champion_facts(workload):
        workload_examples = workload.examples(dataset_folder, champion_facts)
    else:
        workload_examples = workload.examples(dataset_folder)

    if not isinstance(workload_examples, Iterable | Examples):
        raise DataError(
            f"`examples` returned {format_in_one_line(workload_examples)}: it must yield (instance,"
            " truth) for each test row."
        )

    if isinstance(workload_examples, Examples):
        examples = workload_examples
    else:
        examples = Examples.of(islice(workload_examples, max_rows))

    if not len(examples) and champion_facts is None:
        raise DataError(
            "the dataset does not contain test examples for the evaluation. Provide more data."
        )

    return examples


def select_compared_rows(
    workload: Any, examples: Examples, champion_folder: Path | None, dataset_folder: Path
) -> ComparedRows:
    """Return the test rows for a comparison with the champion. If the champion was trained on
    another dataset, return only the rows that the champion was not trained on."""
    if champion_folder is None:
        return ComparedRows(examples, [], "")
    if read_dataset_digest(champion_folder) == read_dataset_digest(dataset_folder):
        return ComparedRows(examples, [], "")

    champion_facts = read_dataset_facts(champion_folder)
    return exclude_seen_rows(workload, examples, dataset_folder, champion_facts)


def exclude_seen_rows(
    workload: Any, examples: Examples, dataset_folder: Path, champion_facts: dict[str, Any]
) -> ComparedRows:
    """Return the test rows that the champion was not trained on. If the workload cannot select
    these rows, return all test rows with a warning."""
    if not takes_champion_facts(workload):
        return ComparedRows(
            examples,
            ["the champion was trained on other data, and may have seen some of the test rows"],
            "",
        )

    try:
        unseen_examples = read_examples(workload, dataset_folder, champion_facts)
        row_count = len(examples)
    except DataError as error:
        return ComparedRows(examples, [], f"{error}")

    if not len(unseen_examples):
        return ComparedRows(examples, [], f"it was trained on all {row_count:,} test rows.")
    if len(unseen_examples) == row_count or unseen_examples.warnings != examples.warnings:
        return ComparedRows(unseen_examples, [], "")

    excluded_warning = (
        f"{row_count - len(unseen_examples):,} of {row_count:,} test rows are excluded: the"
        " champion was trained on them"
    )
    return ComparedRows(unseen_examples, [excluded_warning], "")


def score(examples: Examples, model_folder: Path, dataset_folder: Path) -> Any:
    """Return the predictions of a model, one per test row. Raises DataError or CodeError."""
    with convert_errors("`predict` failed on the test rows"):
        predictions = examples.score(model_folder, dataset_folder)
    if len(predictions) != len(examples):
        raise DataError(
            f"`score` returned {len(predictions)} predictions for {len(examples)} test rows."
        )
    return predictions


@contextmanager
def convert_errors(error_location: str) -> Iterator[None]:
    """Convert exceptions of the workload's code to errors that name the location in the code. The
    error is a CodeError if a retry cannot help."""
    try:
        yield
    except RekindleError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise user_exceptions.convert_exception(error, error_location) from error


def to_array(nested_numbers: object) -> Any:
    """Convert numbers, or nested lists of numbers, to a NumPy array; return other values
    unchanged."""
    try:
        number_array = np.asarray(nested_numbers)
    except ValueError:
        # nested lists of different lengths are not an array
        return nested_numbers
    if number_array.dtype.kind in "biuf":
        return number_array
    return nested_numbers


def split_parts(examples: Examples) -> PartMasks:
    """Return the parts of the test rows by name. If the workload defines no parts, return one part
    with an empty name."""
    if examples.parts is None:
        return {"": np.ones(len(examples), bool)}
    part_names, part_numbers = np.unique(np.asarray(examples.parts), return_inverse=True)
    return {
        str(part_name): part_numbers == part_number
        for part_number, part_name in enumerate(part_names)
    }


def select_rows(row_values: Any, selected_rows: Any) -> Any:
    """Return the values of the rows that are selected by row numbers or by a mask."""
    if isinstance(row_values, np.ndarray):
        return row_values[selected_rows]
    return [row_values[row_number] for row_number in np.arange(len(row_values))[selected_rows]]


def compute_metrics(
    metrics: Sequence[Metric], predictions: object, examples: Examples
) -> PartMetrics:
    """Compute the metrics of a model on each part of the test rows."""
    prediction_array = to_array(predictions)
    all_truths = to_array(examples.truths)
    part_metrics: PartMetrics = {}
    for part_name, part_rows in split_parts(examples).items():
        selected_predictions = select_rows(prediction_array, part_rows)
        truths = select_rows(all_truths, part_rows)
        part_metrics[part_name] = {
            metric.name: compute_metric(metric, selected_predictions, truths) for metric in metrics
        }
    return part_metrics


def compute_finite_metrics(workload: Any, predictions: object, examples: Examples) -> ScoredModel:
    """Compute the metrics of a model on each part of the test rows. Raises NotFiniteError if a
    metric is NaN or infinite."""
    metrics_by_part = compute_metrics(workload.metrics, predictions, examples)
    for part_name, metric_values in metrics_by_part.items():
        for metric_name, metric_value in metric_values.items():
            if not math.isfinite(metric_value):
                if part_name:
                    rows_description = f'the test rows of the part "{part_name}"'
                else:
                    rows_description = "the test rows"

                raise NotFiniteError(
                    f"the metric {metric_name} is {metric_value} on {rows_description}: it must be"
                    " a finite number. Let the metric's function return a number for such rows, or"
                    " leave them out of `examples`."
                )

    return ScoredModel(predictions, metrics_by_part)


def describe_named_parts(
    scores_by_model: dict[str, ScoredModel], examples: Examples
) -> list[dict[str, Any]]:
    """Return, for each named part, its name, its number of rows, and the metrics of each model."""
    return [
        {"name": part_name, "rows": int(part_rows.sum())}
        | {
            model_name: scores_by_model[model_name].metrics[part_name]
            for model_name in scores_by_model
        }
        for part_name, part_rows in split_parts(examples).items()
        if part_name
    ]


def average_parts(metrics_by_part: PartMetrics) -> dict[str, float]:
    """Return the mean of each metric over the parts."""
    metric_names = next(iter(metrics_by_part.values()))
    return {
        metric_name: compute_mean(
            part_values[metric_name] for part_values in metrics_by_part.values()
        )
        for metric_name in metric_names
    }


def compute_mean(numbers: Iterable[float]) -> float:
    return float(np.mean([*numbers]))


def compute_metric(metric: Metric, predictions: object, truths: object) -> float:
    """Compute one metric of predictions. Raises CodeError if the result is not a number."""
    assert metric.function, "workload.load rejects a metric without a function"
    with convert_errors(f"the metric {metric.name} cannot be computed"):
        raw_value = metric.function(predictions, truths)
    metric_value = to_number(raw_value)
    if metric_value is None:
        raise CodeError(
            f"the metric {metric.name} is {format_in_one_line(raw_value)}: its function must"
            " return a number."
        )
    return metric_value


def compute_difference(
    metric: Metric,
    candidate_scores: ScoredModel,
    other_scores: ScoredModel,
    examples: Examples,
    gate: Gate,
) -> Difference:
    """Return the difference of `metric` between two models, with the interval of a paired
    bootstrap."""
    model_arrays = [
        to_array(scored_model.predictions) for scored_model in (candidate_scores, other_scores)
    ]
    truths = to_array(examples.truths)
    part_masks = split_parts(examples)
    metric_function = metric.function
    weighted_function = metric.weighted
    assert metric_function, "workload.load rejects a metric without a function"

    def compute_part_difference(row_numbers: RowNumbers) -> float:
        candidate_value, other_value = (
            metric_function(select_rows(model_array, row_numbers), select_rows(truths, row_numbers))
            for model_array in model_arrays
        )
        return candidate_value - other_value

    def compute_mean_difference(row_numbers: RowNumbers) -> float:
        return compute_mean(
            compute_part_difference(row_numbers[part_mask[row_numbers]])
            for part_mask in part_masks.values()
        )

    def compute_draw_differences(
        group_numbers: RowNumbers, draw_weights: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        assert weighted_function
        difference_sums = np.zeros(draw_weights.shape[1])
        for part_mask in part_masks.values():
            weighted_arguments = (
                select_rows(truths, part_mask),
                group_numbers[part_mask],
                draw_weights,
            )
            candidate_values, other_values = (
                weighted_function(select_rows(model_array, part_mask), *weighted_arguments)
                for model_array in model_arrays
            )
            difference_sums += candidate_values - other_values
        return difference_sums / len(part_masks)

    row_count = len(examples)
    row_groups = examples.groups
    bootstrap_settings = (gate.resamples, gate.confidence)

    if weighted_function is None:
        return Difference(
            metric.name,
            *paired_bootstrap(compute_mean_difference, row_count, row_groups, *bootstrap_settings),
        )

    confidence_interval = compute_weighted_bootstrap(
        compute_draw_differences, row_count, row_groups, *bootstrap_settings
    )
    return Difference(
        metric.name, compute_mean_difference(np.arange(row_count)), *confidence_interval
    )
