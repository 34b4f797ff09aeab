"""A program that counts steps, without any library. Rank 0 writes the number of the step to a file
with a temporary name, and then renames the file.

counter.py --folder FOLDER [--steps 100] [--save-every 5] [--fail-at STEP] [--last-steps-after FILE]

With --last-steps-after, no process goes beyond half of the steps before FILE exists.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=5)
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--last-steps-after", type=Path, metavar="FILE")
arguments = parser.parse_args()

rank = int(os.environ.get("RANK", "0"))
world_size = int(os.environ.get("WORLD_SIZE", "1"))
latest = arguments.folder / "counter.ckpt"
step = int(latest.read_text().split()[-1]) if latest.exists() else 0


def save() -> None:
    if rank == 0:
        temporary = latest.with_suffix(".tmp")
        temporary.write_text(f"step {step}")
        # wait, because two renames within one tick of the kernel's clock look like one
        time.sleep(0.02)
        os.replace(temporary, latest)


def leave(signal_number: int, frame: FrameType | None) -> None:
    save()
    print(f"rank {rank} leaves after step {step}", flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, leave)
print(f"rank {rank} of {world_size} starts at step {step}", flush=True)
while step < arguments.steps:
    time.sleep(0.02)
    gate = arguments.last_steps_after
    if gate and step >= arguments.steps // 2 and not gate.exists():
        continue
    step += 1
    if 0 <= arguments.fail_at <= step and rank == world_size - 1:
        raise ValueError("the learning rate is negative")
    if step % arguments.save_every == 0:
        save()

if rank == 0:
    (arguments.folder / "final.txt").write_text(str(step))
