"""Measure the speed of the step prepare: its feature engineering compared with pandas, the whole
step, and the verification of its dataset, which every reader repeats.

    # a simulated world of the published size (1.75 million rows)
    python -m benchmarks.prepare
    python -m benchmarks.prepare --source transactions.parquet --json
    # also time and memory for ten times the rows
    python -m benchmarks.prepare --large

Each measurement runs in its own process with one thread. It counts CPU seconds, which do not depend
on other load.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, bar, parser, report

WORLD = "simulate://7?cards={cards}&terminals={terminals}&days=183&start=2018-04-01"
PUBLISHED = 1_750_000  # number of rows of the published data; the limits hold for this number
ONE_THREAD = dict.fromkeys(
    ("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)


def simulated(source: Path, target: Path) -> None:
    """Simulate transactions by the `simulate://` URI in the file `source`, and write them as a
    parquet file with the column names of the published data."""
    from steps.fraud.data.simulate import simulate
    from steps.fraud.data.simulation_uri import parse
    from steps.fraud.fraud_config import Columns

    simulate(parse(source.read_text())).rename(Columns().model_dump()).write_parquet(target)


def polars(source: Path, target: Path) -> None:
    """Read a parquet file with the step's reader and checks, compute the handbook's 15 features,
    and write them to a parquet file."""
    import polars as pl

    from steps.fraud.data.features import HANDBOOK_NAMES, tables
    from steps.fraud.data.row_checks import check
    from steps.fraud.data.source import read
    from steps.fraud.fraud_config import Data

    data = Data(source=str(source))
    rows = check(read(data, target), data.columns, data.tolerated_rejects).rows
    pieces = [
        pl.from_numpy(table, schema=list(HANDBOOK_NAMES)).with_columns(id=piece.id)
        for piece, table in tables(rows, data.label_delay_days, names=HANDBOOK_NAMES)
    ]
    pl.concat(pieces).write_parquet(target)


def step(source: Path, target: Path) -> None:
    """Run the whole step prepare, with all features, shards, statistics, digest and serving
    state."""
    from rekindle.workload import prepare
    from steps import fraud

    prepare(fraud, fraud.Data(source=str(source)), target)


def verify(source: Path, target: Path) -> None:
    """Verify the dataset `source`, as on a node that reads it for the first time."""
    from rekindle.content.dataset import verify_dataset

    verify_dataset(source)


def pandas(source: Path, target: Path) -> None:
    """Compute the 15 features of the handbook with idiomatic pandas: groupby().rolling()."""
    import pandas as pd

    frame = pd.read_parquet(source)
    when = frame["TX_DATETIME"]

    result: dict[str, Any] = {
        "id": frame["TRANSACTION_ID"],
        "amount": frame["TX_AMOUNT"].round(2),
        "weekend": when.dt.dayofweek >= 5,
        "night": when.dt.hour <= 6,
    }

    def rolling(key: str, column: str, days: int) -> Any:
        ordered = frame.sort_values([key, "TX_DATETIME"], kind="stable")
        windows = ordered.set_index("TX_DATETIME").groupby(key)[column].rolling(f"{days}D")
        return [
            pd.Series(f().to_numpy(), ordered.index).sort_index()
            for f in (windows.count, windows.sum)
        ]

    late_count, late_frauds = rolling("TERMINAL_ID", "TX_FRAUD", 7)
    for days in (1, 7, 30):
        count, amounts = rolling("CUSTOMER_ID", "TX_AMOUNT", days)
        result[f"card_count_{days}d"] = count
        result[f"card_mean_{days}d"] = amounts / count
        count, frauds = rolling("TERMINAL_ID", "TX_FRAUD", 7 + days)
        count -= late_count
        risk = ((frauds - late_frauds) / count).fillna(0)
        result[f"terminal_count_{days}d"] = count
        result[f"terminal_risk_{days}d"] = risk

    pd.DataFrame(result).to_parquet(target)


def difference(first: Path, second: Path) -> float:
    """Return the share of rows in which two feature files differ by more than rounding errors."""
    import polars as pl

    a, b = (pl.read_parquet(path).sort("id").cast(pl.Float64) for path in (first, second))
    apart = [(a[name] - b[name]).abs() > 1e-4 * (1 + b[name].abs()) for name in a.columns]
    return pl.DataFrame(apart).select(pl.any_horizontal(pl.all()).mean()).item()


def measure(work: str, source: Path, target: Path) -> tuple[float, float]:
    """Run the function `work` of this module in its own process.

    Returns its CPU seconds without imports, and its peak memory in GB.
    """
    if work == "pandas":
        modules = "pandas, pyarrow.parquet"
    else:
        modules = "steps.fraud.data.shards"

    program = f"""
