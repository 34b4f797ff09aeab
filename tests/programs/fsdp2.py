"""A model trained with fully_shard (FSDP2), as in the tutorials of PyTorch: each rank writes its
shard with torch.distributed.checkpoint, and a checkpoint can be loaded with any number of ranks."""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH_ROWS = 24


class AppState(Stateful):
    """The state of a training: model, optimizer and step."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))

    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)]
    model = torch.nn.Sequential(*layers)
    for layer in (layers[0], layers[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    app = AppState(model, optimizer)
    if arguments.checkpoint:
        state = {"app": app}
        dcp.load(state, checkpoint_id=arguments.checkpoint)  # type: ignore[attr-defined]
    print(f"rank {rank} of {world_size} starts at step {app.step}", flush=True)

    while app.step < arguments.steps:
        generator = torch.Generator().manual_seed(app.step)
        rows = torch.randn(BATCH_ROWS, 16, generator=generator)
        own_rows = rows.chunk(world_size)[rank]
        loss = (model(own_rows) - own_rows[:, :4].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        app.step += 1
        time.sleep(arguments.step_seconds)

        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {app.step} loss {total.item() / world_size:.9f}", flush=True)
        if app.step % arguments.save_every == 0:
            path = arguments.checkpoint_dir / f"step_{app.step}"
            dcp.save({"app": app}, checkpoint_id=path)  # type: ignore[attr-defined]

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if rank == 0:
        torch.save(weights, arguments.checkpoint_dir / "final.pt")
        print(f"finished at step {app.step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
