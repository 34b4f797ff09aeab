"""A dataset on disk: what training, evaluation and serving read. `write_dataset` makes it, sequences.py reads it.

    dataset.json           the engine's; its facts say everything below as numbers (see FACTS)
    shards/NAME-00000.npy  NAME of ARRAYS: columns to map, sorted by (card, time, id); a card is in one shard only
    transactions.parquet   the checked rows sorted by (time, id): id, time, card, terminal, amount, fraud, scenario
    rejects.parquet        rows that broke a rule, as they came, with their position `row` and the `reason`
    state/                 what a server needs to compute features of later transactions: steps/fraud/data/state.py

Time: the last `test_weeks` weeks (of 7 whole days, UTC) whose labels are known are for tests: they end where the label
delay before the last full day begins. Training uses rows with time < train_end only: the first test day minus the label
delay, so every label was known when the tests begin. Rows after the tests are there for the serving state.
"""

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rekindle.errors import DataError, RekindleError
from rekindle.workload import Prepared
from steps.fraud.config import Data
from steps.fraud.data import features, source, state
from steps.fraud.data.boosting import BOOSTED, Sample
from steps.fraud.data.checks import check
from steps.fraud.data.schema import DAY, UNKNOWN, Rows, day, utc
from steps.fraud.data.suspicions import suspicions

ARRAYS = {  # of a shard with n rows
    "features": np.float32,  # [n, F]
    "labels": np.uint8,  # 1 fraud, 0 genuine, 2 (schema.UNKNOWN) not known yet
    "scenarios": np.uint8,  # 0 where genuine or not known
    "times": np.int64,  # µs since the epoch
    "cards": np.int64,
    "ids": np.int64,
}
FACTS = {  # times are µs since the epoch
    "features": "names of the feature columns",
    "mean": "of each feature over the training rows",
    "std": "of each feature over the training rows",
    "shards": "rows of each shard",
    "rows": "transactions in the shards",
    "frauds": "frauds among them",
    "train_rows": "rows before train_end",
    "train_frauds": "frauds among them",
    "rejected": "rejected rows by reason",
    "was_sorted": "whether the source was in time order",
    "train_start": "rows before it only give context: sums over past days are not whole there",
    "train_end": "training uses rows before it",
    "data_until": "train_end as text: where the serving state ends",
    "test_weeks": "[start, end) of each test week, oldest first",
    "test_rows": "[rows, frauds] of each test week",
    "first_time": "of the first transaction",
    "last_time": "of the last transaction",
    "unknown": "rows in the training time and the test weeks whose label is not known: they neither teach nor judge",
    "label_delay_days": "a label is known this long after its transaction",
}


ROW_BYTES = 250  # of a transaction in the dataset, about
WARM_UP = 14 * DAY  # at the start of the data, at most a quarter of the training time


def write_dataset(data: Data, out: Path) -> Prepared:
    """Raw transactions → the files of a dataset in `out`.

    Raises DataError for bad data, ConfigError for a bad setting, RekindleError if the disk does not take it.
    """
    try:
        (out / "shards").mkdir()
        facts, digest, warnings = _write(data, out)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise RekindleError(
            f"{out} cannot be written: {error}. It takes about {ROW_BYTES} bytes a transaction: make room, or set "
            "TMPDIR to a directory on a larger disk."
        ) from error
    shown = ("frauds", "train_rows", "train_frauds", "unknown", "rejected", "was_sorted", "test_rows")
    days = {name: day(facts[name]) for name in ("first_time", "last_time", "train_end")}
    rejected = sum(facts["rejected"].values())
    tags = {name: facts[name] for name in shown} | days
    share = facts["train_frauds"] / facts["train_rows"]
    newest = utc(facts["last_time"])
    return Prepared(facts["rows"], rejected, facts, tags, digest, warnings, {"fraud_share": share}, newest)


