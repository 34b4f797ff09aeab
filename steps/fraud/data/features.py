"""Point-in-time features of transactions.

A feature at time t uses the transactions of the card in (t - 30 days, t], the last 50 transactions
of the card, and the transactions of the terminal in (t - delay - 30 days, t - delay], whose labels
are known at t. So a server needs only a history of limited length to compute each feature, with the
same code. A feature does not depend on the order of transactions of a card (or terminal) at the
same time.

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

WINDOWS = (1, 7, 30)  # lengths of the time windows of features, in days
HABIT_ROWS = 50  # number of a card's latest transactions that define its habits

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
TERMINAL_NAMES = tuple(n for n in NAMES if n.startswith("terminal_")) + EXTRA_NAMES[3:]
CARD_NAMES = tuple(n for n in NAMES if n not in TERMINAL_NAMES)

Floats = NDArray[np.float32]
Column = NDArray[Any]
Names = tuple[str, ...]


def lookback_days(delay_days: int) -> int:
    """Return the number of days that the longest window of a feature looks back."""
    return delay_days + max(WINDOWS)


def card_features(
    rows: Rows, names: Names = NAMES, row_indices: Ints | None = None
) -> dict[str, Column]:
    """Compute the features CARD_NAMES: all of them, or at least those in `names`.

    `rows` must contain all rows of each card, sorted by (card, time, id). With `row_indices`,
    return the features of these rows only.
    """
    index, first, line = _join_timelines(rows.card, rows.time, max(WINDOWS) * DAY)
    cents_before = _running_sum(rows.cents)
    amount = rows.cents / 100
    second = rows.time % DAY / 1e6
    weekend = (rows.time // DAY + 3) % 7 >= 5  # day 0 of the epoch was a Thursday
    result: dict[str, Column] = {"amount": amount, "weekend": weekend, "night": second < 7 * 3600}
    end = np.searchsorted(line, line, side="right")

    for days in WINDOWS:
        start = np.searchsorted(line, line - days * DAY, side="right")
        result[f"card_count_{days}d"] = count = end - start
        result[f"card_mean_{days}d"] = (cents_before[end] - cents_before[start]) / (100 * count)

    if set(names) <= result.keys() | set(TERMINAL_NAMES):
        return result

    start = np.maximum(first, index - HABIT_ROWS)
    mean = (cents_before[index] - cents_before[start]) / (100 * np.maximum(index - start, 1))
    gap = np.diff(rows.time, prepend=rows.time[:1]) / 1e6
    max_gap = max(WINDOWS) * DAY / 1e6
    angle = second * (2 * np.pi / 86_400)

    result.update(
        {
            "log_amount": np.log1p(amount),
            "log_ratio_to_mean": np.where(index > first, _log_ratio(amount, mean), 0),
            "log_gap": np.log1p(np.where(index > first, np.minimum(gap, max_gap), max_gap)),
            "sin_time": np.sin(angle),
            "cos_time": np.cos(angle),
        }
    )

    if row_indices is None:
        return result | _habits(rows.card, amount)

    return {name: values[row_indices] for name, values in result.items()} | _habits_at(
        row_indices, first, amount
    )


def _habits(card: Ints, amount: NDArray[np.float64]) -> dict[str, Column]:
    """Compute features that relate the amount, and the highest recent amounts of the card, to the
    median of its recent amounts."""
    column = pl.col("amount")
    table = pl.DataFrame({"card": card, "amount": amount}).select(
        column.rolling_median(HABIT_ROWS, min_samples=1).over("card").alias("median"),
        *(column.rolling_max(n, min_samples=1).over("card").alias(f"max{n}") for n in (5, 20)),
    )
    return _compare_amounts(amount, *(series.to_numpy() for series in table))


def _habits_at(row_indices: Ints, first: Ints, amount: NDArray[np.float64]) -> dict[str, Column]:
    """Compute the features of `_habits` for a few rows, as servers do; this is faster than a polars
    query."""
    index = row_indices[:, None] - np.arange(HABIT_ROWS)  # newest first
    same_card = index >= first[row_indices, None]
    recent_amounts = np.where(same_card, amount[index.clip(0)], np.inf)
    sorted_amounts = np.sort(recent_amounts, axis=1)
    count = same_card.sum(1)
    row = np.arange(len(row_indices))
    median = (sorted_amounts[row, (count - 1) // 2] + sorted_amounts[row, count // 2]) / 2
    highest = np.where(same_card, recent_amounts, -np.inf)

    return _compare_amounts(
        amount[row_indices], median, highest[:, :5].max(1), highest[:, :20].max(1)
    )


def _compare_amounts(
    amount: Column, median: Column, max5: Column, max20: Column
) -> dict[str, Column]:
    return {
        "log_ratio_to_median": _log_ratio(amount, median),
        "log_max5_to_median": _log_ratio(max5, median),
        "log_max20_to_median": _log_ratio(max20, median),
    }


def terminal_features(rows: Rows, delay_days: int, names: Names = NAMES) -> dict[str, Column]:
    """Compute the features TERMINAL_NAMES: all of them, or at least those in `names`.

    `rows` must contain all rows of each terminal, sorted by (terminal, time, id).
    """
    index, _, line = _join_timelines(rows.terminal, rows.time, lookback_days(delay_days) * DAY)
    is_fraud = rows.fraud == 1
    frauds_before = _running_sum(is_fraud)
    result: dict[str, Column] = {}
    # end of the rows whose labels are known at the time of each row
    cutoff = np.searchsorted(line, line - delay_days * DAY, side="right")
    start = cutoff

    for days in WINDOWS:
        start = np.searchsorted(line, line - (delay_days + days) * DAY, side="right")
        result[f"terminal_count_{days}d"] = count = cutoff - start
        result[f"terminal_risk_{days}d"] = (
            frauds_before[cutoff] - frauds_before[start]
        ) / np.maximum(count, 1)

    if set(names) <= result.keys() | set(CARD_NAMES):
        return result

    n = len(rows)
    last_fraud = np.maximum.accumulate(np.where(is_fraud, index, -1))[cutoff - 1]
    last_genuine = np.maximum.accumulate(np.where(is_fraud, -1, index))[cutoff - 1]
    first_fraud = np.minimum.accumulate(np.append(np.where(is_fraud, index, n), n)[::-1])[::-1][
        start
    ]
    has_fraud = frauds_before[cutoff] > frauds_before[start]

    for name, row in (("first", first_fraud), ("last", last_fraud)):
        days = (line - line[np.where(has_fraud, row, 0)]) / DAY
        result[f"days_since_{name}_fraud"] = np.where(has_fraud, days, lookback_days(delay_days))

    result["fraud_run"] = np.where(has_fraud, cutoff - np.maximum(last_genuine + 1, start), 0)
    return result


def matrix(columns: dict[str, Column], names: Names) -> Floats:
    """Return the columns `names` as one array: float32 [n, len(names)]."""
    result = np.empty((len(columns[names[0]]), len(names)), np.float32)
    # rows are processed in blocks that fit into the CPU cache
    for start in range(0, len(result), 1 << 14):
        block = slice(start, start + (1 << 14))
        for column, name in enumerate(names):
            result[block, column] = columns[name][block]
    return result


def tables(
    rows: Rows, delay_days: int, chunk: int = 250_000, names: Names = NAMES
) -> Iterator[tuple[Rows, Floats]]:
    """Yield the rows and their features `names` in pieces that contain all rows of their cards:
    (rows, float32 [m, len(names)]), sorted by (card, time, id).

    `rows` must be sorted by (time, id). The function needs about the memory of `rows` plus one
    piece.
    """
    terminal_names = tuple(name for name in names if name in TERMINAL_NAMES)
    by_terminal = _stable_order(rows.terminal)
    terminal_table = np.empty((len(rows), len(terminal_names)), np.float32)

    for group in chunks(rows.terminal[by_terminal], chunk):
        index = by_terminal[group]
        terminal_table[index] = matrix(
            terminal_features(rows[index], delay_days, names), terminal_names
        )

    by_card = _stable_order(rows.card)
    for group in chunks(rows.card[by_card], chunk):
        index = by_card[group]
        piece = rows[index]
        columns = card_features(piece, names) | dict(
            zip(terminal_names, terminal_table[index].T, strict=True)
        )
        yield piece, matrix(columns, names)


def _stable_order(group: Ints) -> Ints:
    """Return the indices that sort rows by group; rows of a group keep their order."""
    group = group - group.min()
    # use 16 bits if possible, because such numbers are sorted faster
    return np.argsort(group.astype(np.uint16) if group.max() < 1 << 16 else group, kind="stable")


def chunks(groups: Ints, size: int) -> Iterator[slice]:
    """Divide the sorted `groups` into slices of about `size` rows, each with complete groups
    only."""
    start = 0
    while start < len(groups):
        last = groups[min(start + size, len(groups)) - 1]
        end = int(np.searchsorted(groups, last, side="right"))
        yield slice(start, end)
        start = end


def _join_timelines(group: Ints, time: Ints, longest_window: int) -> tuple[Ints, Ints, Ints]:
    """For rows sorted by (group, time), return (index, first row of the group, position on a common
    time line).

    The time line concatenates the groups. Gaps between groups, and gaps longer than `reach`, become
    just longer than `reach`. So one binary search finds the starts of windows in all groups, and
    positions do not overflow with many groups.
    """
    index = np.arange(len(time))
    first = first_rows_of_groups(group)
    gap = np.diff(time, prepend=time[:1])
    line = np.cumsum(
        np.where(first == index, longest_window + 1, np.minimum(gap, longest_window + 1))
    )
    return index, first, line


def _running_sum(values: NDArray[np.integer | np.bool_]) -> Ints:
    """Return the running sums of the values: the sums of the first 0, 1, ..., n values."""
    result = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=result[1:])
    return result


def _log_ratio(a: Column, b: Column) -> NDArray[np.float64]:
    """Return log((a + 1) / (b + 1)), which is defined for amounts that are 0."""
    return np.log((a + 1) / (b + 1))
