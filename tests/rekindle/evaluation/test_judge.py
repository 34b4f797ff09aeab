"""A model is judged by the very predictions that it will serve, beside the champion, or the gate decides on others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rekindle.errors import CodeError, DataError
from rekindle.evaluation.judge import evaluate
from rekindle.gate import Gate
from rekindle.serving.release import PREDICTIONS
from rekindle.workload import prepare
from tests.rekindle.evaluation import lines


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    prepare(lines, lines.Data(source="none"), tmp_path / "dataset")
    return tmp_path / "dataset"


def trained(folder: Path, slope: float, dataset: Path | None = None) -> Path:
    """A model directory; with a dataset that of a champion."""
    folder.mkdir()
    save_file({"slope": torch.tensor([slope])}, folder / "model.safetensors")
    card = {"sha256": f"{slope}", "workload": lines.__name__, "model": {}}
    (folder / "model.json").write_text(json.dumps(card))
    if dataset:
        (folder / "dataset.json").write_text((dataset / "dataset.json").read_text())
    return folder


def judge(candidate: Path, champion: Path | None, dataset: Path, report: Path, workload: Any = lines) -> Any:
    return evaluate(workload, candidate, champion, dataset, report, Gate(resamples=100))


def test_candidate_champion_and_baseline_meet_the_same_rows(dataset: Path, tmp_path: Path) -> None:
    good, bad = trained(tmp_path / "good", 2.0, dataset), trained(tmp_path / "bad", 1.0, dataset)
    judged = judge(good, bad, dataset, tmp_path / "report")
    assert judged.rows == 20
    assert judged.metrics["candidate"] == {"rmse": pytest.approx(0.0, abs=1e-6)}
    assert judged.metrics["champion"]["rmse"] > judged.metrics["baseline"]["rmse"] / 2 > 1
    assert judged.difference.high < 0, "lower is better: the candidate's error is surely the smaller one"
    replayed = [json.loads(line) for line in (tmp_path / "report" / PREDICTIONS).read_text().splitlines()]
    assert len(replayed) == 20
    assert replayed[3]["prediction"] == pytest.approx(2 * replayed[3]["instance"]["x"])


def test_a_champion_of_another_shape_is_no_error_but_said(dataset: Path, tmp_path: Path) -> None:
    other = trained(tmp_path / "other", 1.0, dataset)
    save_file({"another": torch.zeros(3)}, other / "model.safetensors")
    judged = judge(trained(tmp_path / "good", 2.0), other, dataset, tmp_path / "report")
    assert judged.difference is None
    assert "holds no model of" in judged.incomparable


@pytest.mark.parametrize(("until", "rows"), [(-1, 20), (4, 15), (99, 20)])
def test_rows_that_the_champion_was_trained_on_do_not_judge_the_candidate_beside_it(
    until: float, rows: int, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion = trained(tmp_path / "champion", 1.0, dataset)
    record = json.loads((champion / "dataset.json").read_text()) | {"digest": "older", "facts": {"until": until}}
    (champion / "dataset.json").write_text(json.dumps(record))
    candidate = trained(tmp_path / "good", 2.0)
    judged = judge(candidate, champion, dataset, tmp_path / "report")
    assert (judged.rows, judged.warnings) == (
        20,
        ["the champion was trained on other data, and may have seen some of the test rows"],
    )
    monkeypatch.setattr(lines, "seen", lambda facts, instance: instance["x"] <= facts["until"], raising=False)
    judged = judge(candidate, champion, dataset, tmp_path / "report")
    assert judged.rows == rows
    left_out = ["5 of 20 test rows were in the champion's training: they judge nothing"]
    assert judged.warnings == (left_out if rows == 15 else [])
    assert judged.incomparable == ("it was trained on all 20 of them." if until == 99 else "")


def test_a_dataset_without_test_rows_is_refused(dataset: Path, tmp_path: Path) -> None:
    (dataset / "test.json").write_text("[]")
    with pytest.raises(DataError, match="no test examples"):
        judge(trained(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")


def test_an_example_that_no_client_could_send_is_refused_by_number(dataset: Path, tmp_path: Path) -> None:
    (dataset / "test.json").write_text('[[1.0, 2.0], ["high", 2.0]]')
    with pytest.raises(DataError, match=r"test row 1 that no client could send: x is 'high'"):
        judge(trained(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("baseline", lambda path, instances: [1.0], "`baseline` gave 1 predictions for 20 instances"),
        (
            "baseline",
            lambda path, instances: instances[0].x,
            r"`baseline` failed whose `instances` are dicts: \S+test_judge.py:\d+: AttributeError: ",
        ),
        (
            "predict",
            lambda model, instances, facts: 1 / 0,
            r"`predict` failed on the test rows: \S+test_judge.py:\d+: ZeroDivisionError: ",
        ),
        (
            "predict",
            lambda model, instances, facts: torch.ones(1),
            r"`predict` returned Tensor: it must return a list .* such as tensor.tolist\(\)",
        ),
        (
            "predict",
            lambda model, instances, facts: [torch.ones(1)],
            r"`predict` gave a .*Tensor is not JSON serializable",
        ),
    ],
)
def test_a_mistake_in_the_workload_is_named_and_not_tried_again(
    name: str, function: Any, words: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, name, function)
    with pytest.raises((CodeError, DataError), match=words):
        judge(trained(tmp_path / "good", 2.0), None, dataset, tmp_path / "report")
