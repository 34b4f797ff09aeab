"""A training program that survives interruptions. `rekindle.attach` restores the program's state at
the start, and saves the state during the training.

    run = rekindle.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(3):
        for batch in run.batches(dataset, batch_size=64):
            ...  # forward, backward, optimizer.step()
            run.step(loss=loss)

Two copies of the state are kept. A *snapshot* in shared memory, at most 2 s old, survives the death
of the processes; a *durable checkpoint* in the checkpoint folder survives the loss of the machine.
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
    check_batch_sizes,
    check_dataset_length,
    make_data_loader,
    order_samples,
    plan_batches,
    split_batches,
)
from rekindle.attached.group import Group
from rekindle.attached.metrics import MetricsRecorder
from rekindle.attached.random_states import restore_random_states
from rekindle.attached.restore import RestoredState, StateSource
from rekindle.attached.saver import SaveSettings, StateSaver
from rekindle.attached.state import AttachedObjects
from rekindle.attached.timing import StepClock
from rekindle.errors import ConfigError, write_stderr
from rekindle.kubernetes_names import REKINDLE_CHECKPOINTS
from rekindle.training.checkpoint.manifest import IntervalFacts
from rekindle.training.sampler import mix_seed


class RankSums(NamedTuple):
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
    """A training program whose state is restored at the start and saved during the training.
    `rekindle.attach` creates this object."""

    def __init__(
        self, objects_by_name: dict[str, Any], folder: Path, save_settings: SaveSettings
    ) -> None:
        self.objects = AttachedObjects(objects_by_name)
        self.group = Group()
        self.folder = folder
        self.progress = Progress()

        self._random_states: list[dict[str, Any]] | None = None
        self._interval_facts: IntervalFacts | None = None
        self._metrics = MetricsRecorder(self.group.rank)
        self._leaving = threading.Event()
        self._clock = StepClock()
        self._is_slow = self.group.world == 1
        self._has_finished = False

        run_id = self._agree_on_run_id()
        state_source = StateSource(self.group, self.objects, folder, run_id)
        self.restored = self._restore(state_source)
        self._saver = StateSaver(
            self.group,
            self.objects,
            folder,
            run_id,
            save_settings,
            self.restored.step,
            self._interval_facts,
        )
        # a process must not overwrite its snapshots before all other processes have read them
        self.group.barrier()
        self._saver.open()
        self._install_sigterm_handler()

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
        """True if this process got SIGTERM. The other processes learn of the signal at the end of
        the step."""
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
        """Yield this process's share of each remaining batch of the current epoch.

        `dataset`: an object with `__len__` and `__getitem__`; `batch_size`: number of samples that
        all processes together use in one step, so that steps do not depend on the number of
        processes; `options`: arguments of torch.utils.data.DataLoader, for example num_workers and
        collate_fn.

        Raises ConfigError if a batch has fewer samples than there are processes.
        """
        progress = self.progress
        sample_count = len(dataset)
        check_dataset_length(progress, sample_count)
        progress.samples = sample_count

        batch_sizes = plan_batches(sample_count, progress.offset, batch_size, drop_last)
        check_batch_sizes(batch_sizes, batch_size, self.group.world)
        sample_order = order_samples(sample_count, seed, progress.epoch, shuffle=shuffle)
        rank_batches = split_batches(
            sample_order, progress.offset, batch_sizes, self.group.rank, self.group.world
        )

        loader_seed = mix_seed(seed, progress.epoch, progress.offset, self.group.rank)
        batch_iterator = iter(make_data_loader(dataset, list(rank_batches), loader_seed, options))
        # restore the generators again, because the program may have drawn random numbers since the
        # start
        self._restore_random_states()

        epoch = progress.epoch
        for batch_sample_count, batch in zip(batch_sizes, batch_iterator, strict=True):
            progress.offset = progress.offset + batch_sample_count
            yield batch
        if progress.epoch == epoch:
            self._end_epoch()

    def start_next_epoch(self, *, batch_size: int, drop_last: bool = False) -> None:
        """End the current epoch if all its batches are used. Call this method in loops that do not
        exhaust the iterator `batches`."""
        progress = self.progress
        remaining_batch_sizes = plan_batches(
            progress.samples, progress.offset, batch_size, drop_last
        )
        if progress.offset and not remaining_batch_sizes:
            self._end_epoch()

    def step(self, **metrics: Any) -> None:
        """Record that a step is completed, and save the state if a snapshot or checkpoint is due.

        Call `step` on all ranks, after each update of the parameters (with gradient accumulation:
        not after each batch). `metrics`: numbers or tensors with one element, which rank 0 sends to
        MLflow if MLFLOW_TRACKING_URI and MLFLOW_RUN_ID are set.

        After a SIGTERM to any rank, all ranks save the state of the same step and raise
        SystemExit(143). Raises ConfigError if the state cannot be saved.
        """
        self.progress.step = self.progress.step + 1
        self._random_states = None
        self._clock.record_step()
        self._metrics.record(self.progress.step, metrics)
        self._saver.raise_write_error()

        # the sums of the previous step have arrived during the computation of this step
        self._handle_rank_sums()
        self._start_rank_sums()
        if self._is_slow:
            self._handle_rank_sums()

    def save(self) -> None:
        """Write a durable checkpoint of the current state now, and wait until it is written. Call
        `save` on all ranks."""
        self._saver.save(self.progress, checkpoint=True)
        self._saver.wait()

    def finish(self) -> None:
        """Write the last checkpoint, and remove the snapshots. Call `finish` on all ranks when the
        training is complete; `epochs` calls `finish` automatically."""
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

    def _start_rank_sums(self) -> None:
        due_copies = self._saver.find_due_copies(self.progress.step, self._clock.step_s)
        is_first_rank = self.group.rank == 0
        rank_sums = RankSums(
            leaving=int(self.is_leaving),
            snapshot=int(is_first_rank and due_copies.snapshot),
            checkpoint=int(is_first_rank and due_copies.checkpoint),
            written=self._saver.written,
            is_slow=int(is_first_rank and self._clock.is_slow),
        )
        self.group.start_sum(list(rank_sums))

    def _handle_rank_sums(self) -> None:
        summed_numbers = self.group.finish_sum()
        if summed_numbers is None:
            return

        rank_sums = RankSums(*summed_numbers)
        self._is_slow = bool(rank_sums.is_slow) or self.group.world == 1
        self._saver.commit_written_shards(rank_sums.written)
        if rank_sums.leaving:
            self._leave()
        elif rank_sums.snapshot or rank_sums.checkpoint:
            self._saver.save(self.progress, checkpoint=bool(rank_sums.checkpoint))

    def _leave(self) -> None:
        self._saver.wait()
        self.save()
        self._metrics.close()
        self.group.barrier()
        if self.group.rank == 0:
            write_stderr(f"SIGTERM: the state of step {self.progress.step} is saved")
        raise SystemExit(exit_codes.TERMINATED)

    def _agree_on_run_id(self) -> str:
        """Return the id of this training, which the checkpoint folder stores. If the checkpoint
        folder was deleted, the id is new, and earlier snapshots are not used."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the checkpoint folder {self.folder} cannot be created ({error.strerror}). Pass"
                " folder=... with a folder that this process may write to."
            ) from error

        rank_run_ids = self.group.gather(durable.read_run_id(self.folder))
        new_run_id = self.group.gather(uuid.uuid4().hex[:12])[0]
        run_id = next((run_id for run_id in rank_run_ids if run_id), new_run_id)
        if self.group.local_index == 0:
            durable.write_run_id(self.folder, run_id)
            durable.remove_temporary_files(self.folder)
        self.group.barrier()
        return run_id

    def _restore(self, state_source: StateSource) -> RestoredState:
        if self.objects.is_sharded:
            loaded_state = state_source.load_shards()
        else:
            loaded_state = state_source.load_whole_state()
        if loaded_state is None:
            return RestoredState(0, "")

        state_tree, restored_state = loaded_state
        if not self.objects.is_sharded:
            self.objects.load(state_tree["objects"])
        self.progress = Progress(**state_tree["progress"])
        self._interval_facts = state_tree["interval"]
        self._random_states = state_tree["random"]
        self._restore_random_states()

        if self.group.rank == 0:
            source_name = (
                "a snapshot in memory" if restored_state.tier == "memory" else "a checkpoint"
            )
            write_stderr(f"continuing from step {restored_state.step}, from {source_name}")
        return restored_state

    def _restore_random_states(self) -> None:
        if self._random_states is not None:
            restore_random_states(self._random_states, self.group.rank, self.progress.step)

    def _install_sigterm_handler(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            write_stderr("rekindle.attach was called in a thread: SIGTERM does not save the state")
            return

        previous_handler = signal.getsignal(signal.SIGTERM)

        def handle(signal_number: int, stack_frame: FrameType | None) -> None:
            self._leaving.set()
            if callable(previous_handler):
                previous_handler(signal_number, stack_frame)

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
    """Restore the state of `objects`, if a copy exists, and return an object that saves this state.

    `objects`: objects with the methods state_dict and load_state_dict, under names of your choice,
    for example model=, optimizer= and scheduler=. Models that fully_shard has sharded, and their
    optimizers, are saved as shards. `folder`: folder for durable checkpoints; the environment
    variable REKINDLE_CHECKPOINTS has priority.

    `snapshot_seconds`: longest time between two snapshots in memory, 0 for no snapshots; the time
    is extended if snapshots would otherwise take more than 3 % of the training time.
    `checkpoint_seconds`: time between two durable checkpoints, 0 for the optimum, which is computed
    from the measured costs. `checkpoint_steps`: maximum number of steps between two durable
    checkpoints, 0 for no limit. `keep`: number of durable checkpoints to keep.

    Call `attach` on all ranks, after torch.distributed.init_process_group. Raises ConfigError.
    """
    save_settings = SaveSettings(snapshot_seconds, checkpoint_seconds, checkpoint_steps, keep)
    checkpoint_folder = Path(os.environ.get(REKINDLE_CHECKPOINTS) or folder)
    return AttachedProgram(objects, checkpoint_folder.absolute(), save_settings)
