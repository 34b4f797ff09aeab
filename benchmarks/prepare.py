"""Measure the speed of the step prepare: its feature engineering compared with pandas, the whole
step, and the verification of its dataset, which every reader repeats.

    # a simulated world of the published size (1.75 million rows)
    python -m benchmarks.prepare
    python -m benchmarks.prepare --source transactions.parquet --json
    # also time and memory for ten times the rows
    python -m benchmarks.prepare --large

Each measurement runs in its own process with one thread. Each measurement counts CPU seconds, which
do not depend on other load.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, make_bar, make_parser, report

SIMULATED_WORLD_URI = "simulate://7?cards={cards}&terminals={terminals}&days=183&start=2018-04-01"
PUBLISHED_ROW_COUNT = (
    # number of rows of the published data; the limits hold for this number
    1_750_000
)
ONE_THREAD_ENVIRONMENT = dict.fromkeys(
    ("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)


def simulated(uri_path: Path, parquet_path: Path) -> None:
    """Simulate transactions for the `simulate://` URI in the file `uri_path`, and write them as a
    parquet file with the column names of the published data."""
    from steps.fraud.data.simulate import simulate
    from steps.fraud.data.simulation_uri import parse
    from steps.fraud.fraud_config import Columns

    simulate(parse(uri_path.read_text())).rename(Columns().model_dump()).write_parquet(parquet_path)


def polars(parquet_path: Path, feature_path: Path) -> None:
    """Read a parquet file with the reader and the checks of the step `prepare`, compute the
    handbook's 15 features, and write them to a parquet file."""
    import polars as pl

    from steps.fraud.data.features import HANDBOOK_NAMES, tables
    from steps.fraud.data.row_checks import check
    from steps.fraud.data.source import read
    from steps.fraud.fraud_config import Data

    data_spec = Data(source=str(parquet_path))
    checked_rows = check(
        read(data_spec, feature_path), data_spec.columns, data_spec.tolerated_rejects
    ).rows
    feature_tables = [
        pl.from_numpy(feature_table, schema=list(HANDBOOK_NAMES)).with_columns(id=rows_piece.id)
        for rows_piece, feature_table in tables(
            checked_rows, data_spec.label_delay_days, feature_names=HANDBOOK_NAMES
        )
    ]
    pl.concat(feature_tables).write_parquet(feature_path)


def step(parquet_path: Path, output_folder: Path) -> None:
    """Run the whole step prepare, with all features, shards, statistics, digest and serving
    state."""
    from rekindle.workload import prepare
    from steps import fraud

    prepare(fraud, fraud.Data(source=str(parquet_path)), output_folder)


def verify(dataset_folder: Path, unused_target: Path) -> None:
    """Verify the dataset `dataset_folder`, as on a node that reads it for the first time."""
    from rekindle.content.dataset import verify_dataset

    verify_dataset(dataset_folder)


def pandas(parquet_path: Path, feature_path: Path) -> None:
    """Compute the 15 features of the handbook with idiomatic pandas: groupby().rolling()."""
    import pandas as pd

    transactions = pd.read_parquet(parquet_path)
    transaction_times = transactions["TX_DATETIME"]

    feature_columns: dict[str, Any] = {
        "id": transactions["TRANSACTION_ID"],
        "amount": transactions["TX_AMOUNT"].round(2),
        "weekend": transaction_times.dt.dayofweek >= 5,
        "night": transaction_times.dt.hour <= 6,
    }

    def rolling(group_column: str, value_column: str, window_days: int) -> Any:
        ordered_rows = transactions.sort_values([group_column, "TX_DATETIME"], kind="stable")
        rolling_windows = (
            ordered_rows.set_index("TX_DATETIME")
            .groupby(group_column)[value_column]
            .rolling(f"{window_days}D")
        )
        return [
            pd.Series(aggregate().to_numpy(), ordered_rows.index).sort_index()
            for aggregate in (rolling_windows.count, rolling_windows.sum)
        ]

    recent_count, recent_fraud_count = rolling("TERMINAL_ID", "TX_FRAUD", 7)
    for window_days in (1, 7, 30):
        transaction_count, amount_sum = rolling("CUSTOMER_ID", "TX_AMOUNT", window_days)
        feature_columns[f"card_count_{window_days}d"] = transaction_count
        feature_columns[f"card_mean_{window_days}d"] = amount_sum / transaction_count
        transaction_count, fraud_count = rolling("TERMINAL_ID", "TX_FRAUD", 7 + window_days)
        transaction_count -= recent_count
        fraud_risk = ((fraud_count - recent_fraud_count) / transaction_count).fillna(0)
        feature_columns[f"terminal_count_{window_days}d"] = transaction_count
        feature_columns[f"terminal_risk_{window_days}d"] = fraud_risk

    pd.DataFrame(feature_columns).to_parquet(feature_path)


