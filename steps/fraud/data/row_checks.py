"""Validate rows: types, ranges, duplicates, time order.

Each invalid row is returned with a reason.
"""

import time
from dataclasses import dataclass

import polars as pl

from rekindle.errors import DataError
from steps.fraud.data.convert import to_amounts, to_instants, to_numbers
from steps.fraud.data.csv_file import FILE, LINE_NUMBER, RAGGED
from steps.fraud.data.suspicions import strays
from steps.fraud.data.transactions import DAY, UNKNOWN, Rows, identity
from steps.fraud.fraud_config import Columns, Text

COLUMN_TYPES: dict[str, str] = dict.fromkeys(("id", "card", "terminal"), "a number or a text")
COLUMN_TYPES["time"] = "a timestamp"
COLUMN_TYPES["amount"] = "a number"
COLUMN_TYPES["fraud"] = "0, 1 or nothing"
# text ids that `transactions.identity` converts to their numeric value
INTEGER_PATTERN = r"^-?[0-9]{1,18}$"
MIN_TIME = 946_684_800_000_000  # 2000-01-01 in µs
MAX_AMOUNT = 1e9  # larger amounts are probably in another unit


@dataclass(frozen=True)
class CheckedRows:
    """Valid rows sorted by (time, id), and the rejected rows with reasons."""

    rows: Rows
    # rejected rows, unchanged, with columns `row` (position from 0) and `reason`
    rejects: pl.DataFrame
    was_sorted: bool

    def reasons(self) -> dict[str, int]:
        """Return the number of rejected rows by reason."""
        return dict(self.rejects["reason"].value_counts(sort=True).iter_rows())


def check(
    frame: pl.DataFrame,
    columns: Columns,
    max_bad_share: float,
    text: Text | None = None,
    now: float | None = None,
) -> CheckedRows:
    """Validate the rows of `source.read`. Rows more than a day later than `now` (seconds since the
    epoch) are rejected.

    Raises DataError if more than the share `max_bad_share` of the rows is invalid, or a column has
    the wrong type.
    """
    tomorrow = int((time.time() if now is None else now) * 1e6) + DAY
    converted = _convert(frame, columns, text or Text())

    if RAGGED in frame.columns:
        is_ragged = frame[RAGGED].is_not_null()
    else:
        is_ragged = pl.Series([False]).new_from_index(0, len(frame))

    # the reason for rejecting a row is the first rule that the row breaks
    rules = {
        "line with too few or too many fields": pl.lit(is_ragged),
        "id missing, or neither integer nor text": pl.col("id").is_null(),
        "time missing or not a timestamp": pl.col("time").is_null(),
        "time before the year 2000": pl.col("time") < MIN_TIME,
        "time in the future": pl.col("time") > tomorrow,
        "card missing, or neither integer nor text": pl.col("card").is_null(),
        "terminal missing, or neither integer nor text": pl.col("terminal").is_null(),
        "amount missing or not a number": pl.col("amount").is_null() | pl.col("amount").is_nan(),
        "amount negative": pl.col("amount") < 0,
        f"amount above {MAX_AMOUNT:,.0f}": pl.col("amount") > MAX_AMOUNT,
        "label not 0 or 1": (
            pl.col("fraud").is_null() | ~pl.col("fraud").is_in([0.0, 1.0, float(UNKNOWN)])
        ),
    }
    if not converted.select(pl.any_horizontal(rule.any() for rule in rules.values())).item():
        reason = pl.Series("reason", [None], pl.String).new_from_index(0, len(converted))
    else:
        reason = converted.select(
            reason=pl.coalesce(
                pl.when(rule.fill_null(False)).then(pl.lit(text)) for text, rule in rules.items()
            )
        )["reason"]

    is_valid = reason.is_null()
    times = converted["time"].filter(is_valid).to_numpy()
    if len(times) and (is_stray := converted["time"] >= strays(times)).any():
        reason = reason.set(is_valid & is_stray, "time far after all other rows")
        is_valid = reason.is_null()

    ids = converted["id"]
    # strictly ascending ids are unique, so duplicates need no further check
    if not (is_valid.all() and (ids.diff() > 0).all()):
        is_duplicate = ~ids.set(~is_valid, None).is_first_distinct() & is_valid
        reason = reason.set(is_duplicate, "id seen before")
        is_valid = reason.is_null()

    rejects = frame.with_columns(reason=reason).with_row_index("row").filter(~is_valid)
    checked = _sort(converted if is_valid.all() else converted.filter(is_valid), rejects)
    _reject_too_many(checked, len(frame), columns, max_bad_share)

    return checked


