"""Warn about properties of the data that change on some day: truncated values, new ids, missing
genuine rows, missing labels."""

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from steps.fraud.data.transactions import DAY, UNKNOWN, Ints, Rows
from steps.fraud.data.transactions import format_day as day_of
from steps.fraud.fraud_config import Columns

Floats = NDArray[np.float64]
HOUR = DAY // 24
# days
WEEK = 7
# minimum number of rows of a day that can cause a warning
MIN_ROWS = 20
# a day with equal values is suspicious if the probability of equal values by chance is lower than
# this
MAX_CHANCE = 1e-6
# minimum fraction of rows with new ids on the day of a break
MIN_NEW_IDS = 0.6
# maximum fraction of rows with new ids in the week before a break
MAX_USUAL_NEW_IDS = 0.3
# minimum factor by which genuine rows per day change at a break
MIN_GENUINE_RATIO = 1.6
# minimum ratio of the factor for genuine rows to the factor for frauds
MIN_SHARE_RATIO = 1.3
# warn if the ratio of labelled to expected frauds in the newest week is at most this fraction of
# the ratio in earlier weeks
MAX_LABELLED_SHARE = 0.85
# minimum distance of the labelled frauds from the expected frauds, in standard deviations
MIN_Z = 4


@dataclass(frozen=True)
class Days:
    """Days with transactions, as columns: days since the epoch, first row of the day, and number of
    rows."""

    number: Ints
    start: Ints
    size: Ints

    @classmethod
    def of(cls, time: Ints) -> "Days":
        """Return the days of `time` (µs since the epoch, ascending)."""
        day_numbers, first_row_indices, row_counts = np.unique(
            time // DAY, return_index=True, return_counts=True
        )
        return cls(day_numbers, first_row_indices, row_counts)

    def name(self, day_index: int) -> str:
        return day_of(self.number[day_index] * DAY)


def truncated_values(transactions: Rows, columns: Columns) -> list[str]:
    """Return a sentence for each column whose cents, or minutes and seconds, are equal in all rows
    of some days."""
    transaction_days = Days.of(transactions.time)
    warning_sentences = []

    for column_name, unit_words, column_values in (
        ("amount", "cents", transactions.cents % 100),
        ("time", "minutes and seconds", transactions.time % HOUR),
    ):
        is_constant_day = _constant_days(column_values, transaction_days)
        # do not warn if no amount has cents, as in some currencies
        if is_constant_day.any() and not (column_name == "amount" and is_constant_day.all()):
            warning_sentences.append(
                f"{columns.describe(column_name)} has equal {unit_words} in all rows of"
                f" {is_constant_day.sum()} of {len(is_constant_day)} days, the first of them"
                f" {transaction_days.name(int(np.argmax(is_constant_day)))}: does the export"
                " truncate it? Export the full value for all days."
            )

    return warning_sentences


def new_ids(transactions: Rows, columns: Columns) -> list[str]:
    """Return a sentence for each column with a day whose ids are mostly new, although earlier days
    had few new ids."""
    transaction_days = Days.of(transactions.time)
    warning_sentences = []

    for column_name, column_ids in (
        ("card", transactions.card),
        ("terminal", transactions.terminal),
    ):
        new_id_share = _share_of_new(column_ids, transaction_days)
        earlier_new_id_share = _mean_before(new_id_share)
        known_id_row_count = (1 - new_id_share) * transaction_days.size
        is_break = (
            (new_id_share >= MIN_NEW_IDS)
            & (earlier_new_id_share < MAX_USUAL_NEW_IDS)
            & (transaction_days.size >= MIN_ROWS)
        )
        # also require that the number of rows with known ids drops, because additional customers do
        # not reduce this number
        is_break &= known_id_row_count < _mean_before(known_id_row_count) / 2

        break_day_indices = np.flatnonzero(is_break)
        if len(break_day_indices):
            warning_sentences.append(
                f"{columns.describe(column_name)} has ids that no earlier day has in"
                f" {new_id_share[break_day_indices[0]]:.0%} of the rows of"
                f" {transaction_days.name(break_day_indices[0])}, and in"
                f" {earlier_new_id_share[break_day_indices[0]]:.1%} in the week before: were the"
                f" ids hashed again? Then the history of each {column_name} is lost. Give all rows"
                " the same kind of id, or set data.first_day to that day."
            )

    return warning_sentences


def _constant_days(column_values: Ints, transaction_days: Days) -> NDArray[np.bool_]:
    """Return a mask of the days on which all rows have the same value, unless chance can explain
    this because the value is frequent on other days."""
    lowest_by_day, highest_by_day = (
        extreme_function.reduceat(column_values, transaction_days.start)
        for extreme_function in (np.minimum, np.maximum)
    )
    is_constant_day = (lowest_by_day == highest_by_day) & (transaction_days.size >= MIN_ROWS)
    if is_constant_day.any() and not is_constant_day.all():
        values_on_other_days = column_values[~np.repeat(is_constant_day, transaction_days.size)]
        is_constant_day &= (
            np.mean(values_on_other_days == lowest_by_day[np.argmax(is_constant_day)])
            ** transaction_days.size
            < MAX_CHANCE
        )
    return is_constant_day & (len(is_constant_day) > 1)


def _share_of_new(column_ids: Ints, transaction_days: Days) -> Floats:
    """Return, for each day, the fraction of rows whose id does not occur on earlier days."""
    day_index_by_row = np.repeat(np.arange(len(transaction_days.size)), transaction_days.size)
    is_new = pl.DataFrame({"id": column_ids, "day": day_index_by_row}).select(
        pl.col("day").first().over("id") == pl.col("day")
    )
    return (
        np.add.reduceat(is_new.to_series().to_numpy(), transaction_days.start, dtype=np.int64)
        / transaction_days.size
    )