def _check_disk(rows: int, out: Path) -> None:
    """Raises RekindleError if the files of so many rows do not fit."""
    need, free = 1.1 * ROW_BYTES * rows, shutil.disk_usage(out).free
    if need > free:
        raise RekindleError(
            f"the dataset of {rows:,} rows takes about {need / 1e9:.1f} GB and {out} has {free / 1e9:.1f} GB left: "
            "make room, or set TMPDIR to a directory on a larger disk."
        )


def _write(data: Data, out: Path) -> tuple[dict[str, Any], str, list[str]]:
    raw = source.read(data, out / "download")
    shutil.rmtree(out / "download", ignore_errors=True)
    checked = check(raw, data.columns, data.tolerated_rejects, data.text)
    del raw
    checked.rejects.write_parquet(out / "rejects.parquet")
    rows = _between(checked.rows, data)
    if data.window:
        rows = _unlabelled(rows, labels_end(checked.rows, data))
    _check_disk(len(rows), out)
    warnings = suspicions(rows, data.columns)
    facts = calendar(rows, data, labels_end(checked.rows, data)) | {
        "features": [*features.NAMES, BOOSTED],
        "label_delay_days": data.label_delay_days,
    }
    facts["data_until"] = utc(facts["train_end"])
    rows.to_frame().write_parquet(out / "transactions.parquet")

    digest = sha256(json.dumps(facts, sort_keys=True).encode())
    sample = Sample(facts["train_rows"])
    parts: list[Rows] = []
    for number, (part, table) in enumerate(features.tables(rows, data.label_delay_days, data.shard_rows)):
        np.save(_file(out, "features", number), table)
        sample.add(table, part.fraud, part.card, (part.time >= facts["train_start"]) & (part.time < facts["train_end"]))
        parts.append(part)
    boosting = sample.fit()

    train = _Moments(len(facts["features"]))
    tail: list[tuple[Rows, features.Floats]] = []
    for number, part in enumerate(parts):
        table, training = np.load(_file(out, "features", number)), part.time < facts["train_end"]
        table = np.column_stack([table, boosting.score(table, part.card, training)])
        arrays = (table, part.fraud, part.scenario, part.time, part.card, part.id)
        for name, array in zip(ARRAYS, arrays, strict=True):
            np.save(_file(out, name, number), array)
            digest.update(array.data)
        train.add(table, training)
        keep = state.needed(part, facts["train_end"], data.label_delay_days)
        tail.append((part[keep], table[keep]))
    sizes = [len(part) for part in parts]
    facts |= {"shards": sizes, "mean": train.mean(), "std": train.std()}
    facts |= {"rejected": checked.reasons(), "was_sorted": checked.was_sorted}
    kept = Rows.concat([part for part, _ in tail]), np.concatenate([table for _, table in tail])
    state.write(out / "state", *kept, boosting.trees(), facts | {"digest": digest.hexdigest()})
    return facts, digest.hexdigest(), warnings


class _Moments:
    """Mean and standard deviation of rows that come in pieces."""

    def __init__(self, width: int) -> None:
        self.count, self.sums, self.squares = 0, np.zeros(width), np.zeros(width)

    def add(self, table: features.Floats, which: NDArray[np.bool_]) -> None:
        self.count += int(which.sum())
        for at in range(0, len(table), 4096):  # in blocks that stay in the cache
            block = table[at : at + 4096][which[at : at + 4096]].astype(np.float64)
            self.sums += block.sum(0)
            self.squares += np.square(block).sum(0)

    def mean(self) -> list[float]:
        return (self.sums / self.count).tolist()

    def std(self) -> list[float]:
        mean = self.sums / self.count
        return np.sqrt(np.maximum(self.squares / self.count - mean**2, 0)).tolist()


