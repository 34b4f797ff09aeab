"""Warnings about data that changes from a day on: truncated values."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steps.fraud.config import Columns
from steps.fraud.data.schema import DAY, Ints, Rows
from steps.fraud.data.schema import day as day_of

Floats = NDArray[np.float64]
HOUR = DAY // 24
WEEK = 7  # days
MIN_ROWS = 20  # of a day; fewer prove nothing
CHANCE = 1e-6  # a constant day that is more probable than this is not a break


@dataclass(frozen=True)
class Days:
    """Days with transactions: number since the epoch, first row and number of rows."""

    number: Ints
    start: Ints
    size: Ints

    @classmethod
    def of(cls, time: Ints) -> "Days":
        """Return the days of `time` (µs since the epoch, ascending)."""
        number, start, size = np.unique(time // DAY, return_index=True, return_counts=True)
        return cls(number, start, size)

    def name(self, index: int) -> str:
        return day_of(self.number[index] * DAY)


def truncated_values(rows: Rows, columns: Columns) -> list[str]:
    """Return a sentence for each column whose cents or times of day are constant on some days."""
    days, result = Days.of(rows.time), []
    for name, what, values in (
        ("amount", "cents", rows.cents % 100),
        ("time", "minutes and seconds", rows.time % HOUR),
    ):
        constant = _constant_days(values, days)
        if constant.any() and not (name == "amount" and constant.all()):  # a currency without cents
            result.append(
                f"{columns.describe(name)} has equal {what} in all rows of {constant.sum()} of {len(constant)} days, "
                f"the first of them {days.name(int(np.argmax(constant)))}: does the export truncate it? Export the "
                "full value for all days."
            )
    return result


def _constant_days(values: Ints, days: Days) -> NDArray[np.bool_]:
    """Return a mask of the days whose rows all have the same value, unless the rows of other days often have it too."""
    low, high = (function.reduceat(values, days.start) for function in (np.minimum, np.maximum))
    constant = (low == high) & (days.size >= MIN_ROWS)
    if constant.any() and not constant.all():
        others = values[~np.repeat(constant, days.size)]
        constant &= np.mean(others == low[np.argmax(constant)]) ** days.size < CHANCE
    return constant & (len(constant) > 1)
