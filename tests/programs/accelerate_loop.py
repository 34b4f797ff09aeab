"""A regression, trained in a loop with Accelerate, as in Accelerate's guide for checkpoints."""

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--resume-from-checkpoint", type=Path)
    parser.add_argument("--max-train-steps", type=int, default=60)
    parser.add_argument("--checkpointing-steps", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    arguments = parser.parse_args()

    # each epoch has its own order of the samples, which does not depend on where the epoch began
    settings = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    set_seed(0)

    inputs = torch.randn(240, 16)
    data = TensorDataset(inputs, inputs[:, :4].sin())
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step = 0
    first_epoch = 0
    skipped_batches = 0
    if arguments.resume_from_checkpoint:
        accelerator.load_state(str(arguments.resume_from_checkpoint))
        step = int(arguments.resume_from_checkpoint.name.removeprefix("step_"))
        first_epoch, skipped_batches = divmod(step, len(loader))
    rank = f"rank {accelerator.process_index} of {accelerator.num_processes}"
    print(f"{rank} starts at step {step}", flush=True)

    epochs = -(-arguments.max_train_steps // len(loader))
    for epoch in range(first_epoch, epochs):
        loader.set_epoch(epoch)
        batches = loader
        if epoch == first_epoch and skipped_batches:
            batches = accelerator.skip_first_batches(loader, skipped_batches)

        for rows, targets in batches:
            loss = torch.nn.functional.mse_loss(model(rows), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            time.sleep(arguments.step_seconds)
            if step % arguments.checkpointing_steps == 0:
                accelerator.save_state(str(arguments.output_dir / f"step_{step}"))
            if step == arguments.max_train_steps:
                break

    accelerator.wait_for_everyone()
    accelerator.save_model(model, str(arguments.output_dir / "final"))
    if accelerator.is_main_process:
        print(f"finished at step {step}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
