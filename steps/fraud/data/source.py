"""Read transactions from parquet or CSV files (a file or a folder, local or in S3), or simulate
transactions.

The columns get the names that this workload uses, but keep the types of the source (text in CSV
files). row_checks.py validates the rows.
"""

import os
from pathlib import Path
from urllib.parse import urlsplit

import polars as pl

from rekindle.errors import DataError, suggest_similar
from rekindle.kubernetes_names import S3_ENDPOINT_URL
from rekindle.names import parse_s3_address
from steps.fraud.data.csv_file import FILE, LINE_NUMBER, RAGGED, read_csv
from steps.fraud.data.simulate import simulate
from steps.fraud.data.simulation_uri import parse
from steps.fraud.fraud_config import Columns, Data

SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".csv.gz": "csv"}


def read(data_settings: Data, download_folder: Path) -> pl.DataFrame:
    """Read the source with the columns id, time, card, terminal, amount, fraud and, if it exists,
    scenario.

    Rows of CSV files also have the columns LINE_NUMBER, FILE and RAGGED. Objects in S3 are
    downloaded to `download_folder`. Raises DataError or ConfigError.
    """
    scheme = urlsplit(data_settings.source).scheme
    if scheme == "simulate":
        return simulate(parse(data_settings.source))

    if parse_s3_address(data_settings.source):
        path = _download_files(data_settings.source, download_folder)
    else:
        path = Path(data_settings.source.removeprefix("file://"))

    data_files, file_format = _find_files(path, data_settings.source)
    try:
        if file_format == "csv":
            file_tables = [_read_csv(csv_file, data_settings) for csv_file in data_files]
            if len(file_tables) > 1:
                joined_rows = pl.concat(file_tables, how="diagonal")
            else:
                joined_rows = file_tables[0]
        else:
            lazy_table = pl.scan_parquet(data_files)
            source_columns = _map_columns(
                lazy_table.collect_schema().names(), data_settings.columns, data_settings.source
            )
            joined_rows = lazy_table.select(
                pl.col(source_name).alias(column_name)
                for column_name, source_name in source_columns.items()
            ).collect()
    except pl.exceptions.NoDataError as error:
        raise DataError(
            f"{data_settings.source} is empty: it must hold a header and at least one transaction."
        ) from error
    except (pl.exceptions.PolarsError, OSError) as error:
        error_line = str(error).splitlines()[0]
        raise DataError(
            f"{data_settings.source} cannot be read as {file_format}: {error_line}. Give a"
            " complete file of that format."
        ) from error

    if joined_rows.is_empty():
        raise DataError(
            f"{data_settings.source} holds no transactions: it has a header, but no rows."
        )

    return joined_rows


def _read_csv(csv_file: Path, data_settings: Data) -> pl.DataFrame:
    csv_table = read_csv(csv_file, data_settings.text, data_settings.columns)
    source_columns = _map_columns(
        [
            column_name
            for column_name in csv_table.columns
            if column_name not in (LINE_NUMBER, RAGGED, FILE)
        ],
        data_settings.columns,
        str(csv_file),
    )
    return csv_table.select(
        *(
            pl.col(source_name).alias(column_name)
            for column_name, source_name in source_columns.items()
        ),
        LINE_NUMBER,
        FILE,
        RAGGED,
    )


def _download_files(uri: str, download_folder: Path) -> Path:
    """Download an object or prefix of an s3:// URI to `download_folder`.

    Raises StorageError, and DataError if the URI does not exist.
    """
    from rekindle.storage import NotFound, Store

    s3_address = parse_s3_address(uri)
    assert s3_address
    target_path = download_folder / Path(s3_address.key).name
    object_store = Store(s3_address.bucket, os.environ.get(S3_ENDPOINT_URL) or None)

    try:
        object_store.download(s3_address.key, target_path)
    # raise a DataError, because Argo does not retry a step after a DataError
    except NotFound as error:
        raise DataError(f"{error} Correct data.source.") from error

    return target_path


def _find_files(path: Path, shown_source: str) -> tuple[list[Path], str]:
    """Return the data files at `path`, sorted by name, and their common format."""
    if not path.exists():
        raise DataError(
            f"{shown_source} does not exist: data.source must be a file, a folder, an s3:// URI or"
            " simulate://SEED."
        )

    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise DataError(
            f"{shown_source} cannot be read: permission denied. Change the permissions of the"
            " file, or run as another user."
        )

    if path.is_dir():
        files_inside = sorted(file_path for file_path in path.rglob("*") if file_path.is_file())
    else:
        files_inside = [path]

    files_with_formats = [
        (file_path, file_format)
        for file_path in files_inside
        for file_suffix, file_format in SUFFIXES.items()
        if file_path.name.lower().endswith(file_suffix)
    ]

    file_formats = {file_format for _, file_format in files_with_formats}
    if len(file_formats) != 1:
        formats_text = "both parquet and CSV" if file_formats else "neither parquet nor CSV"
        raise DataError(
            f"{shown_source} contains {formats_text}: file names must end with one of"
            f" {', '.join(SUFFIXES)}, and all files must have one format."
        )

    return [file_path for file_path, _ in files_with_formats], file_formats.pop()


def _map_columns(
    source_names: list[str], column_settings: Columns, shown_source: str
) -> dict[str, str]:
    """Return a dict {column name in this workload: column name in the source}. Raises a DataError
    that names all missing columns."""
    configured_names: dict[str, str] = column_settings.model_dump()
    missing_columns = {
        column_name: source_name
        for column_name, source_name in configured_names.items()
        if source_name not in source_names
    }
    missing_columns.pop("scenario", None)

    if missing_columns:
        missing_column_lines = [
            f'column "{source_name}"'
            f" (data.columns.{column_name}){suggest_similar(source_name, set(source_names))}"
            for column_name, source_name in missing_columns.items()
        ]
        raise DataError(
            f"{shown_source} lacks {'; '.join(missing_column_lines)} Found:"
            f" {', '.join(source_names) or 'no column'}. Set"
            " data.columns.NAME to the column's name in the source."
        )

    return {
        column_name: source_name
        for column_name, source_name in configured_names.items()
        if source_name in source_names
    }
