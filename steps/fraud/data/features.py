"""Point-in-time features of transactions.

A feature at time t uses the transactions of the card in (t - 30 days, t], the last 50 transactions
of the card, and the transactions of the terminal in (t - delay - 30 days, t - delay], whose labels
are known at t. Therefore a server can compute each feature with the same code from a history of
limited length. If a card or a terminal has several transactions at the same time, a feature does
not depend on their order.

Sums over a window are differences of running sums of integers (cents, counts), so they do not
depend on chunks or threads.
The 15 features HANDBOOK_NAMES follow the Fraud Detection Handbook, chapter 3 (Le Borgne et al.).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from steps.fraud.data.transactions import DAY, Ints, Rows, first_rows_of_groups

# lengths of the time windows of features, in days
WINDOWS = (1, 7, 30)
# number of a card's latest transactions that define its habits
HABIT_ROWS = 50

RAW_NAMES = ("log_amount", "log_ratio_to_mean", "log_gap", "sin_time", "cos_time")
HANDBOOK_NAMES = (
    "amount",
    "weekend",
    "night",
    *(f"card_{figure}_{days}d" for days in WINDOWS for figure in ("count", "mean")),
    *(f"terminal_{figure}_{days}d" for days in WINDOWS for figure in ("count", "risk")),
)
EXTRA_NAMES = (
    "log_ratio_to_median",
    "log_max5_to_median",
    "log_max20_to_median",
    "days_since_first_fraud",
    "days_since_last_fraud",
    "fraud_run",
)
NAMES = RAW_NAMES + HANDBOOK_NAMES + EXTRA_NAMES
TERMINAL_NAMES = tuple(name for name in NAMES if name.startswith("terminal_")) + EXTRA_NAMES[3:]
CARD_NAMES = tuple(name for name in NAMES if name not in TERMINAL_NAMES)

Floats = NDArray[np.float32]
Column = NDArray[Any]
Names = tuple[str, ...]


def lookback_days(delay_days: int) -> int:
    """Return the number of days that the longest window of a feature looks back."""
    return delay_days + max(WINDOWS)


def card_features(
    transactions: Rows, feature_names: Names = NAMES, row_indices: Ints | None = None
) -> dict[str, Column]:
    """Compute the features CARD_NAMES; features that are not in `feature_names` may be left out.

    `transactions` must contain all rows of each card, sorted by (card, time, id). If `row_indices`
    is given, return only the features of these rows.
    """
    timeline_row_index, first_timeline_index, timeline_positions = _join_timelines(
        transactions.card, transactions.time, max(WINDOWS) * DAY
    )
    cents_before = _running_sum(transactions.cents)
    amounts = transactions.cents / 100
    second_of_day = transactions.time % DAY / 1e6
    # day 0 of the epoch was a Thursday
    is_weekend = (transactions.time // DAY + 3) % 7 >= 5
    features_by_name: dict[str, Column] = {
        "amount": amounts,
        "weekend": is_weekend,
        "night": second_of_day < 7 * 3600,
    }
    window_end = np.searchsorted(timeline_positions, timeline_positions, side="right")

    for window_days in WINDOWS:
        window_start = np.searchsorted(
            timeline_positions, timeline_positions - window_days * DAY, side="right"
        )
        features_by_name[f"card_count_{window_days}d"] = transaction_count = (
            window_end - window_start
        )
        features_by_name[f"card_mean_{window_days}d"] = (
            cents_before[window_end] - cents_before[window_start]
        ) / (100 * transaction_count)

    if set(feature_names) <= features_by_name.keys() | set(TERMINAL_NAMES):
        return features_by_name

    window_start = np.maximum(first_timeline_index, timeline_row_index - HABIT_ROWS)
    mean_amount = (cents_before[timeline_row_index] - cents_before[window_start]) / (
        100 * np.maximum(timeline_row_index - window_start, 1)
    )
    gap_seconds = np.diff(transactions.time, prepend=transactions.time[:1]) / 1e6
    max_gap_seconds = max(WINDOWS) * DAY / 1e6
    time_angle = second_of_day * (2 * np.pi / 86_400)

    features_by_name.update(
        {
            "log_amount": np.log1p(amounts),
            "log_ratio_to_mean": np.where(
                timeline_row_index > first_timeline_index, _log_ratio(amounts, mean_amount), 0
            ),
            "log_gap": np.log1p(
                np.where(
                    timeline_row_index > first_timeline_index,
                    np.minimum(gap_seconds, max_gap_seconds),
                    max_gap_seconds,
                )
            ),
            "sin_time": np.sin(time_angle),
            "cos_time": np.cos(time_angle),
        }
    )

    if row_indices is None:
        return features_by_name | _compute_habits(transactions.card, amounts)

    return {
        feature_name: feature_values[row_indices]
        for feature_name, feature_values in features_by_name.items()
    } | _compute_habits_of_rows(row_indices, first_timeline_index, amounts)


def _compute_habits(card_ids: Ints, amounts: NDArray[np.float64]) -> dict[str, Column]:
    """Compute the features that compare the amount, and the highest recent amounts of the card,
    with the median of the card's recent amounts."""
    amount_column = pl.col("amount")
    habit_table = pl.DataFrame({"card": card_ids, "amount": amounts}).select(
        amount_column.rolling_median(HABIT_ROWS, min_samples=1).over("card").alias("median"),
        *(
            amount_column.rolling_max(row_count, min_samples=1)
            .over("card")
            .alias(f"max{row_count}")
            for row_count in (5, 20)
        ),
    )
    return _compare_amounts(amounts, *(feature_series.to_numpy() for feature_series in habit_table))


