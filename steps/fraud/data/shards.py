"""The dataset on disk for training, evaluation and serving. `write_dataset` writes the dataset, and
sequences.py reads it.

    dataset.json           the facts below
    shards/NAME-00000.npy  column NAME (see ARRAYS), sorted by (card, time, id), with complete cards
    transactions.parquet   valid rows sorted by (time, id)
    rejects.parquet        rejected rows, unchanged, with their position `row` and the `reason`
    state/                 the serving state, see steps/fraud/data/serving_state.py

The test weeks are the last `test_weeks` weeks (7 whole days, UTC) with known labels; they end
`label_delay_days` before the last full day. Training uses rows before `train_end`, which is
`label_delay_days` before the first test day: all labels of these rows are known when the test weeks
begin. No model is trained or evaluated on rows after the test weeks.

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

from argolocal.common.files import check_space
from rekindle.errors import DataError, RekindleError
from rekindle.workload import SMALL_DISK, Prepared
from steps.fraud.data import features, serving_state, source
from steps.fraud.data.boosting import BOOSTED, Sample
from steps.fraud.data.breaks import late_labels, sum_labels
from steps.fraud.data.row_checks import check
from steps.fraud.data.suspicions import suspicions
from steps.fraud.data.transactions import DAY, UNKNOWN, Rows, format_day, format_utc
from steps.fraud.fraud_config import Data

# columns of a shard of n rows, and their types
ARRAYS = {
    "features": np.float32,  # shape [n, F]
    "labels": np.uint8,  # 1: fraud, 0: genuine, 2 (UNKNOWN): label not known yet
    "scenarios": np.uint8,  # kind of fraud; 0: genuine or not known
    "times": np.int64,  # µs since the epoch
    "cards": np.int64,
    "ids": np.int64,
}


ROW_BYTES = 250  # approximate bytes of a transaction in the dataset
# rows in this time after the first row only give context; limited to a quarter of the training time
WARM_UP = 14 * DAY


def write_dataset(data: Data, out: Path) -> Prepared:
    """Write the dataset of the raw transactions to `out`.

    Raises DataError for invalid data, ConfigError for an invalid setting, RekindleError if writing
    fails.
    """
    try:
        (out / "shards").mkdir()
        facts, was_sorted, warnings = _write(data, out)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise RekindleError(
            f"{out} cannot be written: {error}. It needs about {ROW_BYTES} bytes per transaction:"
            " free space, or set TMPDIR to a directory on a larger disk."
        ) from error

    names = ("frauds", "train_rows", "train_frauds", "unknown", "rejected", "test_rows")
    days = {name: format_day(facts[name]) for name in ("first_time", "last_time", "train_end")}
    rejected = sum(facts["rejected"].values())
    # `was_sorted` is a tag, not a fact, because facts are part of the dataset, which does not
    # depend on the order of the source
    tags = {name: facts[name] for name in names} | {"was_sorted": was_sorted} | days
    share = facts["train_frauds"] / facts["train_rows"]
    newest = format_utc(facts["last_time"])

    return Prepared(facts["rows"], rejected, facts, tags, warnings, {"fraud_share": share}, newest)


def _write(data: Data, out: Path) -> tuple[dict[str, Any], bool, list[str]]:
    raw = source.read(data, out / "download")
    shutil.rmtree(out / "download", ignore_errors=True)
    checked = check(raw, data.columns, data.tolerated_rejects, data.text)
    del raw

    # if no row is rejected, omit the source's columns, so that equal transactions give equal
    # datasets
    if checked.rejects.is_empty():
        rejects = checked.rejects.select("row", "reason")
    else:
        rejects = checked.rejects

    rejects.write_parquet(out / "rejects.parquet")
    rows = _select_days(checked.rows, data)
    labels_until = labels_end(checked.rows, data)

    if data.window:
        rows = _hide_labels(rows, labels_until)

    check_space(f"the dataset of {len(rows):,} rows", 1.1 * ROW_BYTES * len(rows), out, SMALL_DISK)
    facts = calendar(rows, data, labels_until) | {
        "features": [*features.NAMES, BOOSTED],
        "label_delay_days": data.label_delay_days,
    }
    facts["data_until"] = format_utc(facts["train_end"])
    labels_until = facts["test_weeks"][-1][1]
    warnings = suspicions(rows, data.columns, labels_until)
    rows.to_frame().write_parquet(out / "transactions.parquet")

    sample = Sample(facts["train_rows"])
    pieces: list[Rows] = []

    for number, (piece, table) in enumerate(
        features.tables(rows, data.label_delay_days, data.shard_rows)
    ):
        np.save(_file(out, "features", number), table)
        usable = (piece.time >= facts["train_start"]) & (piece.time < facts["train_end"])
        sample.add(table, piece.fraud, piece.card, usable)
        pieces.append(piece)

    boosting = sample.fit()

    train = _Moments(len(facts["features"]))
    tail: list[tuple[Rows, features.Floats]] = []
    label_sums = np.zeros((2, 3))

    for number, piece in enumerate(pieces):
        table = np.load(_file(out, "features", number))
        training = piece.time < facts["train_end"]
        log_odds = boosting.score(table, piece.card, training)
        label_sums += sum_labels(piece, log_odds, facts["train_start"], labels_until)
        table = np.column_stack([table, log_odds])

        arrays = (table, piece.fraud, piece.scenario, piece.time, piece.card, piece.id)
        for name, array in zip(ARRAYS, arrays, strict=True):
            np.save(_file(out, name, number), array)

        train.add(table, training)
        keep = serving_state.needed(piece, facts["train_end"], data.label_delay_days)
        tail.append((piece[keep], table[keep]))

    warnings += late_labels(label_sums, labels_until, data.label_delay_days)
    sizes = [len(piece) for piece in pieces]
    facts["shards"] = sizes
    facts["mean"] = train.mean()
    facts["std"] = train.std()
    facts["rejected"] = checked.reasons()
    kept = Rows.concat([piece for piece, _ in tail]), np.concatenate([table for _, table in tail])
    serving_state.write(out / "state", *kept, boosting.trees(), facts)

    return facts, checked.was_sorted, warnings


class _Moments:
    """Mean and standard deviation of rows that are added in pieces."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.sums = np.zeros(width)
        self.squares = np.zeros(width)

    def add(self, table: features.Floats, mask: NDArray[np.bool_]) -> None:
        self.count += int(mask.sum())
        # process rows in blocks that fit into the CPU cache
        for start in range(0, len(table), 4096):
            block = table[start : start + 4096][mask[start : start + 4096]].astype(np.float64)
            self.sums += block.sum(0)
            self.squares += np.square(block).sum(0)

    def mean(self) -> list[float]:
        return (self.sums / self.count).tolist()

    def std(self) -> list[float]:
        mean = self.sums / self.count
        return np.sqrt(np.maximum(self.squares / self.count - mean**2, 0)).tolist()


