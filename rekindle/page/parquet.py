"""Read the first rows of a parquet file in a separate process.

    python -m rekindle.page.parquet ROWS COLUMNS MEMORY < FILE

The memory and the time of the process that reads a parquet file are limited, because the file comes
from a run, and may expand to a million times its size. The separate process also keeps polars out
of the memory of the page.
"""

import io
import os
import resource
import subprocess
import sys
from typing import BinaryIO

from argolocal.common.json_text import loads, to_json
from argolocal.common.processes import make_python_command
from argolocal.page.tabs.artifacts import TableContent, UnreadableTable

SUFFIX = "parquet"
TIMEOUT_S = 20.0
# limit of the address space, of which polars reserves much more than it uses
MAX_MEMORY_BYTES = 3 << 30
MAX_CELL_CHARACTERS = 200


def read_parquet(file: BinaryIO, rows: int, columns: int) -> TableContent:
    """Return the first rows and columns of a parquet file. Raises UnreadableTable."""
    limits = (rows, columns, MAX_MEMORY_BYTES)
    command = make_python_command("-m", "rekindle.page.parquet", *map(str, limits))
    # polars reserves less memory with one thread
    environ = {**os.environ, "POLARS_MAX_THREADS": "1"}
    try:
        finished_process = subprocess.run(
            command, stdin=file, capture_output=True, timeout=TIMEOUT_S, env=environ
        )
    except subprocess.TimeoutExpired:
        raise UnreadableTable(f"the table was not read within {TIMEOUT_S:g} s") from None

    if finished_process.returncode:
        lines = finished_process.stderr.decode(errors="replace").strip().splitlines()
        reason = (
            lines[-1][:MAX_CELL_CHARACTERS] if lines else f"exit code {finished_process.returncode}"
        )
        raise UnreadableTable(reason)

    table = loads(finished_process.stdout)
    return TableContent(table["columns"], table["rows"], table["row_count"], table["column_count"])


def main() -> None:
    """Print the first rows of the file at stdin as JSON."""
    row_limit, column_limit, memory_limit = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    try:
        import polars as pl

        frame = pl.scan_parquet(io.BytesIO(sys.stdin.buffer.read()))
        names = frame.collect_schema().names()
        row_count = frame.select(pl.len()).collect().item()
        table = frame.select(names[:column_limit]).head(row_limit).collect()
    except ModuleNotFoundError:
        sys.exit("polars is not installed (`pip install 'rekindle[prepare]'`)")
    except Exception as error:
        # polars raises errors of many kinds for a malformed file
        sys.exit(f"the file is not a valid parquet file ({error})".partition("\n")[0])

    rows = [[str(cell)[:MAX_CELL_CHARACTERS] for cell in row] for row in table.rows()]
    answer = {
        "columns": table.columns,
        "rows": rows,
        "row_count": row_count,
        "column_count": len(names),
    }
    sys.stdout.write(to_json(answer))


if __name__ == "__main__":
    main()
