"""A model whose state `rekindle.attach` keeps, as docs/your-own-program.md shows. The program
records which samples each step has used; this record belongs to the state of the training."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rekindle

parser = argparse.ArgumentParser()
parser.add_argument("--result", type=Path, required=True)
parser.add_argument("--samples", type=int, default=240)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--step-seconds", type=float, default=0.05)
arguments = parser.parse_args()


class SampleRecord:
    """A part of the training's state: the numbers of the samples that all completed steps have
    used."""

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


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
seen = SampleRecord()
inputs = torch.randn(arguments.samples, 16)
dataset = [(inputs[number], number) for number in range(arguments.samples)]

run = rekindle.attach(model=model, optimizer=optimizer, seen=seen)
rank = f"rank {dist.get_rank()} of {dist.get_world_size()}"
print(f"{rank} starts at step {run.current_step} from {run.restored.tier or 'new'}", flush=True)

for _ in run.epochs(arguments.epochs):
    for rows, numbers in run.batches(dataset, batch_size=12):
        loss = (model(rows) - rows[:, :4].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.add(numbers.tolist())
        time.sleep(arguments.step_seconds)
        print(f"{rank} has made step {run.current_step + 1}", flush=True)
        run.step(loss=loss)

if dist.get_rank() == 0:
    draft = arguments.result.with_suffix(".tmp")
    draft.write_text(json.dumps({"samples": seen.samples}))
    os.replace(draft, arguments.result)
dist.destroy_process_group()