def _select_days(rows: Rows, data: Data) -> Rows:
    """Return the rows from `first_day` to `last_day`. Raises DataError if no row remains."""
    start = 0
    end = len(rows)

    if data.first_day:
        start = int(np.searchsorted(rows.time, _to_microseconds(data.first_day)))
    if data.last_day:
        end = int(np.searchsorted(rows.time, _to_microseconds(data.last_day) + DAY))

    if start >= end:
        if data.window:
            remedy = f"data.window ({data.window}) sets both."
        else:
            remedy = "Set both to days of the data."

        raise DataError(
            f"{data.source}: no transaction from data.first_day ({data.first_day}) to data.last_day"
            f" ({data.last_day}); the data is from {format_day(rows.time[0])} to"
            f" {format_day(rows.time[-1])}."
            f" {remedy}"
        )

    return rows[start:end]


def _hide_labels(rows: Rows, start: int) -> Rows:
    """Remove the labels of rows from time `start` on, so that a run that starts late creates the
    same dataset."""
    unknown = rows.time >= start
    fraud = np.where(unknown, np.uint8(UNKNOWN), rows.fraud)
    return replace(rows, fraud=fraud, scenario=np.where(unknown, np.uint8(0), rows.scenario))


def labels_end(rows: Rows, data: Data) -> int:
    """Return the time up to which labels are known. `rows`: all rows of the source, sorted by
    time."""
    if data.labels_until:
        return _to_microseconds(data.labels_until) + DAY
    return (last_full_day(rows.time) + 1 - data.label_delay_days) * DAY


