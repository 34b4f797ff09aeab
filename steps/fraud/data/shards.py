"""The dataset on disk for training, evaluation and serving. `write_dataset` writes the dataset, and
sequences.py reads it.

    dataset.json           the facts below
    shards/NAME-00000.npy  column NAME (see ARRAYS), sorted by (card, time, id), with complete cards
    transactions.parquet   valid rows sorted by (time, id)
    rejects.parquet        rejected rows, unchanged, with their position `row` and the `reason`
    state/                 the serving state, see steps/fraud/data/serving_state.py

The test weeks are the last `test_weeks` weeks (7 whole days, UTC) with known labels. The test weeks
end `label_delay_days` before the last full day. Training uses rows before `train_end`, which is
`label_delay_days` before the first test day, so that all labels of the training rows are known when
the test weeks begin. No model is trained or evaluated on rows after the test weeks.

Facts (times are µs since the epoch, and counts are numbers of rows):

    train_start            start of the training rows; earlier rows only give context
    train_end, data_until  end of the training rows and of the serving state: number, text
    test_weeks, test_rows  [start, end) and [rows, frauds] of each test week, oldest first
    mean, std              mean and standard deviation of each feature over the training rows
    unknown                unused rows before the end of the test weeks, whose label is unknown
    rejected               rejected rows by reason
"""

import shutil
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from argolocal.common.files import require_disk_space
from rekindle.errors import DataError, RekindleError
from rekindle.workload import SMALL_DISK_REMEDY, Prepared
from steps.fraud.data import features, serving_state, source
from steps.fraud.data.boosting import BOOSTED, Boosting, Sample
from steps.fraud.data.breaks import late_labels, sum_labels
from steps.fraud.data.row_checks import CheckedRows, check
from steps.fraud.data.suspicions import suspicions
from steps.fraud.data.transactions import DAY, UNKNOWN, Rows, format_day, format_utc
from steps.fraud.fraud_config import Data

# columns of a shard of n rows, and their types
ARRAYS = {
    # shape [n, F]
    "features": np.float32,
    # 1: fraud, 0: genuine, 2 (UNKNOWN): label not known yet
    "labels": np.uint8,
    # kind of fraud; 0: genuine or not known
    "scenarios": np.uint8,
    # µs since the epoch
    "times": np.int64,
    "cards": np.int64,
    "ids": np.int64,
}


# approximate bytes of a transaction in the dataset
ROW_BYTES = 250
# time after the first row in which rows are only context; at most a quarter of the training time
WARM_UP = 14 * DAY


def write_dataset(data_settings: Data, dataset_folder: Path) -> Prepared:
    """Write the dataset of the raw transactions to `dataset_folder`.

    Raises DataError for invalid data, ConfigError for an invalid setting, RekindleError if writing
    fails.
    """
    try:
        (dataset_folder / "shards").mkdir()
        dataset_facts, was_sorted, warnings = _write_dataset(data_settings, dataset_folder)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise RekindleError(
            f"{dataset_folder} cannot be written: {error}. It needs about {ROW_BYTES} bytes per"
            " transaction: free space, or set TMPDIR to a directory on a larger disk."
        ) from error

    tag_names = ("frauds", "train_rows", "train_frauds", "unknown", "rejected", "test_rows")
    day_texts = {
        fact_name: format_day(dataset_facts[fact_name])
        for fact_name in ("first_time", "last_time", "train_end")
    }
    rejected_count = sum(dataset_facts["rejected"].values())
    # `was_sorted` is a tag, not a fact, because facts are part of the dataset, which does not
    # depend on the order of the source
    run_tags = (
        {fact_name: dataset_facts[fact_name] for fact_name in tag_names}
        | {"was_sorted": was_sorted}
        | day_texts
    )
    fraud_share = dataset_facts["train_frauds"] / dataset_facts["train_rows"]
    newest_time = format_utc(dataset_facts["last_time"])

    return Prepared(
        dataset_facts["rows"],
        rejected_count,
        dataset_facts,
        run_tags,
        warnings,
        {"fraud_share": fraud_share},
        newest_time,
    )


