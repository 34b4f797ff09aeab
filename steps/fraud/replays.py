"""Create requests from test transactions, to verify the scores of a server. This module does not
import torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from steps.fraud.data.transactions import DAY, UNKNOWN, Rows
from steps.fraud.facts import read_facts
from steps.fraud.fraud_config import CONTEXT, MAX_HISTORY

BATCH = 20  # maximum number of transactions per request


def replay(
    dataset: Path, report: Path, count: int, seed: int, max_history: int = MAX_HISTORY
) -> Iterator[tuple[dict[str, Any], list[float]]]:
    """Yield requests for about `count` test transactions of all weeks, half of them frauds, with
    the expected scores.

    Each request contains the history that affects its scores, with only the labels known at the
    time of the scored transactions. Transactions that need more than `max_history` rows are
    skipped.
    """
    facts = read_facts(dataset)
    start = facts.train_end
    delay = facts.label_delay_days * DAY
    frame = pl.read_parquet(dataset / "transactions.parquet").filter(
        pl.col("time").dt.epoch("us") >= start
    )
    later = Rows.from_frame(frame)
    expected = _sample_scores(
        pl.read_parquet(report / "scores.parquet"), count, np.random.default_rng(seed)
    )
    chosen = np.flatnonzero(np.isin(later.id, list(expected)))
    batch: list[int] = []
    needed = np.zeros(len(later), bool)

    for row in chosen.tolist():
        history = _find_needed_rows(later, row)
        if history.sum() > max_history:
            continue

        # all scored transactions are sent without labels, so end a request before the label of its
        # first one becomes known
        due = batch and later.time[row] - later.time[batch[0]] >= max(delay, 1)
        if batch and (due or len(batch) == BATCH or (needed | history).sum() > max_history):
            yield _request(later, batch, needed, delay), [expected[int(later.id[r])] for r in batch]
            batch = []
            needed = np.zeros(len(later), bool)

        batch.append(row)
        needed |= history

    if batch:
        yield _request(later, batch, needed, delay), [expected[int(later.id[r])] for r in batch]


def _sample_scores(scores: Any, count: int, draw: np.random.Generator) -> dict[int, float]:
    """Return a dict {transaction id: offline score} for about `count` rows, equally many from each
    week, half of them frauds."""
    chosen: dict[int, float] = {}
    weeks = scores.partition_by("week")
    for week in weeks:
        labels = week["label"].to_numpy()
        size = -(-count // len(weeks))
        frauds = draw.permutation(np.flatnonzero(labels == 1))[: size // 2]
        others = draw.permutation(np.flatnonzero(labels == 0))[: size - len(frauds)]
        for index in np.concatenate([frauds, others]).tolist():
            chosen[week["id"][index]] = week["score"][index]
    return chosen


def _find_needed_rows(later: Rows, row: int) -> NDArray[np.bool_]:
    """Return a mask of the earlier rows that affect the score of `row`: rows of its card, and rows
    of the terminals that this card used."""
    same_card = later.card == later.card[row]
    seen = np.flatnonzero(same_card[: row + 1])[-CONTEXT - 1 :]
    needed = (later.time <= later.time[row]) & (
        same_card | np.isin(later.terminal, later.terminal[seen])
    )
    needed[row] = False
    return needed


def _request(
    later: Rows, batch: list[int], needed: NDArray[np.bool_], delay: int
) -> dict[str, Any]:
    history = np.flatnonzero(needed & ~np.isin(np.arange(len(later)), batch))
    has_label = later.time[history] <= later.time[batch].max() - delay
    rows = _records(later, history)
    has_label &= later.fraud[history] != UNKNOWN
    for record, label, is_known in zip(
        rows, later.fraud[history].tolist(), has_label.tolist(), strict=True
    ):
        if is_known:
            record["fraud"] = label
    return {"instances": _records(later, np.array(batch)), "history": rows}


def _records(rows: Rows, index: NDArray[np.int64]) -> list[dict[str, Any]]:
    times = np.datetime_as_string(rows.time[index].astype("datetime64[us]")).tolist()
    columns = (rows.id[index], rows.card[index], rows.terminal[index], rows.cents[index] / 100)
    return [
        {"transaction_id": i, "time": time, "card": card, "terminal": terminal, "amount": amount}
        for time, i, card, terminal, amount in zip(
            times, *(c.tolist() for c in columns), strict=True
        )
    ]