import resource, sys, time
from pathlib import Path
from benchmarks import prepare
import {modules}
began = time.process_time()
prepare.{work}(*map(Path, sys.argv[1:]))
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)
"""

    command = [sys.executable, "-c", program, str(source), str(target)]

    done = subprocess.run(command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the measurement of {work} failed with exit code {done.returncode}")

    cpu, memory = map(float, done.stdout.split()[-2:])
    return cpu, memory


def world(folder: Path, cards: int) -> Path:
    """Write a simulated world as a parquet file."""
    uri = folder / f"{cards}.txt"
    uri.write_text(WORLD.format(cards=cards, terminals=2 * cards))
    measure("simulated", uri, folder / f"{cards}.parquet")
    return folder / f"{cards}.parquet"


def compare(source: Path, folder: Path, repeats: int) -> list[Bar]:
    """Compare the CPU seconds of computing features with polars and with pandas. The figures are
    the minimum of `repeats` runs, scaled to the number of published rows."""
    import polars as pl

    scale = PUBLISHED / pl.scan_parquet(source).select(pl.len()).collect().item()
    cpu = {
        work: min(measure(work, source, folder / work)[0] for _ in range(repeats))
        for work in ("polars", "step", "pandas")
    }
    cpu["verify"] = min(measure("verify", folder / "step", folder)[0] for _ in range(repeats))
    apart = difference(folder / "polars", folder / "pandas")
    features = cpu["polars"] * scale
    whole = cpu["step"] * scale
    ratio = cpu["pandas"] / cpu["polars"]

    return [
        bar("15 features of 1.75 M rows, parquet to parquet", features, "CPU s", 3.0),
        bar("speed relative to pandas", ratio, "x", 5.0, "more"),
        bar("rows whose features differ from pandas (same-second ties)", apart, "share", 1e-4),
        bar("the whole step prepare for 1.75 M rows, boosting included", whole, "CPU s", 25.0),
        bar(
            "verification of the dataset, relative to the step prepare",
            cpu["verify"] / cpu["step"],
            "share",
            0.03,
        ),
    ]


def large(folder: Path, cards: int) -> list[Bar]:
    """Return the CPU seconds and peak memory for computing the features of ten times as many
    cards."""
    cpu, memory = measure("polars", world(folder, 10 * cards), folder / "large")
    return [
        bar("15 features of ten times the rows", cpu, "CPU s", 45.0),
        bar("peak memory with ten times the rows", memory, "GB", 6.0),
    ]


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--source",
        type=Path,
        help="parquet file with the published columns (default: simulated data)",
    )

    command.add_argument(
        "--cards",
        type=int,
        default=5000,
        help="number of cards of the simulated world, with 350 rows each",
    )

    command.add_argument(
        "--repeats", type=int, default=2, help="number of measurements; the least result counts"
    )
    command.add_argument(
        "--large", action="store_true", help="also measure a world of ten times the cards"
    )
    options = command.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = options.source or world(folder, options.cards)
        bars = compare(source, folder, options.repeats)

        if options.large:
            bars += large(folder, options.cards)

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
