"""`rekindle.attach` for the Trainer of Hugging Face.

    callback = rekindle.TrainerCallback()
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer))

The snapshots contain all that the Trainer's own checkpoints contain. At the start, the newest
snapshot is converted to a checkpoint of the Trainer, which then restores the state and skips the
used data.
"""

import dataclasses
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.trainer import (
    OPTIMIZER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import WEIGHTS_NAME

from rekindle.attached.program import AttachedProgram, attach
from rekindle.errors import ConfigError, say


class TrainerContent:
    """Saves and restores the state of a Trainer through the methods that `rekindle.attach`
    needs."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self.trainer: Any = trainer
        self.restored: dict[str, Any] = {}

    @property
    def batch_samples(self) -> int:
        """The number of samples that all processes together use in one step."""
        arguments = self.trainer.args
        return (
            arguments.train_batch_size
            * arguments.gradient_accumulation_steps
            * arguments.world_size
        )

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        scaler = trainer.accelerator.scaler
        return {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
            "trainer": dataclasses.asdict(trainer.state),
            "batch_samples": self.batch_samples,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict

    def write(self, folder: Path, random_states: list[dict[str, Any]]) -> None:
        """Write the restored state as a checkpoint of the Trainer."""
        state = self.restored
        folder.mkdir(parents=True)
        torch.save(state["model"], folder / WEIGHTS_NAME)
        torch.save(state["optimizer"], folder / OPTIMIZER_NAME)
        torch.save(state["scheduler"], folder / SCHEDULER_NAME)
        if state["scaler"]:
            torch.save(state["scaler"], folder / SCALER_NAME)

        for rank, states in enumerate(random_states):
            name = f"rng_state_{rank}.pth" if len(random_states) > 1 else "rng_state.pth"
            torch.save(_convert_random_states(states), folder / name)
        trainer_state = transformers.TrainerState(**state["trainer"])
        trainer_state.save_to_json(str(folder / TRAINER_STATE_NAME))


class TrainerCallback(transformers.TrainerCallback):
    """Saves the state of a Trainer as `rekindle.attach` does, with the same settings. `folder`:
    by default the Trainer's `output_dir`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._run: AttachedProgram | None = None
        self._folder: Path | None = None

    def resume(self, trainer: transformers.Trainer) -> str | None:
        """Return the checkpoint to pass to `trainer.train(resume_from_checkpoint=...)`, None for a
        new training. Raises ConfigError."""
        arguments: Any = trainer.args
        if arguments.fsdp or arguments.deepspeed:
            raise ConfigError(
                "rekindle.TrainerCallback saves models that each process has as a whole, and this"
                " Trainer uses FSDP or DeepSpeed. Use the Trainer's own checkpoints:"
                " save_strategy='steps'."
            )

        content = TrainerContent(trainer)
        settings = {"folder": arguments.output_dir, **self._settings}
        self._run = run = attach(trainer=content, **settings)
        if not content.restored:
            return None

        saved_samples = content.restored["batch_samples"]
        if saved_samples != content.batch_samples and run.group.rank == 0:
            say(
                f"a step has {content.batch_samples} samples, and had {saved_samples} before: the"
                " Trainer skips another number of samples than were used. Keep"
                " per_device_train_batch_size * gradient_accumulation_steps * processes the same."
            )

        host = hashlib.sha256(run.group.host.encode()).hexdigest()[:12]
        self._folder = run.folder / f".tmp-resume-{host}"
        checkpoint = self._folder / f"{PREFIX_CHECKPOINT_DIR}-{run.current_step}"
        if run.group.local_index == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            content.write(checkpoint, run.restored_random_states)
        run.group.barrier()
        return os.fspath(checkpoint)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self._require_run()
        if self._folder:
            # after the first step, all processes have read this checkpoint
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        run.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._require_run().finish()

    def _require_run(self) -> AttachedProgram:
        if self._run is None:
            raise ConfigError(
                "rekindle.TrainerCallback does not know the Trainer yet: call"
                " trainer.train(resume_from_checkpoint=callback.resume(trainer))."
            )
        return self._run


def _convert_random_states(states: dict[str, Any]) -> dict[str, Any]:
    """Convert random states to the format of the Trainer's files."""
    numpy_state: Any = np.random.get_state()
    if "numpy" in states:
        name, words, *others = states["numpy"]
        numpy_state = (name, words.numpy().astype("uint32"), *others)

    version, keys, gauss = states["python"]
    converted = {
        "python": (version, tuple(keys), gauss),
        "numpy": numpy_state,
        "cpu": states["torch"].clone(),
    }
    if "cuda" in states:
        converted["cuda"] = states["cuda"].clone()
    return converted
