"""Saves the state of a program as snapshots in memory and as durable checkpoints in a folder.

The training waits only until the state is copied. Threads compute checksums and write files.
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
from rekindle.attached.durable import Writer
from rekindle.attached.encoding.payload import Payload, decode
from rekindle.attached.encoding.safe_reader import encode_values
from rekindle.attached.group import Group
from rekindle.attached.memory import Memory, Record, Slot
from rekindle.attached.random_states import read_random_states
from rekindle.attached.restore import REST, WHOLE
from rekindle.attached.state import Objects, take_local
from rekindle.attached.timing import SnapshotInterval
from rekindle.errors import ConfigError, say
from rekindle.training.checkpoint.interval import CheckpointInterval
from rekindle.training.checkpoint.manifest import IntervalFacts
from rekindle.training.checkpoint.snapshot_file import remove_stale_files


class SaveSettings(NamedTuple):
    """`snapshot_seconds`: longest time between two snapshots, 0 for none; `checkpoint_seconds`:
    time between two durable checkpoints, 0 for automatic; `checkpoint_steps`: maximum number of
    steps between them, 0 for no limit; `keep`: number of durable checkpoints to keep."""

    snapshot_seconds: float
    checkpoint_seconds: float
    checkpoint_steps: int
    keep: int

    def check(self) -> None:
        """Raise ConfigError for a value that is not allowed."""
        for name, value in self._asdict().items():
            smallest = 1 if name == "keep" else 0
            if value < smallest:
                raise ConfigError(
                    f"{name} is {value}: rekindle.attach takes a number of at least {smallest}."
                )


class Due(NamedTuple):
    """The kinds of copies that are due: a snapshot, a durable checkpoint, or both."""

    snapshot: bool
    checkpoint: bool


class Saver:
    """Makes the snapshots and checkpoints of one rank. All ranks must call the methods in the same
    order."""

    def __init__(
        self,
        group: Group,
        objects: Objects,
        folder: Path,
        run: str,
        settings: SaveSettings,
        restored_step: int,
        facts: IntervalFacts | None,
    ) -> None:
        """`restored_step`: the step from which the program continues; `facts`: measured costs and
        losses of earlier processes. Raises ConfigError."""
        settings.check()
        self.group = group
        self.objects = objects
        self.folder = folder
        self.run = run
        self.settings = settings
        self.lineage = group.gather(uuid.uuid4().hex[:12])[0]

        self.written = 0  # number of durable checkpoints that this rank has written
        # step of the last started durable checkpoint, and of the last one that this rank has
        # written
        self._checkpoint_step = -1
        self._written_step = -1
        self._started = 0  # number of durable checkpoints that were started
        self._committed = 0
        self._future: Future[Any] | None = None
        self._future_start_s = 0.0

        self._restored_step = restored_step
        self._memory: Memory | None = None
        self._snapshots = SnapshotInterval(settings.snapshot_seconds)
        self._checkpoints = CheckpointInterval(
            settings.checkpoint_seconds, settings.checkpoint_steps
        )
        if facts:
            self._checkpoints.resume(restored_step, facts)
        self._writer = Writer()

    @property
    def snapshot_seconds(self) -> float:
        """The time between two snapshots."""
        return self._snapshots.seconds

    @property
    def _writes_whole(self) -> bool:
        """True if this rank writes snapshots of an unsharded state, which only one process per host
        does."""
        return not self.objects.is_sharded and self.group.local_index == 0

    def open(self) -> None:
        """Open the files of this rank's snapshots."""
        has_snapshots = self.objects.is_sharded or self._writes_whole
        if not has_snapshots or not self.settings.snapshot_seconds:
            return
        if self.group.local_index == 0:
            remove_stale_files(self.run)
        try:
            self._memory = Memory(
                self.run, self.group.host, self.group.local_index, self._restored_step
            )
        except OSError as error:
            say(
                f"no snapshots in shared memory ({error}): a failure costs the steps since the last"
                " durable checkpoint. Set REKINDLE_SHM to a directory that this process may write."
            )

    def find_due(self, step: int, step_s: float) -> Due:
        """Return the copies that should be made at the end of the next step, which takes about
        `step_s` seconds. All ranks follow the answer of rank 0."""
        if self._is_writing:
            return Due(self._snapshots.is_due(step_s), False)
        return Due(self._snapshots.is_due(step_s), self._checkpoints.is_due(step + 1))

    def raise_error(self) -> None:
        """Raise ConfigError if the last checkpoint failed because the state can never be saved."""
        self._writer.raise_error()

    def save(self, progress: Progress, *, checkpoint: bool) -> None:
        """Copy the state to memory; if `checkpoint`, also start to write it to the folder."""
        random_states = self.group.gather(read_random_states())
        # start the clock after the exchange: waiting for slower ranks is not a cost of the copies
        start_s = time.monotonic()
        common = {
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
            self._save_shards(progress.step, common, checkpoint=checkpoint)
        elif self._writes_whole:
            self._save_whole(progress.step, common, checkpoint=checkpoint)
        elif checkpoint:
            self._record_written(progress.step)

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
            self._finish_future()
        self.group.barrier()
        self.commit_written(self._started * self.group.world)

    def commit_written(self, written: int) -> None:
        """Make a sharded checkpoint visible, if all ranks have written it; `written`: the sum of
        the ranks' numbers of written checkpoints."""
        is_complete = written == self._started * self.group.world
        if not is_complete or self._committed == self._started:
            return

        self._committed = self._started
        if not self.objects.is_sharded:
            return
        name = durable.checkpoint_name(self._checkpoint_step, is_sharded=True)
        draft = self._draft(name)
        target = self.folder / name
        if self.group.local_index == 0 and draft.exists():
            # an earlier process may have written the same step
            shutil.rmtree(target, ignore_errors=True)
            try:
                draft.rename(target)
                sync_folder(self.folder)
            except OSError:
                # a process of another host that shares the folder has already renamed the draft
                if not target.exists():
                    raise
            durable.remove_old(self.folder, self.settings.keep, sharded=True)

    def has_written(self, step: int) -> bool:
        """Return True if all ranks have written the durable checkpoint of `step`. Call after
        `wait`."""
        return set(self.group.gather(self._written_step)) == {step}

    def close(self) -> None:
        """Remove the snapshots of this rank."""
        if self._memory:
            self._memory.close(remove=True)
            self._memory = None

    def _record_written(self, step: int) -> None:
        self.written = self._started
        self._written_step = step

    @property
    def _is_writing(self) -> bool:
        if self.objects.is_sharded:
            self._poll_future()
        return self._committed < self._started or self._writer.is_busy

    def _draft(self, name: str) -> Path:
        return self.folder / f"{durable.TEMPORARY_PREFIX}{name}"

    def _save_whole(self, step: int, common: dict[str, Any], *, checkpoint: bool) -> None:
        payload = Payload({**common, "objects": self.objects.save()})
        slot: Slot | None = None
        if self._memory:
            record = Record(self.lineage, step, WHOLE, self.group.world, 0, 0)
            slot = self._memory.save(payload, record)

        if checkpoint and self.group.rank == 0:
            self._write_whole(step, payload, slot)
        elif checkpoint:
            self._record_written(step)

    def _write_whole(self, step: int, payload: Payload, slot: Slot | None) -> None:
        """Start to write a checkpoint from the snapshot in `slot` or, without a slot, from a
        separate copy."""
        if slot:
            slot.is_pinned = True
        data = slot.data if slot else payload.to_bytes()
        number = self._started

        def write() -> None:
            try:
                durable.write_checkpoint(self.folder, step, decode(data))
                durable.remove_old(self.folder, self.settings.keep, sharded=False)
                self._written_step = step
            finally:
                if slot:
                    slot.is_pinned = False
                self._checkpoints.duration = self._writer.duration_s
                self.written = number

        self._writer.start(write)

    def _save_shards(self, step: int, common: dict[str, Any], *, checkpoint: bool) -> None:
        shards, shared = self.objects.save_shards()
        common["shared"] = shared
        if self._memory:
            record = Record(self.lineage, step, self.group.rank, self.group.world, 0, 0)
            self._memory.save(Payload({**common, "shards": take_local(shards)}), record)

        if checkpoint:
            name = durable.checkpoint_name(step, is_sharded=True)
            rest = encode_values(common)
            durable.verify_loadable(io.BytesIO(rest))
            self._future_start_s = time.monotonic()
            response = async_save(
                {"shards": shards, REST: rest},
                checkpoint_id=self._draft(name),
                process_group=self.group.checkpoints,
            )
            assert isinstance(response, Future)
            self._future = response

    def _poll_future(self) -> None:
        if self._future and self._future.done():
            self._finish_future()

    def _finish_future(self) -> None:
        """Wait until the shards of this rank are written."""
        assert self._future
        try:
            self._future.result()
            self._written_step = self._checkpoint_step
        # torch.distributed.checkpoint wraps every error in its own exceptions
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            say(
                f"a checkpoint could not be written ({reason}): the training continues, and tries"
                " again at the next checkpoint. Free the disk of the checkpoint folder."
            )
            shutil.rmtree(
                self._draft(durable.checkpoint_name(self._checkpoint_step, is_sharded=True)),
                ignore_errors=True,
            )
        self._checkpoints.duration = time.monotonic() - self._future_start_s
        self._future = None
        self.written = self._started
