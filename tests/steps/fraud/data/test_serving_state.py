"""A server computes the same features for a transaction as the training."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.errors import DataError
from steps.fraud.data.serving_state import State
from steps.fraud.data.transactions import DAY, Rows
from steps.fraud.fraud_config import CONTEXT, Data
from tests.steps.fraud.written import Written, write

NOTHING = Rows.of(id=[], time=[], card=[], terminal=[], amount=[])


class World:
    """A dataset, its serving state, and all transactions after the end of the dataset."""

    def __init__(self, path: Path) -> None:
        write(Data(source="simulate://5?cards=60&terminals=90&days=110", shard_rows=2000), path)
        self.shards = Written(path)
        self.state = State.load(path / "state")
        rows = Rows.from_frame(pl.read_parquet(path / "transactions.parquet"))
        self.later = rows[rows.time >= self.shards.facts["train_end"]]
        self.features = self.shards.column("features")
        self.cards, self.ids = self.shards.column("cards"), self.shards.column("ids")

    def offline(self, id: int, length: int) -> np.ndarray:
        """Return the last `length` feature rows of the dataset up to transaction `id`."""
        last_row = int(np.flatnonzero(self.ids == id)[0])
        first_row = int(np.searchsorted(self.cards, self.cards[last_row]))
        return self.features[max(first_row, last_row - length + 1) : last_row + 1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("state") / "dataset")


@settings(max_examples=60)
@given(st.data(), st.integers(1, CONTEXT + 1))
def test_online_features_equal_offline_features(
    world: World, data: st.DataObject, length: int
) -> None:
    picked = data.draw(
        st.lists(st.integers(0, len(world.later) - 1), min_size=1, max_size=8, unique=True)
    )
    new_rows = world.later[np.array(picked)]
    # the history includes the new transactions, as clients may send them
    history = world.later[world.later.time <= new_rows.time.max()]
    windows, lengths = world.state.windows([(new_rows, history)], length)
    assert windows.shape == (len(picked), length, world.features.shape[1])
    for window, n, id in zip(windows, lengths, new_rows.id, strict=True):
        np.testing.assert_array_equal(window[:n], world.offline(id, length))
        assert not window[n:].any()


@settings(max_examples=30)
@given(st.data())
def test_labels_within_the_delay_change_nothing(world: World, data: st.DataObject) -> None:
    new = world.later[data.draw(st.integers(0, len(world.later) - 1)) :][:1]
    history = world.later[world.later.time <= new.time[0]]
    young = history.time > new.time[0] - 7 * DAY

    unknown = Rows.of(
        history.id,
        history.time,
        history.card,
        history.terminal,
        history.cents / 100,
        history.fraud & ~young,
    )

    known_too, known_only = (world.state.windows([(new, rows)])[0] for rows in (history, unknown))
    np.testing.assert_array_equal(known_too, known_only)


def test_a_batch_equals_its_transactions_one_by_one(world: World) -> None:
    new = world.later[:50]
    batched_windows, _ = world.state.windows([(new, NOTHING)])
    for row in range(50):
        single_windows, _ = world.state.windows([(new[row : row + 1], new[:50])])
        np.testing.assert_array_equal(single_windows[0][0], batched_windows[row][0])


def test_requests_in_a_batch_are_independent(world: World) -> None:
    pieces = [
        world.later[start : start + size]
        for start, size in ((0, 40), (10, 40), (10, 1), (300, 5), (0, 40))
    ]
    requests = [
        (piece[-3:], piece[:-3] if number % 2 else NOTHING) for number, piece in enumerate(pieces)
    ]
    together, lengths = world.state.windows(requests)
    single_windows = [world.state.windows([request]) for request in requests]
    np.testing.assert_array_equal(
        together, np.concatenate([windows for windows, _ in single_windows])
    )
    np.testing.assert_array_equal(lengths, np.concatenate([counts for _, counts in single_windows]))


def test_new_cards_and_terminals_can_be_scored(world: World) -> None:
    new = Rows.of(
        id=[-1], time=world.later.time[:1], card=[10**12], terminal=[10**12], amount=[33.3]
    )
    windows, lengths = world.state.windows([(new, NOTHING)])
    first_features = dict(zip(world.state.features, windows[0, 0], strict=True))
    assert lengths.tolist() == [1]
    assert first_features["card_count_30d"] == 1
    assert first_features["terminal_count_30d"] == 0
    assert first_features["card_mean_30d"] == np.float32(33.3)


def test_the_state_contains_only_the_rows_that_a_server_needs(world: World) -> None:
    rows = world.state.rows
    end = world.shards.facts["train_end"]
    assert (rows.time < end).all()
    old_rows = rows[rows.time < end - 37 * DAY]
    for card in np.unique(old_rows.card):
        assert (rows.card == card).sum() <= CONTEXT
    assert len(rows) < (world.shards.column("times") < end).sum()


def test_invalid_transactions_and_states_are_rejected(world: World, tmp_path: Path) -> None:
    early_row = Rows.of(
        id=[1], time=[world.state.train_end - 1], card=[1], terminal=[1], amount=[1]
    )
    with pytest.raises(DataError, match="older than the end of the state"):
        world.state.windows([(early_row, NOTHING)])
    twice = Rows.of(
        id=[1, 1], time=[world.state.train_end] * 2, card=[1, 2], terminal=[1, 1], amount=[1, 1]
    )
    with pytest.raises(DataError, match="same id"):
        world.state.windows([(twice, NOTHING)])
    with pytest.raises(DataError, match="not a complete serving state"):
        State.load(tmp_path)
