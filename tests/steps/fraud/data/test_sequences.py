"""Tests of training windows: every transaction counts exactly once, without future transactions and
other cards."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import DataError
from steps.fraud.data.sequences import (
    LENGTH,
    OVERLAP,
    SCORED,
    Rows,
    TrainingWindows,
    open_dataset,
    scoring_windows,
)
from steps.fraud.data.transactions import DAY
from steps.fraud.fraud_config import CONTEXT


@pytest.fixture(scope="module")
def windows(small_dataset: Path) -> TrainingWindows:
    return open_dataset(small_dataset)


def list_positions(windows: TrainingWindows) -> torch.Tensor:
    """Return the row at each position of each window."""
    return windows.start[:, None] + torch.arange(LENGTH)


def counted_rows(windows: TrainingWindows) -> np.ndarray:
    """Return the rows of all counted positions of all windows."""
    _, _, counted = windows.batch(torch.arange(len(windows)))
    return list_positions(windows)[counted].numpy()


def test_every_training_transaction_counts_once(windows: TrainingWindows):
    rows = windows.rows
    begin = rows.facts.first_time
    end = rows.facts.train_end
    begin += min(14 * DAY, (end - begin) // 4)
    expected = np.flatnonzero((rows.times >= begin) & (rows.times < end))
    np.testing.assert_array_equal(np.sort(counted_rows(windows)), expected)


def test_a_counted_transaction_has_enough_context_of_its_own_card(windows: TrainingWindows):
    rows = windows.rows
    _, _, counted = windows.batch(torch.arange(len(windows)))
    window, position = counted.nonzero(as_tuple=True)
    start = windows.start[window].numpy()
    row = start + position.numpy()
    assert (rows.first[row] <= start).all()
    assert ((start == rows.first[row]) | (position.numpy() >= OVERLAP)).all()


def test_a_batch_equals_the_rows_of_the_shards_bit_for_bit(
    windows: TrainingWindows, small_dataset: Path
):
    assert len(windows.rows.facts.shards) >= 2, "the test must cross shards"

    def load(name: str) -> np.ndarray:
        files = sorted((small_dataset / "shards").glob(f"{name}-*"))
        return np.concatenate([np.load(file) for file in files])

    all_features = load("features")
    labels = load("labels")
    indices = torch.randperm(len(windows))[:200]
    batch, fraud, counted = windows.batch(indices)
    row = list_positions(windows)[indices][counted].numpy()
    np.testing.assert_array_equal(batch[counted].numpy(), all_features[row])
    np.testing.assert_array_equal(fraud[counted].numpy(), labels[row])


def test_a_batch_depends_on_its_indices_only_and_is_finite(windows: TrainingWindows):
    indices = torch.arange(len(windows)).flip(0)
    for batch_array, single_array in zip(
        windows.batch(indices), windows.batch(indices[5:6]), strict=True
    ):
        assert torch.equal(batch_array[5:6], single_array)
    # values after the rows of a card have weight 0, and 0 * nan is nan
    assert windows.batch(indices)[0].isfinite().all()


def test_an_incomplete_dataset_is_rejected_by_name(small_dataset: Path, tmp_path: Path):
    for name in ("features-00001", "labels-00000"):
        copy = tmp_path / name
        shutil.copytree(small_dataset, copy)
        (copy / "shards" / f"{name}.npy").unlink()
        with pytest.raises(DataError, match=name):
            Rows(copy)
    torn = tmp_path / "features-00001" / "shards" / "features-00001.npy"
    torn.write_bytes((small_dataset / "shards" / torn.name).read_bytes()[:-400])
    with pytest.raises(DataError, match="not a complete dataset"):
        Rows(tmp_path / "features-00001")
    with pytest.raises(DataError, match=r"dataset\.json"):
        Rows(tmp_path)


@given(st.lists(st.integers(1, 4 * SCORED), min_size=1, max_size=5), st.data())
def test_a_scored_row_has_the_same_context_as_in_a_server(cards: list[int], data: st.DataObject):
    first_rows = np.repeat(np.cumsum([0, *cards[:-1]]), cards)
    index = data.draw(st.lists(st.integers(0, sum(cards) - 1), min_size=1, unique=True).map(sorted))
    starts, window, position = scoring_windows(first_rows, np.array(index))
    assert (starts[window] + position == index).all()
    assert (starts[window] >= first_rows[index]).all()
    assert (position < SCORED).all()
    assert (position >= np.minimum(CONTEXT, index - first_rows[index])).all()


def test_windows_overlap_by_less_than_their_length():
    assert 0 < OVERLAP < LENGTH <= SCORED
