"""Warnings about data whose rows are valid, but look wrong as a whole."""

import numpy as np

from steps.fraud.config import Columns
from steps.fraud.data.schema import DAY, Ints, Rows

STRAY_GAP = 30 * DAY  # rows after such a gap are strays if they are fewer than MAX_STRAYS of all rows
MAX_STRAYS = 0.001
MAX_DUPLICATES = 0.001  # share of rows that are equal except for their id


def strays(time: Ints) -> int:
    """Return the start of a few rows that lie far after all others; without such rows, a time after all rows."""
    sorted_times = np.sort(time)
    first = len(sorted_times) - max(1, int(MAX_STRAYS * len(sorted_times)))
    wide_gaps = np.flatnonzero(np.diff(sorted_times[max(0, first - 1) :]) > STRAY_GAP) if len(sorted_times) > 1 else []
    return int(sorted_times[max(0, first - 1) :][wide_gaps[0] + 1]) if len(wide_gaps) else int(sorted_times[-1]) + 1


def suspicions(rows: Rows, columns: Columns) -> list[str]:
    """Return a sentence for each suspicious property of `rows`, which are sorted by time."""
    result = []
    for name, values in (("card", rows.card), ("terminal", rows.terminal), ("amount", rows.cents)):
        column = f'column "{getattr(columns, name)}" (data.columns.{name})'
        if values.min() == values.max():
            result.append(f"{column} has only one value: is it the right column?")
        elif name != "amount" and len(np.unique(values)) == len(values):
            result.append(f"{column} differs in every row: is it swapped with another column?")
    keys = np.lexsort((rows.cents, rows.terminal, rows.time, rows.card))
    equal_neighbours = [np.diff(values[keys]) == 0 for values in (rows.card, rows.time, rows.terminal, rows.cents)]
    duplicates = int(np.logical_and.reduce(equal_neighbours).sum())
    if duplicates > MAX_DUPLICATES * len(rows):
        result.append(f"{duplicates:,} rows equal another row except for their id: was a file read twice?")
    days = np.unique(rows.time // DAY)
    gaps = np.flatnonzero(np.diff(days) > 1)
    if len(gaps) and len(days) > 0.5 * (days[-1] - days[0]):
        missing = int((np.diff(days) - 1).sum())
        first = np.datetime64(int(days[gaps[0]]) + 1, "D")
        result.append(f"{missing} days are without a transaction, the first of them {first}: is a file missing?")
    return result
