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
WEEK = 7  # days
MIN_ROWS = 20  # days with fewer rows cause no warning
MAX_CHANCE = 1e-6  # a constant day with a lower probability is a break
MIN_NEW_IDS = 0.6  # minimum fraction of rows with new ids on the day of a break
MAX_USUAL_NEW_IDS = 0.3  # upper limit for this fraction in the week before a break
MIN_GENUINE_RATIO = 1.6  # minimum factor by which genuine rows per day change at a break
MIN_SHARE_RATIO = 1.3  # minimum ratio of this factor to the factor for frauds
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
        number, start, size = np.unique(time // DAY, return_index=True, return_counts=True)
        return cls(number, start, size)

    def name(self, index: int) -> str:
        return day_of(self.number[index] * DAY)


def truncated_values(rows: Rows, columns: Columns) -> list[str]:
    """Return a sentence for each column whose cents, or minutes and seconds, are equal in all rows
    of some days."""
    days = Days.of(rows.time)
    result = []

    for name, what, values in (
        ("amount", "cents", rows.cents % 100),
        ("time", "minutes and seconds", rows.time % HOUR),
    ):
        constant = _constant_days(values, days)
        # no warning if no amount has cents, as in some currencies
        if constant.any() and not (name == "amount" and constant.all()):
            result.append(
                f"{columns.describe(name)} has equal {what} in all rows of {constant.sum()} of"
                f" {len(constant)} days, the first of them {days.name(int(np.argmax(constant)))}:"
                " does the export truncate it? Export the full value for all days."
            )

    return result


def new_ids(rows: Rows, columns: Columns) -> list[str]:
    """Return a sentence for each column with a day whose ids are mostly new, although earlier days
    had few new ids."""
    days = Days.of(rows.time)
    result = []

    for name, ids in (("card", rows.card), ("terminal", rows.terminal)):
        new = _share_of_new(ids, days)
        before = _mean_before(new)
        known = (1 - new) * days.size
        is_break = (new >= MIN_NEW_IDS) & (before < MAX_USUAL_NEW_IDS) & (days.size >= MIN_ROWS)
        # also require a drop of the rows with known ids, because additional customers do not reduce
        # these
        is_break &= known < _mean_before(known) / 2

        found = np.flatnonzero(is_break)
        if len(found):
            result.append(
                f"{columns.describe(name)} has ids that no earlier day has in {new[found[0]]:.0%}"
                f" of the rows of {days.name(found[0])}, and in {before[found[0]]:.1%} in the week"
                f" before: were the ids hashed again? Then the history of each {name} is lost. Give"
                " all rows the same kind of id, or set data.first_day to that day."
            )

    return result


def _constant_days(values: Ints, days: Days) -> NDArray[np.bool_]:
    """Return a mask of the days on which all rows have one value that is not frequent on other
    days."""
    low, high = (function.reduceat(values, days.start) for function in (np.minimum, np.maximum))
    constant = (low == high) & (days.size >= MIN_ROWS)
    if constant.any() and not constant.all():
        others = values[~np.repeat(constant, days.size)]
        constant &= np.mean(others == low[np.argmax(constant)]) ** days.size < MAX_CHANCE
    return constant & (len(constant) > 1)


def _share_of_new(ids: Ints, days: Days) -> Floats:
    """Return, for each day, the fraction of rows whose id does not occur on earlier days."""
    day = np.repeat(np.arange(len(days.size)), days.size)
    is_new = pl.DataFrame({"id": ids, "day": day}).select(
        pl.col("day").first().over("id") == pl.col("day")
    )
    return np.add.reduceat(is_new.to_series().to_numpy(), days.start, dtype=np.int64) / days.size


def _mean_before(values: Floats) -> Floats:
    """Return, for each day, the mean of `values` in the week before it; 1 for the first day."""
    sums = np.append(0, np.cumsum(values))
    index = np.arange(len(values))
    first = np.maximum(index - WEEK, 0)
    return np.where(index, (sums[index] - sums[first]) / np.maximum(index - first, 1), 1)


def missing_genuine_rows(labelled: Rows) -> list[str]:
    """Return a sentence if the genuine rows per day change from some day on, but the frauds per day
    do not."""
    is_fraud = labelled.fraud == 1
    if 2 * is_fraud.sum() >= len(labelled):
        return []

    first_day = labelled.time[0] // DAY
    day = labelled.time // DAY - first_day
    daily = np.stack(
        [np.bincount(day[mask], minlength=day[-1] + 1) for mask in (~is_fraud, is_fraud)]
    )
    sums = np.pad(np.cumsum(daily, axis=1), [(0, 0), (1, 0)])
    count = daily.shape[1]
    middle = np.arange(WEEK, count - WEEK + 1)
    start = np.maximum(middle - 2 * WEEK, 0)
    end = np.minimum(middle + 2 * WEEK, count)
    # daily means of [genuine rows, frauds] in the two weeks before and after each day in `middle`
    before = (sums[:, middle] - sums[:, start]) / (middle - start)
    after = (sums[:, end] - sums[:, middle]) / (end - middle)

    with np.errstate(divide="ignore", invalid="ignore"):
        genuine = np.log((after[0] + 1) / (before[0] + 1))
        frauds = np.log(after[1] / before[1])
        is_break = np.isfinite(frauds) & (
            np.sign(genuine) * (genuine - frauds) >= np.log(MIN_SHARE_RATIO)
        )

    is_break &= np.maximum(before[0], after[0]) >= MIN_ROWS
    size = np.where(is_break, np.abs(genuine), 0)
    if size.max(initial=0) < np.log(MIN_GENUINE_RATIO):
        return []

    found = int(np.argmax(size))

    return [
        f"the genuine rows per day change from {before[0, found]:,.0f} to {after[0, found]:,.0f} on"
        f" {day_of((first_day + middle[found]) * DAY)}, and the frauds per day from"
        f" {before[1, found]:,.1f} to {after[1, found]:,.1f}: are genuine rows left out before or"
        " after that day, or labels inverted? Give all rows, or leave out the days before or after"
        " it with data.first_day or data.last_day."
    ]


def sum_labels(rows: Rows, log_odds: NDArray[np.float32], start: int, end: int) -> Floats:
    """Return the sums that `late_labels` needs, over the rows from `start` to `end`, whose labels
    should be known.

    `log_odds`: predictions of trees that were not fitted on these rows. Row 0 of the result has the
    sums over the newest week, row 1 those over earlier weeks. The columns are expected frauds,
    labelled frauds and variance; each transaction is weighted with its probability of fraud.
    """
    usable = (rows.time >= start) & (rows.time < end) & (rows.fraud != UNKNOWN)
    probability = 1 / (1 + np.exp(-log_odds[usable].astype(float)))
    is_fraud = rows.fraud[usable] == 1
    values = probability * np.stack([probability, is_fraud, probability**2 * (1 - probability)])
    is_new = rows.time[usable] >= end - WEEK * DAY

    return np.stack([values[:, is_new].sum(1), values[:, ~is_new].sum(1)])


def late_labels(sums: Floats, end: int, delay_days: int) -> list[str]:
    """Return a sentence if labels of frauds are missing in the week before `end`.

    `sums`: total of the results of `sum_labels` for all parts of the data.
    """
    expected, labelled, variance = sums.T
    if not (expected.all() and labelled[1]):
        return []

    new, old = labelled / expected
    deviation = np.sqrt(old * (variance / expected**2).sum())
    if new > MAX_LABELLED_SHARE * old or old - new < MIN_Z * deviation:
        return []

    return [
        f"about {1 - new / old:.0%} of the frauds from {day_of(end - WEEK * DAY)} to"
        f" {day_of(end - DAY)} are not labelled, judged by earlier data: do labels arrive later"
        f" than data.label_delay_days ({delay_days})? Raise this setting, because training and"
        " evaluation take frauds without their label for genuine."
    ]
