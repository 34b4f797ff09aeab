"""`rekindle.attach` for the Trainer of Lightning.

    callback = rekindle.LightningCallback()
    trainer = lightning.Trainer(..., callbacks=[callback])
    path = callback.resume(trainer)
    trainer.fit(model, callback.loader(dataset, batch_size=64), ckpt_path=path)

The snapshots of `rekindle.attach` contain everything that Lightning's own checkpoints contain. At
the start, the newest snapshot is converted to a checkpoint of Lightning, which Lightning then
restores.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch

from rekindle.attached.data import plan_batches
from rekindle.attached.program import AttachedProgram, attach
from rekindle.errors import ConfigError


class LightningContent:
    """The state of a Lightning Trainer, as an object that `rekindle.attach` can save and restore.
    `restored`: the state that was restored at the start, {} for a new training."""

    def __init__(self, trainer: lightning.Trainer) -> None:
        self.trainer: Any = trainer
        self.restored: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.trainer._checkpoint_connector.dump_checkpoint(False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict


class Loader:
    """A loader for the batches of `AttachedProgram.batches`. After a restart of the program, the
    loader continues in the middle of the epoch."""

    def __init__(
        self, attached_program: AttachedProgram, dataset: Any, loader_options: dict[str, Any]
    ) -> None:
        self._program = attached_program
        self._dataset = dataset
        self._loader_options = loader_options

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        drop_last = self._loader_options.get("drop_last", False)
        return len(
            plan_batches(len(self._dataset), 0, self._loader_options["batch_size"], drop_last)
        )

    def __iter__(self) -> Iterator[Any]:
        drop_last = self._loader_options.get("drop_last", False)
        self._program.start_next_epoch(
            batch_size=self._loader_options["batch_size"], drop_last=drop_last
        )
        yield from self._program.batches(self._dataset, **self._loader_options)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because the attached program stores the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: `rekindle.attach` has restored the position."""


class LightningCallback(lightning.Callback):
    """Saves the state of a Lightning Trainer as `rekindle.attach` does, with the same settings.
    `folder`: by default the Trainer's `default_root_dir`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._program: AttachedProgram | None = None
        self._resume_path: Path | None = None
        self._last_step = 0

    def resume(self, trainer: lightning.Trainer) -> str | None:
        """Return the checkpoint to pass to `trainer.fit(ckpt_path=...)`, None for a new training.
        Raises ConfigError."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # start the process group of torch.distributed now, because Lightning would start it
            # only in `fit`
            trainer.strategy.setup_environment()

        trainer_content = LightningContent(trainer)
        save_settings = {"folder": trainer.default_root_dir, **self._settings}
        self._program = attached_program = attach(trainer=trainer_content, **save_settings)
        if not trainer_content.restored:
            return None

        host_hash = hashlib.sha256(attached_program.group.host.encode()).hexdigest()[:12]
        self._resume_path = attached_program.folder / f".tmp-resume-{host_hash}.ckpt"
        if attached_program.group.local_index == 0:
            torch.save(trainer_content.restored, self._resume_path)
        attached_program.group.barrier()
        return os.fspath(self._resume_path)

    def loader(self, dataset: Any, *, batch_size: int, **options: Any) -> Loader:
        """Return a loader for `fit`, with the arguments of `AttachedProgram.batches`. For any
        number of processes, each sample is used once per epoch. Call `loader` only after
        `resume`."""
        return Loader(self._require_program(), dataset, {"batch_size": batch_size, **options})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last_step = trainer.global_step
        if self._resume_path:
            self._require_program().group.barrier()
            self._resume_path.unlink(missing_ok=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # global_step does not change while Lightning accumulates gradients
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self._require_program().step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._require_program().finish()

    def _require_program(self) -> AttachedProgram:
        if self._program is None:
            raise ConfigError(
                "rekindle.LightningCallback does not know the Trainer yet: call"
                " callback.resume(trainer) before trainer.fit."
            )
        return self._program
