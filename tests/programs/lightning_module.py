"""A regression, trained with the Trainer of Lightning, as in Lightning's documentation."""

import argparse
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self.step_seconds = step_seconds
        self.layers = torch.nn.Linear(16, 4)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        time.sleep(self.step_seconds)
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Steps(Callback):
    """Prints the first and the last step of the training."""

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        rank = f"rank {trainer.global_rank} of {trainer.world_size}"
        print(f"{rank} starts at step {trainer.global_step}", flush=True)

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if trainer.is_global_zero:
            print(f"finished at step {trainer.global_step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--checkpoint", help="checkpoint from which the training continues")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    arguments = parser.parse_args()
    lightning.seed_everything(0)

    inputs = torch.randn(60, 16)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :4].sin()), batch_size=4, shuffle=True)
    saving = ModelCheckpoint(arguments.checkpoint_dir, save_top_k=2, monitor="step", mode="max")
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=arguments.nodes,
        max_steps=arguments.steps,
        max_epochs=-1,
        callbacks=[saving, Steps()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression(arguments.step_seconds)
    trainer.fit(model, loader, ckpt_path=arguments.checkpoint)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), arguments.checkpoint_dir / "final.pt")


if __name__ == "__main__":
    main()
