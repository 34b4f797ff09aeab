"""A model trained with DistributedDataParallel, as in the tutorial of PyTorch: rank 0 writes
latest.pt under a temporary name and then renames it."""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-dir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--save-every", type=int, default=5)
parser.add_argument("--step-seconds", type=float, default=0.02)
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
latest = arguments.checkpoint_dir / "latest.pt"
first_step = 0

if latest.exists():
    state = torch.load(latest)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first_step = state["step"]

stop = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))


def save(step: int) -> None:
    if rank == 0:
        temporary = latest.with_suffix(".tmp")
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
        }
        torch.save(state, temporary)
        os.replace(temporary, latest)


print(f"rank {rank} of {dist.get_world_size()} starts at step {first_step}", flush=True)
for step in range(first_step, arguments.steps):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 16, generator=generator)
    targets = inputs[:, :4].sin()
    loss = (model(inputs) - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(arguments.step_seconds)

    leaving = stop.clone()
    dist.all_reduce(leaving, op=dist.ReduceOp.MAX)
    if leaving.item():
        save(step + 1)
        print(f"rank {rank} leaves after step {step + 1}", flush=True)
        break
    if (step + 1) % arguments.save_every == 0:
        save(step + 1)
else:
    if rank == 0:
        torch.save(model.module.state_dict(), arguments.checkpoint_dir / "final.pt")
        print(f"finished at step {arguments.steps}", flush=True)

dist.destroy_process_group()
