"""The transformer's samples: windows over the memory-mapped shards of a dataset directory.

A training sample is a window of `LENGTH` consecutive transactions of one card. Windows of a card
overlap by `OVERLAP`. Each transaction counts for the loss in exactly one window, where at least
`OVERLAP` earlier transactions of the card, if they exist, precede it. Transactions before
`train_start`, in the first days of the data, are only context for later ones. All shards are mapped
into one memory region, so a batch is one gather over any number of shards.
"""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.errors import DataError
from steps.fraud.data.boosting import BOOSTED
from steps.fraud.data.transactions import UNKNOWN, Ints, first_rows_of_groups
from steps.fraud.facts import read_facts
from steps.fraud.fraud_config import CONTEXT

LENGTH = 40  # number of transactions in a training window
OVERLAP = 16  # number of transactions of a training window that only give context
SCORED = 128  # window length for scoring many consecutive rows
MAP_FIXED = 0x10


class Rows:
    """All rows of a dataset directory, sorted by (card, time); features are memory-mapped, small
    columns are in memory.

    Reads the files of shards.py without importing polars. Raises DataError if a file is missing or
    incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.facts = read_facts(path)
        self.width = len(self.facts.features)

        try:
            names = ("times", "cards", "labels", "scenarios", "ids")
            columns = [_load_column(self._files(path, name)) for name in names]
            self.times, self.cards, self.labels, self.scenarios, self.ids = columns
            self.features, self.offsets = _map_features(self._files(path, "features"), self.width)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is not a complete dataset ({error}). Run the step prepare again."
            ) from error

        if not {len(column) for column in (*columns, self.offsets)} == {sum(self.facts.shards)}:
            raise DataError(
                f"{path}: the rows of its shards differ from the counts in dataset.json. Run the"
                " step prepare again."
            )

        self.first = first_rows_of_groups(self.cards)  # index of the first row of each row's card

    def __len__(self) -> int:
        return len(self.times)

    def _files(self, path: Path, name: str) -> list[Path]:
        return [
            path / "shards" / f"{name}-{number:05d}.npy" for number in range(len(self.facts.shards))
        ]

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """Return the features [B, length, F] of the `length` rows from each offset in `starts` on,
        even if they belong to several cards."""
        return self.overlapping(length).index_select(0, starts).view(-1, length, self.width)

    def boosted(self, index: Ints) -> NDArray[np.float64]:
        """Return the log-odds of fraud that gradient boosting gave to the rows `index`."""
        offset = torch.from_numpy(self.offsets[index]) + self.facts.features.index(BOOSTED)
        return self.features[offset].double().numpy()

    def overlapping(self, length: int) -> Tensor:
        """Return a view of the features, not a copy, in which row i is the flattened window of
        `length` rows at offset i."""
        size = length * self.width
        return self.features.as_strided((len(self.features) - size + 1, size), (1, 1))


class TrainingWindows:
    """The windows over the rows from `train_start` to `train_end`.

    `batch` returns features, labels, and a mask of the transactions that count in the loss: their
    label is known, and they are not only context.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        begin = rows.facts.train_start
        end = rows.facts.train_end

        counted = np.flatnonzero((rows.times >= begin) & (rows.times < end))
        if not len(counted):
            raise DataError(
                "no transaction is older than the end of training: give more data, or lower"
                " data.test_weeks."
            )

        start, low, high = _windows(rows.first, counted)
        # offsets, starts and masks are separate columns, because gathering numbers is several times
        # faster than gathering short rows
        self.offsets = torch.from_numpy(rows.offsets[start])
        self.start = torch.from_numpy(start)
        self.mask = torch.from_numpy(low * (LENGTH + 1) + high)
        self.counted = _interval_masks()
        self.features = rows.overlapping(LENGTH)
        padded = torch.cat([torch.from_numpy(rows.labels), torch.zeros(LENGTH, dtype=torch.uint8)])
        self.labels = padded.as_strided((len(rows), LENGTH), (1, 1))

    def __len__(self) -> int:
        return len(self.offsets)

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return (float32 [B, LENGTH, F], uint8 [B, LENGTH], bool [B, LENGTH]) of the windows
        `indices`."""
        features = self.features.index_select(0, self.offsets.index_select(0, indices))
        labels = self.labels.index_select(0, self.start.index_select(0, indices))
        counted = self.counted.index_select(0, self.mask.index_select(0, indices))
        return features.view(-1, LENGTH, self.rows.width), labels, counted & (labels != UNKNOWN)


def open_dataset(path: Path, split: str = "train") -> TrainingWindows:
    """Open the training samples of a dataset directory."""
    if split != "train":
        raise ValueError(f'split is "{split}": it must be "train"; the evaluation uses Rows')
    return TrainingWindows(Rows(path))


def scoring_windows(first: Ints, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Arrange windows of SCORED rows so that in its window, each of `rows` (ascending) is preceded
    by at least CONTEXT earlier rows of its card, or by all that exist.

    `first`: for each row, the first row of its card. Returns (starts of windows; window of each of
    `rows`; position of each of `rows` in its window).
    """
    origin = rows[
        first_rows_of_groups(first[rows])
    ]  # for each of `rows`, the first of them with the same card
    block = (rows - origin) // (SCORED - CONTEXT)
    start = np.maximum(origin + block * (SCORED - CONTEXT) - CONTEXT, first[rows])
    starts, window = np.unique(start, return_inverse=True)
    return starts, window, rows - start


