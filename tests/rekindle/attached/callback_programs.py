"""Programs for the Trainers of Hugging Face and Lightning, with Rekindle's callbacks.

python callback_programs.py KIND FOLDER STEP

The last rank is killed at STEP, unless STEP is 0 or the program has resumed.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import rekindle

EPOCHS = 3
SETTINGS: dict[str, Any] = {"snapshot_seconds": 1e-6, "checkpoint_seconds": 1000.0}
RANK = int(os.environ.get("RANK", "0"))
SIZE = int(os.environ.get("WORLD_SIZE", "1"))
used_samples: list[int] = []


def kill_last_rank(checkpoint: object) -> None:
    if RANK == SIZE - 1 and checkpoint is None:
        os.kill(os.getpid(), signal.SIGKILL)


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset of numbers, whose sine a model learns. The dataset records the numbers that are
    read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        used_samples.append(index)
        inputs = torch.full((4,), index / 20)
        return {"inputs": inputs, "labels": inputs.sin()}


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(inputs)
        return {"loss": (outputs - labels).square().mean(), "outputs": outputs}


def train_huggingface(folder: str, kill_step: int) -> tuple[torch.nn.Module, bool]:
    import transformers

    class Killer(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if kill_step and state.global_step == kill_step:
                kill_last_rank(checkpoint)

    transformers.set_seed(0)
    model = Network()
    arguments = transformers.TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        learning_rate=0.01,
        disable_tqdm=True,
    )
    callback = rekindle.TrainerCallback(**SETTINGS)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Numbers(), callbacks=[callback, Killer()]
    )
    checkpoint = callback.resume(trainer)
    used_samples.clear()
    trainer.train(resume_from_checkpoint=checkpoint)
    return model, checkpoint is not None


def train_lightning(folder: str, kill_step: int) -> tuple[torch.nn.Module, bool]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            if kill_step and self.global_step == kill_step:
                kill_last_rank(checkpoint)
            return self.network(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    model = Module()
    callback = rekindle.LightningCallback(**SETTINGS)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp" if SIZE > 1 else "auto",
        devices=1,
        num_nodes=SIZE,
        default_root_dir=folder,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    checkpoint = callback.resume(trainer)
    trainer.fit(model, callback.loader(Numbers(), batch_size=4), ckpt_path=checkpoint)
    return model, checkpoint is not None


def main(kind: str, folder: str, kill_step: int) -> None:
    train = {"huggingface": train_huggingface, "lightning": train_lightning}[kind]
    model, is_resumed = train(folder, kill_step)
    print(f"resumed={is_resumed}")
    print(f"samples={' '.join(f'{number:02d}' for number in used_samples)}")
    weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    print(f"weights={weights}")
    if RANK == 0:
        Path(folder, "final.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
