"""The evaluation uses the same predictions as the servers will return, for the candidate and the
champion on the same rows."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import load_file, save_file

from rekindle.content.dataset import FILE_LIST, record_files
from rekindle.content.dataset_record import DATASET
from rekindle.content.verified_release import REFERENCE
from rekindle.content.weights import weights_sha256
from rekindle.errors import CodeError, DataError
from rekindle.gate import Evaluation, Gate, Metric
from rekindle.release.bootstrap import paired_bootstrap
from rekindle.release.compare import read_numerics, read_predictions
from rekindle.release.evaluation import evaluate, exclude_seen_rows, read_examples
from rekindle.release.examples import Examples
from rekindle.workload import Example, prepare, read_dataset_facts
from tests.rekindle.release import lines


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    prepare(lines, lines.Data(source="none"), tmp_path / "dataset")
    return tmp_path / "dataset"


def write_model(folder: Path, slope: float, dataset: Path | None = None) -> Path:
    """Write a model directory; with a dataset, write the directory of a champion."""
    folder.mkdir()
    tensors = {"slope": torch.tensor([slope])}
    save_file(tensors, folder / "model.safetensors")
    card = {"sha256": weights_sha256(tensors), "workload": lines.__name__, "model": {}}
    (folder / "model.json").write_text(json.dumps(card))
    if dataset:
        for name in (DATASET, FILE_LIST):
            (folder / name).write_bytes((dataset / name).read_bytes())
    return folder


def run_evaluation(
    candidate: Path, champion: Path | None, dataset: Path, report: Path, workload: Any = lines
) -> Any:
    return evaluate(workload, candidate, champion, dataset, report, Gate(resamples=100))


def replayed_rows(report: Path) -> list[tuple[dict[str, Any], Any]]:
    """Return the instances that `verify` sends, with their expected predictions."""
    requests = read_predictions(report, 10_000)
    return [
        row
        for request, expected in requests
        for row in zip(request["instances"], expected, strict=True)
    ]


def only_unseen(examples: Any) -> Any:
    """Omit the examples up to the x that a champion was trained on."""

    def unseen(path: Path, champion: dict[str, Any] | None) -> list[Any]:
        return [row for row in examples(path) if not champion or row[0]["x"] > champion["until"]]

    return unseen


def test_candidate_champion_and_baseline_are_evaluated_on_the_same_rows(
    dataset: Path, tmp_path: Path
) -> None:
    good_model = write_model(tmp_path / "good", 2.0, dataset)
    bad_model = write_model(tmp_path / "bad", 1.0, dataset)
    evaluation = run_evaluation(good_model, bad_model, dataset, tmp_path / "report")
    assert evaluation.rows == 20
    assert evaluation.metrics["candidate"] == {"rmse": pytest.approx(0.0, abs=1e-6)}
    assert evaluation.metrics["champion"]["rmse"] > evaluation.metrics["baseline"]["rmse"] / 2 > 1
    assert evaluation.difference.high < 0, (
        "lower is better: the candidate's error is surely the smaller one"
    )
    replayed = replayed_rows(tmp_path / "report")
    assert len(replayed) == 20
    assert replayed[3][1] == pytest.approx(2 * replayed[3][0]["x"])


def test_a_champion_of_another_shape_is_reported_as_incomparable(
    dataset: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", 1.0, dataset)
    save_file({"another": torch.zeros(3)}, other / "model.safetensors")
    evaluation = run_evaluation(
        write_model(tmp_path / "good", 2.0), other, dataset, tmp_path / "report"
    )
    assert evaluation.difference is None
    assert "does not contain a model of" in evaluation.incomparable


@pytest.mark.parametrize("name", ["test.json", "dataset.json", FILE_LIST])
def test_a_changed_byte_of_the_dataset_is_not_evaluated(
    name: str, dataset: Path, tmp_path: Path
) -> None:
    data = bytearray((dataset / name).read_bytes())
    data[-3] ^= 1
    (dataset / name).write_bytes(data)
    with pytest.raises(
        DataError, match=f"{dataset}/{FILE_LIST if name == FILE_LIST else name}.* --no-cache"
    ):
        run_evaluation(write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")


def test_a_changed_byte_of_the_weights_is_not_evaluated(dataset: Path, tmp_path: Path) -> None:
    candidate = write_model(tmp_path / "good", 2.0)
    described = json.loads((candidate / "model.json").read_text())["sha256"]
    data = bytearray((candidate / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (candidate / "model.safetensors").write_bytes(data)
    message = (
        rf"{candidate}/model\.safetensors have the sha256 \w{{64}}, but model\.json has"
        rf" {described}: .*--no-cache"
    )
    with pytest.raises(DataError, match=message):
        run_evaluation(candidate, None, dataset, tmp_path / "report")


@pytest.mark.parametrize(("until", "rows"), [(-1, 20), (4, 15), (99, 20)])
def test_rows_that_the_champion_was_trained_on_are_excluded(
    until: float, rows: int, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion = write_model(tmp_path / "champion", 1.0, dataset)
    record = json.loads((champion / "dataset.json").read_text()) | {
        "digest": "older",
        "facts": {"until": until},
    }
    (champion / "dataset.json").write_text(json.dumps(record))
    candidate = write_model(tmp_path / "good", 2.0)
    evaluation = run_evaluation(candidate, champion, dataset, tmp_path / "report")
    assert evaluation.rows == 20
    assert evaluation.warnings == [
        "the champion was trained on other data, and may have seen some of the test rows"
    ]
    monkeypatch.setattr(lines, "examples", only_unseen(lines.examples))
    evaluation = run_evaluation(candidate, champion, dataset, tmp_path / "report")
    assert evaluation.rows == rows
    warnings = ["5 of 20 test rows are excluded: the champion was trained on them"]
    assert evaluation.warnings == (warnings if rows == 15 else [])
    assert evaluation.incomparable == ("it was trained on all 20 test rows." if until == 99 else "")


def test_a_dataset_without_test_rows_is_rejected(dataset: Path, tmp_path: Path) -> None:
    (dataset / "test.json").write_text("[]")
    record_files(dataset)
    with pytest.raises(DataError, match="does not contain test examples"):
        run_evaluation(write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")


def test_the_error_of_an_invalid_example_has_its_row(dataset: Path, tmp_path: Path) -> None:
    (dataset / "test.json").write_text('[[1.0, 2.0], ["high", 2.0]]')
    record_files(dataset)
    with pytest.raises(DataError, match=r"test row 1, which is not a valid instance: x is 'high'"):
        run_evaluation(write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        (
            "examples",
            lambda path: Examples([1.0, 2.0], [{"x": 1.0}, {"x": 2.0}], baseline=[20.0]),
            "the examples have 1 baseline for 2 truths",
        ),
        (
            "examples",
            lambda path: Short([1.0, 2.0]),
            "`score` returned 1 predictions for 2 test rows",
        ),
        (
            "examples",
            lambda path: Unreported([1.0, 2.0]),
            r"the report cannot be written: FILE:\d+: ZeroDivisionError: ",
        ),
        (
            "predict",
            lambda model, instances, facts: 1 / 0,
            r"`predict` failed on the test rows: FILE:\d+: ZeroDivisionError: ",
        ),
        (
            "predict",
            lambda model, instances, facts: torch.ones(1),
            r"`predict` returned Tensor: it must return a list .* such as tensor.tolist\(\)",
        ),
        (
            "predict",
            lambda model, instances, facts: [torch.ones(1)] * len(instances),
            r"`predict` returned a .*Tensor is not JSON serializable",
        ),
    ],
)
def test_a_mistake_in_the_workload_is_reported_and_not_retried(
    name: str,
    function: Any,
    words: str,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, name, function)
    with pytest.raises((CodeError, DataError), match=words.replace("FILE", re.escape(__file__))):
        run_evaluation(write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")


class Short(Examples):
    """A workload that returns too few predictions."""

    def score(self, model: Path, dataset: Path) -> list[float]:
        return [1.0]


class Unreported(Examples):
    """A workload that fails while it writes the report."""

    def score(self, model: Path, dataset: Path) -> list[float]:
        return [1.0, 2.0]

    def report(self, out: Path, predictions: dict[str, Any], evaluation: Evaluation) -> Evaluation:
        return [evaluation][1 // 0]


class Server:
    """Predicts y = slope * x + shift, where the shift is a part of the dataset's state."""

    class Request(BaseModel):
        instances: list[lines.Instance]

    def __init__(self, release: Path) -> None:
        self.slope = float(load_file(release / "model.safetensors")["slope"])
        self.shift = float((release / "state/shift").read_text())

    def predict(self, requests: Sequence[Request]) -> list[list[float]]:
        return [
            [self.slope * instance.x + self.shift for instance in request.instances]
            for request in requests
        ]


