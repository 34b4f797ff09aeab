"""Run training programs of other libraries, as processes that save in every step and can be killed
at any moment.

    python -m tests.rekindle.program.checkpoints.saving_programs KIND FOLDER RANK SIZE PORT

Every saved value is a function of the step, so that a checkpoint with parts of two saves is
recognized. `find_error` loads a checkpoint with the program's own library.
"""

import json
import os
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.utils.data import DataLoader, TensorDataset

# size of the saved tensors
NUMBERS = 300_000
# number of checkpoints that the programs keep
KEEP_COUNT = 3


def make_stamped_tensor(step: int, numbers: int = NUMBERS) -> torch.Tensor:
    return torch.full((numbers,), float(step))


def next_step(folder: Path) -> int:
    """Return the step after the highest step in the folder, or the highest step again, so that its
    checkpoint is written again."""
    steps = [int("".join(filter(str.isdigit, path.name)) or 0) for path in folder.iterdir()]
    return max(max(steps, default=0) + random.choice([0, 1]), 1)


def train_huggingface(folder: Path, rank: int, world_size: int) -> None:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=500,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
    )
    row = {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": 0}
    arguments = TrainingArguments(
        str(folder),
        save_steps=1,
        max_steps=100_000,
        save_total_limit=KEEP_COUNT,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        per_device_train_batch_size=1,
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=[row] * 8)
    complete = [path for path in folder.iterdir() if (path / "trainer_state.json").exists()]
    newest = max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)
    try:
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    except (RuntimeError, ValueError, FileNotFoundError, json.JSONDecodeError, EOFError):
        trainer.train()


def train_lightning(folder: Path, rank: int, world_size: int) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(300, 300)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=100_000,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, save_last=True)],
        logger=True,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(64, 300))))


