"""Where transactions come from: parquet or CSV, a file or a folder, here or in S3, or a simulated world.

The rows are not validated yet: columns have our names, and the types of the source (CSV: text).
"""

import os
from pathlib import Path
from urllib.parse import urlsplit

import polars as pl

from rekindle.errors import DataError, did_you_mean
from steps.fraud.config import Columns, Data
from steps.fraud.data.csv_file import FILE, LINE, RAGGED, read_csv
from steps.fraud.data.simulate import simulate
from steps.fraud.data.world import parse

SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".csv.gz": "csv"}


def read(data: Data, scratch: Path) -> pl.DataFrame:
    """The source's rows with the columns id, time, card, terminal, amount, fraud and, if known, scenario.

    Those of a CSV file have LINE, FILE and RAGGED, too.

    Objects of S3 are downloaded below `scratch`. Raises DataError or ConfigError, each with a way out.
    """
    scheme = urlsplit(data.source).scheme
    if scheme == "simulate":
        return simulate(parse(data.source))
    path = _download(data.source, scratch) if scheme == "s3" else Path(data.source.removeprefix("file://"))
    files, kind = _files(path, data.source)
    try:
        if kind == "csv":
            parts = [_csv(file, data) for file in files]
            rows = pl.concat(parts, how="diagonal") if len(parts) > 1 else parts[0]
        else:
            frame = pl.scan_parquet(files)
            chosen = _choose(frame.collect_schema().names(), data.columns, data.source)
            rows = frame.select(pl.col(theirs).alias(ours) for ours, theirs in chosen.items()).collect()
    except pl.exceptions.NoDataError as error:
        raise DataError(f"{data.source} is empty: it must hold a header and at least one transaction.") from error
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{data.source} cannot be read as {kind}: {reason}. Is it whole, and of that format?"
        ) from error
    if rows.is_empty():
        raise DataError(f"{data.source} holds no transactions: the header is there, but no row.")
    return rows


def _csv(file: Path, data: Data) -> pl.DataFrame:
    frame = read_csv(file, data.text, data.columns)
    chosen = _choose([name for name in frame.columns if name not in (LINE, RAGGED, FILE)], data.columns, str(file))
    return frame.select(*(pl.col(theirs).alias(ours) for ours, theirs in chosen.items()), LINE, FILE, RAGGED)


def _download(uri: str, scratch: Path) -> Path:
    """The object or prefix of an s3:// URI, below `scratch`. Raises StorageError, and DataError if it is not there."""
    from rekindle.storage import NotFound, Store

    parts = urlsplit(uri)
    bucket, key = parts.netloc, parts.path.lstrip("/")
    target = scratch / Path(key).name
    try:
        Store(bucket, os.environ.get("S3_ENDPOINT_URL") or None).download(key, target)
    except NotFound as error:  # trying again cannot help
        raise DataError(f"{error} Correct data.source.") from error
    return target


def _files(path: Path, shown: str) -> tuple[list[Path], str]:
    """The data files at `path` in the order of their names, and their one format."""
    if not path.exists():
        raise DataError(
            f"{shown} does not exist: data.source must be a file, a folder, an s3:// URI or simulate://SEED."
        )
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise DataError(f"{shown} cannot be read: permission denied. Run as a user who may, or change its mode.")
    inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    files = [(p, kind) for p in inside for suffix, kind in SUFFIXES.items() if p.name.lower().endswith(suffix)]
    kinds = {kind for _, kind in files}
    if len(kinds) != 1:
        formats = "both parquet and CSV" if kinds else "neither parquet nor CSV"
        raise DataError(
            f"{shown} holds {formats}: the files must end with one of {', '.join(SUFFIXES)}, all of one format."
        )
    return [p for p, _ in files], kinds.pop()


def _choose(names: list[str], columns: Columns, shown: str) -> dict[str, str]:
    """Our name → the source's name. Raises DataError for every column that is not there."""
    configured: dict[str, str] = columns.model_dump()
    missing = {ours: theirs for ours, theirs in configured.items() if theirs not in names}
    missing.pop("scenario", None)
    if missing:
        lines = [
            f'column "{theirs}" (data.columns.{ours}){did_you_mean(theirs, set(names))}'
            for ours, theirs in missing.items()
        ]
        raise DataError(
            f"{shown} lacks {'; '.join(lines)} Found: {', '.join(names) or 'no column'}. Set data.columns.NAME to what "
            "the source calls it."
        )
    return {ours: theirs for ours, theirs in configured.items() if theirs in names}
