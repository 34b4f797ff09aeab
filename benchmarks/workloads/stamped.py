"""A workload that records its steps, for benchmarks/recovery.py: 5 MB of weights, steps of about 30
ms.

Each micro-batch appends 16 bytes to `$STAMPS/<POD_NAME>-<pid>`: the time (CLOCK_MONOTONIC) and one
weight. Every update changes the recorded weight, so the number of consecutive equal weights is the
number of micro-batches in one step.
"""

import json
import os
import struct
import time
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rekindle.content.dataset import record_files
from rekindle.gate import Metric
from rekindle.sections import Section
from rekindle.workload import DataConfig

Data = DataConfig
examples = prepare = predictor = None
metrics = (Metric("loss", max),)
FEATURE_COUNT = 10
SAMPLE_COUNT = 4096
STAMP_STRUCT = struct.Struct("dd")


class Model(Section):
    # width of the model, which gives it 5 MB of weights
    width: int = 104_000


@dataclass(frozen=True)
class StampedStep:
    """One training step of one process: its start and end, its number of micro-batches, and the
    weight before the step."""

    began: float
    finished: float
    batches: int
    weight: float


def find_newest_pid(stamps_folder: Path, worker_name: str) -> int:
    """Return the process id of the newest worker with this name, or 0."""
    time_and_pid_pairs = [
        (path.stat().st_ctime_ns, int(path.name.rpartition("-")[2]))
        for path in stamps_folder.glob(f"{worker_name}-*")
    ]
    if time_and_pid_pairs:
        return max(time_and_pid_pairs)[1]
    return 0


def read_steps(stamps_folder: Path, worker_name: str, worker_pid: int = 0) -> list[StampedStep]:
    """Return the steps that a process has finished (default: the newest process of the worker
    `worker_name`).

    Consecutive micro-batches with the same weight count as one step.
    """
    stamp_file = (
        stamps_folder / f"{worker_name}-{worker_pid or find_newest_pid(stamps_folder, worker_name)}"
    )
    stamp_bytes = stamp_file.read_bytes() if stamp_file.exists() else b""

    stamp_groups = [
        list(stamp_group)
        for _, stamp_group in groupby(
            STAMP_STRUCT.iter_unpack(stamp_bytes[: len(stamp_bytes) // 16 * 16]),
            key=lambda stamp_pair: stamp_pair[1],
        )
    ]

    return [
        StampedStep(step_stamps[0][0], next_step_stamps[0][0], len(step_stamps), step_stamps[0][1])
        for step_stamps, next_step_stamps in pairwise(stamp_groups)
    ]


def write_dataset(dataset_folder: Path) -> str:
    """Write a dataset directory, whose content is always the same, and return its digest."""
    dataset_folder.mkdir(parents=True)
    (dataset_folder / "dataset.json").write_text(json.dumps({"facts": {}}))
    return record_files(dataset_folder)


@cache
def compute_digest() -> str:
    """Return the digest of the dataset that `write_dataset` writes."""
    with TemporaryDirectory() as temporary_folder:
        return write_dataset(Path(temporary_folder) / "dataset")


@cache
def _open_stamp_file() -> int:
    file_name = f"{os.environ.get('POD_NAME', 'alone')}-{os.getpid()}"
    return os.open(Path(os.environ["STAMPS"]) / file_name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class RandomSamples:
    def __init__(self) -> None:
        import torch

        self.rows = torch.randn(
            SAMPLE_COUNT, FEATURE_COUNT, generator=torch.Generator().manual_seed(5)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Any) -> tuple[Any, ...]:
        batch_rows = self.rows.index_select(0, indices)
        return batch_rows, batch_rows.square().sum(1, keepdim=True)


def dataset(path: Path, split: str) -> RandomSamples:
    return RandomSamples()


def model(section: Model, facts: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(FEATURE_COUNT, section.width), nn.ReLU(), nn.Linear(section.width, 1)
    )


def loss(model: Any, batch: tuple[Any, ...]) -> Any:
    os.write(_open_stamp_file(), STAMP_STRUCT.pack(time.monotonic(), model[-1].bias.item()))
    batch_rows, batch_targets = batch
    return (model(batch_rows) - batch_targets).square().mean()
