"""The first rows of a data file: enough to try a workload on."""

from pathlib import Path

LINE_FORMATS = (".csv", ".tsv", ".jsonl", ".ndjson")


def copy_first_rows(source: Path, rows: int, folder: Path) -> Path | None:
    """Copy about `rows` rows of a CSV, JSON lines or parquet file to `folder`.

    Return the copy, or None for another format.
    """
    target = folder / source.name
    if source.suffix in LINE_FORMATS and source.is_file():
        copy_lines(source, target, rows + 1)
    elif source.suffix == ".parquet" and source.is_file():
        import polars as pl

        pl.scan_parquet(source).head(rows).collect().write_parquet(target)
    else:
        return None
    return target


def copy_lines(source: Path, target: Path, lines: int) -> None:
    """Copy the first `lines` lines; if they end within a quoted field, also copy the lines up to its end."""
    quotes = 0
    with source.open("rb") as read, target.open("wb") as write:
        for number, line in enumerate(read):
            if number >= lines and quotes % 2 == 0:
                break
            write.write(line)
            quotes += line.count(b'"')