def measure_difference(first_path: Path, second_path: Path) -> float:
    """Return the share of rows in which two feature files differ by more than rounding errors."""
    import polars as pl

    first_features, second_features = (
        pl.read_parquet(feature_path).sort("id").cast(pl.Float64)
        for feature_path in (first_path, second_path)
    )
    is_different_by_column = [
        (first_features[column_name] - second_features[column_name]).abs()
        > 1e-4 * (1 + second_features[column_name].abs())
        for column_name in first_features.columns
    ]
    return pl.DataFrame(is_different_by_column).select(pl.any_horizontal(pl.all()).mean()).item()


def measure_function(
    function_name: str, source_path: Path, target_path: Path
) -> tuple[float, float]:
    """Run the function `function_name` of this module in its own process.

    Returns the function's CPU seconds without imports, and its peak memory in GB.
    """
    if function_name == "pandas":
        imported_modules = "pandas, pyarrow.parquet"
    else:
        imported_modules = "steps.fraud.data.shards"

    program_text = f"""
import resource, sys, time
from pathlib import Path
from benchmarks import prepare
import {imported_modules}
began = time.process_time()
prepare.{function_name}(*map(Path, sys.argv[1:]))
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)
"""

    command = [sys.executable, "-c", program_text, str(source_path), str(target_path)]

    completed_process = subprocess.run(
        command, env=os.environ | ONE_THREAD_ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    if completed_process.returncode:
        raise SystemExit(
            f"the measurement of {function_name} failed with exit code"
            f" {completed_process.returncode}"
        )

    cpu_seconds, memory_megabytes = map(float, completed_process.stdout.split()[-2:])
    return cpu_seconds, memory_megabytes


def write_world(folder: Path, card_count: int) -> Path:
    """Write simulated transactions, described by a `simulate://` URI, as a parquet file."""
    uri_path = folder / f"{card_count}.txt"
    uri_path.write_text(SIMULATED_WORLD_URI.format(cards=card_count, terminals=2 * card_count))
    measure_function("simulated", uri_path, folder / f"{card_count}.parquet")
    return folder / f"{card_count}.parquet"


def compare_features(parquet_path: Path, folder: Path, repeat_count: int) -> list[Bar]:
    """Compare the CPU seconds of computing features with polars and with pandas. The figures are
    the minimum of `repeat_count` runs, scaled to the number of published rows."""
    import polars as pl

    row_scale = (
        PUBLISHED_ROW_COUNT / pl.scan_parquet(parquet_path).select(pl.len()).collect().item()
    )
    cpu_seconds_by_work = {
        function_name: min(
            measure_function(function_name, parquet_path, folder / function_name)[0]
            for _ in range(repeat_count)
        )
        for function_name in ("polars", "step", "pandas")
    }
    cpu_seconds_by_work["verify"] = min(
        measure_function("verify", folder / "step", folder)[0] for _ in range(repeat_count)
    )
    different_share = measure_difference(folder / "polars", folder / "pandas")
    feature_cpu_seconds = cpu_seconds_by_work["polars"] * row_scale
    step_cpu_seconds = cpu_seconds_by_work["step"] * row_scale
    pandas_ratio = cpu_seconds_by_work["pandas"] / cpu_seconds_by_work["polars"]

    return [
        make_bar(
            "15 features of 1.75 M rows, parquet to parquet", feature_cpu_seconds, "CPU s", 3.0
        ),
        make_bar("speed relative to pandas", pandas_ratio, "x", 5.0, "more"),
        make_bar(
            "rows whose features differ from pandas (same-second ties)",
            different_share,
            "share",
            1e-4,
        ),
        make_bar(
            "the whole step prepare for 1.75 M rows, boosting included",
            step_cpu_seconds,
            "CPU s",
            25.0,
        ),
        make_bar(
            "verification of the dataset, relative to the step prepare",
            cpu_seconds_by_work["verify"] / cpu_seconds_by_work["step"],
            "share",
            0.03,
        ),
    ]


def measure_large_world(folder: Path, card_count: int) -> list[Bar]:
    """Return the CPU seconds and peak memory for computing the features of ten times as many
    cards."""
    cpu_seconds, memory_megabytes = measure_function(
        "polars", write_world(folder, 10 * card_count), folder / "large"
    )
    return [
        make_bar("15 features of ten times the rows", cpu_seconds, "CPU s", 45.0),
        make_bar("peak memory with ten times the rows", memory_megabytes, "GB", 6.0),
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--source",
        type=Path,
        help="parquet file with the published columns (default: simulated data)",
    )

    argument_parser.add_argument(
        "--cards",
        type=int,
        default=5000,
        help="number of cards of the simulated world, with 350 rows each",
    )

    argument_parser.add_argument(
        "--repeats", type=int, default=2, help="number of measurements; the least result counts"
    )
    argument_parser.add_argument(
        "--large", action="store_true", help="also measure a world of ten times the cards"
    )
    options = argument_parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary_folder:
        working_folder = Path(temporary_folder)
        source_path = options.source or write_world(working_folder, options.cards)
        bars = compare_features(source_path, working_folder, options.repeats)

        if options.large:
            bars += measure_large_world(working_folder, options.cards)

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
