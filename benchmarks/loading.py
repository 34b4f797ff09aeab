"""Speed of loading batches: samples per CPU second, compared with torch's DataLoader on the same
dataset.

    python -m benchmarks.loading [--json] [--source FILE]

A sample is a window of 40 transactions with 27 features each; a batch has 256 random windows from
1.7 million transactions (simulated, or from FILE). Figures are medians over blocks of batches; all
loaders load blocks in turns, in one process with one thread, after a warm-up. The bare gather,
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

from benchmarks.bars import Bar, bar, parser, report
from rekindle.training.numerics import prepare_device
from rekindle.training.sampler import Sampler
from rekindle.training.spec import TrainingSpec as Inputs
from rekindle.workload import prepare
from steps import fraud
from steps.fraud.data.sequences import LENGTH, TrainingWindows, open_dataset
from steps.fraud.fraud_config import Data

WORLD = "simulate://1?cards=5000&terminals=10000&days=183"
BATCH = 256
BAR = 1200  # minimum speed, in thousand samples per second
Next = Callable[[], Any]


class Single(Dataset[tuple[Tensor, ...]]):
    """A dataset that returns one window at a time, as a DataLoader requests by default."""

    def __init__(self, windows: TrainingWindows) -> None:
        self.windows = windows
        self.place, self.start, self.mask = (
            each.tolist() for each in (windows.offsets, windows.start, windows.mask)
        )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        windows = self.windows
        features = windows.features[self.place[index]].view(LENGTH, -1)
        return features, windows.labels[self.start[index]], windows.counted[self.mask[index]]


class Batched(Single):
    """A dataset that returns all windows of a batch at once, which is faster."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return self.windows.batch(torch.tensor(indices))


def contenders(windows: TrainingWindows) -> dict[str, Next]:
    """Return a function by name of each loader; every call of the function returns the loader's
    next batch."""
    sampler = Sampler(len(windows), BATCH, 1, 0)
    steps = iter(range(10**9))
    indices = _cycle([sampler.sample_indices(step, 0) for step in range(100)])
    places = _cycle(
        [windows.offsets.index_select(0, sampler.sample_indices(step, 0)) for step in range(100)]
    )
    settings: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "drop_last": True}
    items = _cycle(DataLoader(Single(windows), **settings))
    lists = _cycle(DataLoader(Batched(windows), collate_fn=_identity, **settings))

    return {
        "Rekindle, with its sampler": lambda: windows.batch(sampler.sample_indices(next(steps), 0)),
        "Rekindle, with precomputed indices": lambda: windows.batch(next(indices)),
        "bare gather of the features": lambda: windows.features.index_select(0, next(places)),
        "DataLoader, __getitems__": lambda: next(lists),
        "DataLoader": lambda: next(items),
    }


def _identity(batch: object) -> Any:
    return batch


def _cycle(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def measure(path: Path, rounds: int, block: int) -> list[Bar]:
    """Return the figures for the dataset at `path`."""
    settings: dict[str, Any] = {
        "workload": "",
        "dataset": "",
        "digest": "",
        "out": "",
        "checkpoints": "",
    }

    prepare_device(Inputs(**settings))  # this call also configures torch as in training
    windows = open_dataset(path)
    if len(windows) < BATCH:
        # with fewer rows, the loaders would yield nothing, because they drop an incomplete batch
        raise SystemExit(
            f"error: the source has {len(windows):,} windows, and a batch needs {BATCH:,}: give"
            " --source more cards or days."
        )

    loaders = contenders(windows)
    speeds: dict[str, list[float]] = {name: [] for name in loaders}

    for turn in range(rounds + 1):
        for name, batch in loaders.items():
            began = time.thread_time()
            for _ in range(block):
                batch()

            if turn:  # the first turn is a warm-up
                speeds[name].append(block * BATCH / (time.thread_time() - began) / 1000)

    first, _, limit, *_ = speeds
    shares = [speed / bare for speed, bare in zip(speeds[first], speeds[limit], strict=True)]
    bars = [
        bar(name, each, "k/s", BAR if name == first else None, "more")
        for name, each in speeds.items()
    ]

    return [*bars, bar("speed of Rekindle, relative to the bare gather", shares, "times")]


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--source", default=WORLD, help=f"source of the raw transactions (default: {WORLD})"
    )
    command.add_argument(
        "--rounds", type=int, default=40, help="number of blocks per loader (default: 40)"
    )
    options = command.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dataset"
        prepare(fraud, Data(source=options.source), path)
        bars = measure(path, options.rounds, 100)

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
