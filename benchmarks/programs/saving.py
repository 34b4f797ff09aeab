"""A training program for benchmarks/programs/overhead.py: DDP with a checkpoint every few seconds.

    python -m benchmarks.programs.saving CHECKPOINTS SECONDS SAVE_SECONDS MEGABYTES

Rank 0 prints `N steps in S seconds`.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

FLOATS_PER_MB = 1_000_000 // 4
FEATURES = 256


def main(folder: Path, seconds: float, save_seconds: float, megabytes: int) -> None:
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    model = nn.parallel.DistributedDataParallel(nn.Linear(FEATURES, FEATURES))
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(64, FEATURES)
    # fills the checkpoint up to MEGABYTES, like the optimizer state of a larger model
    moments = torch.randn(megabytes * FLOATS_PER_MB)

    dist.barrier()
    start = last_save = time.monotonic()
    steps = 0
    is_over = torch.zeros(1)
    while not is_over.item():
        optimizer.zero_grad()
        (model(rows) - rows).square().mean().backward()
        optimizer.step()
        steps += 1

        now = time.monotonic()
        if is_first and now - last_save >= save_seconds:
            last_save = now
            torch.save({"step": steps, "moments": moments}, folder / "latest.tmp")
            os.replace(folder / "latest.tmp", folder / "latest.pt")
        if is_first:
            is_over.fill_(float(now - start >= seconds))
        dist.broadcast(is_over, 0)

    if is_first:
        print(f"{steps} steps in {time.monotonic() - start:.3f} seconds", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    main(Path(path), float(numbers[0]), float(numbers[1]), int(numbers[2]))
