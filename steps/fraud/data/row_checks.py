"""Validate the rows of raw transactions: types, ranges, duplicates, time order.

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
# matches text ids that `transactions.identity` converts to their numeric value
INTEGER_PATTERN = r"^-?[0-9]{1,18}$"
# 2000-01-01 in µs
MIN_TIME = 946_684_800_000_000
# largest plausible amount; larger amounts are probably in another unit
MAX_AMOUNT = 1e9


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
    raw_rows: pl.DataFrame,
    column_settings: Columns,
    max_bad_share: float,
    text_settings: Text | None = None,
    now_seconds: float | None = None,
) -> CheckedRows:
    """Validate the rows of `source.read`. Rows more than a day later than `now_seconds` (seconds
    since the epoch) are rejected.

    Raises DataError if more than the fraction `max_bad_share` of the rows is invalid, or a column
    has the wrong type.
    """
    tomorrow_microseconds = int((time.time() if now_seconds is None else now_seconds) * 1e6) + DAY
    converted_rows = _convert_columns(raw_rows, column_settings, text_settings or Text())

    if RAGGED in raw_rows.columns:
        is_ragged = raw_rows[RAGGED].is_not_null()
    else:
        is_ragged = pl.Series([False]).new_from_index(0, len(raw_rows))

    # the reason for rejecting a row is the first rule that the row breaks
    rejection_rules = {
        "line with too few or too many fields": pl.lit(is_ragged),
        "id missing, or neither integer nor text": pl.col("id").is_null(),
        "time missing or not a timestamp": pl.col("time").is_null(),
        "time before the year 2000": pl.col("time") < MIN_TIME,
        "time in the future": pl.col("time") > tomorrow_microseconds,
        "card missing, or neither integer nor text": pl.col("card").is_null(),
        "terminal missing, or neither integer nor text": pl.col("terminal").is_null(),
        "amount missing or not a number": pl.col("amount").is_null() | pl.col("amount").is_nan(),
        "amount negative": pl.col("amount") < 0,
        f"amount above {MAX_AMOUNT:,.0f}": pl.col("amount") > MAX_AMOUNT,
        "label not 0 or 1": (
            pl.col("fraud").is_null() | ~pl.col("fraud").is_in([0.0, 1.0, float(UNKNOWN)])
        ),
    }
    if not converted_rows.select(
        pl.any_horizontal(rejection_rule.any() for rejection_rule in rejection_rules.values())
    ).item():
        reject_reasons = pl.Series("reason", [None], pl.String).new_from_index(
            0, len(converted_rows)
        )
    else:
        reject_reasons = converted_rows.select(
            reason=pl.coalesce(
                pl.when(rejection_rule.fill_null(False)).then(pl.lit(reason_text))
                for reason_text, rejection_rule in rejection_rules.items()
            )
        )["reason"]

    is_valid = reject_reasons.is_null()
    valid_times = converted_rows["time"].filter(is_valid).to_numpy()
    if len(valid_times):
        is_stray = converted_rows["time"] >= strays(valid_times)
        reject_reasons = reject_reasons.set(is_valid & is_stray, "time far after all other rows")
        is_valid = reject_reasons.is_null()

    transaction_ids = converted_rows["id"]
    # strictly ascending ids are unique, so duplicates need no further check
    if not (is_valid.all() and (transaction_ids.diff() > 0).all()):
        is_duplicate = ~transaction_ids.set(~is_valid, None).is_first_distinct() & is_valid
        reject_reasons = reject_reasons.set(is_duplicate, "id seen before")
        is_valid = reject_reasons.is_null()

    rejected_rows = (
        raw_rows.with_columns(reason=reject_reasons).with_row_index("row").filter(~is_valid)
    )
    checked_rows = _sort_rows(
        converted_rows if is_valid.all() else converted_rows.filter(is_valid), rejected_rows
    )
    _reject_too_many(checked_rows, len(raw_rows), column_settings, max_bad_share)

    return checked_rows


def _convert_columns(
    raw_rows: pl.DataFrame, column_settings: Columns, text_settings: Text
) -> pl.DataFrame:
    """Convert the columns to the types of the dataset. Values that cannot be converted become
    null."""
    converters = {
        "id": _convert_ids,
        "time": lambda column: to_instants(column, text_settings.time),
        "card": _convert_ids,
        "terminal": _convert_ids,
        "amount": lambda column: to_amounts(column, text_settings.decimal),
        "fraud": _convert_labels,
    }

    converted_columns = []

    for column_name, convert_column in converters.items():
        converted_column = convert_column(raw_rows[column_name])
        if converted_column is None:
            raise DataError(
                f'column "{getattr(column_settings, column_name)}" holds'
                f" {raw_rows[column_name].dtype}, which is not {COLUMN_TYPES[column_name]}."
                " Convert the column in the source, or name another column by"
                f" data.columns.{column_name}."
            )

        converted_columns.append(converted_column)

    if "scenario" in raw_rows.columns:
        scenario_column = raw_rows["scenario"]
    else:
        scenario_column = pl.Series("scenario", [0]).new_from_index(0, len(raw_rows))

    return pl.DataFrame(
        [*converted_columns, scenario_column.cast(pl.UInt8, strict=False).fill_null(0)]
    )


def _convert_ids(column: pl.Series) -> pl.Series | None:
    """Convert ids (numbers or text) to numbers."""
    if column.dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    # pandas writes integers with gaps as floats
    if column.dtype.is_float():
        return column.cast(pl.Int64, strict=False).set(column != column.floor(), None)
    if column.dtype not in (pl.String, pl.Categorical):
        return None

    id_texts = column.cast(pl.String).str.strip_chars()
    numeric_ids = id_texts.set(~id_texts.str.contains(INTEGER_PATTERN), None).cast(pl.Int64)

    text_ids = id_texts.filter(numeric_ids.is_null() & (id_texts != "")).unique()
    if text_ids.is_empty():
        return numeric_ids

    hashes = id_texts.replace_strict(
        text_ids,
        pl.Series([identity(text_id) for text_id in text_ids], dtype=pl.Int64),
        default=None,
    )
    return numeric_ids.fill_null(hashes)


def _convert_labels(label_column: pl.Series) -> pl.Series | None:
    """Convert labels (0, 1 or empty) to numbers; UNKNOWN for an empty label."""
    is_missing = label_column.is_null()
    if label_column.dtype == pl.String:
        label_column = (
            label_column.str.strip_chars().str.to_lowercase().replace({"true": "1", "false": "0"})
        )
        is_missing |= label_column.is_in(["", "null", "none", "nan"])
    elif label_column.dtype.is_float():  # pandas writes integers with gaps as floats
        is_missing |= label_column.is_nan()
    labels = to_numbers(label_column)
    if labels is None:
        return None
    return labels.set(labels == UNKNOWN, None).set(is_missing.fill_null(True), float(UNKNOWN))


def _sort_rows(valid_rows: pl.DataFrame, rejected_rows: pl.DataFrame) -> CheckedRows:
    is_ascending = valid_rows.select(
        (pl.col("time").diff() > 0) | ((pl.col("time").diff() == 0) & (pl.col("id").diff() > 0))
    ).to_series()
    was_sorted = bool(is_ascending.all())
    valid_rows = valid_rows if was_sorted else valid_rows.sort("time", "id")
    column_arrays = {
        column_name: valid_rows[column_name].to_numpy() for column_name in valid_rows.columns
    }
    return CheckedRows(Rows.of(**column_arrays), rejected_rows, was_sorted)


def _reject_too_many(
    checked_rows: CheckedRows, total_row_count: int, column_settings: Columns, max_bad_share: float
) -> None:
    """Raise DataError if too many rows are invalid, with the number and an example of each
    reason."""
    bad_count = len(checked_rows.rejects)
    if bad_count <= max_bad_share * total_row_count and len(checked_rows.rows):
        return

    reason_lines = []
    for reject_reason, reason_count in checked_rows.reasons().items():
        first_rejected_row = checked_rows.rejects.filter(pl.col("reason") == reject_reason).row(
            0, named=True
        )
        if LINE_NUMBER in first_rejected_row:
            row_position = f"line {first_rejected_row[LINE_NUMBER]:,} of {first_rejected_row[FILE]}"
        else:
            row_position = f"row {first_rejected_row['row']:,}"

        field_name = reject_reason.split()[0].replace("label", "fraud")
        if field_name in first_rejected_row and hasattr(column_settings, field_name):
            value_text = (
                f", {getattr(column_settings, field_name)} = {first_rejected_row[field_name]}"
            )
        else:
            value_text = ""

        reason_lines.append(
            f"{reason_count:,} × {reject_reason} (the first: {row_position}{value_text})"
        )

    raise DataError(
        f"{bad_count:,} of {total_row_count:,} rows ({bad_count / total_row_count:.2%}) are"
        f" invalid, more than data.tolerated_rejects ({max_bad_share:.2%}):"
        f" {'; '.join(reason_lines)}. Correct the source, or raise data.tolerated_rejects to leave"
        " these rows out."
    )
