"""The workload of benchmarks/loop.py: a small network trained on random numbers, and the training
loops with which Rekindle's loop is compared.

After each block of Rekindle's steps, the dataset object runs the same number of steps in each of
the other loops. All training loops run in one process and in turns, so that all loops are measured
under the same load.
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
from rekindle.training.group.tree import list_rank_leaves
from rekindle.training.spec import TrainingSpec as Inputs
from rekindle.workload import DataConfig

Data = DataConfig
examples = prepare = predictor = None
metrics = (Metric("loss", max),)
SAMPLE_COUNT = 4096
INPUT_COUNT = 256
# runs the given number of steps
TrainingLoop = Callable[[int], None]


class Model(Section):
    width: int = 64
    layers: int = 1


@dataclass
class LoopTurns:
    """Runs the training loops alternately, `block` steps each, and measures the CPU seconds of each
    loop."""

    inputs: Inputs
    block: int
    # number of steps before the first block
    warm: int
    rank: int
    size: int
    # host:port of the rendezvous of the DDP processes
    meeting: str
    calls: int = 0
    began: float = 0.0
    # CPU time and clock time at the start of the first block
    first: tuple[float, float] = (0.0, 0.0)
    # CPU time and clock time at the end of the last block
    last: tuple[float, float] = (0.0, 0.0)
    loops: dict[str, TrainingLoop] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"Rekindle": []})

    def clock(self) -> float:
        """Return the CPU time of this thread. In a group of processes, return the CPU time of the
        whole process, because gloo's threads work for the loop."""
        if self.size == 1:
            return time.thread_time()
        return time.process_time()

    def leaf_numbers(self) -> range:
        """Return the numbers of the micro-batches of a step that this process computes."""
        return list_rank_leaves(self.inputs.virtual_workers, self.size, self.rank)

    def take(self, random_samples: "RandomSamples") -> None:
        """Handle the start of a micro-batch in Rekindle's loop. If a block of steps is complete,
        run the other training loops."""
        step_number, leaf_number = divmod(self.calls, len(self.leaf_numbers()))
        self.calls += 1

        if leaf_number or step_number < self.warm or (step_number - self.warm) % self.block:
            return

        if self.loops:
            self.seconds["Rekindle"].append(self.clock() - self.began)
            self.last = time.process_time(), time.monotonic()
        else:
            self.loops = make_other_loops(self, random_samples)
            for loop_name, run_steps in self.loops.items():
                self.seconds[loop_name] = []
                run_steps(20)

            self.first = time.process_time(), time.monotonic()

        for loop_name, run_steps in self.loops.items():
            start_cpu_seconds = self.clock()
            run_steps(self.block)
            self.seconds[loop_name].append(self.clock() - start_cpu_seconds)

        self.began = self.clock()

    def result(self) -> dict[str, Any]:
        """Return the CPU seconds per step of each training loop in each block, and the CPU share of
        Rekindle's background threads."""
        block_count = len(self.seconds["Rekindle"])
        step_seconds_by_loop = {
            loop_name: [seconds / self.block for seconds in block_seconds[:block_count]]
            for loop_name, block_seconds in self.seconds.items()
        }
        spent_cpu_seconds, passed_seconds = (
            last_reading - first_reading
            for first_reading, last_reading in zip(self.first, self.last, strict=True)
        )
        return {
            "steps": step_seconds_by_loop,
            "threads": (
                spent_cpu_seconds - sum(map(sum, step_seconds_by_loop.values())) * self.block
            )
            / passed_seconds,
        }


# set by benchmarks/loop.py in a worker
turns: LoopTurns | None = None


