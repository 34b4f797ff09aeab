"""A training program that survives: `rekindle.attach` restores its state at the start, and saves it
while it trains.

    run = rekindle.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(3):
        for batch in run.batches(dataset, batch_size=64):
            ...  # forward, backward, optimizer.step()
            run.step(loss=loss)

Two copies are kept. A *snapshot* in shared memory, at most 2 s old, survives the death of the
processes; a *durable checkpoint* in the checkpoint folder survives the loss of the machine.
"""

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from argolocal.common import exit_codes
from rekindle.attached import durable
from rekindle.attached.data import (
    Progress,
    check_length,
    check_sizes,
    make_loader,
    order_samples,
    plan_batches,
    split_batches,
)
from rekindle.attached.group import Group
from rekindle.attached.metrics import Metrics
from rekindle.attached.random_states import restore_random_states
from rekindle.attached.restore import Restored, Source
from rekindle.attached.saver import Saver, SaveSettings
from rekindle.attached.state import Objects
from rekindle.attached.timing import StepClock
from rekindle.errors import ConfigError, say
from rekindle.kubernetes_names import REKINDLE_CHECKPOINTS
from rekindle.training.checkpoint.manifest import IntervalFacts
from rekindle.training.sampler import mix_seed


class Sums(NamedTuple):
    """Numbers that are summed over all ranks in each step. `leaving`: number of ranks that got
    SIGTERM; `snapshot`, `checkpoint`: 1 if rank 0 asks for a snapshot or a checkpoint; `written`:
    number of written checkpoints, summed over the ranks; `is_slow`: 1 if steps are so slow that
    each step waits for its own sums."""

    leaving: int
    snapshot: int
    checkpoint: int
    written: int
    is_slow: int


