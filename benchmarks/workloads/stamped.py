"""A workload that records its steps, for benchmarks/recovery.py: 5 MB of weights, steps of about 30
ms.

Each micro-batch appends 16 bytes to `$STAMPS/<POD_NAME>-<pid>`: the time (CLOCK_MONOTONIC) and one
weight. Every update changes this weight, so the number of consecutive equal weights is the number
of micro-batches in one step.
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
FEATURES = 10
SAMPLES = 4096
STAMP = struct.Struct("dd")


class Model(Section):
    width: int = 104_000  # width of the model, which gives it 5 MB of weights


@dataclass(frozen=True)
class Step:
    """One training step of one process: its start and end, its number of micro-batches, and the
    weight before the step."""

    began: float
    finished: float
    batches: int
    weight: float


def pid(folder: Path, name: str) -> int:
    """Return the process id of the newest worker with this name, or 0."""
    files = [
        (path.stat().st_ctime_ns, int(path.name.rpartition("-")[2]))
        for path in folder.glob(f"{name}-*")
    ]
    if files:
        return max(files)[1]
    return 0


def steps(folder: Path, name: str, process: int = 0) -> list[Step]:
    """Return the steps that a process has finished (default: the newest process of the worker
    `name`).

    Consecutive micro-batches with the same weight count as one step.
    """
    file = folder / f"{name}-{process or pid(folder, name)}"
    data = file.read_bytes() if file.exists() else b""

    runs = [
        list(run)
        for _, run in groupby(
            STAMP.iter_unpack(data[: len(data) // 16 * 16]), key=lambda pair: pair[1]
        )
    ]

    return [
        Step(this[0][0], following[0][0], len(this), this[0][1])
        for this, following in pairwise(runs)
    ]


def write(path: Path) -> str:
    """Write a dataset directory, whose content is always the same, and return its digest."""
    path.mkdir(parents=True)
    (path / "dataset.json").write_text(json.dumps({"facts": {}}))
    return record_files(path)


@cache
def digest() -> str:
    """Return the digest of the dataset."""
    with TemporaryDirectory() as folder:
        return write(Path(folder) / "dataset")


@cache
def _file() -> int:
    name = f"{os.environ.get('POD_NAME', 'alone')}-{os.getpid()}"
    return os.open(Path(os.environ["STAMPS"]) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class Numbers:
    def __init__(self) -> None:
        import torch

        self.rows = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Any) -> tuple[Any, ...]:
        rows = self.rows.index_select(0, indices)
        return rows, rows.square().sum(1, keepdim=True)


def dataset(path: Path, split: str) -> Numbers:
    return Numbers()


def model(section: Model, facts: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(FEATURES, section.width), nn.ReLU(), nn.Linear(section.width, 1))


def loss(model: Any, batch: tuple[Any, ...]) -> Any:
    os.write(_file(), STAMP.pack(time.monotonic(), model[-1].bias.item()))
    rows, targets = batch
    return (model(rows) - targets).square().mean()