def _mean_before(values_by_day: Floats) -> Floats:
    """Return, for each day, the mean of `values_by_day` in the week before the day; 1 for the first
    day."""
    cumulative_sums = np.append(0, np.cumsum(values_by_day))
    day_indices = np.arange(len(values_by_day))
    window_start = np.maximum(day_indices - WEEK, 0)
    return np.where(
        day_indices,
        (cumulative_sums[day_indices] - cumulative_sums[window_start])
        / np.maximum(day_indices - window_start, 1),
        1,
    )


def missing_genuine_rows(labelled_rows: Rows) -> list[str]:
    """Return a sentence if the genuine rows per day change from some day on, but the frauds per day
    do not."""
    is_fraud = labelled_rows.fraud == 1
    if 2 * is_fraud.sum() >= len(labelled_rows):
        return []

    first_day = labelled_rows.time[0] // DAY
    day_index_by_row = labelled_rows.time // DAY - first_day
    daily_counts = np.stack(
        [
            np.bincount(day_index_by_row[label_mask], minlength=day_index_by_row[-1] + 1)
            for label_mask in (~is_fraud, is_fraud)
        ]
    )
    cumulative_counts = np.pad(np.cumsum(daily_counts, axis=1), [(0, 0), (1, 0)])
    day_count = daily_counts.shape[1]
    split_days = np.arange(WEEK, day_count - WEEK + 1)
    window_start = np.maximum(split_days - 2 * WEEK, 0)
    window_end = np.minimum(split_days + 2 * WEEK, day_count)
    # daily means of [genuine rows, frauds] in the two weeks before and after each of `split_days`
    mean_before = (cumulative_counts[:, split_days] - cumulative_counts[:, window_start]) / (
        split_days - window_start
    )
    mean_after = (cumulative_counts[:, window_end] - cumulative_counts[:, split_days]) / (
        window_end - split_days
    )

    with np.errstate(divide="ignore", invalid="ignore"):
        genuine_log_ratio = np.log((mean_after[0] + 1) / (mean_before[0] + 1))
        fraud_log_ratio = np.log(mean_after[1] / mean_before[1])
        is_break = np.isfinite(fraud_log_ratio) & (
            np.sign(genuine_log_ratio) * (genuine_log_ratio - fraud_log_ratio)
            >= np.log(MIN_SHARE_RATIO)
        )

    is_break &= np.maximum(mean_before[0], mean_after[0]) >= MIN_ROWS
    break_size = np.where(is_break, np.abs(genuine_log_ratio), 0)
    if break_size.max(initial=0) < np.log(MIN_GENUINE_RATIO):
        return []

    break_index = int(np.argmax(break_size))

    return [
        f"the genuine rows per day change from {mean_before[0, break_index]:,.0f} to"
        f" {mean_after[0, break_index]:,.0f} on"
        f" {day_of((first_day + split_days[break_index]) * DAY)}, and the frauds per day from"
        f" {mean_before[1, break_index]:,.1f} to {mean_after[1, break_index]:,.1f}: are genuine"
        " rows left out before or after that day, or labels inverted? Give all rows, or leave out"
        " the days before or after it with data.first_day or data.last_day."
    ]


def sum_labels(
    transactions: Rows, log_odds: NDArray[np.float32], start_time: int, end_time: int
) -> Floats:
    """Return the sums that `late_labels` needs, over the rows from `start_time` to `end_time`,
    whose labels should be known.

    `log_odds`: predictions of trees that were not fitted on the given rows. Row 0 of the result has
    the sums over the newest week, row 1 the sums over earlier weeks. The columns of the result are
    expected frauds, labelled frauds and variance; each transaction is weighted with its probability
    of fraud.
    """
    is_usable = (
        (transactions.time >= start_time)
        & (transactions.time < end_time)
        & (transactions.fraud != UNKNOWN)
    )
    fraud_probability = 1 / (1 + np.exp(-log_odds[is_usable].astype(float)))
    is_fraud = transactions.fraud[is_usable] == 1
    weighted_values = fraud_probability * np.stack(
        [fraud_probability, is_fraud, fraud_probability**2 * (1 - fraud_probability)]
    )
    is_new = transactions.time[is_usable] >= end_time - WEEK * DAY

    return np.stack([weighted_values[:, is_new].sum(1), weighted_values[:, ~is_new].sum(1)])


def late_labels(label_sums: Floats, end_time: int, delay_days: int) -> list[str]:
    """Return a sentence if labels of frauds are missing in the week before `end_time`.

    `label_sums`: total of the results of `sum_labels` for all parts of the data.
    """
    expected_frauds, labelled_frauds, fraud_variance = label_sums.T
    if not (expected_frauds.all() and labelled_frauds[1]):
        return []

    recent_label_ratio, earlier_label_ratio = labelled_frauds / expected_frauds
    standard_deviation = np.sqrt(earlier_label_ratio * (fraud_variance / expected_frauds**2).sum())
    if (
        recent_label_ratio > MAX_LABELLED_SHARE * earlier_label_ratio
        or earlier_label_ratio - recent_label_ratio < MIN_Z * standard_deviation
    ):
        return []

    return [
        f"about {1 - recent_label_ratio / earlier_label_ratio:.0%} of the frauds from"
        f" {day_of(end_time - WEEK * DAY)} to {day_of(end_time - DAY)} are not labelled, judged by"
        f" earlier data: do labels arrive later than data.label_delay_days ({delay_days})? Raise"
        " this setting, because training and evaluation take frauds without their label for"
        " genuine."
    ]
