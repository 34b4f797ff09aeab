"""`rekindle.attach` for the Trainer of Lightning.

    callback = rekindle.LightningCallback()
    trainer = lightning.Trainer(..., callbacks=[callback])
    path = callback.resume(trainer)
    trainer.fit(model, callback.loader(dataset, batch_size=64), ckpt_path=path)

The snapshots contain all that Lightning's own checkpoints contain. At the start, the newest
snapshot is converted to a checkpoint of Lightning, which Lightning then restores.
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
    """Saves and restores the state of a Lightning Trainer through the methods that
    `rekindle.attach` needs."""

    def __init__(self, trainer: lightning.Trainer) -> None:
        self.trainer: Any = trainer
        self.restored: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.trainer._checkpoint_connector.dump_checkpoint(False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict


class Loader:
    """A loader for the batches of `AttachedProgram.batches`. After a restart, it continues in the
    middle of the epoch."""

    def __init__(self, run: AttachedProgram, dataset: Any, options: dict[str, Any]) -> None:
        self._run = run
        self._dataset = dataset
        self._options = options

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        drop_last = self._options.get("drop_last", False)
        return len(plan_batches(len(self._dataset), 0, self._options["batch_size"], drop_last))

    def __iter__(self) -> Iterator[Any]:
        drop_last = self._options.get("drop_last", False)
        self._run.start_next_epoch(batch_size=self._options["batch_size"], drop_last=drop_last)
        yield from self._run.batches(self._dataset, **self._options)

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
        self._run: AttachedProgram | None = None
        self._checkpoint: Path | None = None
        self._last_step = 0

    def resume(self, trainer: lightning.Trainer) -> str | None:
        """Return the checkpoint to pass to `trainer.fit(ckpt_path=...)`, None for a new training.
        Raises ConfigError."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # start the process group now, because Lightning starts it only in `fit`
            trainer.strategy.setup_environment()

        content = LightningContent(trainer)
        settings = {"folder": trainer.default_root_dir, **self._settings}
        self._run = run = attach(trainer=content, **settings)
        if not content.restored:
            return None

        host = hashlib.sha256(run.group.host.encode()).hexdigest()[:12]
        self._checkpoint = run.folder / f".tmp-resume-{host}.ckpt"
        if run.group.local_index == 0:
            torch.save(content.restored, self._checkpoint)
        run.group.barrier()
        return os.fspath(self._checkpoint)

    def loader(self, dataset: Any, *, batch_size: int, **options: Any) -> Loader:
        """Return a loader for `fit`, with the arguments of `AttachedProgram.batches`: each sample
        is used once per epoch, whatever the number of processes. Call after `resume`."""
        return Loader(self._require_run(), dataset, {"batch_size": batch_size, **options})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last_step = trainer.global_step
        if self._checkpoint:
            self._require_run().group.barrier()
            self._checkpoint.unlink(missing_ok=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # do not save while gradients are still accumulated
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self._require_run().step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._require_run().finish()

    def _require_run(self) -> AttachedProgram:
        if self._run is None:
            raise ConfigError(
                "rekindle.LightningCallback does not know the Trainer yet: call"
                " callback.resume(trainer) before trainer.fit."
            )
        return self._run