class RandomSamples:
    """A dataset of random samples."""

    def __init__(self, unused_path: Path) -> None:
        import torch

        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randn(SAMPLE_COUNT, INPUT_COUNT, generator=generator)
        self.targets = self.rows.square().mean(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLE_COUNT

    def batch(self, indices: object) -> tuple[Any, ...]:
        if turns:
            turns.take(self)
        return self.select(indices)

    def select(self, indices: Any) -> tuple[Any, ...]:
        return self.rows.index_select(0, indices), self.targets.index_select(0, indices)


def dataset(path: Path, split: str) -> RandomSamples:
    return RandomSamples(path)


def model(section: Model, facts: dict[str, Any]) -> Any:
    from torch import nn

    layer_widths = [INPUT_COUNT, *[section.width] * section.layers]
    hidden_layers = [
        layer
        for input_width, output_width in pairwise(layer_widths)
        for layer in (nn.Linear(input_width, output_width), nn.ReLU())
    ]
    return nn.Sequential(*hidden_layers, nn.Linear(section.width, 1))


def loss(model: Any, batch: tuple[Any, ...]) -> Any:
    batch_rows, batch_targets = batch
    return (model(batch_rows) - batch_targets).square().mean()


def make_other_loops(
    loop_turns: LoopTurns, random_samples: RandomSamples
) -> dict[str, TrainingLoop]:
    """Return the loops to compare with Rekindle's loop.

    For a single process, the other loops are bare loops and loops of frameworks. For a group of
    processes, the other loops are a DDP loop and a bare loop that does not exchange gradients.
    """
    from rekindle.training.sampler import Sampler

    training_inputs = loop_turns.inputs
    sampler = Sampler(
        SAMPLE_COUNT,
        training_inputs.batch_size,
        training_inputs.virtual_workers,
        training_inputs.seed,
    )

    if loop_turns.size > 1:
        return {
            "no exchange": bare_loop(loop_turns, random_samples, sampler, reads_loss=False),
            "DDP": ddp_loop(loop_turns, random_samples, sampler),
        }

    loops_by_name = {
        "bare": bare_loop(loop_turns, random_samples, sampler, reads_loss=False),
        "bare + loss.item()": bare_loop(loop_turns, random_samples, sampler, reads_loss=True),
    }
    if importlib.util.find_spec("accelerate"):
        network, optimizer = make_network_and_optimizer(training_inputs)
        loops_by_name["accelerate"] = accelerate_loop(network, optimizer, random_samples, sampler)
    if importlib.util.find_spec("ignite"):
        network, optimizer = make_network_and_optimizer(training_inputs)
        loops_by_name["Ignite"] = ignite_loop(network, optimizer, random_samples, sampler)

    return loops_by_name


def make_network_and_optimizer(training_inputs: Inputs) -> tuple[Any, Any]:
    """Return a new network, with the same initial weights each time, and its optimizer."""
    import torch

    torch.manual_seed(0)
    network = model(Model.model_validate(training_inputs.model), {})
    return network, torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)


def bare_loop(
    loop_turns: LoopTurns, random_samples: RandomSamples, sampler: Any, *, reads_loss: bool
) -> TrainingLoop:
    """Return a training loop without a framework; if `reads_loss` is True, it reads the value of
    each loss, as a loop that logs the loss does."""
    leaf_numbers = loop_turns.leaf_numbers()
    network, optimizer = make_network_and_optimizer(loop_turns.inputs)

    def run_steps(step_count: int) -> None:
        for step_number in range(step_count):
            optimizer.zero_grad()
            for leaf_number in leaf_numbers:
                indices = sampler.select_sample_indices(step_number, leaf_number)
                loss_value = loss(network, random_samples.select(indices))
                loss_value.backward()
                if reads_loss:
                    loss_value.item()
            optimizer.step()

    return run_steps


def ddp_loop(loop_turns: LoopTurns, random_samples: RandomSamples, sampler: Any) -> TrainingLoop:
    """Join the group of processes, and return a training loop with DistributedDataParallel."""
    import torch

    leaf_numbers = loop_turns.leaf_numbers()
    rendezvous_url = f"tcp://{loop_turns.meeting}"
    torch.distributed.init_process_group(
        "gloo", rendezvous_url, rank=loop_turns.rank, world_size=loop_turns.size
    )
    network, optimizer = make_network_and_optimizer(loop_turns.inputs)
    ddp_network = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)

    def run_steps(step_count: int) -> None:
        for step_number in range(step_count):
            optimizer.zero_grad()
            for leaf_number in leaf_numbers:
                # exchange the gradients only once a step
                is_last_leaf = leaf_number == leaf_numbers[-1]
                with nullcontext() if is_last_leaf else ddp_network.no_sync():
                    indices = sampler.select_sample_indices(step_number, leaf_number)
                    loss(ddp_network, random_samples.select(indices)).backward()
            optimizer.step()

    return run_steps


def accelerate_loop(
    network: Any, optimizer: Any, random_samples: RandomSamples, sampler: Any
) -> TrainingLoop:
    """Return the training loop that accelerate's documentation shows."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True)
    network, optimizer = accelerator.prepare(network, optimizer)

    def run_steps(step_count: int) -> None:
        for step_number in range(step_count):
            optimizer.zero_grad()
            indices = sampler.select_sample_indices(step_number, 0)
            accelerator.backward(loss(network, random_samples.select(indices)))
            optimizer.step()

    return run_steps


def ignite_loop(
    network: Any, optimizer: Any, random_samples: RandomSamples, sampler: Any
) -> TrainingLoop:
    """Return a training loop with Ignite's engine, which computes a running average of the loss."""
    from ignite.engine import Engine  # pyright: ignore[reportMissingImports]
    from ignite.metrics import RunningAverage  # pyright: ignore[reportMissingImports]

    def update(engine: Any, step_number: int) -> float:
        optimizer.zero_grad()
        indices = sampler.select_sample_indices(step_number, 0)
        loss_value = loss(network, random_samples.select(indices))
        loss_value.backward()
        optimizer.step()
        return loss_value.item()

    engine = Engine(update)
    RunningAverage(output_transform=lambda value: value).attach(engine, "loss")

    def run_steps(step_count: int) -> None:
        engine.run(range(step_count), max_epochs=1)

    return run_steps
