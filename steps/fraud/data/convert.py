"""Convert text columns to numbers and times.

The format of a column is detected from all its values; an ambiguous format must be set in the
config.
"""

import polars as pl

from rekindle.errors import DataError

ISO_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:|$)"
EPOCH_PATTERN = r"^[0-9]{9,19}(\.[0-9]+)?$"
UNIT_MICROSECONDS = {"s": 1_000_000.0, "ms": 1_000.0, "us": 1.0, "ns": 0.001}
DATES = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y%m%d")
FORMATS = tuple(
    f"{date}{time}" for date in DATES for time in (" %H:%M:%S", " %H:%M", "T%H:%M:%S", "")
)
# smallest number that counts as a Unix time (about 2000-01-01)
YEAR_2000 = 9.4e8


def to_numbers(column: pl.Series) -> pl.Series | None:
    """Convert a column to numbers; return None if its type cannot be converted."""
    if not (column.dtype.is_numeric() or column.dtype in (pl.String, pl.Boolean)):
        return None
    return column.cast(pl.Float64, strict=False)


def to_amounts(column: pl.Series, decimal_separator: str) -> pl.Series | None:
    """Convert a column to amounts of money; return None if the type of the column is unsuitable.

    Raises DataError if the format is ambiguous.
    """
    if column.dtype != pl.String:
        return to_numbers(column)

    stripped_text = column.str.strip_chars()
    has_decimal_comma = stripped_text.str.contains(r"^-?[0-9]+(\.[0-9]{3})*,[0-9]+$")
    has_decimal_point = stripped_text.str.contains(r"^-?[0-9]+(,[0-9]{3})*\.[0-9]+$")

    if not decimal_separator:
        if (has_decimal_comma.sum() or 0) > (has_decimal_point.sum() or 0):
            decimal_separator = ","
        else:
            decimal_separator = "."

        if (
            decimal_separator == ","
            and stripped_text.filter(has_decimal_comma)
            .str.contains(r"^-?[0-9]{1,3}(,[0-9]{3})+$")
            .all()
        ):
            raise DataError(
                f'amounts such as "{stripped_text.filter(has_decimal_comma)[0]}" are ambiguous: '
                'set data.text.decimal to "," or ".".'
            )

    group_separator = "." if decimal_separator == "," else ","
    has_groups = stripped_text.str.contains(
        rf"^-?[0-9]{{1,3}}([{group_separator}][0-9]{{3}})+([{decimal_separator}][0-9]+)?$"
    )
    text_without_groups = stripped_text.zip_with(
        ~has_groups.fill_null(False),
        stripped_text.str.replace_all(group_separator, "", literal=True),
    )

    if decimal_separator == ",":
        text_without_groups = text_without_groups.set(
            text_without_groups.str.contains(".", literal=True), None
        ).str.replace(",", ".", literal=True)

    return text_without_groups.cast(pl.Float64, strict=False)


def to_instants(column: pl.Series, time_format: str) -> pl.Series | None:
    """Convert a column to µs since the epoch; return None if its type is unsuitable.

    Raises DataError if the format is ambiguous.
    """
    if column.dtype == pl.Date:
        return column.cast(pl.Datetime("us")).dt.epoch("us")
    if isinstance(column.dtype, pl.Datetime):
        # the result is also right for times with a time zone, because polars stores such times in
        # UTC
        return column.dt.epoch("us")
    if column.dtype.is_numeric():
        return _to_epoch_microseconds(column, time_format)
    if column.dtype != pl.String:
        return None

    stripped_text = column.str.strip_chars()
    half_count = stripped_text.count() / 2
    if time_format in UNIT_MICROSECONDS or (
        not time_format and (stripped_text.str.contains(EPOCH_PATTERN).sum() or 0) > half_count
    ):
        return _to_epoch_microseconds(
            stripped_text.set(~stripped_text.str.contains(EPOCH_PATTERN), None).cast(
                pl.Float64, strict=False
            ),
            time_format,
        )

    if not time_format and (stripped_text.str.contains(ISO_PATTERN).sum() or 0) < half_count:
        time_format = _detect_format(stripped_text)
    if time_format:
        return _parse_times(stripped_text, time_format)

    # parse only ISO 8601, because polars would guess the order of day and month in 01/02/2024
    iso_text = stripped_text.set(~stripped_text.str.contains(ISO_PATTERN), None)
    try:
        return iso_text.str.to_datetime(time_unit="us", strict=False).dt.epoch("us")
    except pl.exceptions.ComputeError:
        # polars raises ComputeError if no value is a timestamp
        return pl.Series(column.name, [None], pl.Int64).new_from_index(0, len(column))


def _to_epoch_microseconds(column: pl.Series, epoch_unit: str) -> pl.Series | None:
    epoch_values = column.cast(pl.Float64)
    median_value = epoch_values.median()
    if epoch_unit not in UNIT_MICROSECONDS:
        if not isinstance(median_value, float) or median_value < YEAR_2000:
            return None
        epoch_unit = next(
            (
                unit_name
                for unit_name, unit_limit in (("s", 1e11), ("ms", 1e14), ("us", 1e17))
                if median_value < unit_limit
            ),
            "ns",
        )
    if column.dtype.is_integer() and epoch_unit in ("us", "ns"):
        return column.cast(pl.Int64, strict=False) // (1000 if epoch_unit == "ns" else 1)
    return (epoch_values * UNIT_MICROSECONDS[epoch_unit]).round().cast(pl.Int64, strict=False)


def _detect_format(time_texts: pl.Series) -> str:
    """Return the format that matches most values; an empty text if no format matches.

    Raises DataError if several formats match equally well.
    """
    sampled_texts = time_texts.drop_nulls().gather_every(max(1, len(time_texts) // 2000))
    likely_formats = [
        format_name
        for format_name in FORMATS
        if 2 * _parse_times(sampled_texts, format_name).count() > len(sampled_texts)
    ]
    parsed_counts = {
        format_name: _parse_times(time_texts, format_name).count() for format_name in likely_formats
    }

    best_formats = [
        format_name
        for format_name in likely_formats
        if parsed_counts[format_name] == max(parsed_counts.values())
    ]
    if len(best_formats) > 1:
        raise DataError(
            f'times such as "{time_texts.drop_nulls()[0]}" are ambiguous'
            f" ({' or '.join(best_formats)}): set data.text.time to one of these formats."
        )

    if best_formats:
        return best_formats[0]

    return ""


def _parse_times(time_texts: pl.Series, time_format: str) -> pl.Series:
    try:
        if "%H" in time_format:
            return time_texts.str.to_datetime(time_format, time_unit="us", strict=False).dt.epoch(
                "us"
            )
        return (
            time_texts.str.to_date(time_format, strict=False).cast(pl.Datetime("us")).dt.epoch("us")
        )
    except pl.exceptions.ComputeError:
        return pl.Series(time_texts.name, [None], pl.Int64).new_from_index(0, len(time_texts))