def _convert(frame: pl.DataFrame, columns: Columns, text: Text) -> pl.DataFrame:
    """Convert the columns to the types of the dataset. Values that cannot be converted become
    null."""
    converters = {
        "id": _convert_ids,
        "time": lambda column: to_instants(column, text.time),
        "card": _convert_ids,
        "terminal": _convert_ids,
        "amount": lambda column: to_amounts(column, text.decimal),
        "fraud": _convert_labels,
    }

    converted_columns = []

    for name, convert in converters.items():
        series = convert(frame[name])
        if series is None:
            raise DataError(
                f'column "{getattr(columns, name)}" holds {frame[name].dtype}, which is not'
                f" {COLUMN_TYPES[name]}. Convert the column in the source, or name another column"
                f" by data.columns.{name}."
            )

        converted_columns.append(series)

    if "scenario" in frame.columns:
        scenario = frame["scenario"]
    else:
        scenario = pl.Series("scenario", [0]).new_from_index(0, len(frame))

    return pl.DataFrame([*converted_columns, scenario.cast(pl.UInt8, strict=False).fill_null(0)])


def _convert_ids(column: pl.Series) -> pl.Series | None:
    """Convert ids (numbers or text) to numbers."""
    if column.dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    if column.dtype.is_float():  # pandas writes integers with gaps as floats
        return column.cast(pl.Int64, strict=False).set(column != column.floor(), None)
    if column.dtype not in (pl.String, pl.Categorical):
        return None

    text = column.cast(pl.String).str.strip_chars()
    numbers = text.set(~text.str.contains(INTEGER_PATTERN), None).cast(pl.Int64)

    words = text.filter(numbers.is_null() & (text != "")).unique()
    if words.is_empty():
        return numbers

    hashes = text.replace_strict(
        words, pl.Series([identity(w) for w in words], dtype=pl.Int64), default=None
    )
    return numbers.fill_null(hashes)


def _convert_labels(column: pl.Series) -> pl.Series | None:
    """Convert labels (0, 1 or empty) to numbers; UNKNOWN for an empty label."""
    is_missing = column.is_null()
    if column.dtype == pl.String:
        column = column.str.strip_chars().str.to_lowercase().replace({"true": "1", "false": "0"})
        is_missing |= column.is_in(["", "null", "none", "nan"])
    elif column.dtype.is_float():  # pandas writes integers with gaps as floats
        is_missing |= column.is_nan()
    labels = to_numbers(column)
    if labels is None:
        return None
    return labels.set(labels == UNKNOWN, None).set(is_missing.fill_null(True), float(UNKNOWN))


def _sort(valid_rows: pl.DataFrame, rejects: pl.DataFrame) -> CheckedRows:
    is_ascending = valid_rows.select(
        (pl.col("time").diff() > 0) | ((pl.col("time").diff() == 0) & (pl.col("id").diff() > 0))
    ).to_series()
    was_sorted = bool(is_ascending.all())
    valid_rows = valid_rows if was_sorted else valid_rows.sort("time", "id")
    columns = {name: valid_rows[name].to_numpy() for name in valid_rows.columns}
    return CheckedRows(Rows.of(**columns), rejects, was_sorted)


def _reject_too_many(
    checked: CheckedRows, total: int, columns: Columns, max_bad_share: float
) -> None:
    """Raise DataError if too many rows are invalid, with the number and an example of each
    reason."""
    bad_count = len(checked.rejects)
    if bad_count <= max_bad_share * total and len(checked.rows):
        return

    lines = []
    for reason, count in checked.reasons().items():
        first = checked.rejects.filter(pl.col("reason") == reason).row(0, named=True)
        if LINE_NUMBER in first:
            position = f"line {first[LINE_NUMBER]:,} of {first[FILE]}"
        else:
            position = f"row {first['row']:,}"

        name = reason.split()[0].replace("label", "fraud")
        if name in first and hasattr(columns, name):
            value = f", {getattr(columns, name)} = {first[name]}"
        else:
            value = ""

        lines.append(f"{count:,} × {reason} (the first: {position}{value})")

    raise DataError(
        f"{bad_count:,} of {total:,} rows ({bad_count / total:.2%}) are invalid, more than"
        f" data.tolerated_rejects ({max_bad_share:.2%}): {'; '.join(lines)}. Correct the source, or"
        " raise data.tolerated_rejects to leave these rows out."
    )