def calendar(rows: Rows, data: Data, labels_until: int) -> dict[str, Any]:
    """Return the test weeks, the end of training, and numbers of rows, as facts of the dataset.

    Raises DataError if there is too little data.
    """
    end = min((last_full_day(rows.time) + 1) * DAY, labels_until)
    edges = [end - 7 * DAY * weeks for weeks in range(data.test_weeks, -1, -1)]
    train_end = edges[0] - data.label_delay_days * DAY
    weeks = list(pairwise(edges))
    counts = np.searchsorted(rows.time, [train_end, *edges])
    fraud = rows.fraud == 1
    frauds = np.append(0, np.cumsum(fraud, dtype=np.int64))[counts]

    facts = {
        "first_time": int(rows.time[0]),
        "last_time": int(rows.time[-1]),
        "train_start": int(rows.time[0]) + min(WARM_UP, max(0, train_end - int(rows.time[0])) // 4),
        "train_end": train_end,
        "test_weeks": weeks,
        "rows": len(rows),
        "frauds": int(fraud.sum()),
        "train_rows": int(counts[0]),
        "train_frauds": int(frauds[0]),
        "unknown": int((rows.fraud[: counts[-1]] == UNKNOWN).sum()),
        "test_rows": [
            [int(n), int(f)] for n, f in zip(np.diff(counts[1:]), np.diff(frauds[1:]), strict=True)
        ],
    }
    if not 0 < facts["train_frauds"] < facts["train_rows"]:
        raise DataError(
            f"nothing to learn from: {facts['train_rows']:,} transactions with"
            f" {facts['train_frauds']:,} frauds before {format_day(train_end)}, where training"
            f" ends (data from {format_day(rows.time[0])} to {format_day(rows.time[-1])}, less"
            f" {data.test_weeks} test weeks"
            f" and, before and after them, {data.label_delay_days} days until labels are known)."
            " Give more data, or lower data.test_weeks."
        )

    if not any(frauds for _, frauds in facts["test_rows"]):
        raise DataError(
            f"nothing to evaluate on: no fraud among the {sum(n for n, _ in facts['test_rows']):,}"
            f" transactions of the test weeks ({format_day(edges[0])} to {format_day(end)}). Raise"
            " data.test_weeks, or give more data."
        )

    return facts


def last_full_day(time: NDArray[np.int64]) -> int:
    """Return the last complete day, as days since the epoch.

    The newest day counts as complete if its last transaction is at most one hour earlier in the day
    than the last one of each day in the week before.
    """
    last = int(time[-1] // DAY)
    ends = (
        time[np.searchsorted(time, np.arange(last - 7, last + 1) * DAY + DAY) - 1]
        - np.arange(last - 7, last + 1) * DAY
    )

    # omit days without transactions, whose values are negative
    usual = ends[:-1][ends[:-1] >= 0]
    if not len(usual) or ends[-1] >= usual.min() - DAY // 24:
        return last

    return last - 1


def _to_microseconds(day: date) -> int:
    return int(np.datetime64(day, "us").astype(np.int64))


def _file(path: Path, name: str, number: int) -> Path:
    return path / "shards" / f"{name}-{number:05d}.npy"
