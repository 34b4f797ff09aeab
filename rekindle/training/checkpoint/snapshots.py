"""Copies of the training state: three slots in shared memory, or one slot in private memory.

The training loop waits only until the state is copied. A thread reserves the memory, computes
checksums and marks the copies as complete (see snapshot_file.py). A slot that an upload reads is
*pinned*, which means that later copies do not overwrite the slot.
"""

import mmap
import threading
from queue import SimpleQueue

import torch

from rekindle.errors import RekindleError, write_stderr
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.training_state import TrainingState

# slot, step, and state of the data loader
CommitJob = tuple[int, int, bytes]


class SnapshotSlots:
    """The slots for copies of one worker's state. Without a snapshot file, only one slot exists, in
    private memory, which is used only for uploads."""

    def __init__(
        self, training_state: TrainingState, file: snapshot_file.SnapshotFile | None
    ) -> None:
        self.state = training_state
        self.file = file
        # set once the memory is reserved, or its reservation has failed
        self.ready = threading.Event()
        self._problem: RekindleError | None = None
        self._slots: list[memoryview] = []
        self._tensors: list[torch.Tensor] = []
        # slot of the newest complete snapshot
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
    def _snapshot_bytes(self) -> int:
        return self.state.memory.numel() * self.state.memory.element_size()

    @property
    def is_idle(self) -> bool:
        """True if shared memory is used and all snapshots in it are complete."""
        return self.ready.is_set() and self.file is not None and not self._queued_slots

    def copy_state(
        self, loader_state: bytes, *, should_pin: bool = False, should_commit: bool = True
    ) -> int | None:
        """Copy the current state to a free slot, and return the slot; None if all slots are in use.

        `should_pin`: True to keep the copy until `unpin`. `should_commit`: True to make the copy
        the newest snapshot in shared memory. Raises RekindleError if the memory could not be
        reserved.
        """
        if not self.ready.is_set():
            return None
        if self._problem:
            raise self._problem

        with self._lock:
            busy_slots = {self._newest_slot, *self._queued_slots, *self._pinned_slots}
            slot_index = next(
                (
                    slot_index
                    for slot_index in range(len(self._slots))
                    if slot_index not in busy_slots
                ),
                None,
            )
            if slot_index is None:
                return None
            if should_pin:
                self._pinned_slots.add(slot_index)

            if self.file:
                self._queued_slots.update({slot_index} if should_commit else set())
                self.file.clear_slot(slot_index)

        self._tensors[slot_index].copy_(self.state.memory)
        if self.file and should_commit:
            self._jobs.put((slot_index, self.state.step, loader_state))

        return slot_index

    def record_step(self, step: int) -> None:
        """Record in shared memory, for a later process, that `step` was completed now."""
        if self.ready.is_set() and self.file:
            self.file.record_step(step)

    def view_slot(self, slot_index: int) -> memoryview:
        return self._slots[slot_index]

    def unpin(self, slot_index: int) -> None:
        with self._lock:
            self._pinned_slots.discard(slot_index)

    def close(self, *, remove: bool) -> None:
        """Complete all queued snapshots and close the snapshot file; if `remove` is True, also
        delete the file."""
        self._jobs.put(None)
        self._thread.join()
        opened_file = self.file
        self.file = None
        if opened_file:
            opened_file.close(deletes_file=remove)

    def _commit_queued_slots(self) -> None:
        try:
            self._reserve()
        # keep the error, which `copy_state` raises later, since only a checkpoint needs the
        # reserved memory
        except OSError as error:
            self._problem = RekindleError(
                f"cannot reserve {self._snapshot_bytes >> 20} MiB for a copy of the state"
                f" ({error}), which checkpoints need: raise cluster.pods.train.memory, or the"
                " memory limit of this process."
            )

        self.ready.set()
        while commit_job := self._jobs.get():
            slot_index, step, loader_state = commit_job
            assert self.file
            self.file.commit_slot(slot_index, step, loader_state)

            with self._lock:
                self._newest_slot = slot_index
                self._queued_slots.discard(slot_index)

    def _reserve(self) -> None:
        state_memory = self.state.memory
        state_bytes = self._snapshot_bytes

        if self.file:
            try:
                self.file.reserve()
                self._slots = [file_slot[:state_bytes] for file_slot in self.file.slots]
            except OSError as error:
                snapshot_folder = snapshot_file.find_snapshot_directory()
                size_mib = state_bytes >> 20
                write_stderr(
                    f"no snapshots in shared memory: {error}. {snapshot_folder} needs"
                    f" {snapshot_file.SLOT_COUNT} times {size_mib} MiB: mount an emptyDir with"
                    " medium: Memory at this path. Until then, if all workers are lost, the steps"
                    " since the last durable checkpoint are repeated."
                )
                self.file.close(deletes_file=True)
                self.file = None

        if not self.file:
            self._slots = [memoryview(mmap.mmap(-1, state_bytes))]

        self._tensors = [
            torch.frombuffer(file_slot, dtype=state_memory.dtype) for file_slot in self._slots
        ]
        if not self.file:
            # pages are faulted in now, so that later copies do not wait for page faults
            self._tensors[0].zero_()
