"""Trees give the same scores in the step and in the server, and training rows are scored by trees
that were fitted on other cards."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from rekindle.errors import DataError
from steps.fraud.data.boosting import BOOSTED, Sample, Trees, write_arrays
from steps.fraud.data.sequences import Rows
from steps.fraud.data.transactions import UNKNOWN
from steps.fraud.ranking import average_precision

RNG = np.random.default_rng(1)


def draw_sample(n: int = 3000) -> tuple[Sample, np.ndarray, np.ndarray, np.ndarray]:
    """Return rows with random labels, except for a rare tail of the first feature."""
    table = RNG.exponential(size=(n, 3)).astype(np.float32)
    cards = RNG.integers(0, 40, n)
    labels = ((table[:, 0] > np.sort(table[:, 0])[-8]) | (RNG.random(n) < 0.05)).astype(np.uint8)
    collected = Sample(n)
    for rows in np.array_split(np.arange(n), 3):
        collected.add(table[rows], labels[rows], cards[rows], np.ones(len(rows), bool))
    return collected, table, labels, cards


def test_trees_in_the_server_and_in_the_step_prepare_give_the_same_bits(tmp_path: Path) -> None:
    collected, table, _, cards = draw_sample()
    boosting = collected.fit()
    boosting.trees().save(tmp_path / "trees.npz")
    trees = Trees.load(tmp_path / "trees.npz")
    is_training_row = np.zeros(len(table), bool)
    assert np.array_equal(trees.score(table), boosting.score(table, cards, is_training_row))
    assert np.array_equal(trees.score(table[5:6]), trees.score(table)[5:6])


def test_a_file_of_arrays_has_the_same_bytes_with_every_version_of_python(tmp_path: Path) -> None:
    # the file of numpy.savez differs between Python 3.11.2 and 3.11.7, so a release would not be
    # reproduced
    write_arrays(tmp_path / "arrays.npz", {"a": np.arange(3)})
    # the digest is the same with Python 3.11.2 and with 3.11.7
    digest = "2acc146760e6948ed5d2737c7d20e1f47fdc375ef79be3f1d7440e703bebe5cb"
    assert sha256((tmp_path / "arrays.npz").read_bytes()).hexdigest() == digest


def test_training_rows_are_scored_by_trees_of_other_cards() -> None:
    collected, table, labels, cards = draw_sample()
    boosting = collected.fit()
    rows = cards % 2 == 0
    scores = boosting.score(table, cards, np.ones(len(table), bool))[rows]
    other_sample = Sample(len(table))
    other_sample.add(
        table, np.where(rows, 1 - labels, labels).astype(np.uint8), cards, np.ones(len(table), bool)
    )
    assert np.array_equal(
        other_sample.fit().score(table, cards, np.ones(len(table), bool))[rows], scores
    )


def test_rows_without_a_label_are_not_fitted() -> None:
    collected = Sample(10)
    collected.add(
        np.zeros((10, 2), np.float32),
        np.full(10, UNKNOWN, np.uint8),
        np.arange(10),
        np.ones(10, bool),
    )
    with pytest.raises(DataError, match="nothing to learn from: 0 transactions"):
        collected.fit()


def test_trees_separate_frauds_in_a_rare_tail_of_a_feature() -> None:
    """Plain quantiles are too coarse for a tail of one row in three hundred."""
    table = RNG.exponential(size=(30_000, 2)).astype(np.float32)
    labels = (table[:, 0] > np.quantile(table[:, 0], 0.997)).astype(np.uint8)
    collected = Sample(len(table))
    collected.add(table, labels, np.arange(len(table)), np.ones(len(table), bool))
    assert average_precision(collected.fit().trees().score(table).astype(float), labels) > 0.99


def test_the_boosted_feature_is_better_than_chance_on_test_rows(small_dataset: Path) -> None:
    rows = Rows(small_dataset)
    test_row_indices = np.flatnonzero(rows.times >= rows.facts.test_weeks[0][0])
    assert (
        average_precision(rows.boosted(test_row_indices), rows.labels[test_row_indices])
        > 5 * rows.labels[test_row_indices].mean()
    )
    assert rows.facts.features[-1] == BOOSTED
