"""Read transactions from parquet or CSV files (a file or a folder, local or in S3), or simulate
transactions.

Columns get the names of this workload, but keep the types of the source (CSV: text). row_checks.py
validates the rows.
"""

import os
from pathlib import Path
from urllib.parse import urlsplit

import polars as pl

from rekindle.errors import DataError, did_you_mean
from rekindle.kubernetes_names import S3_ENDPOINT_URL
from rekindle.names import parse_s3_address
from steps.fraud.data.csv_file import FILE, LINE_NUMBER, RAGGED, read_csv
from steps.fraud.data.simulate import simulate
from steps.fraud.data.simulation_uri import parse
from steps.fraud.fraud_config import Columns, Data

SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".csv.gz": "csv"}


def read(data: Data, scratch: Path) -> pl.DataFrame:
    """Read the source with the columns id, time, card, terminal, amount, fraud and, if it exists,
    scenario.

    Rows of CSV files also have the columns LINE_NUMBER, FILE and RAGGED. Objects in S3 are
    downloaded to `scratch`. Raises DataError or ConfigError.
    """
    scheme = urlsplit(data.source).scheme
    if scheme == "simulate":
        return simulate(parse(data.source))

    if parse_s3_address(data.source):
        path = _download(data.source, scratch)
    else:
        path = Path(data.source.removeprefix("file://"))

    files, kind = _find_files(path, data.source)
    try:
        if kind == "csv":
            frames = [_read_csv(file, data) for file in files]
            if len(frames) > 1:
                rows = pl.concat(frames, how="diagonal")
            else:
                rows = frames[0]
        else:
            frame = pl.scan_parquet(files)
            chosen = _map_columns(frame.collect_schema().names(), data.columns, data.source)
            rows = frame.select(
                pl.col(source_name).alias(name) for name, source_name in chosen.items()
            ).collect()
    except pl.exceptions.NoDataError as error:
        raise DataError(
            f"{data.source} is empty: it must hold a header and at least one transaction."
        ) from error
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{data.source} cannot be read as {kind}: {reason}. Give a complete file of that"
            " format."
        ) from error

    if rows.is_empty():
        raise DataError(f"{data.source} holds no transactions: it has a header, but no rows.")

    return rows


def _read_csv(file: Path, data: Data) -> pl.DataFrame:
    frame = read_csv(file, data.text, data.columns)
    chosen = _map_columns(
        [name for name in frame.columns if name not in (LINE_NUMBER, RAGGED, FILE)],
        data.columns,
        str(file),
    )
    return frame.select(
        *(pl.col(source_name).alias(name) for name, source_name in chosen.items()),
        LINE_NUMBER,
        FILE,
        RAGGED,
    )


def _download(uri: str, scratch: Path) -> Path:
    """Download an object or prefix of an s3:// URI to `scratch`.

    Raises StorageError, and DataError if the URI does not exist.
    """
    from rekindle.storage import NotFound, Store

    address = parse_s3_address(uri)
    assert address
    target = scratch / Path(address.key).name
    store = Store(address.bucket, os.environ.get(S3_ENDPOINT_URL) or None)

    try:
        store.download(address.key, target)
    # a DataError, because Argo does not retry it
    except NotFound as error:
        raise DataError(f"{error} Correct data.source.") from error

    return target


def _find_files(path: Path, shown: str) -> tuple[list[Path], str]:
    """Return the data files at `path`, sorted by name, and their common format."""
    if not path.exists():
        raise DataError(
            f"{shown} does not exist: data.source must be a file, a folder, an s3:// URI or"
            " simulate://SEED."
        )

    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise DataError(
            f"{shown} cannot be read: permission denied. Change the permissions of the file, or run"
            " as another user."
        )

    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
    else:
        inside = [path]

    files = [
        (p, kind)
        for p in inside
        for suffix, kind in SUFFIXES.items()
        if p.name.lower().endswith(suffix)
    ]

    kinds = {kind for _, kind in files}
    if len(kinds) != 1:
        formats = "both parquet and CSV" if kinds else "neither parquet nor CSV"
        raise DataError(
            f"{shown} contains {formats}: file names must end with one of {', '.join(SUFFIXES)}, "
            "and all files must have one format."
        )

    return [p for p, _ in files], kinds.pop()


def _map_columns(names: list[str], columns: Columns, shown: str) -> dict[str, str]:
    """Return a dict {column name in this workload: column name in the source}. Raises a DataError
    that names all missing columns."""
    configured: dict[str, str] = columns.model_dump()
    missing = {
        name: source_name for name, source_name in configured.items() if source_name not in names
    }
    missing.pop("scenario", None)

    if missing:
        lines = [
            f'column "{source_name}" (data.columns.{name}){did_you_mean(source_name, set(names))}'
            for name, source_name in missing.items()
        ]
        raise DataError(
            f"{shown} lacks {'; '.join(lines)} Found: {', '.join(names) or 'no column'}. Set"
            " data.columns.NAME to the column's name in the source."
        )

    return {name: source_name for name, source_name in configured.items() if source_name in names}
