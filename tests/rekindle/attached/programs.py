"""Training programs that attach their state. Each of these programs records the samples that its
steps have used."""

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import rekindle

EPOCHS = 3
SAMPLES = 101
BATCH_SIZE = 12


class SampleRecord:
    """The samples of all completed steps, as a part of the program's state."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"samples": list(self.samples)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = list(state_dict["samples"])

    def add(self, samples: list[int]) -> None:
        """Add the samples that all ranks have used in a step."""
        parts = [samples] * dist.get_world_size()
        dist.all_gather_object(parts, samples)
        for part in parts:
            self.samples += part


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )


def make_dataset(samples: int) -> list[tuple[torch.Tensor, int]]:
    inputs = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    return [(inputs[number], number) for number in range(samples)]


def train(
    folder: str,
    *,
    sharded: bool = False,
    samples: int = SAMPLES,
    step_s: float = 0.005,
    **settings: Any,
) -> None:
    """Train with DistributedDataParallel or fully_shard. The program writes the files `steps` and
    `result.json` below `folder`, which is also the parent of the checkpoint folder."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model()
    if sharded:
        # switch dropout off, because ranks without dropout compute the same for any number of ranks
        model.get_submodule("1").eval()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    seen = SampleRecord()

    run = rekindle.attach(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        seen=seen,
        folder=Path(folder, "checkpoints"),
        **{"snapshot_seconds": 0.01, "checkpoint_seconds": 1000.0, **settings},
    )
    record = partial(append_line, Path(folder, f"steps-{rank}"))
    record(f"start {run.current_step} {run.restored.tier or 'new'}")

    for _ in run.epochs(EPOCHS):
        for inputs, numbers in run.batches(make_dataset(samples), batch_size=BATCH_SIZE):
            loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            seen.add(numbers.tolist())
            time.sleep(step_s)
            run.step(loss=loss)
            record(f"step {run.current_step} {loss.item()}")

    weights = [_gather_parameter(parameter).flatten().tolist() for parameter in model.parameters()]
    if rank == 0:
        result = {"samples": seen.samples, "weights": weights, "position": run.position}
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _gather_parameter(parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    return parameter


def append_line(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(f"{line}\n")


def set_variables(variables: dict[str, str]) -> None:
    os.environ.update(variables)
