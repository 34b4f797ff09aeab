"""The transformer's samples: windows over the memory-mapped shards of a dataset directory.

A training sample is a window of `LENGTH` consecutive transactions of one card. Windows of a card
overlap by `OVERLAP`. Each transaction counts for the loss in exactly one window, where at least
`OVERLAP` earlier transactions of the card, if they exist, precede it. Transactions before
`train_start`, in the first days of the data, are only context for later transactions. All shards
are mapped into one memory region, so a batch is read by one gather operation over any number of
shards.
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

# number of transactions in a training window
LENGTH = 40
# number of transactions of a training window that are only context
OVERLAP = 16
# window length for scoring many consecutive rows
SCORED = 128
MAP_FIXED = 0x10


class Rows:
    """All rows of a dataset directory, sorted by (card, time); features are memory-mapped, small
    columns are in memory.

    Rows reads the files that shards.py has written, without importing polars. Raises DataError if a
    file is missing or incomplete.
    """

    def __init__(self, dataset_folder: Path) -> None:
        self.facts = read_facts(dataset_folder)
        self.width = len(self.facts.features)

        try:
            column_names = ("times", "cards", "labels", "scenarios", "ids")
            columns = [
                _load_column(self._list_column_files(dataset_folder, column_name))
                for column_name in column_names
            ]
            self.times, self.cards, self.labels, self.scenarios, self.ids = columns
            self.features, self.offsets = _map_features(
                self._list_column_files(dataset_folder, "features"), self.width
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"{dataset_folder} is not a complete dataset ({error}). Run the step prepare again."
            ) from error

        if not {len(column) for column in (*columns, self.offsets)} == {sum(self.facts.shards)}:
            raise DataError(
                f"{dataset_folder}: the rows of its shards differ from the counts in dataset.json."
                " Run the step prepare again."
            )

        # index of the first row of each row's card
        self.first = first_rows_of_groups(self.cards)

    def __len__(self) -> int:
        return len(self.times)

    def _list_column_files(self, dataset_folder: Path, column_name: str) -> list[Path]:
        return [
            dataset_folder / "shards" / f"{column_name}-{shard_number:05d}.npy"
            for shard_number in range(len(self.facts.shards))
        ]

    def windows(self, start_offsets: Tensor, window_length: int) -> Tensor:
        """Return the features [B, length, F] of the `window_length` rows from each offset in
        `start_offsets` on, even if they belong to several cards."""
        return (
            self.overlapping(window_length)
            .index_select(0, start_offsets)
            .view(-1, window_length, self.width)
        )

    def boosted(self, row_indices: Ints) -> NDArray[np.float64]:
        """Return the log-odds of fraud that gradient boosting gave to the rows `row_indices`."""
        score_offsets = torch.from_numpy(self.offsets[row_indices]) + self.facts.features.index(
            BOOSTED
        )
        return self.features[score_offsets].double().numpy()

    def overlapping(self, window_length: int) -> Tensor:
        """Return a view of the features, not a copy, in which row i is the flattened window of
        `window_length` rows at offset i."""
        window_size = window_length * self.width
        return self.features.as_strided((len(self.features) - window_size + 1, window_size), (1, 1))


class TrainingWindows:
    """The windows over the rows from `train_start` to `train_end`.

    `batch` returns features, labels, and a mask of the transactions that count in the loss, which
    are transactions with a known label that are not only context.
    """

    def __init__(self, dataset_rows: Rows) -> None:
        self.rows = dataset_rows
        train_start = dataset_rows.facts.train_start
        train_end = dataset_rows.facts.train_end

        counted_rows = np.flatnonzero(
            (dataset_rows.times >= train_start) & (dataset_rows.times < train_end)
        )
        if not len(counted_rows):
            raise DataError(
                "no transaction is older than the end of training: give more data, or lower"
                " data.test_weeks."
            )

        start_rows, first_counted, after_last_counted = _find_windows(
            dataset_rows.first, counted_rows
        )
        # offsets, starts and masks are separate columns, because gathering numbers is several times
        # faster than gathering short rows
        self.offsets = torch.from_numpy(dataset_rows.offsets[start_rows])
        self.start = torch.from_numpy(start_rows)
        self.mask = torch.from_numpy(first_counted * (LENGTH + 1) + after_last_counted)
        self.counted = _interval_masks()
        self.features = dataset_rows.overlapping(LENGTH)
        padded_labels = torch.cat(
            [torch.from_numpy(dataset_rows.labels), torch.zeros(LENGTH, dtype=torch.uint8)]
        )
        self.labels = padded_labels.as_strided((len(dataset_rows), LENGTH), (1, 1))

    def __len__(self) -> int:
        return len(self.offsets)

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return (float32 [B, LENGTH, F], uint8 [B, LENGTH], bool [B, LENGTH]) of the windows
        `indices`."""
        features = self.features.index_select(0, self.offsets.index_select(0, indices))
        labels = self.labels.index_select(0, self.start.index_select(0, indices))
        counted_masks = self.counted.index_select(0, self.mask.index_select(0, indices))
        return (
            features.view(-1, LENGTH, self.rows.width),
            labels,
            counted_masks & (labels != UNKNOWN),
        )