def _interval_masks() -> Tensor:
    """Return masks: bool [(LENGTH + 1)², LENGTH].

    The row low * (LENGTH + 1) + high is True from position low to the position before high.
    """
    edge = torch.arange(LENGTH + 1)
    position = torch.arange(LENGTH)
    return ((position >= edge[:, None, None]) & (position < edge[None, :, None])).view(-1, LENGTH)


def _windows(first: Ints, counted: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (first row, first counted position, position after the last counted position) of each
    window.

    `counted`: rows that count for the loss, a contiguous run per card.
    """
    card, run, count = np.unique(first[counted], return_index=True, return_counts=True)
    begin = counted[run]
    end = counted[run] + count
    origin = np.maximum(card, begin - OVERLAP)
    stride = LENGTH - OVERLAP
    windows = np.maximum(1, -(-(end - origin - OVERLAP) // stride))
    number = np.arange(windows.sum()) - np.repeat(np.cumsum(windows) - windows, windows)
    start = np.repeat(origin, windows) + number * stride
    low = np.where(number == 0, np.repeat(begin - origin, windows), OVERLAP)

    return start, low, np.minimum(np.repeat(end, windows) - start, LENGTH)


def _load_column(files: list[Path]) -> NDArray[Any]:
    return np.concatenate([np.load(file, mmap_mode="r") for file in files])


def _map_features(files: list[Path], width: int) -> tuple[Tensor, Ints]:
    """Map all feature files into one float32 tensor; return the tensor, and the offset of each
    row's first feature.

    The files are mapped next to each other into one reserved region, without reading them. Between
    and after the features, the tensor has file headers and zeros: finite numbers without meaning.
    """
    tables = [np.load(file, mmap_mode="r") for file in files]
    for file, table in zip(files, tables, strict=True):
        if table.dtype != np.float32 or table.ndim != 2 or table.shape[1] != width:
            raise DataError(
                f"{file} holds {table.dtype} {table.shape}: it must be float32 [rows, {width}]."
            )

    page = mmap.ALLOCATIONGRANULARITY
    sizes = [-(-file.stat().st_size // page) * page for file in files]
    offsets = np.cumsum([0, *sizes])
    region = mmap.mmap(-1, int(offsets[-1]) + SCORED * width * 4)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    base = ctypes.addressof(ctypes.c_char.from_buffer(region))

    for file, offset in zip(files, offsets, strict=False):
        with file.open("rb") as opened:
            address = base + int(offset)
            size = file.stat().st_size

            mapped = libc.mmap(
                address, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, opened.fileno(), 0
            )
            if mapped != address:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))

    starts = [
        np.arange(len(t)) * width + (o + t.offset) // 4
        for t, o in zip(tables, offsets, strict=False)
    ]
    return torch.frombuffer(region, dtype=torch.float32), np.concatenate(starts)
