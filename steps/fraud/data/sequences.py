"""The transformer's samples: windows over the memory-mapped shards of a dataset directory.

A training sample is a window of `LENGTH` consecutive transactions of one card. Windows of a card overlap by
`OVERLAP`; each transaction counts for the loss once, after at least `OVERLAP` earlier ones if the card has them.
The first days of the data (before `train_start`) give context only.
All shards are mapped into one stretch of memory, so a batch is one gather however many shards it touches.
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
from rekindle.workload import dataset_facts
from steps.fraud.config import CONTEXT
from steps.fraud.data.boosting import BOOSTED
from steps.fraud.data.schema import UNKNOWN, Ints, firsts

LENGTH = 40  # transactions in a training window
OVERLAP = 16  # of them, those that only give context
SCORED = 128  # transactions in a window when a trained model scores long runs of rows
MAP_FIXED = 0x10


class Rows:
    """All rows of a dataset directory, sorted by (card, time): the features mapped, the small columns in memory.

    Reads what shards.py writes, without importing polars. Raises DataError if a file is missing or incomplete.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.facts: dict[str, Any] = dataset_facts(path)
            self.width = len(self.facts["features"])
            names = ("times", "cards", "labels", "scenarios", "ids")
            columns = [_joined(self._files(path, name)) for name in names]
            self.times, self.cards, self.labels, self.scenarios, self.ids = columns
            self.features, self.place = _mapped(self._files(path, "features"), self.width)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path} is not a whole dataset ({error}): let the step prepare make it again.") from error
        if not {len(column) for column in (*columns, self.place)} == {sum(self.facts["shards"])}:
            raise DataError(f"{path}: its shards do not have the rows that it lists. Let prepare make it again.")
        self.first = firsts(self.cards)  # the card's first row, of each row

    def __len__(self) -> int:
        return len(self.times)

    def _files(self, path: Path, name: str) -> list[Path]:
        return [path / "shards" / f"{name}-{number:05d}.npy" for number in range(len(self.facts["shards"]))]

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """Features [B, length, F] of `length` rows from each of `starts` on; after a card's rows comes anything."""
        return self.overlapping(length).index_select(0, starts).view(-1, length, self.width)

    def boosted(self, wanted: Ints) -> NDArray[np.float64]:
        """The log-odds of gradient boosting alone for the rows `wanted`."""
        at = torch.from_numpy(self.place[wanted]) + self.facts["features"].index(BOOSTED)
        return self.features[at].double().numpy()

    def overlapping(self, length: int) -> Tensor:
        """The features as one flat window of `length` rows from each number on: takes no memory."""
        size = length * self.width
        return self.features.as_strided((len(self.features) - size + 1, size), (1, 1))


class TrainingWindows:
    """The windows over the rows before `train_end`; `batch` gives (features, labels, counted)."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        begin, end = rows.facts["train_start"], rows.facts["train_end"]
        counted = np.flatnonzero((rows.times >= begin) & (rows.times < end))
        if not len(counted):
            raise DataError("no transaction is older than the end of training: give more data, or fewer test weeks.")
        start, low, high = _windows(rows.first, counted)
        # one column each: a gather of single numbers is several times faster than one of short rows
        self.place, self.start = torch.from_numpy(rows.place[start]), torch.from_numpy(start)
        self.mask = torch.from_numpy(low * (LENGTH + 1) + high)
        self.counted = _masks()
        self.features = rows.overlapping(LENGTH)
        padded = torch.cat([torch.from_numpy(rows.labels), torch.zeros(LENGTH, dtype=torch.uint8)])
        self.labels = padded.as_strided((len(rows), LENGTH), (1, 1))

    def __len__(self) -> int:
        return len(self.place)

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """(float32 [B, LENGTH, F], uint8 [B, LENGTH], bool [B, LENGTH]) of the windows `indices`."""
        features = self.features.index_select(0, self.place.index_select(0, indices))
        labels = self.labels.index_select(0, self.start.index_select(0, indices))
        counted = self.counted.index_select(0, self.mask.index_select(0, indices))
        return features.view(-1, LENGTH, self.rows.width), labels, counted & (labels != UNKNOWN)


def open_dataset(path: Path, split: str = "train") -> TrainingWindows:
    """The training samples of a dataset directory."""
    if split != "train":
        raise ValueError(f'split is "{split}": the training windows are all there is; evaluation reads Rows')
    return TrainingWindows(Rows(path))


def scoring_windows(first: Ints, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Windows of SCORED rows that give each of `rows` (ascending) at least CONTEXT rows of its card's past.

    `first` is the card's first row of each row. Gives (start of each window; window and position of each of `rows`).
    """
    origin = rows[firsts(first[rows])]  # the first of `rows` of the same card
    block = (rows - origin) // (SCORED - CONTEXT)
    start = np.maximum(origin + block * (SCORED - CONTEXT) - CONTEXT, first[rows])
    starts, window = np.unique(start, return_inverse=True)
    return starts, window, rows - start


def _masks() -> Tensor:
    """bool [(LENGTH + 1)², LENGTH]: row low * (LENGTH + 1) + high is true from position low to before high."""
    edge, position = torch.arange(LENGTH + 1), torch.arange(LENGTH)
    return ((position >= edge[:, None, None]) & (position < edge[None, :, None])).view(-1, LENGTH)


def _windows(first: Ints, counted: Ints) -> tuple[Ints, Ints, Ints]:
    """(first row, first and last+1 counted position) of windows over the rows `counted`, which are one run a card."""
    card, at, count = np.unique(first[counted], return_index=True, return_counts=True)
    begin, end = counted[at], counted[at] + count
    origin = np.maximum(card, begin - OVERLAP)
    stride = LENGTH - OVERLAP
    windows = np.maximum(1, -(-(end - origin - OVERLAP) // stride))
    number = np.arange(windows.sum()) - np.repeat(np.cumsum(windows) - windows, windows)
    start = np.repeat(origin, windows) + number * stride
    low = np.where(number == 0, np.repeat(begin - origin, windows), OVERLAP)
    return start, low, np.minimum(np.repeat(end, windows) - start, LENGTH)


def _joined(files: list[Path]) -> NDArray[Any]:
    return np.concatenate([np.load(file, mmap_mode="r") for file in files])


def _mapped(files: list[Path], width: int) -> tuple[Tensor, Ints]:
    """All feature files in one float32 tensor, and the place in it of each row's first feature.

    Nothing is read: the files are mapped side by side into one reserved stretch. Between and after them lie finite
    numbers without meaning (file headers, zeros).
    """
    tables = [np.load(file, mmap_mode="r") for file in files]
    for file, table in zip(files, tables, strict=True):
        if table.dtype != np.float32 or table.ndim != 2 or table.shape[1] != width:
            raise DataError(f"{file} holds {table.dtype} {table.shape}: it must be float32 [rows, {width}].")
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
            wanted, size = base + int(offset), file.stat().st_size
            got = libc.mmap(wanted, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, opened.fileno(), 0)
            if got != wanted:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    place = [np.arange(len(t)) * width + (o + t.offset) // 4 for t, o in zip(tables, offsets, strict=False)]
    return torch.frombuffer(region, dtype=torch.float32), np.concatenate(place)