def train_accelerate(folder: Path, rank: int, world_size: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(500, 500, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    counter = Counter()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(counter)
    step = next_step(folder)
    while True:
        accelerator.unwrap_model(model).weight.data.fill_(float(step))
        counter.step = step
        optimizer.param_groups[0]["weight_decay"] = float(step)
        accelerator.save_state(str(folder / f"step_{step}"))
        step += 1


class Counter:
    """An object of the program that Accelerate saves after its own files."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "filler": make_stamped_tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def train_shards(folder: Path, rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    step = torch.tensor(next_step(folder))
    dist.broadcast(step, 0)
    while True:
        number = int(step)
        full_tensor: DTensor = distribute_tensor(
            make_stamped_tensor(number).reshape(-1, 100), mesh, [Shard(0)]
        )
        copy = distribute_tensor(make_stamped_tensor(number, 100), mesh, [Replicate()])
        save_shards(
            {"whole": full_tensor, "copy": copy, "step": number},
            checkpoint_id=folder / f"step_{number}",
        )
        step += 1


def train_overwritten_shards(folder: Path, rank: int, world_size: int) -> None:
    step = random.randrange(1, 10**6)
    while True:
        state = {"a": make_stamped_tensor(step), "b": make_stamped_tensor(step), "step": step}
        save_shards(state, checkpoint_id=folder / "sharded")
        step += 1


def train_file(folder: Path, rank: int, world_size: int) -> None:
    step = random.randrange(1, 10**6)
    while True:
        torch.save({"a": make_stamped_tensor(step), "step": step}, folder / "latest.pt")
        step += 1


def train_renamed_pickle(folder: Path, rank: int, world_size: int) -> None:
    step = random.randrange(1, 10**6)
    while True:
        with open(folder / "latest.pkl.tmp", "wb") as file:
            pickle.dump({"a": make_stamped_tensor(step).tolist(), "step": step}, file)
        os.replace(folder / "latest.pkl.tmp", folder / "latest.pkl")
        step += 1


def train_pickle(folder: Path, rank: int, world_size: int) -> None:
    step = next_step(folder)
    while True:
        with open(folder / f"step_{step}.pkl", "wb") as file:
            for _ in range(20):
                pickle.dump((step, make_stamped_tensor(step, 5000).tolist()), file)
        step += 1


def train_safetensors(folder: Path, rank: int, world_size: int) -> None:
    step = next_step(folder)
    while True:
        save_file(
            {"a": make_stamped_tensor(step), "b": make_stamped_tensor(step)},
            folder / f"step_{step}.safetensors",
        )
        step += 1


def train_directory(folder: Path, rank: int, world_size: int) -> None:
    step = next_step(folder)
    while True:
        directory = folder / f"step_{step}"
        directory.mkdir(exist_ok=True)
        for name in ("model.pt", "optimizer.pt", "loader.pt"):
            torch.save({"a": make_stamped_tensor(step), "step": step}, directory / name)
        step += 1


PROGRAMS: dict[str, Callable[[Path, int, int], None]] = {
    "huggingface": train_huggingface,
    "lightning": train_lightning,
    "accelerate": train_accelerate,
    "shards": train_shards,
    "overwritten_shards": train_overwritten_shards,
    "file": train_file,
    "renamed_pickle": train_renamed_pickle,
    "pickle": train_pickle,
    "safetensors": train_safetensors,
    "directory": train_directory,
}


def equals_step(step: int, *tensors: torch.Tensor) -> bool:
    return all(bool((tensor == float(step)).all()) for tensor in tensors)


def check_huggingface(path: Path) -> bool:
    state = json.loads((path / "trainer_state.json").read_text())
    step = int(path.name.split("-")[1])
    optimizer = torch.load(path / "optimizer.pt", weights_only=True)["state"]
    scheduler = torch.load(path / "scheduler.pt", weights_only=True)
    model = load_file(path / "model.safetensors")
    is_whole = (path / "training_args.bin").stat().st_size > 0 and len(model) > 10
    torch.load(path / "training_args.bin", weights_only=False)
    random_states = list(path.glob("rng_state*.pth"))
    for file in random_states:
        torch.load(file, weights_only=False)
    return (
        is_whole
        and len(random_states) in (1, 2)
        and state["global_step"] == step == scheduler["last_epoch"]
        and all(int(values["step"]) == step for values in optimizer.values())
    )


def check_lightning(path: Path) -> bool:
    state = torch.load(path, weights_only=False)
    steps = [int(value["step"]) for value in state["optimizer_states"][0]["state"].values()]
    return all(step == state["global_step"] for step in steps) and len(steps) == 2


def check_accelerate(path: Path) -> bool:
    step = int(path.name.split("_")[1])
    counter = torch.load(path / "custom_checkpoint_0.pkl", weights_only=True)
    optimizer = torch.load(path / "optimizer.bin", weights_only=True)
    torch.load(path / "random_states_0.pkl", weights_only=False)
    model = load_file(path / "model.safetensors")
    return (
        counter["step"] == step
        and optimizer["param_groups"][0]["weight_decay"] == step
        and equals_step(step, *model.values(), counter["filler"])
    )


def check_shards(path: Path) -> bool:
    step = int(path.name.split("_")[1])
    state: dict[str, Any] = {
        "whole": torch.zeros(NUMBERS).reshape(-1, 100),
        "copy": torch.zeros(100),
        "step": 0,
    }
    load_shards(state, checkpoint_id=path, no_dist=True)
    return state["step"] == step and equals_step(step, state["whole"], state["copy"])


def check_overwritten_shards(path: Path) -> bool:
    state: dict[str, Any] = {"a": make_stamped_tensor(0), "b": make_stamped_tensor(0), "step": 0}
    load_shards(state, checkpoint_id=path, no_dist=True)
    return equals_step(state["step"], state["a"], state["b"])


def check_file(path: Path) -> bool:
    state = torch.load(path, weights_only=True)
    return equals_step(state["step"], state["a"])


def check_renamed_pickle(path: Path) -> bool:
    state = pickle.loads(path.read_bytes())
    return all(value == state["step"] for value in state["a"])


def check_pickle(path: Path) -> bool:
    step = int(path.stem.split("_")[1])
    with path.open("rb") as file:
        parts = [pickle.load(file) for _ in range(20)]
    return all(number == step and values[-1] == step for number, values in parts)


def check_safetensors(path: Path) -> bool:
    state = load_file(path)
    return equals_step(int(path.stem.split("_")[1]), state["a"], state["b"])


def check_directory(path: Path) -> bool:
    step = int(path.name.split("_")[1])
    states = [
        torch.load(path / name, weights_only=True)
        for name in ("model.pt", "optimizer.pt", "loader.pt")
    ]
    return all(state["step"] == step and equals_step(step, state["a"]) for state in states)


def find_error(kind: str, path: Path) -> str:
    """Return "" if the library loads the checkpoint and all its values are of one step."""
    try:
        is_whole = globals()[f"check_{kind}"](path)
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return "" if is_whole else "its values are of several steps"


def run_program(kind: str, folder: Path, rank: int, world_size: int, port: int) -> None:
    """Run a program until it is killed, as one of `world_size` processes."""
    torch.set_num_threads(1)
    needs_group = "shards" in kind or world_size > 1
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        ACCELERATE_USE_CPU="true",
    )
    if needs_group and kind != "huggingface":
        dist.init_process_group("gloo")
    if world_size == 1 and not needs_group:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
    PROGRAMS[kind](folder, rank, world_size)


if __name__ == "__main__":
    run_program(
        sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    )