def _write_dataset(
    data_settings: Data, dataset_folder: Path
) -> tuple[dict[str, Any], bool, list[str]]:
    """Write all files of the dataset except dataset.json. Return the facts of the dataset, True if
    the source was sorted by time, and warnings about the data."""
    checked_rows = _read_rows(data_settings, dataset_folder)
    selected_rows = _select_days(checked_rows.rows, data_settings)
    labels_until = labels_end(checked_rows.rows, data_settings)

    if data_settings.window:
        selected_rows = _hide_labels(selected_rows, labels_until)

    require_disk_space(
        f"the dataset of {len(selected_rows):,} rows",
        1.1 * ROW_BYTES * len(selected_rows),
        dataset_folder,
        SMALL_DISK_REMEDY,
    )
    dataset_facts = calendar(selected_rows, data_settings, labels_until) | {
        "features": [*features.NAMES, BOOSTED],
        "label_delay_days": data_settings.label_delay_days,
    }
    dataset_facts["data_until"] = format_utc(dataset_facts["train_end"])
    labels_until = dataset_facts["test_weeks"][-1][1]
    warnings = suspicions(selected_rows, data_settings.columns, labels_until)
    selected_rows.to_frame().write_parquet(dataset_folder / "transactions.parquet")

    row_pieces, fitted_boosting = _write_features(
        selected_rows, data_settings, dataset_facts, dataset_folder
    )
    label_sums = _write_shards(row_pieces, fitted_boosting, dataset_facts, dataset_folder)
    warnings += late_labels(label_sums, labels_until, data_settings.label_delay_days)
    dataset_facts["rejected"] = checked_rows.reasons()

    return dataset_facts, checked_rows.was_sorted, warnings


def _read_rows(data_settings: Data, dataset_folder: Path) -> CheckedRows:
    """Read and check the source, and write the rejected rows."""
    raw_rows = source.read(data_settings, dataset_folder / "download")
    shutil.rmtree(dataset_folder / "download", ignore_errors=True)
    checked_rows = check(
        raw_rows, data_settings.columns, data_settings.tolerated_rejects, data_settings.text
    )

    # if no row is rejected, omit the source's columns, so that equal transactions give equal
    # datasets
    if checked_rows.rejects.is_empty():
        rejected_rows = checked_rows.rejects.select("row", "reason")
    else:
        rejected_rows = checked_rows.rejects

    rejected_rows.write_parquet(dataset_folder / "rejects.parquet")
    return checked_rows


def _write_features(
    selected_rows: Rows, data_settings: Data, dataset_facts: dict[str, Any], dataset_folder: Path
) -> tuple[list[Rows], Boosting]:
    """Write the features of single transactions, one file per shard, and fit the boosted trees on
    these features. Return the rows of each shard, and the trees."""
    boosting_sample = Sample(dataset_facts["train_rows"])
    row_pieces: list[Rows] = []

    for piece_number, (piece_rows, feature_table) in enumerate(
        features.tables(selected_rows, data_settings.label_delay_days, data_settings.shard_rows)
    ):
        np.save(_name_shard_file(dataset_folder, "features", piece_number), feature_table)
        is_usable = (piece_rows.time >= dataset_facts["train_start"]) & (
            piece_rows.time < dataset_facts["train_end"]
        )
        boosting_sample.add(feature_table, piece_rows.fraud, piece_rows.card, is_usable)
        row_pieces.append(piece_rows)

    return row_pieces, boosting_sample.fit()


