"""Speed of loading batches: samples per CPU second, compared with torch's DataLoader on the same
dataset.

    python -m benchmarks.loading [--json] [--source FILE]

A sample is a window of 40 transactions with 27 features each; a batch has 256 random windows from
1.7 million transactions (simulated, or from FILE). The figures are medians over blocks of batches;
all loaders load blocks in turns, in one process with one thread, after a warm-up. The bare gather,
which only copies the features of a batch, is the upper limit for every loader.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.bars import Bar, make_bar, make_parser, report
from rekindle.training.numerics import prepare_device
from rekindle.training.sampler import Sampler
from rekindle.training.spec import TrainingSpec as Inputs
from rekindle.workload import prepare
from steps import fraud
from steps.fraud.data.sequences import LENGTH, TrainingWindows, open_dataset
from steps.fraud.fraud_config import Data

SIMULATED_WORLD_URI = "simulate://1?cards=5000&terminals=10000&days=183"
BATCH_SIZE = 256
# minimum speed, in thousand samples per second
MIN_SAMPLES_PER_MS = 1200
NextBatch = Callable[[], Any]


class SingleWindowDataset(Dataset[tuple[Tensor, ...]]):
    """A dataset that returns one window at a time, as a DataLoader requests by default."""

    def __init__(self, training_windows: TrainingWindows) -> None:
        self.windows = training_windows
        self.place, self.start, self.mask = (
            window_tensor.tolist()
            for window_tensor in (
                training_windows.offsets,
                training_windows.start,
                training_windows.mask,
            )
        )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        windows = self.windows
        features = windows.features[self.place[index]].view(LENGTH, -1)
        return features, windows.labels[self.start[index]], windows.counted[self.mask[index]]


class BatchedWindowDataset(SingleWindowDataset):
    """A dataset that returns all windows of a batch at once, which is faster."""

    def __getitems__(self, window_indices: list[int]) -> tuple[Tensor, ...]:
        return self.windows.batch(torch.tensor(window_indices))


def make_contenders(training_windows: TrainingWindows) -> dict[str, NextBatch]:
    """Return one function for each loader, by the loader's name; every call of a function returns
    the next batch of its loader."""
    sampler = Sampler(len(training_windows), BATCH_SIZE, 1, 0)
    step_numbers = iter(range(10**9))
    index_batches = _cycle_batches(
        [sampler.select_sample_indices(step_number, 0) for step_number in range(100)]
    )
    place_batches = _cycle_batches(
        [
            training_windows.offsets.index_select(0, sampler.select_sample_indices(step_number, 0))
            for step_number in range(100)
        ]
    )
    loader_settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "drop_last": True}
    single_batches = _cycle_batches(
        DataLoader(SingleWindowDataset(training_windows), **loader_settings)
    )
    list_batches = _cycle_batches(
        DataLoader(
            BatchedWindowDataset(training_windows), collate_fn=_return_batch, **loader_settings
        )
    )

    return {
        "Rekindle, with its sampler": lambda: training_windows.batch(
            sampler.select_sample_indices(next(step_numbers), 0)
        ),
        "Rekindle, with precomputed indices": lambda: training_windows.batch(next(index_batches)),
        "bare gather of the features": lambda: training_windows.features.index_select(
            0, next(place_batches)
        ),
        "DataLoader, __getitems__": lambda: next(list_batches),
        "DataLoader": lambda: next(single_batches),
    }


def _return_batch(batch: object) -> Any:
    return batch


def _cycle_batches(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def measure_loaders(dataset_path: Path, round_count: int, batches_per_round: int) -> list[Bar]:
    """Return the figures for the dataset at `dataset_path`."""
    training_settings: dict[str, Any] = {
        "workload": "",
        "dataset": "",
        "digest": "",
        "out": "",
        "checkpoints": "",
    }

    # `open_dataset` also configures torch as in training
    prepare_device(Inputs(**training_settings))
    training_windows = open_dataset(dataset_path)
    if len(training_windows) < BATCH_SIZE:
        # with fewer rows, the loaders would yield nothing, because they drop an incomplete batch
        raise SystemExit(
            f"error: the source has {len(training_windows):,} windows, and a batch needs"
            f" {BATCH_SIZE:,}: give --source more cards or days."
        )

    loaders_by_name = make_contenders(training_windows)
    speeds_by_loader: dict[str, list[float]] = {loader_name: [] for loader_name in loaders_by_name}

    for round_index in range(round_count + 1):
        for loader_name, next_batch in loaders_by_name.items():
            start_cpu_seconds = time.thread_time()
            for _ in range(batches_per_round):
                next_batch()

            if round_index:  # the first turn of each loader is a warm-up and is not recorded
                speeds_by_loader[loader_name].append(
                    batches_per_round * BATCH_SIZE / (time.thread_time() - start_cpu_seconds) / 1000
                )

    first_loader, _, bare_loader, *_ = speeds_by_loader
    speed_shares = [
        loader_speed / bare_speed
        for loader_speed, bare_speed in zip(
            speeds_by_loader[first_loader], speeds_by_loader[bare_loader], strict=True
        )
    ]
    bars = [
        make_bar(
            loader_name,
            loader_speeds,
            "k/s",
            MIN_SAMPLES_PER_MS if loader_name == first_loader else None,
            "more",
        )
        for loader_name, loader_speeds in speeds_by_loader.items()
    ]

    return [
        *bars,
        make_bar("speed of Rekindle, relative to the bare gather", speed_shares, "times"),
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--source",
        default=SIMULATED_WORLD_URI,
        help=f"source of the raw transactions (default: {SIMULATED_WORLD_URI})",
    )
    argument_parser.add_argument(
        "--rounds", type=int, default=40, help="number of blocks per loader (default: 40)"
    )
    options = argument_parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary_folder:
        dataset_path = Path(temporary_folder) / "dataset"
        prepare(fraud, Data(source=options.source), dataset_path)
        bars = measure_loaders(dataset_path, options.rounds, 100)

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
