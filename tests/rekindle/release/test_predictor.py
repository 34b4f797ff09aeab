"""Predictions of a released model agree in all batches, and to the bit with `max_batch` 1."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rekindle.errors import DataError, RekindleError
from rekindle.release.compare import compute_difference
from rekindle.release.predictor import open_predictor
from tests.rekindle.serving import images

ROWS = [[random.Random(row).gauss(0, 2) for _ in range(8)] for row in range(300)]


@pytest.fixture
def release(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    facts = {"classes": 3}
    network = images.model(images.Model(), facts)
    with torch.no_grad():
        # this call updates the buffers of BatchNorm
        network(torch.tensor(ROWS)[:, None])
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    sha256 = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    card = {"sha256": sha256, "workload": images.__name__, "model": {"width": 5}}
    (tmp_path / "model.json").write_text(json.dumps(card))
    (tmp_path / "dataset.json").write_text(json.dumps({"facts": facts}))
    (tmp_path / "example.json").write_text(json.dumps({"instances": [{"pixels": ROWS[0]}]}))
    return tmp_path


def make_requests(predictor: Any, *sizes: int) -> list[Any]:
    """Create requests of the given sizes for the first rows."""
    rows = iter(ROWS)
    instances = [[{"pixels": next(rows)} for _ in range(size)] for size in sizes]
    return [predictor.Request.model_validate({"instances": request}) for request in instances]


def test_a_predictor_accepts_its_own_example(release: Path) -> None:
    predictor = open_predictor(release)
    [[prediction]] = predictor.predict([predictor.Request.model_validate(predictor.example())])
    assert sum(prediction.values()) == pytest.approx(1)


@pytest.mark.parametrize(("max_batch", "tolerance"), [(1, 0), (16, 1e-5), (1000, 1e-5)])
def test_a_prediction_does_not_depend_on_its_batch(
    release: Path, max_batch: int, tolerance: float
) -> None:
    predictor = open_predictor(release, max_batch)
    single = open_predictor(release, 1)

    single_predictions = [
        prediction
        for request in make_requests(single, *[1] * 300)
        for [prediction] in single.predict([request])
    ]

    for sizes in ((300,), (1, 7, 31, 32, 33, 100, 96), (299, 1)):
        batched_predictions = predictor.predict(make_requests(predictor, *sizes))
        assert [len(predictions) for predictions in batched_predictions] == list(sizes)
        assert (
            compute_difference(
                [prediction for predictions in batched_predictions for prediction in predictions],
                single_predictions,
            )
            <= tolerance
        )


def test_requests_share_batches_and_a_large_request_is_split(
    release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = open_predictor(release, 16)
    sizes = list[int]()
    predict = images.predict
    monkeypatch.setattr(
        images,
        "predict",
        lambda model, rows, facts: sizes.append(len(rows)) or predict(model, rows, facts),
    )
    predictor.predict(make_requests(predictor, 1, 2, 3))
    assert sizes == [6]
    predictor.predict(make_requests(predictor, 40))
    assert sizes == [6, 16, 16, 8]


def test_a_notebook_predicts_in_the_batches_of_the_evaluation(release: Path) -> None:
    assert vars(open_predictor(release))["max_batch"] == 1, (
        "an earlier release was evaluated one instance at a time"
    )
    (release / "verdict.json").write_text('{"max_batch": 32}')
    assert vars(open_predictor(release))["max_batch"] == 32


@pytest.mark.parametrize(("size", "words"), [(1, "1 instance"), (2, "2 instances")])
def test_a_predict_without_a_prediction_is_rejected(release: Path, size: int, words: str) -> None:
    (release / "dataset.json").write_text(json.dumps({"facts": {"classes": 3, "forgetful": True}}))
    predictor = open_predictor(release, 16)
    with pytest.raises(
        RekindleError, match=f"`predict` returned 0 predictions for {words}: it must return one for"
    ):
        predictor.predict(make_requests(predictor, size))


def test_weights_that_no_longer_fit_the_workload_are_rejected(release: Path) -> None:
    (release / "dataset.json").write_text(json.dumps({"facts": {"classes": 4}}))
    with pytest.raises(
        DataError, match=f"not contain a model of {images.__name__} .*If the workload changed"
    ):
        open_predictor(release)


def test_a_release_without_an_example_is_incomplete(release: Path) -> None:
    (release / "example.json").unlink()
    with pytest.raises(DataError, match=r"not a complete release .*example\.json"):
        open_predictor(release).example()
