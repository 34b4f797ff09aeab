"""Read CSV files as text columns, in any encoding and with any separator, without losing a line.

Each record must be on one line. If a quoted value contains a line break, all lines of its record
are ragged, which means that their number of fields differs from the header.
"""

import csv
import gzip
import io
from pathlib import Path

import polars as pl

from rekindle.errors import DataError
from steps.fraud.fraud_config import Columns, Text

SEPARATORS = ",;\t|"
# names of the columns that `read_csv` adds
LINE_NUMBER = "line"
RAGGED = "ragged"
FILE = "file"


def read_csv(csv_path: Path, text_settings: Text, column_settings: Columns) -> pl.DataFrame:
    """Read the rows of a CSV file in file order. Add the columns LINE_NUMBER (from 1), FILE, and
    RAGGED, which contains the text of lines that do not match the header.

    Raises DataError, and PolarsError or OSError if the file is not CSV.
    """
    file_text = _decode_csv(csv_path, text_settings.encoding).replace("\r\n", "\n")
    line_table = pl.DataFrame({RAGGED: file_text.split("\n")}).with_row_index(LINE_NUMBER, 1)

    line_table = line_table.filter(pl.col(RAGGED).str.strip_chars() != "")
    if line_table.is_empty():
        raise DataError(f"{csv_path} is empty: it must hold a header and at least one transaction.")

    header_line = line_table[RAGGED][0]
    separator = text_settings.separator or _detect_separator(
        header_line, set(column_settings.model_dump().values())
    )
    column_names = next(csv.reader([header_line], delimiter=separator))
    unquoted_line = pl.col(RAGGED).str.replace_all('"[^"]*"', "")
    has_expected_columns = (
        unquoted_line.str.count_matches(separator, literal=True) == len(column_names) - 1
    ) & ~unquoted_line.str.contains('"', literal=True)
    complete_lines = line_table[1:].filter(has_expected_columns)
    ragged_lines = line_table[1:].filter(~has_expected_columns)
    complete_rows = pl.DataFrame(schema=dict.fromkeys(column_names, pl.String))

    if len(complete_lines):
        csv_bytes = io.BytesIO("\n".join(complete_lines[RAGGED]).encode())
        complete_rows = pl.read_csv(
            csv_bytes,
            has_header=False,
            new_columns=column_names,
            separator=separator,
            infer_schema=False,
        )

    complete_rows = complete_rows.with_columns(
        complete_lines[LINE_NUMBER], pl.lit(None, pl.String).alias(RAGGED)
    )
    if len(ragged_lines):
        all_rows = pl.concat([complete_rows, ragged_lines], how="diagonal")
    else:
        all_rows = complete_rows

    return all_rows.sort(LINE_NUMBER).with_columns(pl.lit(csv_path.name).alias(FILE))


def _decode_csv(csv_path: Path, encoding: str) -> str:
    file_bytes = csv_path.read_bytes()
    if csv_path.name.lower().endswith(".gz"):
        file_bytes = gzip.decompress(file_bytes)

    charset = encoding or (
        "utf-16" if file_bytes[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    )
    try:
        return file_bytes.decode(charset)
    except UnicodeDecodeError as error:
        if encoding:
            remedy_sentence = "Correct data.text.encoding"
        else:
            remedy_sentence = "Set data.text.encoding, such as cp1252 or latin-1"

        raise DataError(
            f"{csv_path} is not {charset.removesuffix('-sig')}: byte {error.start:,} is"
            f" 0x{file_bytes[error.start]:02x}. {remedy_sentence}."
        ) from error


def _detect_separator(header_line: str, expected_columns: set[str]) -> str:
    """Return the separator that splits the header into the most expected column names; of equally
    good separators, the one that splits it into the most columns."""

    def rate_separator(separator: str) -> tuple[int, int]:
        column_names = next(csv.reader([header_line], delimiter=separator))
        return len(expected_columns & set(column_names)), len(column_names)

    return max(SEPARATORS, key=rate_separator)
