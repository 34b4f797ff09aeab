"""Scores are the same in the server and in the evaluation, and depend only on earlier transactions
of the card."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rekindle.errors import DataError
from rekindle.workload import read_dataset_facts
from steps.fraud.data.boosting import BOOSTED
from steps.fraud.data.sequences import Rows, open_dataset
from steps.fraud.fraud_config import CONTEXT, Model
from steps.fraud.handbook_protocol import score
from steps.fraud.models import FraudModel, build, load, loss, score_all, score_windows

FEATURES = 5


@pytest.fixture
def model() -> FraudModel:
    torch.manual_seed(1)
    names = [*(f"feature {n}" for n in range(FEATURES - 1)), BOOSTED]
    model: Any = build(
        "transformer",
        Model(window=8, layers=3),
        {"features": names, "mean": [0.0] * FEATURES, "std": [1.0, 2, 3, 4, 0]},
    )
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


def test_the_family_of_the_trees_scores_by_the_log_odds_of_the_trees() -> None:
    features = torch.randn(2, 40, 2)
    model = build(
        "trees", Model(), {"features": [BOOSTED, "amount"], "mean": [0.0] * 2, "std": [1.0] * 2}
    )
    assert torch.equal(score_all(model, features), features[..., 0].double().sigmoid())
    lengths = torch.tensor([3, 40])
    assert torch.equal(
        score_windows(model, features, lengths), features[[0, 1], lengths - 1, 0].double().sigmoid()
    )


def test_a_later_transaction_does_not_change_a_score(model: FraudModel):
    features = torch.randn(2, 40, FEATURES)
    changed = features.clone()
    # any values may follow the rows of a card in memory
    changed[:, 30:] = 1e30
    assert torch.equal(score_all(model, features)[:, :30], score_all(model, changed)[:, :30])


def test_a_score_depends_on_exactly_reach_earlier_transactions(model: FraudModel):
    assert model.reach == 3 * 7
    features = torch.randn(1, 40, FEATURES)
    scores = score_all(model, features)[0, -1]
    changed = features.clone()
    changed[:, : 39 - model.reach] = 7.0
    assert torch.equal(score_all(model, changed)[0, -1], scores)
    changed[:, 39 - model.reach] = 7.0
    assert not torch.equal(score_all(model, changed)[0, -1], scores)


def test_server_and_evaluation_give_the_same_score(expert: Path, small_dataset: Path):
    """Compare one window per transaction, as in a server, with long runs of rows, as in an
    evaluation."""
    model = load(expert)
    rows = Rows(small_dataset)
    index = torch.randperm(len(rows))[:300].sort().values.numpy()
    offline = score(model, rows, index)
    history = (index - rows.first[index]).clip(max=CONTEXT)

    windows = torch.zeros(len(index), CONTEXT + 1, rows.width)
    for window, row, past in zip(windows, index, history, strict=True):
        offsets = torch.from_numpy(rows.offsets[row - past : row + 1])
        window[: past + 1] = rows.windows(offsets, 1).squeeze(1)

    online = score_windows(model, windows, torch.from_numpy(history + 1))
    torch.testing.assert_close(online, torch.from_numpy(offline), rtol=0, atol=1e-6)
    single_score = score_windows(
        model, windows[7:8, : history[7] + 1], torch.tensor([history[7] + 1])
    )
    assert abs(single_score.item() - offline[7]) < 1e-6


def test_the_weights_include_names_and_statistics_of_the_inputs(expert: Path, small_dataset: Path):
    facts = read_dataset_facts(small_dataset)
    model = load(expert)
    assert model.feature_names == facts["features"]
    torch.testing.assert_close(model.mean, torch.tensor(facts["mean"]))


def test_gradients_are_the_same_bits_every_time(small_dataset: Path):
    def gradient() -> list[torch.Tensor]:
        samples = open_dataset(small_dataset)
        torch.manual_seed(3)
        model = build("transformer", Model(), read_dataset_facts(small_dataset))
        loss(model, samples.batch(torch.arange(32))).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradient(), gradient(), strict=True))


def test_training_reduces_the_loss(expert: Path, novice: Path, small_dataset: Path):
    samples = open_dataset(small_dataset)
    batch = samples.batch(torch.arange(len(samples)))
    with torch.no_grad():
        assert loss(load(expert), batch) < 0.7 * loss(load(novice), batch)


def test_positions_that_do_not_count_do_not_change_the_loss(model: FraudModel):
    features = torch.randn(4, 16, FEATURES)
    labels = torch.randint(2, (4, 16), dtype=torch.uint8)
    counted = torch.zeros(4, 16, dtype=torch.bool)
    counted[:, :5] = True
    assert torch.equal(
        loss(model, (features, labels, counted)),
        loss(model, (features, labels ^ ~counted, counted)),
    )
    assert loss(model, (features, labels, counted & False)) == 0


def test_a_damaged_model_is_rejected_with_its_path(expert: Path, tmp_path: Path):
    def broken(name: str, **files: bytes) -> Path:
        copy = tmp_path / name
        shutil.copytree(expert, copy)
        for file, content in files.items():
            (copy / f"model.{file}").write_bytes(content)
        return copy

    weights = (expert / "model.safetensors").read_bytes()
    other_shape = json.loads((expert / "model.json").read_text()) | {"model": {"width": 32}}
    for folder in (
        broken("torn", safetensors=weights[:-9]),
        broken("no json", json=b"{"),
        broken("other shape", json=json.dumps(other_shape).encode()),
        tmp_path / "nothing",
    ):
        with pytest.raises(DataError, match=f"{folder} is not a model"):
            load(folder)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"heads": 5}, r"width is 64: it must be a multiple of heads \(5\)"),
        ({"layers": 4}, r"must be at most 63, .* Set window to at most 16"),
    ],
)
def test_an_invalid_shape_names_the_rule(values: dict[str, int], rule: str):
    with pytest.raises(ValidationError, match=rule):
        Model(window=32).model_validate({"window": 32, **values})
