"""Warn about data whose rows are valid, but whose statistics are suspicious."""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from steps.fraud.data.breaks import missing_genuine_rows, new_ids, truncated_values
from steps.fraud.data.transactions import DAY, UNKNOWN, Ints, Rows
from steps.fraud.fraud_config import Columns

STRAY_GAP = 30 * DAY  # minimum time gap before the few latest rows that makes them stray
MAX_STRAYS = 0.001  # maximum fraction of rows that can count as stray
MAX_DUPLICATES = 0.001  # maximum fraction of rows that differ from another row only in the id
# maximum plausible fraction of frauds; fewer than 1% of card payments are frauds
MAX_FRAUD_SHARE = 0.03
# minimum fraction of frauds that the values of a leaking column identify
MIN_LEAK_SHARE = 0.8
MIN_FRAUDS = 10  # with fewer frauds, leaks are not checked


def strays(time: Ints) -> int:
    """Return the time of the first stray row. Stray rows are a few rows that are much later than
    all others. Without any, return a time after the last row."""
    sorted_times = np.sort(time)
    first = len(sorted_times) - max(1, int(MAX_STRAYS * len(sorted_times)))
    if len(sorted_times) > 1:
        wide_gaps = np.flatnonzero(np.diff(sorted_times[max(0, first - 1) :]) > STRAY_GAP)
    else:
        wide_gaps = []
    if len(wide_gaps):
        return int(sorted_times[max(0, first - 1) :][wide_gaps[0] + 1])
    return int(sorted_times[-1]) + 1


def suspicions(rows: Rows, columns: Columns, labels_until: int) -> list[str]:
    """Return a sentence for each suspicious property of `rows`, which are sorted by time.

    Labels are checked only before `labels_until`, because later ones may not have arrived yet.
    """
    labelled = rows[: int(np.searchsorted(rows.time, labels_until))]
    labelled = labelled[labelled.fraud != UNKNOWN]
    result = wrong_columns(rows, columns) + truncated_values(rows, columns) + new_ids(rows, columns)
    return (
        result
        + (missing_genuine_rows(labelled) or frequent_frauds(labelled, columns))
        + leaks(labelled, columns)
    )


def wrong_columns(rows: Rows, columns: Columns) -> list[str]:
    """Return a sentence for each column that is probably wrong or swapped, and for missing or
    repeated rows."""
    result = []
    for name, values in (("card", rows.card), ("terminal", rows.terminal), ("amount", rows.cents)):
        column = columns.describe(name)
        if values.min() == values.max():
            result.append(f"{column} has only one value: is it the right column?")
        elif name != "amount" and pl.Series(values).n_unique() == len(values):
            result.append(f"{column} differs in every row: is it swapped with another column?")

    without_ids = pl.DataFrame(
        {name: getattr(rows, name) for name in ("card", "time", "terminal", "cents")}
    )
    duplicates = len(rows) - without_ids.n_unique()
    if duplicates > MAX_DUPLICATES * len(rows):
        result.append(
            f"{duplicates:,} rows equal another row except for their id: was a file read twice?"
        )

    days = np.unique(rows.time // DAY)
    gaps = np.flatnonzero(np.diff(days) > 1)
    if len(gaps) and len(days) > 0.5 * (days[-1] - days[0]):
        missing = int((np.diff(days) - 1).sum())
        first = np.datetime64(int(days[gaps[0]]) + 1, "D")
        result.append(
            f"{missing} days are without a transaction, the first of them {first}: is a file"
            " missing?"
        )

    return result


def frequent_frauds(labelled: Rows, columns: Columns) -> list[str]:
    """Return a sentence if frauds are more frequent than usual for card payments."""
    share = (labelled.fraud == 1).mean() if len(labelled) else 0
    column = columns.describe("fraud")

    if share >= 0.5:
        return [
            f"{share:.1%} of the known labels are frauds: are they inverted? In {column}, 1 must"
            " mean fraud and 0 genuine. Correct the source."
        ]

    if share > MAX_FRAUD_SHARE:
        return [
            f"{share:.1%} of the known labels are frauds, but usually fewer than 1% of card"
            " payments: are genuine rows left out? Then scores are too high for real traffic, and"
            f" metrics too good. Give all rows; if {column} is complete, ignore this warning."
        ]

    return []


def leaks(labelled: Rows, columns: Columns) -> list[str]:
    """Return a sentence for each column whose values identify the frauds."""
    is_fraud = labelled.fraud == 1
    if not MIN_FRAUDS <= is_fraud.sum() < len(labelled) / 2:
        return []

    result = []
    for name, values in (
        ("card", labelled.card),
        ("terminal", labelled.terminal),
        ("amount", labelled.cents),
    ):
        share = _share_identified(values, is_fraud)
        if name == "amount":
            share = max(share, _share_at_one_end(values, is_fraud))

        if share >= MIN_LEAK_SHARE:
            result.append(
                f"{columns.describe(name)} alone identifies {share:.0%} of the frauds: does it"
                " contain the label, or facts from after the transaction? Name the column with the"
                " original value."
            )

    return result


def _share_identified(values: Ints, is_fraud: NDArray[np.bool_]) -> float:
    """Return the fraction of frauds whose value occurs in at least one other fraud and in no
    genuine row."""
    groups = pl.DataFrame({"value": values, "fraud": is_fraud}).group_by("value")
    pure = groups.agg(pl.col("fraud").sum(), rows=pl.len()).filter(
        pl.col("fraud") == pl.col("rows"), pl.col("rows") > 1
    )
    return float(pure["rows"].sum() / is_fraud.sum())


def _share_at_one_end(values: Ints, is_fraud: NDArray[np.bool_]) -> float:
    """Return the fraction of all frauds that are at one end of the value range where most rows are
    frauds; 0 if neither end is like this."""
    low, high = np.quantile(values[is_fraud], [0.1, 0.9])
    ends = [is_fraud[mask] for mask in (values >= low, values <= high)]
    return max(
        (float(end.sum() / is_fraud.sum()) for end in ends if end.mean() >= MIN_LEAK_SHARE),
        default=0,
    )
