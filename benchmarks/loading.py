"""How fast training gets its batches: samples a CPU second, beside torch's DataLoader over the same data set.

    python -m benchmarks.loading [--json] [--source FILE]

A sample is a window of 40 transactions with 27 features each; a batch has 256 of them from all over 1.7 million
transactions (simulated, or those of FILE). Medians of blocks of batches that all take in turns, in one process with
one thread, everything warm. The bare gather of the features alone is the limit: the memory's, not ours.
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
from rekindle.training.numerics import pick_device
from rekindle.training.sampler import Sampler
from rekindle.training.spec import TrainingSpec as Inputs
from rekindle.workload import prepare
from steps import fraud
from steps.fraud.config import Data
from steps.fraud.data.sequences import LENGTH, TrainingWindows, open_dataset

WORLD = "simulate://1?cards=5000&terminals=10000&days=183"
BATCH = 256
BAR = 1200  # thousands
Next = Callable[[], Any]


class Single(Dataset[tuple[Tensor, ...]]):
    """The windows one by one, as a DataLoader asks for them."""

    def __init__(self, windows: TrainingWindows) -> None:
        self.windows = windows
        self.place, self.start, self.mask = (each.tolist() for each in (windows.offsets, windows.start, windows.mask))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        windows = self.windows
        features = windows.features[self.place[index]].view(LENGTH, -1)
        return features, windows.labels[self.start[index]], windows.counted[self.mask[index]]


class Batched(Single):
    """The same with the DataLoader's faster way: a list of indices at once."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return self.windows.batch(torch.tensor(indices))


def contenders(windows: TrainingWindows) -> dict[str, Next]:
    """By name, what gives the next batch."""
    sampler = Sampler(len(windows), BATCH, 1, 0)
    steps, known = iter(range(10**9)), _endless([sampler.indices(step, 0) for step in range(100)])
    places = _endless([windows.offsets.index_select(0, sampler.indices(step, 0)) for step in range(100)])
    settings: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "drop_last": True}
    items = _endless(DataLoader(Single(windows), **settings))
    lists = _endless(DataLoader(Batched(windows), collate_fn=_same, **settings))
    return {
        "ours, with the sampler": lambda: windows.batch(sampler.indices(next(steps), 0)),
        "ours, indices given": lambda: windows.batch(next(known)),
        "the features' bare gather": lambda: windows.features.index_select(0, next(places)),
        "DataLoader, __getitems__": lambda: next(lists),
        "DataLoader": lambda: next(items),
    }


def _same(batch: Any) -> Any:
    return batch


def _endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def measure(path: Path, rounds: int, block: int) -> list[Bar]:
    """The bars, from the data set at `path`."""
    settings: dict[str, Any] = {"workload": "", "dataset": "", "digest": "", "out": "", "checkpoints": ""}
    pick_device(Inputs(**settings))  # as training sets torch
    rivals = contenders(open_dataset(path))
    speeds: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(rounds + 1):
        for name, batch in rivals.items():
            began = time.thread_time()
            for _ in range(block):
                batch()
            if turn:  # the first warms up
                speeds[name].append(block * BATCH / (time.thread_time() - began) / 1000)
    ours, _, limit, *_ = speeds
    shares = [mine / bare for mine, bare in zip(speeds[ours], speeds[limit], strict=True)]
    bars = [bar(name, each, "k/s", BAR if name == ours else None, "more") for name, each in speeds.items()]
    return [*bars, bar("ours / the bare gather", shares, "times")]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--source", default=WORLD, help=f"raw transactions (default: {WORLD})")
    command.add_argument("--rounds", type=int, default=40, help="turns of each (default: 40)")
    options = command.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dataset"
        prepare(fraud, Data(source=options.source), path)
        bars = measure(path, options.rounds, 100)
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
