"""Saves the state of a program as snapshots in memory and as durable checkpoints in a folder.

The training waits only until its state is copied. Threads compute the checksums and write the
files.
"""

import io
import shutil
import time
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.state_dict_saver import async_save

from argolocal.common.files import sync_folder
from rekindle.attached import durable
from rekindle.attached.data import Progress
from rekindle.attached.durable import CheckpointWriter
from rekindle.attached.encoding.payload import Payload, decode_payload
from rekindle.attached.encoding.safe_reader import encode_named_values
from rekindle.attached.group import Group
from rekindle.attached.memory import SnapshotMemory, SnapshotRecord, SnapshotSlot
from rekindle.attached.random_states import read_random_states
from rekindle.attached.restore import SHARED_VALUES_KEY, WHOLE_STATE_SHARD
from rekindle.attached.state import AttachedObjects, take_local_shards
from rekindle.attached.timing import SnapshotInterval
from rekindle.errors import ConfigError, write_stderr
from rekindle.training.checkpoint.interval import CheckpointInterval
from rekindle.training.checkpoint.manifest import IntervalFacts
from rekindle.training.checkpoint.snapshot_file import remove_stale_files


class SaveSettings(NamedTuple):
    """`snapshot_seconds`: longest time between two snapshots, 0 for none; `checkpoint_seconds`:
    time between two durable checkpoints, 0 for automatic; `checkpoint_steps`: maximum number of
    steps between two durable checkpoints, 0 for no limit; `keep`: number of durable checkpoints to
    keep."""

    snapshot_seconds: float
    checkpoint_seconds: float
    checkpoint_steps: int
    keep: int

    def check(self) -> None:
        """Raise ConfigError for a setting whose value is not allowed."""
        for setting_name, setting_value in self._asdict().items():
            smallest_value = 1 if setting_name == "keep" else 0
            if setting_value < smallest_value:
                raise ConfigError(
                    f"{setting_name} is {setting_value}: rekindle.attach takes a number of at"
                    f" least {smallest_value}."
                )


class DueCopies(NamedTuple):
    """The kinds of copies that are due: a snapshot, a durable checkpoint, or both."""

    snapshot: bool
    checkpoint: bool


