"""Read CSV files as text columns, in any encoding and with any separator, without losing a line.

A record must be on one line. If a quoted value contains a line break, all lines of its record count
as ragged, that is, as lines whose fields do not match the header.
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


def read_csv(file: Path, text: Text, columns: Columns) -> pl.DataFrame:
    """Read the rows in file order. Add the columns LINE_NUMBER (from 1), FILE, and RAGGED, which
    contains the text of lines that do not match the header.

    Raises DataError, and PolarsError or OSError if the file is not CSV.
    """
    content = _decode(file, text.encoding).replace("\r\n", "\n")
    lines = pl.DataFrame({RAGGED: content.split("\n")}).with_row_index(LINE_NUMBER, 1)

    lines = lines.filter(pl.col(RAGGED).str.strip_chars() != "")
    if lines.is_empty():
        raise DataError(f"{file} is empty: it must hold a header and at least one transaction.")

    header = lines[RAGGED][0]
    separator = text.separator or _detect_separator(header, set(columns.model_dump().values()))
    names = next(csv.reader([header], delimiter=separator))
    unquoted = pl.col(RAGGED).str.replace_all('"[^"]*"', "")
    fits = (
        unquoted.str.count_matches(separator, literal=True) == len(names) - 1
    ) & ~unquoted.str.contains('"', literal=True)
    complete_lines = lines[1:].filter(fits)
    ragged_lines = lines[1:].filter(~fits)
    rows = pl.DataFrame(schema=dict.fromkeys(names, pl.String))

    if len(complete_lines):
        csv_bytes = io.BytesIO("\n".join(complete_lines[RAGGED]).encode())
        rows = pl.read_csv(
            csv_bytes, has_header=False, new_columns=names, separator=separator, infer_schema=False
        )

    rows = rows.with_columns(complete_lines[LINE_NUMBER], pl.lit(None, pl.String).alias(RAGGED))
    if len(ragged_lines):
        all_rows = pl.concat([rows, ragged_lines], how="diagonal")
    else:
        all_rows = rows

    return all_rows.sort(LINE_NUMBER).with_columns(pl.lit(file.name).alias(FILE))


def _decode(file: Path, encoding: str) -> str:
    raw = file.read_bytes()
    if file.name.lower().endswith(".gz"):
        raw = gzip.decompress(raw)

    charset = encoding or ("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    try:
        return raw.decode(charset)
    except UnicodeDecodeError as error:
        if encoding:
            remedy = "Correct data.text.encoding"
        else:
            remedy = "Set data.text.encoding, such as cp1252 or latin-1"

        raise DataError(
            f"{file} is not {charset.removesuffix('-sig')}: byte {error.start:,} is"
            f" 0x{raw[error.start]:02x}. {remedy}."
        ) from error


def _detect_separator(header: str, expected_columns: set[str]) -> str:
    """Return the separator that splits the header into the most expected column names; in a tie,
    into the most columns."""

    def fitness(separator: str) -> tuple[int, int]:
        names = next(csv.reader([header], delimiter=separator))
        return len(expected_columns & set(names)), len(names)

    return max(SEPARATORS, key=fitness)
