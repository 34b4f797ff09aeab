"""The workload of benchmarks/loop.py: a small network trained on random numbers, and the training
loops with which Rekindle's loop is compared.

After each block of Rekindle's steps, the dataset object runs the same number of steps in each of
the other loops. All loops run in one process and in turns, so that they are measured under the same
load.
"""

import importlib.util
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rekindle.gate import Metric
from rekindle.sections import Section
from rekindle.training.group.tree import rank_leaves
from rekindle.training.spec import TrainingSpec as Inputs
from rekindle.workload import DataConfig

Data = DataConfig
examples = prepare = predictor = None
metrics = (Metric("loss", max),)
SAMPLES = 4096
INPUTS = 256
Loop = Callable[[int], None]  # runs the given number of steps


class Model(Section):
    width: int = 64
    layers: int = 1


@dataclass
class Turns:
    """Runs the loops alternately, `block` steps each, and measures the CPU seconds of each loop."""

    inputs: Inputs
    block: int
    warm: int  # number of steps before the first block
    rank: int
    size: int
    meeting: str  # host:port of the rendezvous of the DDP processes
    calls: int = 0
    began: float = 0.0
    # CPU time and clock time at the start of the first block
    first: tuple[float, float] = (0.0, 0.0)
    last: tuple[float, float] = (0.0, 0.0)  # CPU time and clock time at the end of the last block
    loops: dict[str, Loop] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"Rekindle": []})

    def clock(self) -> float:
        """Return the CPU time of this thread. In a group of processes, return that of the whole
        process, because gloo's threads work for the loop."""
        if self.size == 1:
            return time.thread_time()
        return time.process_time()

    def take(self, data: "Numbers") -> None:
        """Handle the start of a micro-batch in Rekindle's loop. If a block of steps is complete,
        run the other loops."""
        step, leaf = divmod(
            self.calls, len(rank_leaves(self.inputs.virtual_workers, self.size, self.rank))
        )
        self.calls += 1

        if leaf or step < self.warm or (step - self.warm) % self.block:
            return

        if self.loops:
            self.seconds["Rekindle"].append(self.clock() - self.began)
            self.last = time.process_time(), time.monotonic()
        else:
            self.loops = others(self, data)
            for name, make in self.loops.items():
                self.seconds[name] = []
                make(20)

            self.first = time.process_time(), time.monotonic()

        for name, make in self.loops.items():
            began = self.clock()
            make(self.block)
            self.seconds[name].append(self.clock() - began)

        self.began = self.clock()

    def result(self) -> dict[str, Any]:
        """Return the CPU seconds per step of each loop in each block, and the CPU share of
        Rekindle's background threads."""
        blocks = len(self.seconds["Rekindle"])
        steps = {
            name: [seconds / self.block for seconds in each[:blocks]]
            for name, each in self.seconds.items()
        }
        spent, passed = (last - first for first, last in zip(self.first, self.last, strict=True))
        return {
            "steps": steps,
            "threads": (spent - sum(map(sum, steps.values())) * self.block) / passed,
        }


turns: Turns | None = None  # set by benchmarks/loop.py in a worker


class Numbers:
    """A dataset of random samples."""

    def __init__(self, path: Path) -> None:
        import torch

        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randn(SAMPLES, INPUTS, generator=generator)
        self.targets = self.rows.square().mean(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: object) -> tuple[Any, ...]:
        if turns:
            turns.take(self)
        return self.select(indices)

    def select(self, indices: Any) -> tuple[Any, ...]:
        return self.rows.index_select(0, indices), self.targets.index_select(0, indices)


def dataset(path: Path, split: str) -> Numbers:
    return Numbers(path)


def model(section: Model, facts: dict[str, Any]) -> Any:
    from torch import nn

    widths = [INPUTS, *[section.width] * section.layers]
    hidden = [
        layer for ins, outs in pairwise(widths) for layer in (nn.Linear(ins, outs), nn.ReLU())
    ]
    return nn.Sequential(*hidden, nn.Linear(section.width, 1))


def loss(model: Any, batch: tuple[Any, ...]) -> Any:
    rows, targets = batch
    return (model(rows) - targets).square().mean()


def others(turns: Turns, data: Numbers) -> dict[str, Loop]:
    """Return the loops to compare with Rekindle's loop.

    For a single process, these are bare loops and loops of frameworks. For a group, they are a DDP
    loop and a bare loop that does not exchange gradients.
    """
    import torch

    from rekindle.training.sampler import Sampler

    config = turns.inputs
    sampler = Sampler(SAMPLES, config.batch_size, config.virtual_workers, config.seed)
    leaves = rank_leaves(config.virtual_workers, turns.size, turns.rank)

    def parts() -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = model(Model.model_validate(config.model), {})
        return net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def bare(item: bool) -> Loop:
        net, optimizer = parts()

        def make(steps: int) -> None:
            for step in range(steps):
                optimizer.zero_grad()
                for leaf in leaves:
                    value = loss(net, data.select(sampler.sample_indices(step, leaf)))
                    value.backward()
                    if item:
                        value.item()
                optimizer.step()

        return make

    def ddp() -> Loop:
        meeting = f"tcp://{turns.meeting}"
        torch.distributed.init_process_group(
            "gloo", meeting, rank=turns.rank, world_size=turns.size
        )
        net, optimizer = parts()
        wrapped = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)

        def make(steps: int) -> None:
            for step in range(steps):
                optimizer.zero_grad()
                for leaf in leaves:
                    with wrapped.no_sync() if leaf != leaves[-1] else nullcontext():
                        loss(wrapped, data.select(sampler.sample_indices(step, leaf))).backward()
                optimizer.step()

        return make

    if turns.size > 1:
        return {"no exchange": bare(False), "DDP": ddp()}

    loops = {"bare": bare(False), "bare + loss.item()": bare(True)}
    if importlib.util.find_spec("accelerate"):
        loops["accelerate"] = accelerate_loop(*parts(), data, sampler)
    if importlib.util.find_spec("ignite"):
        loops["Ignite"] = ignite_loop(*parts(), data, sampler)

    return loops


def accelerate_loop(net: Any, optimizer: Any, data: Numbers, sampler: Any) -> Loop:
    """Return the training loop that accelerate's documentation shows."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net, optimizer)

    def make(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            accelerator.backward(loss(net, data.select(sampler.indices(step, 0))))
            optimizer.step()

    return make


def ignite_loop(net: Any, optimizer: Any, data: Numbers, sampler: Any) -> Loop:
    """Return a training loop with Ignite's engine, which computes a running average of the loss."""
    from ignite.engine import Engine  # pyright: ignore[reportMissingImports]
    from ignite.metrics import RunningAverage  # pyright: ignore[reportMissingImports]

    def update(engine: Any, step: int) -> float:
        optimizer.zero_grad()
        value = loss(net, data.select(sampler.indices(step, 0)))
        value.backward()
        optimizer.step()
        return value.item()

    engine = Engine(update)
    RunningAverage(output_transform=lambda value: value).attach(engine, "loss")

    def make(steps: int) -> None:
        engine.run(range(steps), max_epochs=1)

    return make