def _between(rows: Rows, data: Data) -> Rows:
    """The rows from `first_day` to `last_day`. Raises DataError if none is left."""
    start, end = 0, len(rows)
    if data.first_day:
        start = int(np.searchsorted(rows.time, _us(data.first_day)))
    if data.last_day:
        end = int(np.searchsorted(rows.time, _us(data.last_day) + DAY))
    if start >= end:
        raise DataError(
            f"{data.source}: no transaction from data.first_day ({data.first_day}) to data.last_day ({data.last_day}); "
            f"it reaches from {day(rows.time[0])} to {day(rows.time[-1])}. Set them to days in between."
        )
    return rows[start:end]


def _unlabelled(rows: Rows, start: int) -> Rows:
    """Without the labels from `start` on: a run in time has only some of them, a late one all."""
    unknown = rows.time >= start
    fraud = np.where(unknown, np.uint8(UNKNOWN), rows.fraud)
    return replace(rows, fraud=fraud, scenario=np.where(unknown, np.uint8(0), rows.scenario))


def labels_end(rows: Rows, data: Data) -> int:
    """The instant up to which every label is known; `rows` are all of the source, sorted by time."""
    if data.labels_until:
        return _us(data.labels_until) + DAY
    return (last_full_day(rows.time) + 1 - data.label_delay_days) * DAY


def calendar(rows: Rows, data: Data, known: int) -> dict[str, Any]:
    """Test weeks, end of training and counts, if labels before `known` are. Raises DataError if too little is left."""
    end = min((last_full_day(rows.time) + 1) * DAY, known)
    edges = [end - 7 * DAY * weeks for weeks in range(data.test_weeks, -1, -1)]
    train_end = edges[0] - data.label_delay_days * DAY
    weeks = list(pairwise(edges))
    at = np.searchsorted(rows.time, [train_end, *edges])
    fraud = rows.fraud == 1
    frauds = np.append(0, np.cumsum(fraud, dtype=np.int64))[at]
    facts = {
        "first_time": int(rows.time[0]),
        "last_time": int(rows.time[-1]),
        "train_start": int(rows.time[0]) + min(WARM_UP, max(0, train_end - int(rows.time[0])) // 4),
        "train_end": train_end,
        "test_weeks": weeks,
        "rows": len(rows),
        "frauds": int(fraud.sum()),
        "train_rows": int(at[0]),
        "train_frauds": int(frauds[0]),
        "unknown": int((rows.fraud[: at[-1]] == UNKNOWN).sum()),
        "test_rows": [[int(n), int(f)] for n, f in zip(np.diff(at[1:]), np.diff(frauds[1:]), strict=True)],
    }
    if not 0 < facts["train_frauds"] < facts["train_rows"]:
        raise DataError(
            f"nothing to learn from: {facts['train_rows']:,} transactions with {facts['train_frauds']:,} frauds "
            f"before {day(train_end)}, where training ends (data from {day(rows.time[0])} to {day(rows.time[-1])}, "
            f"less {data.test_weeks} test weeks and, before and after them, {data.label_delay_days} days until labels "
            "are known). Give more "
            "data, or lower data.test_weeks."
        )
    if not any(frauds for _, frauds in facts["test_rows"]):
        raise DataError(
            f"nothing to judge by: no fraud among the {sum(n for n, _ in facts['test_rows']):,} transactions of the "
            f"test weeks ({day(edges[0])} to {day(end)}). Raise data.test_weeks, or give more data."
        )
    return facts


def last_full_day(time: NDArray[np.int64]) -> int:
    """Days since the epoch of the last day that ended as late as days of the week before did, to the hour."""
    last = int(time[-1] // DAY)
    ends = (
        time[np.searchsorted(time, np.arange(last - 7, last + 1) * DAY + DAY) - 1] - np.arange(last - 7, last + 1) * DAY
    )
    usual = ends[:-1][ends[:-1] >= 0]  # negative: a day without transactions
    return last if not len(usual) or ends[-1] >= usual.min() - DAY // 24 else last - 1


def _us(of: Any) -> int:
    return int(np.datetime64(of, "us").astype(np.int64))


def _file(path: Path, name: str, number: int) -> Path:
    return path / "shards" / f"{name}-{number:05d}.npy"
