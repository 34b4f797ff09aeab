"""Copies of the training state: three slots in shared memory, or one slot in private memory.

The training loop waits only for the copy. A thread reserves the memory, computes checksums and
commits the copies (see snapshot_file.py). A slot that an upload reads is *pinned*: later copies do
not overwrite it.
"""

import mmap
import threading
from queue import SimpleQueue

import torch

from rekindle.errors import RekindleError, say
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.training_state import State

CommitJob = tuple[int, int, bytes]  # slot, step, and state of the data loader


class Snapshots:
    """The slots of one worker. Without a snapshot file, there is only one slot, in private memory,
    which is used only for uploads."""

    def __init__(self, state: State, file: snapshot_file.SnapshotFile | None) -> None:
        self.state = state
        self.file = file
        # set once the memory is reserved, or its reservation has failed
        self.ready = threading.Event()
        self._problem: RekindleError | None = None
        self._slots: list[memoryview] = []
        self._tensors: list[torch.Tensor] = []
        # slot of the newest committed snapshot
        self._newest_slot = file.loaded_slot if file else None
        # slots with copies that the thread has not yet committed to the snapshot file
        self._queued_slots: set[int] = set()
        self._pinned_slots: set[int] = set()
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[CommitJob | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._commit_queued_slots, name="snapshots", daemon=True
        )
        self._thread.start()

    @property
    def _size(self) -> int:
        return self.state.memory.numel() * self.state.memory.element_size()

    @property
    def is_idle(self) -> bool:
        """True if shared memory is used and all its snapshots are committed."""
        return self.ready.is_set() and self.file is not None and not self._queued_slots

    def copy_state(
        self, loader_state: bytes, *, pin: bool = False, commit: bool = True
    ) -> int | None:
        """Copy the current state to a free slot, and return the slot; None if all slots are in use.

        `pin`: do not overwrite the copy until `unpin`. `commit`: make it the newest snapshot in
        shared memory. Raises RekindleError if the memory could not be reserved.
        """
        if not self.ready.is_set():
            return None
        if self._problem:
            raise self._problem

        with self._lock:
            busy_slots = {self._newest_slot, *self._queued_slots, *self._pinned_slots}
            slot = next((slot for slot in range(len(self._slots)) if slot not in busy_slots), None)
            if slot is None:
                return None
            if pin:
                self._pinned_slots.add(slot)

            if self.file:
                self._queued_slots.update({slot} if commit else set())
                self.file.clear_slot(slot)

        self._tensors[slot].copy_(self.state.memory)
        if self.file and commit:
            self._jobs.put((slot, self.state.step, loader_state))

        return slot

    def record_step(self, step: int) -> None:
        """Record in shared memory, for a later process, that `step` was completed now."""
        if self.ready.is_set() and self.file:
            self.file.record_step(step)

    def view_slot(self, slot: int) -> memoryview:
        return self._slots[slot]

    def unpin(self, slot: int) -> None:
        with self._lock:
            self._pinned_slots.discard(slot)

    def close(self, *, remove: bool) -> None:
        """Commit all queued snapshots and close the file; if `remove`, also delete it."""
        self._jobs.put(None)
        self._thread.join()
        file = self.file
        self.file = None
        if file:
            file.close(deletes_file=remove)

    def _commit_queued_slots(self) -> None:
        try:
            self._reserve()
        # `copy_state` raises this error later, since only a checkpoint needs the reserved memory
        except OSError as error:
            self._problem = RekindleError(
                f"cannot reserve {self._size >> 20} MiB for a copy of the state ({error}), which"
                " checkpoints need: raise cluster.pods.train.memory, or the memory limit of this"
                " process."
            )

        self.ready.set()
        while job := self._jobs.get():
            slot, step, loader_state = job
            assert self.file
            self.file.commit_slot(slot, step, loader_state)

            with self._lock:
                self._newest_slot = slot
                self._queued_slots.discard(slot)

    def _reserve(self) -> None:
        memory = self.state.memory
        size = self._size

        if self.file:
            try:
                self.file.reserve()
                self._slots = [slot[:size] for slot in self.file.slots]
            except OSError as error:
                directory = snapshot_file.snapshot_directory()
                mib = size >> 20
                say(
                    f"no snapshots in shared memory: {error}. {directory} needs"
                    f" {snapshot_file.SLOT_COUNT} times {mib} MiB: mount an emptyDir with medium:"
                    " Memory at this path. Until then, if all workers are lost, the steps since the"
                    " last durable checkpoint are repeated."
                )
                self.file.close(deletes_file=True)
                self.file = None

        if not self.file:
            self._slots = [memoryview(mmap.mmap(-1, size))]

        self._tensors = [torch.frombuffer(slot, dtype=memory.dtype) for slot in self._slots]
        if not self.file:
            # pages are faulted in now, so that later copies do not wait for page faults
            self._tensors[0].zero_()
