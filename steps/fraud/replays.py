"""Create requests from test transactions, to verify the scores of a server. The module replays.py
does not import torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from steps.fraud.data.transactions import DAY, UNKNOWN, Rows
from steps.fraud.facts import read_facts
from steps.fraud.fraud_config import CONTEXT, MAX_HISTORY

# maximum number of transactions per request
BATCH = 20


def replay(
    dataset_folder: Path,
    report_folder: Path,
    transaction_count: int,
    random_seed: int,
    max_history: int = MAX_HISTORY,
) -> Iterator[tuple[dict[str, Any], list[float]]]:
    """Yield requests for about `transaction_count` test transactions of all weeks, half of them
    frauds, with the expected scores.

    Each request contains the history that affects its scores, with only the labels known at the
    time of the scored transactions. Transactions that need more than `max_history` rows are
    skipped.
    """
    dataset_facts = read_facts(dataset_folder)
    train_end = dataset_facts.train_end
    label_delay_microseconds = dataset_facts.label_delay_days * DAY
    test_transactions = pl.read_parquet(dataset_folder / "transactions.parquet").filter(
        pl.col("time").dt.epoch("us") >= train_end
    )
    later_rows = Rows.from_frame(test_transactions)
    expected_scores = _sample_scores(
        pl.read_parquet(report_folder / "scores.parquet"),
        transaction_count,
        np.random.default_rng(random_seed),
    )
    chosen_rows = np.flatnonzero(np.isin(later_rows.id, list(expected_scores)))
    batch_rows: list[int] = []
    is_needed = np.zeros(len(later_rows), bool)

    for row_index in chosen_rows.tolist():
        history_mask = _find_needed_rows(later_rows, row_index)
        if history_mask.sum() > max_history:
            continue

        # all scored transactions are sent without labels, so end a request before the label of its
        # first transaction becomes known
        is_batch_complete = batch_rows and later_rows.time[row_index] - later_rows.time[
            batch_rows[0]
        ] >= max(label_delay_microseconds, 1)
        if batch_rows and (
            is_batch_complete
            or len(batch_rows) == BATCH
            or (is_needed | history_mask).sum() > max_history
        ):
            yield (
                _build_request(later_rows, batch_rows, is_needed, label_delay_microseconds),
                [expected_scores[int(later_rows.id[batch_row])] for batch_row in batch_rows],
            )
            batch_rows = []
            is_needed = np.zeros(len(later_rows), bool)

        batch_rows.append(row_index)
        is_needed |= history_mask

    if batch_rows:
        yield (
            _build_request(later_rows, batch_rows, is_needed, label_delay_microseconds),
            [expected_scores[int(later_rows.id[batch_row])] for batch_row in batch_rows],
        )


def _sample_scores(
    score_table: Any, row_count: int, random_generator: np.random.Generator
) -> dict[int, float]:
    """Return a dict {transaction id: offline score} for about `row_count` rows, equally many
    from each week, half of them frauds."""
    score_by_transaction: dict[int, float] = {}
    weekly_tables = score_table.partition_by("week")
    for week_table in weekly_tables:
        week_labels = week_table["label"].to_numpy()
        rows_per_week = -(-row_count // len(weekly_tables))
        fraud_indices = random_generator.permutation(np.flatnonzero(week_labels == 1))[
            : rows_per_week // 2
        ]
        genuine_indices = random_generator.permutation(np.flatnonzero(week_labels == 0))[
            : rows_per_week - len(fraud_indices)
        ]
        for row_index in np.concatenate([fraud_indices, genuine_indices]).tolist():
            score_by_transaction[week_table["id"][row_index]] = week_table["score"][row_index]
    return score_by_transaction


def _find_needed_rows(later_rows: Rows, row_index: int) -> NDArray[np.bool_]:
    """Return a mask of the earlier rows that affect the score of `row_index`: rows of its card,
    and rows of the terminals that this card used."""
    is_same_card = later_rows.card == later_rows.card[row_index]
    visible_rows = np.flatnonzero(is_same_card[: row_index + 1])[-CONTEXT - 1 :]
    is_needed = (later_rows.time <= later_rows.time[row_index]) & (
        is_same_card | np.isin(later_rows.terminal, later_rows.terminal[visible_rows])
    )
    is_needed[row_index] = False
    return is_needed


def _build_request(
    later_rows: Rows,
    batch_rows: list[int],
    is_needed: NDArray[np.bool_],
    label_delay_microseconds: int,
) -> dict[str, Any]:
    history_rows = np.flatnonzero(is_needed & ~np.isin(np.arange(len(later_rows)), batch_rows))
    has_label = (
        later_rows.time[history_rows]
        <= later_rows.time[batch_rows].max() - label_delay_microseconds
    )
    history_records = _list_records(later_rows, history_rows)
    has_label &= later_rows.fraud[history_rows] != UNKNOWN
    for history_record, fraud_label, is_known in zip(
        history_records, later_rows.fraud[history_rows].tolist(), has_label.tolist(), strict=True
    ):
        if is_known:
            history_record["fraud"] = fraud_label
    return {
        "instances": _list_records(later_rows, np.array(batch_rows)),
        "history": history_records,
    }


def _list_records(transactions: Rows, row_indices: NDArray[np.int64]) -> list[dict[str, Any]]:
    time_texts = np.datetime_as_string(
        transactions.time[row_indices].astype("datetime64[us]")
    ).tolist()
    record_columns = (
        transactions.id[row_indices],
        transactions.card[row_indices],
        transactions.terminal[row_indices],
        transactions.cents[row_indices] / 100,
    )
    return [
        {
            "transaction_id": transaction_id,
            "time": time_text,
            "card": card,
            "terminal": terminal,
            "amount": amount,
        }
        for time_text, transaction_id, card, terminal, amount in zip(
            time_texts, *(record_column.tolist() for record_column in record_columns), strict=True
        )
    ]
