"""Warn about data whose rows are valid, but whose statistics are suspicious."""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from steps.fraud.data.breaks import missing_genuine_rows, new_ids, truncated_values
from steps.fraud.data.transactions import DAY, UNKNOWN, Ints, Rows
from steps.fraud.fraud_config import Columns

# minimum time gap before the few latest rows that makes them stray
STRAY_GAP = 30 * DAY
# maximum fraction of rows that can count as stray
MAX_STRAYS = 0.001
# maximum fraction of rows that differ from another row only in the id
MAX_DUPLICATES = 0.001
# maximum plausible fraction of frauds; fewer than 1% of card payments are frauds
MAX_FRAUD_SHARE = 0.03
# minimum fraction of frauds that the values of a leaking column identify
MIN_LEAK_SHARE = 0.8
# minimum number of frauds for which leaks are checked
MIN_FRAUDS = 10


def strays(row_times: Ints) -> int:
    """Return the time of the first stray row. Stray rows are a few rows that are much later than
    all other rows. If there are no stray rows, return a time after the last row."""
    sorted_times = np.sort(row_times)
    first_candidate_index = len(sorted_times) - max(1, int(MAX_STRAYS * len(sorted_times)))
    if len(sorted_times) > 1:
        wide_gaps = np.flatnonzero(
            np.diff(sorted_times[max(0, first_candidate_index - 1) :]) > STRAY_GAP
        )
    else:
        wide_gaps = []
    if len(wide_gaps):
        return int(sorted_times[max(0, first_candidate_index - 1) :][wide_gaps[0] + 1])
    return int(sorted_times[-1]) + 1


def suspicions(transactions: Rows, column_settings: Columns, labels_until: int) -> list[str]:
    """Return a sentence for each suspicious property of `transactions`, which are sorted by time.

    Labels are checked only before `labels_until`, because later labels may not have arrived yet.
    """
    labelled_rows = transactions[: int(np.searchsorted(transactions.time, labels_until))]
    labelled_rows = labelled_rows[labelled_rows.fraud != UNKNOWN]
    warning_sentences = (
        wrong_columns(transactions, column_settings)
        + truncated_values(transactions, column_settings)
        + new_ids(transactions, column_settings)
    )
    return (
        warning_sentences
        + (missing_genuine_rows(labelled_rows) or frequent_frauds(labelled_rows, column_settings))
        + leaks(labelled_rows, column_settings)
    )


def wrong_columns(transactions: Rows, column_settings: Columns) -> list[str]:
    """Return a sentence for each column that is probably wrong or swapped, and for missing or
    repeated rows."""
    warning_sentences = []
    for column_name, column_values in (
        ("card", transactions.card),
        ("terminal", transactions.terminal),
        ("amount", transactions.cents),
    ):
        column_description = column_settings.describe(column_name)
        if column_values.min() == column_values.max():
            warning_sentences.append(
                f"{column_description} has only one value: is it the right column?"
            )
        elif column_name != "amount" and pl.Series(column_values).n_unique() == len(column_values):
            warning_sentences.append(
                f"{column_description} differs in every row: is it swapped with another column?"
            )

    without_ids = pl.DataFrame(
        {
            column_name: getattr(transactions, column_name)
            for column_name in ("card", "time", "terminal", "cents")
        }
    )
    duplicate_count = len(transactions) - without_ids.n_unique()
    if duplicate_count > MAX_DUPLICATES * len(transactions):
        warning_sentences.append(
            f"{duplicate_count:,} rows equal another row except for their id: was a file read"
            " twice?"
        )

    distinct_days = np.unique(transactions.time // DAY)
    gap_positions = np.flatnonzero(np.diff(distinct_days) > 1)
    if len(gap_positions) and len(distinct_days) > 0.5 * (distinct_days[-1] - distinct_days[0]):
        missing_day_count = int((np.diff(distinct_days) - 1).sum())
        first_missing_day = np.datetime64(int(distinct_days[gap_positions[0]]) + 1, "D")
        warning_sentences.append(
            f"{missing_day_count} days are without a transaction, the first of them"
            f" {first_missing_day}: is a file missing?"
        )

    return warning_sentences


def frequent_frauds(labelled_rows: Rows, column_settings: Columns) -> list[str]:
    """Return a sentence if frauds are more frequent than usual for card payments."""
    fraud_share = (labelled_rows.fraud == 1).mean() if len(labelled_rows) else 0
    column_description = column_settings.describe("fraud")

    if fraud_share >= 0.5:
        return [
            f"{fraud_share:.1%} of the known labels are frauds: are they inverted? In"
            f" {column_description}, 1 must mean fraud and 0 genuine. Correct the source."
        ]

    if fraud_share > MAX_FRAUD_SHARE:
        return [
            f"{fraud_share:.1%} of the known labels are frauds, but usually fewer than 1% of card"
            " payments: are genuine rows left out? Then scores are too high for real traffic, and"
            f" metrics too good. Give all rows; if {column_description} is complete, ignore this"
            " warning."
        ]

    return []


def leaks(labelled_rows: Rows, column_settings: Columns) -> list[str]:
    """Return a sentence for each column whose values identify the frauds."""
    is_fraud = labelled_rows.fraud == 1
    if not MIN_FRAUDS <= is_fraud.sum() < len(labelled_rows) / 2:
        return []

    warning_sentences = []
    for column_name, column_values in (
        ("card", labelled_rows.card),
        ("terminal", labelled_rows.terminal),
        ("amount", labelled_rows.cents),
    ):
        identified_share = _share_identified(column_values, is_fraud)
        if column_name == "amount":
            identified_share = max(identified_share, _share_at_one_end(column_values, is_fraud))

        if identified_share >= MIN_LEAK_SHARE:
            warning_sentences.append(
                f"{column_settings.describe(column_name)} alone identifies {identified_share:.0%}"
                " of the frauds: does it contain the label, or facts from after the transaction?"
                " Name the column with the original value."
            )

    return warning_sentences


def _share_identified(column_values: Ints, is_fraud: NDArray[np.bool_]) -> float:
    """Return the fraction of frauds whose value occurs in at least one other fraud and in no
    genuine row."""
    groups_by_value = pl.DataFrame({"value": column_values, "fraud": is_fraud}).group_by("value")
    fraud_only_groups = groups_by_value.agg(pl.col("fraud").sum(), rows=pl.len()).filter(
        pl.col("fraud") == pl.col("rows"), pl.col("rows") > 1
    )
    return float(fraud_only_groups["rows"].sum() / is_fraud.sum())


def _share_at_one_end(column_values: Ints, is_fraud: NDArray[np.bool_]) -> float:
    """Return the fraction of all frauds that are at one end of the value range where most rows are
    frauds; 0 if most rows are frauds at neither end."""
    low_quantile, high_quantile = np.quantile(column_values[is_fraud], [0.1, 0.9])
    extreme_labels = [
        is_fraud[extreme_mask]
        for extreme_mask in (column_values >= low_quantile, column_values <= high_quantile)
    ]
    return max(
        (
            float(end_labels.sum() / is_fraud.sum())
            for end_labels in extreme_labels
            if end_labels.mean() >= MIN_LEAK_SHARE
        ),
        default=0,
    )