def open_dataset(dataset_folder: Path, split_name: str = "train") -> TrainingWindows:
    """Open the training samples of a dataset directory."""
    if split_name != "train":
        raise ValueError(f'split is "{split_name}": it must be "train"; the evaluation uses Rows')
    return TrainingWindows(Rows(dataset_folder))


def scoring_windows(first_row_of_card: Ints, scored_rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Arrange windows of SCORED rows so that in its window, each of `scored_rows` (ascending) is
    preceded by at least CONTEXT earlier rows of its card, or by all existing rows of its card.

    `first_row_of_card`: for each row, the first row of its card. Returns (starts of windows; window
    of each of `scored_rows`; position of each of `scored_rows` in its window).
    """
    origin_rows = scored_rows[
        first_rows_of_groups(first_row_of_card[scored_rows])
    ]  # for each of `rows`, the first of them with the same card
    block_numbers = (scored_rows - origin_rows) // (SCORED - CONTEXT)
    start_by_row = np.maximum(
        origin_rows + block_numbers * (SCORED - CONTEXT) - CONTEXT, first_row_of_card[scored_rows]
    )
    window_starts, window_by_row = np.unique(start_by_row, return_inverse=True)
    return window_starts, window_by_row, scored_rows - start_by_row


def _interval_masks() -> Tensor:
    """Return masks: bool [(LENGTH + 1)², LENGTH].

    The row low * (LENGTH + 1) + high is True from position low to the position before high.
    """
    interval_edges = torch.arange(LENGTH + 1)
    window_positions = torch.arange(LENGTH)
    return (
        (window_positions >= interval_edges[:, None, None])
        & (window_positions < interval_edges[None, :, None])
    ).view(-1, LENGTH)


def _find_windows(first_row_of_card: Ints, counted_rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (first row, first counted position, position after the last counted position) of each
    window.

    `counted_rows`: rows that count for the loss, a contiguous run per card.
    """
    card_first_rows, card_run_indices, card_row_counts = np.unique(
        first_row_of_card[counted_rows], return_index=True, return_counts=True
    )
    first_counted_rows = counted_rows[card_run_indices]
    after_last_rows = counted_rows[card_run_indices] + card_row_counts
    origin_rows = np.maximum(card_first_rows, first_counted_rows - OVERLAP)
    window_stride = LENGTH - OVERLAP
    window_counts = np.maximum(1, -(-(after_last_rows - origin_rows - OVERLAP) // window_stride))
    window_numbers = np.arange(window_counts.sum()) - np.repeat(
        np.cumsum(window_counts) - window_counts, window_counts
    )
    window_starts = np.repeat(origin_rows, window_counts) + window_numbers * window_stride
    first_positions = np.where(
        window_numbers == 0, np.repeat(first_counted_rows - origin_rows, window_counts), OVERLAP
    )

    return (
        window_starts,
        first_positions,
        np.minimum(np.repeat(after_last_rows, window_counts) - window_starts, LENGTH),
    )


def _load_column(shard_files: list[Path]) -> NDArray[Any]:
    return np.concatenate([np.load(shard_file, mmap_mode="r") for shard_file in shard_files])


def _map_features(shard_files: list[Path], feature_count: int) -> tuple[Tensor, Ints]:
    """Map all feature files into one float32 tensor; return the tensor, and the offset of each
    row's first feature.

    The feature files are mapped next to each other into one reserved region, without reading them.
    Between and after the features, the tensor contains file headers and zeros, which are finite
    numbers without meaning.
    """
    shard_tables = [np.load(shard_file, mmap_mode="r") for shard_file in shard_files]
    for shard_file, shard_array in zip(shard_files, shard_tables, strict=True):
        if (
            shard_array.dtype != np.float32
            or shard_array.ndim != 2
            or shard_array.shape[1] != feature_count
        ):
            raise DataError(
                f"{shard_file} holds {shard_array.dtype} {shard_array.shape}: it must be float32"
                f" [rows, {feature_count}]."
            )

    page_bytes = mmap.ALLOCATIONGRANULARITY
    mapped_bytes = [
        -(-shard_file.stat().st_size // page_bytes) * page_bytes for shard_file in shard_files
    ]
    byte_offsets = np.cumsum([0, *mapped_bytes])
    memory_region = mmap.mmap(-1, int(byte_offsets[-1]) + SCORED * feature_count * 4)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    base_address = ctypes.addressof(ctypes.c_char.from_buffer(memory_region))

    for shard_file, byte_offset in zip(shard_files, byte_offsets, strict=False):
        with shard_file.open("rb") as opened_file:
            mapping_address = base_address + int(byte_offset)
            file_bytes = shard_file.stat().st_size

            mapped_address = libc.mmap(
                mapping_address,
                file_bytes,
                mmap.PROT_READ,
                mmap.MAP_SHARED | MAP_FIXED,
                opened_file.fileno(),
                0,
            )
            if mapped_address != mapping_address:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(shard_file))

    row_start_offsets = [
        np.arange(len(shard_table)) * feature_count + (shard_offset + shard_table.offset) // 4
        for shard_table, shard_offset in zip(shard_tables, byte_offsets, strict=False)
    ]
    return torch.frombuffer(memory_region, dtype=torch.float32), np.concatenate(row_start_offsets)
