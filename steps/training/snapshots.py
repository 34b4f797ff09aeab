"""Copies of the state that outlive the step they were made in: three slots of shared memory, or one private one.

The training loop waits for the copy alone. A thread reserves the memory, computes checksums and commits (see hot.py).
A slot that an upload reads is *pinned*: no later copy is made into it.
"""

import mmap
import sys
import threading
from queue import SimpleQueue

import torch

from steps.training import hot
from steps.training.state import State, raw

Job = tuple[int, int, bytes]  # slot, step, the loader's state


class Snapshots:
    """The slots of one worker. `take` is the loop's, everything else may be called by any thread."""

    def __init__(self, state: State, file: hot.Hot | None) -> None:
        self.state, self.file = state, file
        self.ready = threading.Event()
        self._slots: list[memoryview] = []
        self._tensors: list[torch.Tensor] = []
        self._kept: int | None = None  # slot of the newest committed snapshot
        self._queued: set[int] = set()  # slots to be committed
        self._pinned: set[int] = set()
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether the last snapshot is committed, and the slots can take another."""
        return self.ready.is_set() and not self._queued

    def take(self, extra: bytes, *, pin: bool) -> int | None:
        """Copy the state as it is now; gives the slot, None if none is free. `pin`: until `unpin` it stays."""
        with self._lock:
            busy = {self._kept, *self._queued, *self._pinned}
            free = [slot for slot in range(len(self._slots)) if slot not in busy]
            if not free:
                return None
            slot = free[0]
            if pin:
                self._pinned.add(slot)
            if self.file:
                self._queued.add(slot)
        if self.file:
            self.file.begin(slot)
        self._tensors[slot].copy_(self.state.memory)
        if self.file:
            self._jobs.put((slot, self.state.step, extra))
        return slot

    def view(self, slot: int) -> memoryview:
        """The bytes of the state in a slot."""
        return self._slots[slot]

    def unpin(self, slot: int) -> None:
        """The slot may be written again."""
        with self._lock:
            self._pinned.discard(slot)

    def close(self, *, remove: bool) -> None:
        """End the thread; `remove`: the shared memory is not needed any more."""
        self._jobs.put(None)
        self._thread.join()
        if self.file:
            self.file.close(remove=remove)

    def _run(self) -> None:
        self._reserve()
        self.ready.set()
        while job := self._jobs.get():
            slot, step, extra = job
            assert self.file
            self.file.commit(slot, step, extra)
            with self._lock:
                self._kept = slot
                self._queued.discard(slot)

    def _reserve(self) -> None:
        size = len(raw(self.state.memory)) if self.state.device.type == "cpu" else 4 * self.state.memory.numel()
        if self.file:
            try:
                self.file.reserve()
            except OSError as error:
                sys.stderr.write(
                    f"no snapshots in shared memory: {self.file.path} cannot have {hot.SLOTS} times {size >> 20} MiB "
                    f"({error.strerror}). Losing all workers of this node costs the steps since the last durable "
                    "checkpoint. Give the pod a larger /dev/shm (an emptyDir with medium: Memory).\n"
                )
                self.file.close(remove=True)
                self.file = None
        if self.file:
            self._slots = [slot[:size] for slot in self.file.slots]
            self._kept = self.file.kept
        else:
            private = mmap.mmap(-1, size)
            self._slots = [memoryview(private)]
        self._tensors = [torch.frombuffer(slot, dtype=self.state.memory.dtype) for slot in self._slots]
        if not self.file:
            self._tensors[0].zero_()  # touched now, so that no copy has to wait for a page fault
