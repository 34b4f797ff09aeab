"""A workload that trains in milliseconds: a small network with dropout on random numbers."""

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

from rekindle.gate import Metric
from rekindle.sections import Section
from rekindle.workload import DataConfig, Prepared, record_dataset
from tests.waiting import until

Data = DataConfig
splits = ("train", "validation")
examples = prepare = predictor = None
metrics = (Metric("loss", max),)
FEATURES = 10


class Model(Section):
    width: int = 24
    # BatchNorm
    statistics: bool = False
    # True adds a buffer that counts positive inputs, which differs between virtual workers
    hoarding: bool = False


def write(path: Path, samples: int) -> str:
    """Write a dataset directory, and return the digest of the dataset."""
    import torch

    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(samples, FEATURES, generator=generator)
    (path / "numbers.f32").write_bytes(numbers.numpy().tobytes())
    return record_dataset(path, Prepared(samples))


batch_numbers = itertools.count(1)


def _hold_micro_batch() -> None:
    """Count the micro-batches of this process. If TOY_HOLD contains the number of micro-batches so
    far, wait until the folder TOY_GATES has a file with this number as its name."""
    number = str(next(batch_numbers))
    if number in os.environ.get("TOY_HOLD", "").split():
        sys.stderr.write(f"held at {number}\n")
        until(
            f"the test to let {number} go",
            (Path(os.environ["TOY_GATES"]) / number).exists,
            600,
            pause=0.005,
        )


class Journal:
    """Writes a line `time pid name step` to TOY_JOURNAL at the start of each step.

    The first numbers of a micro-batch identify the step. TOY_SAMPLER:
    `batch_size,virtual_workers,steps`.
    """

    def __init__(self, rows: Any) -> None:
        from rekindle.training.sampler import Sampler

        size, virtual, steps = map(int, os.environ["TOY_SAMPLER"].split(","))
        sampler = Sampler(len(rows), size, virtual, 0)
        self.file = os.open(os.environ["TOY_JOURNAL"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.steps: dict[Any, int] = {}
        # the validation at the end of the training counts as one more step, without an update
        for step in range(steps + 1):
            for leaf in range(virtual):
                self.steps[
                    self._key_of(rows.index_select(0, sampler.select_sample_indices(step, leaf)))
                ] = step
        self.step, self.name = -1, os.environ.get("POD_NAME", "alone")

    def note(self, rows: Any) -> None:
        step = self.steps[self._key_of(rows)]
        if step != self.step:
            self.step = step
            os.write(self.file, f"{time.time():.6f} {os.getpid()} {self.name} {step}\n".encode())

    def _key_of(self, rows: Any) -> Any:
        return tuple(rows[:4, 0].tolist())


class Numbers:
    journal: Journal | None = None

    def __init__(self, path: Path) -> None:
        import torch

        data = bytearray((path / "numbers.f32").read_bytes())
        self.rows = torch.frombuffer(data, dtype=torch.float32).view(-1, FEATURES)
        if "TOY_JOURNAL" in os.environ:
            Numbers.journal = Journal(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Any) -> tuple[Any, ...]:
        rows = self.rows.index_select(0, indices)
        return rows, rows.square().sum(1, keepdim=True)


def dataset(path: Path, split: str) -> Numbers:
    assert split in ("train", "validation")
    return Numbers(path)


def model(section: Model, facts: dict[str, Any]) -> Any:
    import torch
    from torch import nn

    statistics = [nn.BatchNorm1d(section.width)] if section.statistics else []

    net = nn.Sequential(
        nn.Linear(FEATURES, section.width),
        *statistics,
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(section.width, 1),
    )

    net.register_buffer("scale", torch.full((1,), 0.5))

    if section.hoarding:
        net.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    return net


def loss(model: Any, batch: tuple[Any, ...]) -> Any:
    if os.environ.get("TOY_FAILS"):
        raise RuntimeError("toy trouble")
    rows, targets = batch
    if model.training:
        _hold_micro_batch()
        if Numbers.journal:
            Numbers.journal.note(rows)
        time.sleep(float(os.environ.get("TOY_PACE", 0)))
    if hasattr(model, "seen"):
        model.seen += (rows > 0).sum()
    return (model(rows) * model.scale - targets).square().mean()