def _compute_habits_of_rows(
    row_indices: Ints, first_card_indices: Ints, amounts: NDArray[np.float64]
) -> dict[str, Column]:
    """Compute the features of `_compute_habits` for a few rows, as servers do. For few rows, this
    function is faster than a polars query."""
    recent_row_indices = row_indices[:, None] - np.arange(HABIT_ROWS)  # newest first
    is_same_card = recent_row_indices >= first_card_indices[row_indices, None]
    recent_amounts = np.where(is_same_card, amounts[recent_row_indices.clip(0)], np.inf)
    sorted_amounts = np.sort(recent_amounts, axis=1)
    card_row_count = is_same_card.sum(1)
    row_positions = np.arange(len(row_indices))
    median_amounts = (
        sorted_amounts[row_positions, (card_row_count - 1) // 2]
        + sorted_amounts[row_positions, card_row_count // 2]
    ) / 2
    highest_amounts = np.where(is_same_card, recent_amounts, -np.inf)

    return _compare_amounts(
        amounts[row_indices],
        median_amounts,
        highest_amounts[:, :5].max(1),
        highest_amounts[:, :20].max(1),
    )


def _compare_amounts(
    amounts: Column, median_amounts: Column, highest_of_5: Column, highest_of_20: Column
) -> dict[str, Column]:
    return {
        "log_ratio_to_median": _log_ratio(amounts, median_amounts),
        "log_max5_to_median": _log_ratio(highest_of_5, median_amounts),
        "log_max20_to_median": _log_ratio(highest_of_20, median_amounts),
    }


def terminal_features(
    transactions: Rows, delay_days: int, feature_names: Names = NAMES
) -> dict[str, Column]:
    """Compute the features TERMINAL_NAMES; features that are not in `feature_names` may be left
    out.

    `transactions` must contain all rows of each terminal, sorted by (terminal, time, id).
    """
    timeline_row_index, _, timeline_positions = _join_timelines(
        transactions.terminal, transactions.time, lookback_days(delay_days) * DAY
    )
    is_fraud = transactions.fraud == 1
    frauds_before = _running_sum(is_fraud)
    features_by_name: dict[str, Column] = {}
    # end of the rows whose labels are known at the time of each row
    label_cutoff_index = np.searchsorted(
        timeline_positions, timeline_positions - delay_days * DAY, side="right"
    )
    window_start = label_cutoff_index

    for window_days in WINDOWS:
        window_start = np.searchsorted(
            timeline_positions, timeline_positions - (delay_days + window_days) * DAY, side="right"
        )
        features_by_name[f"terminal_count_{window_days}d"] = labelled_row_count = (
            label_cutoff_index - window_start
        )
        features_by_name[f"terminal_risk_{window_days}d"] = (
            frauds_before[label_cutoff_index] - frauds_before[window_start]
        ) / np.maximum(labelled_row_count, 1)

    if set(feature_names) <= features_by_name.keys() | set(CARD_NAMES):
        return features_by_name

    row_count = len(transactions)
    last_fraud_index = np.maximum.accumulate(np.where(is_fraud, timeline_row_index, -1))[
        label_cutoff_index - 1
    ]
    last_genuine_index = np.maximum.accumulate(np.where(is_fraud, -1, timeline_row_index))[
        label_cutoff_index - 1
    ]
    first_fraud_index = np.minimum.accumulate(
        np.append(np.where(is_fraud, timeline_row_index, row_count), row_count)[::-1]
    )[::-1][window_start]
    has_fraud = frauds_before[label_cutoff_index] > frauds_before[window_start]

    for fraud_label, fraud_row_index in (("first", first_fraud_index), ("last", last_fraud_index)):
        fraud_positions = timeline_positions[np.where(has_fraud, fraud_row_index, 0)]
        days_since_fraud = (timeline_positions - fraud_positions) / DAY
        features_by_name[f"days_since_{fraud_label}_fraud"] = np.where(
            has_fraud, days_since_fraud, lookback_days(delay_days)
        )

    features_by_name["fraud_run"] = np.where(
        has_fraud, label_cutoff_index - np.maximum(last_genuine_index + 1, window_start), 0
    )
    return features_by_name


def matrix(columns_by_name: dict[str, Column], feature_names: Names) -> Floats:
    """Return the columns `feature_names` as one array: float32 [n, len(feature_names)]."""
    feature_table = np.empty(
        (len(columns_by_name[feature_names[0]]), len(feature_names)), np.float32
    )
    # process the rows in blocks that fit into the CPU cache
    for block_start in range(0, len(feature_table), 1 << 14):
        block_rows = slice(block_start, block_start + (1 << 14))
        for column_index, feature_name in enumerate(feature_names):
            feature_table[block_rows, column_index] = columns_by_name[feature_name][block_rows]
    return feature_table


def tables(
    transactions: Rows, delay_days: int, max_chunk_rows: int = 250_000, feature_names: Names = NAMES
) -> Iterator[tuple[Rows, Floats]]:
    """Yield the rows, piece by piece, with their features, as (rows, float32 [m,
    len(feature_names)]).

    A piece contains all rows of some cards, sorted by (card, time, id). `transactions` must be
    sorted by (time, id). The function needs about as much memory as `transactions` and one piece.
    """
    terminal_names = tuple(
        feature_name for feature_name in feature_names if feature_name in TERMINAL_NAMES
    )
    indices_by_terminal = _stable_order(transactions.terminal)
    terminal_table = np.empty((len(transactions), len(terminal_names)), np.float32)

    for group_slice in chunks(transactions.terminal[indices_by_terminal], max_chunk_rows):
        row_indices = indices_by_terminal[group_slice]
        terminal_table[row_indices] = matrix(
            terminal_features(transactions[row_indices], delay_days, feature_names), terminal_names
        )

    indices_by_card = _stable_order(transactions.card)
    for group_slice in chunks(transactions.card[indices_by_card], max_chunk_rows):
        row_indices = indices_by_card[group_slice]
        piece_rows = transactions[row_indices]
        columns_by_name = card_features(piece_rows, feature_names) | dict(
            zip(terminal_names, terminal_table[row_indices].T, strict=True)
        )
        yield piece_rows, matrix(columns_by_name, feature_names)


def _stable_order(group_ids: Ints) -> Ints:
    """Return the indices that sort rows by group; rows of a group keep their order."""
    group_ids = group_ids - group_ids.min()
    # use 16 bits if possible, because such numbers are sorted faster
    return np.argsort(
        group_ids.astype(np.uint16) if group_ids.max() < 1 << 16 else group_ids, kind="stable"
    )


def chunks(sorted_group_ids: Ints, max_slice_rows: int) -> Iterator[slice]:
    """Divide the sorted `sorted_group_ids` into slices of about `max_slice_rows` rows, each with
    complete groups only."""
    slice_start = 0
    while slice_start < len(sorted_group_ids):
        last_group = sorted_group_ids[min(slice_start + max_slice_rows, len(sorted_group_ids)) - 1]
        slice_end = int(np.searchsorted(sorted_group_ids, last_group, side="right"))
        yield slice(slice_start, slice_end)
        slice_start = slice_end


def _join_timelines(
    group_ids: Ints, row_times: Ints, longest_window: int
) -> tuple[Ints, Ints, Ints]:
    """Place the rows, which are sorted by (group, time), on one time line. Return for each row: its
    index, the index of the first row of its group, and its position on the time line (µs).

    The time line consists of all groups, one after the other. A gap between two groups, or a gap
    that is longer than `longest_window`, is shortened to `longest_window` + 1. Therefore one binary
    search finds the starts of windows in all groups, and positions do not overflow with many
    groups.
    """
    row_indices = np.arange(len(row_times))
    first_row_indices = first_rows_of_groups(group_ids)
    time_gaps = np.diff(row_times, prepend=row_times[:1])
    timeline_positions = np.cumsum(
        np.where(
            first_row_indices == row_indices,
            longest_window + 1,
            np.minimum(time_gaps, longest_window + 1),
        )
    )
    return row_indices, first_row_indices, timeline_positions


def _running_sum(summed_values: NDArray[np.integer | np.bool_]) -> Ints:
    """Return the running sums of the values, that is, the sums of the first 0, 1, ..., n values."""
    running_sums = np.zeros(len(summed_values) + 1, np.int64)
    np.cumsum(summed_values, out=running_sums[1:])
    return running_sums


def _log_ratio(numerator: Column, denominator: Column) -> NDArray[np.float64]:
    """Return log((numerator + 1) / (denominator + 1)), which is defined for amounts that are 0."""
    return np.log((numerator + 1) / (denominator + 1))