def _write_shards(
    row_pieces: list[Rows],
    fitted_boosting: Boosting,
    dataset_facts: dict[str, Any],
    dataset_folder: Path,
) -> NDArray[np.float64]:
    """Write the columns of all shards, with the log-odds of the trees as the last feature, and the
    serving state. Add `shards`, `mean` and `std` to the facts. Return the sums for
    `late_labels`."""
    train_end = dataset_facts["train_end"]
    delay_days = dataset_facts["label_delay_days"]
    labels_until = dataset_facts["test_weeks"][-1][1]
    train_moments = _Moments(len(dataset_facts["features"]))
    needed_pieces: list[tuple[Rows, features.Floats]] = []
    label_sums = np.zeros((2, 3))

    for piece_number, piece_rows in enumerate(row_pieces):
        feature_table = np.load(_name_shard_file(dataset_folder, "features", piece_number))
        is_training_row = piece_rows.time < train_end
        log_odds = fitted_boosting.score(feature_table, piece_rows.card, is_training_row)
        label_sums += sum_labels(piece_rows, log_odds, dataset_facts["train_start"], labels_until)
        feature_table = np.column_stack([feature_table, log_odds])

        shard_arrays = (
            feature_table,
            piece_rows.fraud,
            piece_rows.scenario,
            piece_rows.time,
            piece_rows.card,
            piece_rows.id,
        )
        for array_name, shard_array in zip(ARRAYS, shard_arrays, strict=True):
            np.save(_name_shard_file(dataset_folder, array_name, piece_number), shard_array)

        train_moments.add(feature_table, is_training_row)
        is_needed = serving_state.needed(piece_rows, train_end, delay_days)
        needed_pieces.append((piece_rows[is_needed], feature_table[is_needed]))

    dataset_facts["shards"] = [len(piece_rows) for piece_rows in row_pieces]
    dataset_facts["mean"] = train_moments.mean()
    dataset_facts["std"] = train_moments.std()
    serving_state.write(
        dataset_folder / "state",
        Rows.concat([piece_rows for piece_rows, _ in needed_pieces]),
        np.concatenate([feature_table for _, feature_table in needed_pieces]),
        fitted_boosting.trees(),
        dataset_facts,
    )
    return label_sums


class _Moments:
    """Computes the mean and the standard deviation of each feature over rows that are added in
    pieces."""

    def __init__(self, feature_count: int) -> None:
        self.count = 0
        self.sums = np.zeros(feature_count)
        self.squares = np.zeros(feature_count)

    def add(self, feature_table: features.Floats, row_mask: NDArray[np.bool_]) -> None:
        self.count += int(row_mask.sum())
        # process rows in blocks that fit into the CPU cache
        for block_start in range(0, len(feature_table), 4096):
            block_rows = feature_table[block_start : block_start + 4096][
                row_mask[block_start : block_start + 4096]
            ].astype(np.float64)
            self.sums += block_rows.sum(0)
            self.squares += np.square(block_rows).sum(0)

    def mean(self) -> list[float]:
        return (self.sums / self.count).tolist()

    def std(self) -> list[float]:
        feature_means = self.sums / self.count
        return np.sqrt(np.maximum(self.squares / self.count - feature_means**2, 0)).tolist()


def _select_days(transactions: Rows, data_settings: Data) -> Rows:
    """Return the rows from `first_day` to `last_day`. Raises DataError if no row remains."""
    start_index = 0
    end_index = len(transactions)

    if data_settings.first_day:
        start_index = int(
            np.searchsorted(transactions.time, _to_microseconds(data_settings.first_day))
        )
    if data_settings.last_day:
        end_index = int(
            np.searchsorted(transactions.time, _to_microseconds(data_settings.last_day) + DAY)
        )

    if start_index >= end_index:
        if data_settings.window:
            remedy_sentence = f"data.window ({data_settings.window}) sets both."
        else:
            remedy_sentence = "Set both to days of the data."

        raise DataError(
            f"{data_settings.source}: no transaction from data.first_day"
            f" ({data_settings.first_day}) to data.last_day ({data_settings.last_day}); the data"
            f" is from {format_day(transactions.time[0])} to {format_day(transactions.time[-1])}."
            f" {remedy_sentence}"
        )

    return transactions[start_index:end_index]


def _hide_labels(transactions: Rows, unknown_from_time: int) -> Rows:
    """Remove the labels of rows from time `unknown_from_time` on, so that a run that starts late
    creates the same dataset as a run in time."""
    is_unknown = transactions.time >= unknown_from_time
    fraud_labels = np.where(is_unknown, np.uint8(UNKNOWN), transactions.fraud)
    return replace(
        transactions,
        fraud=fraud_labels,
        scenario=np.where(is_unknown, np.uint8(0), transactions.scenario),
    )