class StateSaver:
    """Makes the snapshots and checkpoints of one rank. All ranks must call the methods of
    StateSaver in the same order."""

    def __init__(
        self,
        process_group: Group,
        attached_objects: AttachedObjects,
        folder: Path,
        run_id: str,
        save_settings: SaveSettings,
        restored_step: int,
        interval_facts: IntervalFacts | None,
    ) -> None:
        """`restored_step`: the step from which the program continues; `interval_facts`: measured
        costs and losses of earlier processes. Raises ConfigError."""
        save_settings.check()
        self.group = process_group
        self.objects = attached_objects
        self.folder = folder
        self.run_id = run_id
        self.settings = save_settings
        self.lineage = process_group.gather(uuid.uuid4().hex[:12])[0]

        # number of durable checkpoints that this rank has written
        self.written = 0
        # step of the last started durable checkpoint, and of the last one that this rank has
        # written
        self._checkpoint_step = -1
        self._written_step = -1
        # number of durable checkpoints that were started
        self._started = 0
        self._committed = 0
        self._future: Future[Any] | None = None
        self._future_start_s = 0.0

        self._restored_step = restored_step
        self._memory: SnapshotMemory | None = None
        self._snapshots = SnapshotInterval(save_settings.snapshot_seconds)
        self._checkpoints = CheckpointInterval(
            save_settings.checkpoint_seconds, save_settings.checkpoint_steps
        )
        if interval_facts:
            self._checkpoints.resume(restored_step, interval_facts)
        self._writer = CheckpointWriter()

    @property
    def snapshot_seconds(self) -> float:
        """The time between two snapshots."""
        return self._snapshots.seconds

    @property
    def _writes_whole_state(self) -> bool:
        """True if this rank writes snapshots of an unsharded state, which only one process per host
        does."""
        return not self.objects.is_sharded and self.group.local_index == 0

    def open(self) -> None:
        """Open the files of this rank's snapshots."""
        has_snapshots = self.objects.is_sharded or self._writes_whole_state
        if not has_snapshots or not self.settings.snapshot_seconds:
            return
        if self.group.local_index == 0:
            remove_stale_files(self.run_id)
        try:
            self._memory = SnapshotMemory(
                self.run_id, self.group.host, self.group.local_index, self._restored_step
            )
        except OSError as error:
            write_stderr(
                f"no snapshots in shared memory ({error}): a failure costs the steps since the last"
                " durable checkpoint. Set REKINDLE_SHM to a directory that this process may write."
            )

    def find_due_copies(self, step: int, step_s: float) -> DueCopies:
        """Return the copies that should be made at the end of the next step, which takes about
        `step_s` seconds. All ranks make the copies that rank 0 returns."""
        if self._is_writing:
            return DueCopies(self._snapshots.is_due(step_s), False)
        return DueCopies(self._snapshots.is_due(step_s), self._checkpoints.is_due(step + 1))

    def raise_write_error(self) -> None:
        """Raise ConfigError if the last checkpoint failed because the state can never be saved."""
        self._writer.raise_write_error()

    def save(self, progress: Progress, *, checkpoint: bool) -> None:
        """Copy the state to memory; if `checkpoint` is True, also start to write the state to the
        checkpoint folder."""
        random_states = self.group.gather(read_random_states())
        # start the clock after the exchange between the ranks, because waiting for slower ranks is
        # not a cost of the copies
        start_s = time.monotonic()
        shared_values = {
            "lineage": self.lineage,
            "progress": progress.to_dict(),
            "random": random_states,
            "interval": dict(self._checkpoints.facts()),
        }
        if checkpoint:
            self._checkpoints.record_start(progress.step)
            self._checkpoint_step = progress.step
            self._started = self._started + 1

        if self.objects.is_sharded:
            self._save_shards(progress.step, shared_values, writes_checkpoint=checkpoint)
        elif self._writes_whole_state:
            self._save_whole_state(progress.step, shared_values, writes_checkpoint=checkpoint)
        elif checkpoint:
            self._record_written_step(progress.step)

        commit_s = self._memory.commit_s if self._memory else 0.0
        cost_s = time.monotonic() - start_s + commit_s
        self._snapshots.record(start_s, cost_s)
        if checkpoint:
            self._checkpoints.cost = cost_s + self._writer.cpu_s

    def wait(self) -> None:
        """Wait until all copies are complete on all ranks."""
        if self._memory:
            self._memory.wait()
        self._writer.wait()
        if self._future:
            self._finish_save_future()
        self.group.barrier()
        self.commit_written_shards(self._started * self.group.world)

    def commit_written_shards(self, written_count: int) -> None:
        """Give a sharded checkpoint its final name if all ranks have written it. `written_count`:
        number of written checkpoints, summed over the ranks."""
        is_complete = written_count == self._started * self.group.world
        if not is_complete or self._committed == self._started:
            return

        self._committed = self._started
        if not self.objects.is_sharded:
            return
        checkpoint_name = durable.format_checkpoint_name(self._checkpoint_step, is_sharded=True)
        temporary_path = self._make_temporary_path(checkpoint_name)
        checkpoint_path = self.folder / checkpoint_name
        if self.group.local_index == 0 and temporary_path.exists():
            # an earlier process may have written a checkpoint of the same step
            shutil.rmtree(checkpoint_path, ignore_errors=True)
            try:
                temporary_path.rename(checkpoint_path)
                sync_folder(self.folder)
            except OSError:
                # a process of another host that shares the folder has already renamed the draft
                if not checkpoint_path.exists():
                    raise
            durable.remove_old_checkpoints(self.folder, self.settings.keep, is_sharded=True)

    def has_written(self, step: int) -> bool:
        """Return True if all ranks have written the durable checkpoint of `step`. Call
        `has_written` only after `wait`."""
        return set(self.group.gather(self._written_step)) == {step}

    def close(self) -> None:
        """Remove the snapshots of this rank."""
        if self._memory:
            self._memory.close(remove=True)
            self._memory = None

    def _record_written_step(self, step: int) -> None:
        self.written = self._started
        self._written_step = step

    @property
    def _is_writing(self) -> bool:
        if self.objects.is_sharded:
            self._poll_save_future()
        return self._committed < self._started or self._writer.is_busy

    def _make_temporary_path(self, checkpoint_name: str) -> Path:
        return self.folder / f"{durable.TEMPORARY_PREFIX}{checkpoint_name}"

    def _save_whole_state(
        self, step: int, shared_values: dict[str, Any], *, writes_checkpoint: bool
    ) -> None:
        payload = Payload({**shared_values, "objects": self.objects.save()})
        snapshot_slot: SnapshotSlot | None = None
        if self._memory:
            snapshot_record = SnapshotRecord(
                self.lineage, step, WHOLE_STATE_SHARD, self.group.world, 0, 0
            )
            snapshot_slot = self._memory.save(payload, snapshot_record)

        if writes_checkpoint and self.group.rank == 0:
            self._write_whole_checkpoint(step, payload, snapshot_slot)
        elif writes_checkpoint:
            self._record_written_step(step)

    def _write_whole_checkpoint(
        self, step: int, payload: Payload, snapshot_slot: SnapshotSlot | None
    ) -> None:
        """Start to write a checkpoint from the snapshot in `snapshot_slot` or, without a slot,
        from a separate copy."""
        if snapshot_slot:
            snapshot_slot.is_pinned = True
        payload_bytes = snapshot_slot.data if snapshot_slot else payload.to_bytes()
        write_number = self._started

        def write() -> None:
            try:
                durable.write_checkpoint(self.folder, step, decode_payload(payload_bytes))
                durable.remove_old_checkpoints(self.folder, self.settings.keep, is_sharded=False)
                self._written_step = step
            finally:
                if snapshot_slot:
                    snapshot_slot.is_pinned = False
                self._checkpoints.duration = self._writer.duration_s
                self.written = write_number

        self._writer.start(write)

    def _save_shards(
        self, step: int, shared_values: dict[str, Any], *, writes_checkpoint: bool
    ) -> None:
        shard_states, shared_states = self.objects.save_shards()
        shared_values["shared"] = shared_states
        if self._memory:
            snapshot_record = SnapshotRecord(
                self.lineage, step, self.group.rank, self.group.world, 0, 0
            )
            self._memory.save(
                Payload({**shared_values, "shards": take_local_shards(shard_states)}),
                snapshot_record,
            )

        if writes_checkpoint:
            checkpoint_name = durable.format_checkpoint_name(step, is_sharded=True)
            encoded_values = encode_named_values(shared_values)
            durable.verify_loadable(io.BytesIO(encoded_values))
            self._future_start_s = time.monotonic()
            save_response = async_save(
                {"shards": shard_states, SHARED_VALUES_KEY: encoded_values},
                checkpoint_id=self._make_temporary_path(checkpoint_name),
                process_group=self.group.checkpoints,
            )
            assert isinstance(save_response, Future)
            self._future = save_response

    def _poll_save_future(self) -> None:
        if self._future and self._future.done():
            self._finish_save_future()

    def _finish_save_future(self) -> None:
        """Wait until the shards of this rank are written. If this fails, print the error to stderr
        and remove the incomplete checkpoint."""
        assert self._future
        try:
            self._future.result()
            self._written_step = self._checkpoint_step
        # torch.distributed.checkpoint wraps every error in its own exceptions
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            write_stderr(
                f"a checkpoint could not be written ({reason}): the training continues, and tries"
                " again at the next checkpoint. Free the disk of the checkpoint folder."
            )
            shutil.rmtree(
                self._make_temporary_path(
                    durable.format_checkpoint_name(self._checkpoint_step, is_sharded=True)
                ),
                ignore_errors=True,
            )
        self._checkpoints.duration = time.monotonic() - self._future_start_s
        self._future = None
        self.written = self._started
