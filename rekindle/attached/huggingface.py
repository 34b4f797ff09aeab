"""`rekindle.attach` for the Trainer of Hugging Face.

    callback = rekindle.TrainerCallback()
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer))

The snapshots of `rekindle.attach` contain everything that the Trainer's own checkpoints contain. At
the start, the newest snapshot is converted to a checkpoint of the Trainer, which then restores the
state and skips the used data.
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
from rekindle.errors import ConfigError, write_stderr


class TrainerContent:
    """The state of a Trainer, as an object that `rekindle.attach` can save and restore.
    `restored`: the state that was restored at the start, {} for a new training."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self.trainer: Any = trainer
        self.restored: dict[str, Any] = {}

    @property
    def batch_samples(self) -> int:
        """The number of samples that all processes together use in one step."""
        training_arguments = self.trainer.args
        return (
            training_arguments.train_batch_size
            * training_arguments.gradient_accumulation_steps
            * training_arguments.world_size
        )

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        gradient_scaler = trainer.accelerator.scaler
        return {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": gradient_scaler.state_dict() if gradient_scaler else None,
            "trainer": dataclasses.asdict(trainer.state),
            "batch_samples": self.batch_samples,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict

    def write(self, folder: Path, random_states: list[dict[str, Any]]) -> None:
        """Write the restored state as a checkpoint of the Trainer."""
        restored_state = self.restored
        folder.mkdir(parents=True)
        torch.save(restored_state["model"], folder / WEIGHTS_NAME)
        torch.save(restored_state["optimizer"], folder / OPTIMIZER_NAME)
        torch.save(restored_state["scheduler"], folder / SCHEDULER_NAME)
        if restored_state["scaler"]:
            torch.save(restored_state["scaler"], folder / SCALER_NAME)

        for rank, rank_states in enumerate(random_states):
            file_name = f"rng_state_{rank}.pth" if len(random_states) > 1 else "rng_state.pth"
            torch.save(_convert_random_states(rank_states), folder / file_name)
        trainer_state = transformers.TrainerState(**restored_state["trainer"])
        trainer_state.save_to_json(str(folder / TRAINER_STATE_NAME))


class TrainerCallback(transformers.TrainerCallback):
    """Saves the state of a Hugging Face Trainer as `rekindle.attach` does, with the same settings.
    `folder`: by default the Trainer's `output_dir`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._program: AttachedProgram | None = None
        self._resume_folder: Path | None = None

    def resume(self, trainer: transformers.Trainer) -> str | None:
        """Return the checkpoint to pass to `trainer.train(resume_from_checkpoint=...)`, None for a
        new training. Raises ConfigError."""
        training_arguments: Any = trainer.args
        if training_arguments.fsdp or training_arguments.deepspeed:
            raise ConfigError(
                "rekindle.TrainerCallback cannot save a sharded model, and this Trainer uses FSDP"
                " or DeepSpeed. Use the Trainer's own checkpoints:"
                " save_strategy='steps'."
            )

        trainer_content = TrainerContent(trainer)
        save_settings = {"folder": training_arguments.output_dir, **self._settings}
        self._program = attached_program = attach(trainer=trainer_content, **save_settings)
        if not trainer_content.restored:
            return None

        saved_batch_samples = trainer_content.restored["batch_samples"]
        if (
            saved_batch_samples != trainer_content.batch_samples
            and attached_program.group.rank == 0
        ):
            write_stderr(
                f"a step has {trainer_content.batch_samples} samples, and had"
                f" {saved_batch_samples} before the restart: the Trainer skips a wrong number of"
                " samples. Keep"
                " per_device_train_batch_size * gradient_accumulation_steps * processes the same."
            )

        host_hash = hashlib.sha256(attached_program.group.host.encode()).hexdigest()[:12]
        self._resume_folder = attached_program.folder / f".tmp-resume-{host_hash}"
        checkpoint_path = (
            self._resume_folder / f"{PREFIX_CHECKPOINT_DIR}-{attached_program.current_step}"
        )
        if attached_program.group.local_index == 0:
            shutil.rmtree(self._resume_folder, ignore_errors=True)
            trainer_content.write(checkpoint_path, attached_program.restored_random_states)
        attached_program.group.barrier()
        return os.fspath(checkpoint_path)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        attached_program = self._require_program()
        if self._resume_folder:
            # after the first step, all processes have read the checkpoint in `_resume_folder`
            shutil.rmtree(self._resume_folder, ignore_errors=True)
            self._resume_folder = None
        attached_program.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._require_program().finish()

    def _require_program(self) -> AttachedProgram:
        if self._program is None:
            raise ConfigError(
                "rekindle.TrainerCallback does not know the Trainer yet: call"
                " trainer.train(resume_from_checkpoint=callback.resume(trainer))."
            )
        return self._program


def _convert_random_states(random_states: dict[str, Any]) -> dict[str, Any]:
    """Convert the states of random generators to the format of the Trainer's files."""
    numpy_state: Any = np.random.get_state()
    if "numpy" in random_states:
        numpy_generator_name, numpy_words, *remaining_fields = random_states["numpy"]
        numpy_state = (
            numpy_generator_name,
            numpy_words.numpy().astype("uint32"),
            *remaining_fields,
        )

    state_version, python_words, next_gauss = random_states["python"]
    trainer_states = {
        "python": (state_version, tuple(python_words), next_gauss),
        "numpy": numpy_state,
        "cpu": random_states["torch"].clone(),
    }
    if "cuda" in random_states:
        trainer_states["cuda"] = random_states["cuda"].clone()
    return trainer_states