def test_a_custom_predictor_is_evaluated_with_the_state_of_each_dataset(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "predictor", Server, raising=False)
    for folder, shift in (
        (dataset, "0.5"),
        (write_model(tmp_path / "champion", 2.0, dataset), "3"),
    ):
        (folder / "state").mkdir()
        (folder / "state/shift").write_text(shift)

    record_files(dataset)
    evaluation = run_evaluation(
        write_model(tmp_path / "good", 2.0), tmp_path / "champion", dataset, tmp_path / "report"
    )
    assert evaluation.metrics["candidate"] == {"rmse": pytest.approx(0.5)}
    assert evaluation.metrics["champion"] == {"rmse": pytest.approx(3)}
    assert [
        prediction - 2 * instance["x"]
        for instance, prediction in replayed_rows(tmp_path / "report")
    ] == [0.5] * 20


def accuracy(predictions: list[str], truths: list[str]) -> float:
    return sum(a == b for a, b in zip(predictions, truths, strict=True)) / len(truths)


def test_the_difference_of_the_first_metric_is_resampled_by_group(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups are ten customers, each with two equal rows."""
    rows = [({"x": float(x)}, "high" if x > 9 else "low", x // 2) for x in range(20)]
    monkeypatch.setattr(lines, "examples", lambda path: iter(rows))
    monkeypatch.setattr(
        lines, "metrics", (Metric("accuracy", accuracy), Metric("error", lambda p, t: 1.0))
    )

    def labels(model: Any, instances: list[Any], facts: dict[str, Any]) -> list[str]:
        return ["high" if instance.x * float(model.slope) > 18 else "low" for instance in instances]

    monkeypatch.setattr(lines, "predict", labels)
    good_model = write_model(tmp_path / "good", 2.0, dataset)
    bad_model = write_model(tmp_path / "bad", 1.0, dataset)
    evaluation = run_evaluation(good_model, bad_model, dataset, tmp_path / "report")
    assert evaluation.metrics == {
        "candidate": {"accuracy": 1.0, "error": 1.0},
        "champion": {"accuracy": 0.55, "error": 1.0},
    }
    right = np.array([row[1] == ("high" if row[0]["x"] > 18 else "low") for row in rows])
    mean, low, high = paired_bootstrap(
        lambda drawn: 1.0 - float(right[drawn].mean()), 20, [row[2] for row in rows], resamples=100
    )
    assert evaluation.difference.metric == "accuracy"
    assert evaluation.difference.mean == pytest.approx(mean)
    assert (evaluation.difference.low, evaluation.difference.high) == pytest.approx((low, high))
    assert evaluation.incomparable == ""
    assert evaluation.warnings == []


def test_excluded_rows_are_excluded_from_all_columns(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion = write_model(tmp_path / "champion", 1.0, dataset)
    record = json.loads((champion / "dataset.json").read_text()) | {
        "digest": "older",
        "facts": {"until": 9},
    }
    (champion / "dataset.json").write_text(json.dumps(record))
    rows = [({"x": float(x)}, 2.0 * x, f"customer {x}") for x in range(20)]
    monkeypatch.setattr(lines, "examples", only_unseen(lambda path: iter(rows)))
    facts = read_dataset_facts(champion)
    examples, warnings, incomparable = exclude_seen_rows(
        lines, read_examples(lines, dataset), dataset, facts
    )
    assert examples.instances == [row[0] for row in rows[10:]]
    assert examples.truths == [row[1] for row in rows[10:]]
    assert examples.groups == [row[2] for row in rows[10:]]
    assert warnings == ["10 of 20 test rows are excluded: the champion was trained on them"]
    assert not incomparable


def test_examples_may_give_the_reason_why_a_champion_cannot_be_compared(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion = write_model(tmp_path / "champion", 1.0, dataset)
    record = json.loads((champion / "dataset.json").read_text()) | {
        "digest": "older",
        "facts": {"until": 9},
    }
    (champion / "dataset.json").write_text(json.dumps(record))
    original = lines.examples

    def refuse(path: Path, champion: dict[str, Any] | None) -> Any:
        if champion:
            raise DataError(f"it knows the rows up to {champion['until']}.")
        return original(path)

    monkeypatch.setattr(lines, "examples", refuse)
    evaluation = run_evaluation(
        write_model(tmp_path / "good", 2.0), champion, dataset, tmp_path / "report"
    )

    assert evaluation.rows == 20
    assert evaluation.incomparable == "it knows the rows up to 9."
    assert evaluation.warnings == []

    assert set(evaluation.metrics) == {"candidate", "baseline"}


def test_the_report_has_histograms_of_instances_and_predictions(
    dataset: Path, tmp_path: Path
) -> None:
    run_evaluation(write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")
    reference = json.loads((tmp_path / "report" / REFERENCE).read_text())
    assert (
        reference["rows"]
        == sum(reference["scores"]["prediction"])
        == sum(reference["features"]["x"])
        == 20
    )
    assert reference["scores"]["prediction"] != reference["features"]["x"]


def test_the_report_has_a_thousand_rows_for_the_replay(dataset: Path, tmp_path: Path) -> None:
    rows = [[float(x), 2.0 * x] for x in range(1200)]
    (dataset / "test.json").write_text(json.dumps(rows))
    record_files(dataset)
    run_evaluation(write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")
    replayed = replayed_rows(tmp_path / "report")
    values = [instance["x"] for instance, _ in replayed]
    assert len(values) == 1000
    assert values == sorted(set(values))
    assert values != list(range(1000))
    assert [prediction for _, prediction in replayed] == [2 * x for x in values]


@pytest.mark.parametrize(("max_batch", "sizes"), [(16, [16, 4]), (1, [1] * 20)])
def test_a_verdict_depends_on_batches_of_a_fixed_size_and_order(
    max_batch: int, sizes: list[int], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = list[list[float]]()
    predict = lines.predict

    def record(model: Any, instances: list[Any], facts: dict[str, Any]) -> list[float]:
        batches.append([instance.x for instance in instances])
        return predict(model, instances, facts)

    monkeypatch.setattr(lines, "predict", record)
    report = tmp_path / "report"

    evaluate(
        lines,
        write_model(tmp_path / "good", 2.0),
        None,
        dataset,
        report,
        Gate(resamples=100),
        max_batch,
    )

    assert [len(batch) for batch in batches] == sizes
    assert [x for batch in batches for x in batch] == [float(x) for x in range(20)]
    assert bool(read_numerics(report)) == (max_batch == 1), (
        "only single predictions have the same bits in a server"
    )


def mean_of_squares(predictions: Any, truths: Any) -> float:
    return float(np.mean(np.square(predictions - truths)))


def weighted_squares(predictions: Any, truths: Any, group_values: Any, draws: Any) -> Any:
    squares = np.square(predictions - truths)
    weights = draws[group_values]
    return (squares[:, None] * weights).sum(0) / weights.sum(0)


@pytest.mark.parametrize("weighted", [None, weighted_squares])
def test_a_metric_is_the_mean_over_the_parts_and_so_is_its_interval(
    weighted: Any, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two weeks with 15 and 5 rows have the same weight. The error of the champion grows with x."""
    parts = ["2024-05-13" if x < 15 else "2024-05-20" for x in range(20)]
    rows = [Example({"x": float(x)}, 2.0 * x, x // 2, part=parts[x]) for x in range(20)]
    monkeypatch.setattr(lines, "examples", lambda path: iter(rows[::-1]))
    monkeypatch.setattr(
        lines, "metrics", (Metric("mse", mean_of_squares, better="lower", weighted=weighted),)
    )
    good_model = write_model(tmp_path / "good", 2.0, dataset)
    bad_model = write_model(tmp_path / "bad", 1.0, dataset)
    evaluation = run_evaluation(good_model, bad_model, dataset, tmp_path / "report")
    first_error = np.mean(np.square(np.arange(15)))
    second_error = np.mean(np.square(np.arange(15, 20)))
    assert [(part["name"], part["rows"]) for part in evaluation.parts] == [
        ("2024-05-13", 15),
        ("2024-05-20", 5),
    ]
    assert [part["champion"]["mse"] for part in evaluation.parts] == pytest.approx(
        [first_error, second_error]
    )
    assert evaluation.metrics["champion"]["mse"] == pytest.approx((first_error + second_error) / 2)
    assert evaluation.difference.mean == pytest.approx(-(first_error + second_error) / 2)

    assert (
        -380
        < evaluation.difference.low
        < evaluation.difference.mean
        < evaluation.difference.high
        < -100
    )


def undefined_for(
    rows: Callable[[Any], Any], metric_value: float = math.nan
) -> Callable[[Any, Any], float]:
    """Return a metric that is NaN if the predictions equal `values`."""
    return lambda predictions, truths: metric_value if np.any(rows(predictions)) else 1.0


@pytest.mark.parametrize("metric_value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_named_with_the_part_of_the_rows(
    metric_value: float, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Example({"x": float(x)}, 2.0 * x, part="first" if x < 15 else "last") for x in range(20)
    ]
    monkeypatch.setattr(lines, "examples", lambda path: iter(rows))
    metric = Metric("auc", undefined_for(lambda predictions: predictions > 35, metric_value))
    monkeypatch.setattr(lines, "metrics", (*lines.metrics, metric))

    message = (
        rf'the metric auc is {metric_value} on the test rows of the part "last": it must be a finite'
        r" number\. Let"
    )
    with pytest.raises(DataError, match=message):
        run_evaluation(write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")

    assert not (tmp_path / "report").exists()


def test_a_champion_with_a_metric_that_is_not_finite_is_incomparable(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lines, "metrics", (Metric("auc", undefined_for(lambda predictions: predictions < 0)),)
    )
    good_model = write_model(tmp_path / "good", 2.0)
    bad_model = write_model(tmp_path / "bad", -1.0, dataset)
    evaluation = run_evaluation(good_model, bad_model, dataset, tmp_path / "report")
    assert "the metric auc is nan on the test rows" in evaluation.incomparable
    assert evaluation.metrics == {"candidate": {"auc": 1.0}, "baseline": {"auc": 1.0}}


def test_a_baseline_with_a_metric_that_is_not_finite_is_left_out_with_a_warning(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Example({"x": float(x)}, 2.0 * x, baseline=math.nan if x == 3 else 1.0) for x in range(20)
    ]
    monkeypatch.setattr(lines, "examples", lambda path: iter(rows))
    evaluation = run_evaluation(
        write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report"
    )
    assert evaluation.metrics.keys() == {"candidate"}
    assert evaluation.baseline_difference is None
    [warning] = evaluation.warnings
    assert warning.startswith(
        "the baseline is not compared: the metric rmse is nan on the test rows: "
    )


@pytest.mark.parametrize("slope", [math.nan, math.inf])
def test_a_prediction_that_is_not_finite_is_named_with_its_row(
    slope: float, dataset: Path, tmp_path: Path
) -> None:
    rows = [[float(x), 2.0 * x] for x in range(1, 20)]
    (dataset / "test.json").write_text(json.dumps(rows))
    record_files(dataset)

    with pytest.raises(
        DataError, match=rf"for test row 0: prediction is {slope}: it must be a finite number"
    ):
        run_evaluation(write_model(tmp_path / "broken", slope), None, dataset, tmp_path / "report")

    evaluation = run_evaluation(
        write_model(tmp_path / "good", 2.0),
        write_model(tmp_path / "bad", slope, dataset),
        dataset,
        tmp_path / "report",
    )

    assert f"prediction is {slope}" in evaluation.incomparable
    assert "champion" not in evaluation.metrics


def test_an_instance_that_is_not_finite_is_named_with_its_row(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lines, "examples", lambda path: iter([({"x": 1.0}, 2.0), ({"x": math.nan}, 2.0)])
    )
    with pytest.raises(
        DataError, match="gives test row 1, which is not a valid instance: x is nan: it must be"
    ):
        run_evaluation(write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")


def divide(predictions: Any, truths: Any) -> float:
    """Return the mean prediction for large truths, without a check: a sample without large truths
    raises ZeroDivisionError."""
    large = [
        float(prediction)
        for prediction, truth in zip(predictions, truths, strict=True)
        if truth > 36
    ]
    return sum(large) / len(large)


def test_a_draw_without_a_value_does_not_count(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "metrics", (Metric("share", divide),))
    good_model = write_model(tmp_path / "good", 2.0, dataset)
    bad_model = write_model(tmp_path / "bad", 1.0, dataset)
    evaluation = run_evaluation(good_model, bad_model, dataset, tmp_path / "report")
    assert (
        evaluation.difference.mean
        == evaluation.difference.low
        == evaluation.difference.high
        == 19.0
    )


class Extended(Examples):
    """A report that adds a figure which is undefined for this candidate."""

    def report(self, out: Path, predictions: dict[str, Any], evaluation: Evaluation) -> Evaluation:
        return replace(
            evaluation,
            metrics={"candidate": evaluation.metrics["candidate"] | {"recall": math.nan}},
        )


def test_a_figure_that_report_adds_must_be_finite(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "examples", lambda path: Extended(np.array([2.0]), [{"x": 1.0}]))
    with pytest.raises(
        DataError,
        match=r"an evaluation whose metrics\.candidate\.recall is nan: it must be a finite",
    ):
        run_evaluation(write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")


@pytest.mark.parametrize(("result", "text"), [(None, "None"), ("0.5", "'0.5'"), ([1, 2], "[1, 2]")])
def test_a_metric_that_is_not_a_number_is_named(
    result: Any, text: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "metrics", (Metric("auc", lambda predictions, truths: result),))
    with pytest.raises(
        CodeError, match=rf"^the metric auc is {re.escape(text)}: its function must return a number"
    ):
        run_evaluation(write_model(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "`examples` returned None: it must yield (instance, truth) for each test row."),
        ([({"x": 1.0},)], "`examples` gives no test rows ("),
        ([3], "`examples` gives no test rows ("),
    ],
)
def test_examples_of_another_form_are_refused(
    rows: Any, message: str, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "examples", lambda path: rows)
    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        read_examples(lines, dataset)
