"""A workload that trains in milliseconds: a small net with dropout on made-up numbers."""

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from steps.workload import DataConfig, Section

Data = DataConfig
evaluate = prepare = scorer = None
FEATURES = 10


class Model(Section):
    width: int = 24
    statistics: bool = False  # BatchNorm, which must be refused


def write(path: Path, samples: int, digest: str) -> None:
    """A dataset directory."""
    import torch

    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    torch.save(torch.randn(samples, FEATURES, generator=generator), path / "numbers.pt")
    (path / "dataset.json").write_text(json.dumps({"digest": digest}))


counted = itertools.count(1)


def _hold() -> None:
    """After each number of micro-batches in TOY_HOLD wait for a file of that name in TOY_GATES."""
    number = str(next(counted))
    if number in os.environ.get("TOY_HOLD", "").split():
        sys.stderr.write(f"held at {number}\n")
        while not (Path(os.environ["TOY_GATES"]) / number).exists():
            time.sleep(0.005)


class Numbers:
    def __init__(self, path: Path) -> None:
        import torch

        self.facts: dict[str, Any] = {}
        self.rows = torch.load(path / "numbers.pt")

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Any) -> tuple[Any, ...]:
        rows = self.rows.index_select(0, indices)
        return rows, rows.square().sum(1, keepdim=True)


def dataset(path: Path, split: str) -> Numbers:
    assert split == "train"
    return Numbers(path)


def model(section: Model, facts: dict[str, Any]) -> Any:
    import torch
    from torch import nn

    statistics = [nn.BatchNorm1d(section.width)] if section.statistics else []
    net = nn.Sequential(
        nn.Linear(FEATURES, section.width), *statistics, nn.ReLU(), nn.Dropout(0.1), nn.Linear(section.width, 1)
    )
    net.register_buffer("scale", torch.full((1,), 0.5))
    return net


def loss(model: Any, batch: tuple[Any, ...]) -> Any:
    if os.environ.get("TOY_FAILS"):
        raise RuntimeError("toy trouble")
    _hold()
    rows, wanted = batch
    return (model(rows) * model.scale - wanted).square().mean()
