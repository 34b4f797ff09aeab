"""The training program that benchmarks/programs/overhead.py measures; it trains with DDP and writes
a checkpoint every few seconds.

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
FEATURE_COUNT = 256


def main(
    checkpoint_folder: Path,
    training_seconds: float,
    save_interval_seconds: float,
    state_megabytes: int,
) -> None:
    dist.init_process_group("gloo")
    is_first_rank = dist.get_rank() == 0
    ddp_model = nn.parallel.DistributedDataParallel(nn.Linear(FEATURE_COUNT, FEATURE_COUNT))
    optimizer = torch.optim.AdamW(ddp_model.parameters())
    batch_rows = torch.randn(64, FEATURE_COUNT)
    # fills the checkpoint up to MEGABYTES, like the optimizer state of a larger model
    extra_state = torch.randn(state_megabytes * FLOATS_PER_MB)

    dist.barrier()
    start_seconds = last_save_seconds = time.monotonic()
    step_count = 0
    end_flag = torch.zeros(1)
    while not end_flag.item():
        optimizer.zero_grad()
        (ddp_model(batch_rows) - batch_rows).square().mean().backward()
        optimizer.step()
        step_count += 1

        now_seconds = time.monotonic()
        if is_first_rank and now_seconds - last_save_seconds >= save_interval_seconds:
            last_save_seconds = now_seconds
            torch.save(
                {"step": step_count, "moments": extra_state}, checkpoint_folder / "latest.tmp"
            )
            os.replace(checkpoint_folder / "latest.tmp", checkpoint_folder / "latest.pt")
        if is_first_rank:
            end_flag.fill_(float(now_seconds - start_seconds >= training_seconds))
        dist.broadcast(end_flag, 0)

    if is_first_rank:
        print(f"{step_count} steps in {time.monotonic() - start_seconds:.3f} seconds", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    main(Path(path), float(numbers[0]), float(numbers[1]), int(numbers[2]))