def labels_end(transactions: Rows, data_settings: Data) -> int:
    """Return the time up to which labels are known. `transactions`: all rows of the source,
    sorted by time."""
    if data_settings.labels_until:
        return _to_microseconds(data_settings.labels_until) + DAY
    return (last_full_day(transactions.time) + 1 - data_settings.label_delay_days) * DAY


def calendar(transactions: Rows, data_settings: Data, labels_until: int) -> dict[str, Any]:
    """Return the facts of the dataset about its times and numbers of rows: the test weeks, the
    training period and the counts in them.

    Raises DataError if there are too few rows to train or to evaluate.
    """
    last_week_end = min((last_full_day(transactions.time) + 1) * DAY, labels_until)
    week_edges = [
        last_week_end - 7 * DAY * weeks_before_end
        for weeks_before_end in range(data_settings.test_weeks, -1, -1)
    ]
    train_end = week_edges[0] - data_settings.label_delay_days * DAY
    row_positions = np.searchsorted(transactions.time, [train_end, *week_edges])
    is_fraud = transactions.fraud == 1
    fraud_counts = np.append(0, np.cumsum(is_fraud, dtype=np.int64))[row_positions]

    calendar_facts = {
        "first_time": int(transactions.time[0]),
        "last_time": int(transactions.time[-1]),
        "train_start": int(transactions.time[0])
        + min(WARM_UP, max(0, train_end - int(transactions.time[0])) // 4),
        "train_end": train_end,
        "test_weeks": list(pairwise(week_edges)),
        "rows": len(transactions),
        "frauds": int(is_fraud.sum()),
        "train_rows": int(row_positions[0]),
        "train_frauds": int(fraud_counts[0]),
        "unknown": int((transactions.fraud[: row_positions[-1]] == UNKNOWN).sum()),
        "test_rows": [
            [int(week_row_count), int(week_fraud_count)]
            for week_row_count, week_fraud_count in zip(
                np.diff(row_positions[1:]), np.diff(fraud_counts[1:]), strict=True
            )
        ],
    }
    if not 0 < calendar_facts["train_frauds"] < calendar_facts["train_rows"]:
        raise DataError(
            f"nothing to learn from: {calendar_facts['train_rows']:,} transactions with"
            f" {calendar_facts['train_frauds']:,} frauds before {format_day(train_end)}, where"
            f" training ends (data from {format_day(transactions.time[0])} to"
            f" {format_day(transactions.time[-1])}, less {data_settings.test_weeks} test weeks"
            f" and, before and after them, {data_settings.label_delay_days} days until labels are"
            " known). Give more data, or lower data.test_weeks."
        )

    if not any(fraud_counts for _, fraud_counts in calendar_facts["test_rows"]):
        raise DataError(
            "nothing to evaluate on: no fraud among the"
            f" {sum(week_row_count for week_row_count, _ in calendar_facts['test_rows']):,}"
            f" transactions of the test weeks ({format_day(week_edges[0])} to"
            f" {format_day(last_week_end)}). Raise data.test_weeks, or give more data."
        )

    return calendar_facts


def last_full_day(row_times: NDArray[np.int64]) -> int:
    """Return the last complete day, as days since the epoch.

    The newest day counts as complete if its last transaction is at most one hour earlier in the day
    than the last transaction of each day in the week before.
    """
    last_day = int(row_times[-1] // DAY)
    day_end_times = (
        row_times[np.searchsorted(row_times, np.arange(last_day - 7, last_day + 1) * DAY + DAY) - 1]
        - np.arange(last_day - 7, last_day + 1) * DAY
    )

    # omit days without transactions, whose end times are negative
    earlier_day_ends = day_end_times[:-1][day_end_times[:-1] >= 0]
    if not len(earlier_day_ends) or day_end_times[-1] >= earlier_day_ends.min() - DAY // 24:
        return last_day

    return last_day - 1


def _to_microseconds(day: date) -> int:
    return int(np.datetime64(day, "us").astype(np.int64))


def _name_shard_file(dataset_folder: Path, array_name: str, shard_number: int) -> Path:
    return dataset_folder / "shards" / f"{array_name}-{shard_number:05d}.npy"