class AttachedProgram:
    """The state of a training program, with its copies. `rekindle.attach` creates this object."""

    def __init__(self, objects: dict[str, Any], folder: Path, settings: SaveSettings) -> None:
        self.objects = Objects(objects)
        self.group = Group()
        self.folder = folder
        self.progress = Progress()

        self._random_states: list[dict[str, Any]] | None = None
        self._interval_facts: IntervalFacts | None = None
        self._metrics = Metrics(self.group.rank)
        self._leaving = threading.Event()
        self._clock = StepClock()
        self._is_slow = self.group.world == 1
        self._has_finished = False

        run = self._agree_on_run()
        source = Source(self.group, self.objects, folder, run)
        self.restored = self._restore(source)
        self._saver = Saver(
            self.group,
            self.objects,
            folder,
            run,
            settings,
            self.restored.step,
            self._interval_facts,
        )
        # a process overwrites its snapshots only after all others have read them
        self.group.barrier()
        self._saver.open()
        self._install_handler()

    @property
    def restored_random_states(self) -> list[dict[str, Any]]:
        """The restored random states by rank; empty after the first step."""
        return self._random_states or []

    @property
    def current_step(self) -> int:
        """The number of steps that the program has completed."""
        return self.progress.step

    @property
    def position(self) -> int:
        """The number of samples that all processes together have used in all epochs."""
        return self.progress.epoch * self.progress.samples + self.progress.offset

    @property
    def is_leaving(self) -> bool:
        """True if this process got SIGTERM. The other processes are told at the end of the step."""
        return self._leaving.is_set()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are not completed, from 0 to `count` - 1; then write
        the last checkpoint and call `finish`."""
        while self.progress.epoch < count:
            epoch = self.progress.epoch
            yield epoch
            # the caller's loop may have stopped before the last batch
            if self.progress.epoch == epoch:
                self._end_epoch()
        self.finish()

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> Iterator[Any]:
        """Yield this process's share of the batches of the current epoch that were not used yet.

        `dataset`: an object with `__len__` and `__getitem__`; `batch_size`: number of samples that
        all processes together use in one step, so that steps do not depend on the number of
        processes; `options`: arguments of torch.utils.data.DataLoader, for example num_workers and
        collate_fn.

        Raises ConfigError if a batch has fewer samples than there are processes.
        """
        progress = self.progress
        samples = len(dataset)
        check_length(progress, samples)
        progress.samples = samples

        sizes = plan_batches(samples, progress.offset, batch_size, drop_last)
        check_sizes(sizes, batch_size, self.group.world)
        order = order_samples(samples, seed, progress.epoch, shuffle=shuffle)
        shares = split_batches(order, progress.offset, sizes, self.group.rank, self.group.world)

        loader_seed = mix_seed(seed, progress.epoch, progress.offset, self.group.rank)
        loader = iter(make_loader(dataset, list(shares), loader_seed, options))
        # restore the generators again, because the program may have drawn random numbers since the
        # start
        self._restore_random_states()

        epoch = progress.epoch
        for size, batch in zip(sizes, loader, strict=True):
            progress.offset = progress.offset + size
            yield batch
        if progress.epoch == epoch:
            self._end_epoch()

    def start_next_epoch(self, *, batch_size: int, drop_last: bool = False) -> None:
        """End the current epoch if all its batches are used. For loops that do not exhaust the
        iterator `batches`."""
        progress = self.progress
        remaining = plan_batches(progress.samples, progress.offset, batch_size, drop_last)
        if progress.offset and not remaining:
            self._end_epoch()

    def step(self, **metrics: Any) -> None:
        """Record that a step is completed, and save the state if a snapshot or checkpoint is due.

        Call it on all ranks, after the update of the parameters; with gradient accumulation, only
        after an update. `metrics`: numbers or tensors with one element, which rank 0 sends to
        MLflow if MLFLOW_TRACKING_URI and MLFLOW_RUN_ID are set.

        After a SIGTERM to any rank, all ranks save the state of the same step and raise
        SystemExit(143). Raises ConfigError if the state cannot be saved.
        """
        self.progress.step = self.progress.step + 1
        self._random_states = None
        self._clock.record_step()
        self._metrics.record(self.progress.step, metrics)
        self._saver.raise_error()

        # the sums of the previous step have arrived during the computation of this step
        self._handle_sums()
        self._start_sums()
        if self._is_slow:
            self._handle_sums()

    def save(self) -> None:
        """Write a durable checkpoint of the current state now, and wait for it. Call on all
        ranks."""
        self._saver.save(self.progress, checkpoint=True)
        self._saver.wait()

    def finish(self) -> None:
        """Write the last checkpoint, and remove the snapshots. Call it on all ranks when the
        training is complete; `epochs` calls it automatically."""
        if self._has_finished:
            return

        self._has_finished = True
        self.group.finish_sum()
        self._saver.wait()
        if not self._saver.has_written(self.progress.step):
            self.save()
        self._saver.close()
        self._metrics.close()
        self.group.barrier()

    def _end_epoch(self) -> None:
        self.progress.epoch = self.progress.epoch + 1
        self.progress.offset = 0

    def _start_sums(self) -> None:
        due = self._saver.find_due(self.progress.step, self._clock.step_s)
        is_first = self.group.rank == 0
        sums = Sums(
            leaving=int(self.is_leaving),
            snapshot=int(is_first and due.snapshot),
            checkpoint=int(is_first and due.checkpoint),
            written=self._saver.written,
            is_slow=int(is_first and self._clock.is_slow),
        )
        self.group.start_sum(list(sums))

    def _handle_sums(self) -> None:
        numbers = self.group.finish_sum()
        if numbers is None:
            return

        sums = Sums(*numbers)
        self._is_slow = bool(sums.is_slow) or self.group.world == 1
        self._saver.commit_written(sums.written)
        if sums.leaving:
            self._leave()
        elif sums.snapshot or sums.checkpoint:
            self._saver.save(self.progress, checkpoint=bool(sums.checkpoint))

    def _leave(self) -> None:
        self._saver.wait()
        self.save()
        self._metrics.close()
        self.group.barrier()
        if self.group.rank == 0:
            say(f"SIGTERM: the state of step {self.progress.step} is saved")
        raise SystemExit(exit_codes.TERMINATED)

    def _agree_on_run(self) -> str:
        """Return the id of the run, which the checkpoint folder stores. If the folder was deleted,
        the id is new, and earlier snapshots are not used."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the checkpoint folder {self.folder} cannot be created ({error.strerror}). Pass"
                " folder=... with a folder that this process may write to."
            ) from error

        runs = self.group.gather(durable.read_run(self.folder))
        new_run = self.group.gather(uuid.uuid4().hex[:12])[0]
        run = next((run for run in runs if run), new_run)
        if self.group.local_index == 0:
            durable.write_run(self.folder, run)
            durable.remove_temporary(self.folder)
        self.group.barrier()
        return run

    def _restore(self, source: Source) -> Restored:
        if self.objects.is_sharded:
            found = source.load_shards()
        else:
            found = source.load_whole()
        if found is None:
            return Restored(0, "")

        tree, restored = found
        if not self.objects.is_sharded:
            self.objects.load(tree["objects"])
        self.progress = Progress(**tree["progress"])
        self._interval_facts = tree["interval"]
        self._random_states = tree["random"]
        self._restore_random_states()

        if self.group.rank == 0:
            source_name = "a snapshot in memory" if restored.tier == "memory" else "a checkpoint"
            say(f"continuing from step {restored.step}, from {source_name}")
        return restored

    def _restore_random_states(self) -> None:
        if self._random_states is not None:
            restore_random_states(self._random_states, self.group.rank, self.progress.step)

    def _install_handler(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            say("rekindle.attach was called in a thread: SIGTERM does not save the state")
            return

        previous = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: FrameType | None) -> None:
            self._leaving.set()
            if callable(previous):
                previous(number, frame)

        signal.signal(signal.SIGTERM, handle)


def attach(
    *,
    folder: str | os.PathLike[str] = "checkpoints",
    snapshot_seconds: float = 2.0,
    checkpoint_seconds: float = 0.0,
    checkpoint_steps: int = 0,
    keep: int = 2,
    **objects: Any,
) -> AttachedProgram:
    """Restore the state of `objects`, if a copy exists, and return an object that saves it.

    `objects`: by any name, with the methods state_dict and load_state_dict, for example model=,
    optimizer= and scheduler=; models and optimizers of fully_shard are saved as shards. `folder`:
    for durable checkpoints; the environment variable REKINDLE_CHECKPOINTS has priority.
    `snapshot_seconds`: longest time between two snapshots in memory, 0 for none; longer if
    snapshots would otherwise take more than 3 % of the training time. `checkpoint_seconds`: time
    between two durable checkpoints, 0 for the optimum that is computed from the measured costs;
    `checkpoint_steps`: maximum number of steps between two durable checkpoints, 0 for no limit.
    `keep`: number of durable checkpoints to keep.

    Call it on all ranks, after torch.distributed.init_process_group. Raises ConfigError.
    """
    settings = SaveSettings(snapshot_seconds, checkpoint_seconds, checkpoint_steps, keep)
    path = Path(os.environ.get(REKINDLE_CHECKPOINTS) or folder)
    return AttachedProgram(objects, path.absolute(), settings)
