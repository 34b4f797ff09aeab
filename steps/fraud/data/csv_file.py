"""CSV files as text columns: any encoding and separator, and no line that is lost.

A record is one line: a line break within quotes makes its lines ragged.
"""

import csv
import gzip
import io
from pathlib import Path

import polars as pl

from rekindle.errors import DataError
from steps.fraud.config import Columns, Text

SEPARATORS = ",;\t|"
LINE, RAGGED, FILE = "line", "ragged", "file"  # columns beside those of the file


def read_csv(file: Path, text: Text, columns: Columns) -> pl.DataFrame:
    """The rows in the order of the file, with LINE (from 1), FILE and, for a line that does not fit the header, RAGGED.

    Raises DataError, and PolarsError or OSError for a file that is no CSV at all.
    """
    content = _decoded(file, text.encoding).replace("\r\n", "\n")
    lines = pl.DataFrame({RAGGED: content.split("\n")}).with_row_index(LINE, 1)
    lines = lines.filter(pl.col(RAGGED).str.strip_chars() != "")
    if lines.is_empty():
        raise DataError(f"{file} is empty: it must hold a header and at least one transaction.")
    header = lines[RAGGED][0]
    separator = text.separator or _separator(header, set(columns.model_dump().values()))
    names = next(csv.reader([header], delimiter=separator))
    bare = pl.col(RAGGED).str.replace_all('"[^"]*"', "")
    fits = (bare.str.count_matches(separator, literal=True) == len(names) - 1) & ~bare.str.contains('"', literal=True)
    split, ragged = lines[1:].filter(fits), lines[1:].filter(~fits)
    rows = pl.DataFrame(schema=dict.fromkeys(names, pl.String))
    if len(split):
        joined = io.BytesIO("\n".join(split[RAGGED]).encode())
        rows = pl.read_csv(joined, has_header=False, new_columns=names, separator=separator, infer_schema=False)
    rows = rows.with_columns(split[LINE], pl.lit(None, pl.String).alias(RAGGED))
    together = pl.concat([rows, ragged], how="diagonal") if len(ragged) else rows
    return together.sort(LINE).with_columns(pl.lit(file.name).alias(FILE))


def _decoded(file: Path, encoding: str) -> str:
    raw = file.read_bytes()
    if file.name.lower().endswith(".gz"):
        raw = gzip.decompress(raw)
    told = encoding or ("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    try:
        return raw.decode(told)
    except UnicodeDecodeError as error:
        way_out = "Correct data.text.encoding" if encoding else "Set data.text.encoding, such as cp1252 or latin-1"
        raise DataError(
            f"{file} is not {told.removesuffix('-sig')}: byte {error.start:,} is 0x{raw[error.start]:02x}. {way_out}."
        ) from error


def _separator(header: str, wanted: set[str]) -> str:
    """The one with which most wanted columns are found, then most columns."""

    def fitness(separator: str) -> tuple[int, int]:
        names = next(csv.reader([header], delimiter=separator))
        return len(wanted & set(names)), len(names)

    return max(SEPARATORS, key=fitness)
