"""Checkpoints in two tiers: snapshots in shared memory every moment, durable ones in the object store now and then.

Survivors carry the state, so both are for the loss of everyone. Every worker calls `keep` after each step: a snapshot
is due by its own clock. That a durable checkpoint is due, rank 0 decides; it rides on the gradients of the next step,
so that all copy the same state. The loop waits for a copy in memory, threads do the rest: see hot.py, durable.py.
"""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from steps.storage import Store
from steps.training import hot
from steps.training.data import Cursor
from steps.training.durable import Durable
from steps.training.snapshots import Snapshots
from steps.training.state import State, raw

Place = tuple[int, int]  # rank and size of the group
Note = Callable[..., None]


class Checkpoints:
    """What one worker keeps of its state, and where it begins."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        identity: str,
        fingerprint: dict[str, Any],
        state: State,
        cursor: Cursor,
        note: Note,
    ) -> None:
        self.state, self.config, self.cursor, self.note = state, state.config, cursor, note
        layout = _hash(state.layout)
        self.durable = Durable(store, prefix, identity, layout, fingerprint, state.config)
        self.crc = 0  # of the state, if it comes from shared memory
        file = hot.path(hot.run_name(identity, prefix), hot.node_name())
        self.snapshots = Snapshots(state, self._recall(file, identity, layout, _hash(fingerprint)))
        self._hot_due = self._last = time.monotonic()
        self._last_step = 0
        self._thread: threading.Thread | None = None

    def due(self) -> bool:
        """Whether it is time for a durable checkpoint, and it could be made. (Rank 0 asks.)"""
        if not self.snapshots.ready.is_set() or (self._thread and self._thread.is_alive()):
            return False
        config = self.config
        steps_due = config.checkpoint_steps and self.state.step + 1 - self._last_step >= config.checkpoint_steps
        return bool(steps_due) or time.monotonic() - self._last >= config.checkpoint_seconds

    def keep(self, place: Place, *, durable: bool) -> None:
        """A step is made, and equally by all: snapshot the state if that is due."""
        now = time.monotonic()
        if durable:
            self._save(place)
        elif now >= self._hot_due and self.snapshots.file and self.snapshots.idle:
            self.snapshots.take(self.cursor.dump(), pin=False)
        else:
            return
        end = time.monotonic()
        self._hot_due = end + (self.config.hot_seconds or max(0.25, 100 * (end - now)))

    def flush(self, place: Place) -> None:
        """Make the state as it is now durable, and wait for it: nobody else carries it on."""
        self.snapshots.ready.wait()
        if self._thread:
            self._thread.join()
        self._save(place)
        if self._thread:
            self._thread.join()

    def restore(self, known: int) -> None:
        """Nobody was training: take the newest durable checkpoint if it is newer than step `known` of a snapshot."""
        target = torch.empty_like(self.state.memory, device="cpu")
        step, extra = self.durable.restore(raw(target), known)
        if step > known:
            self.state.memory.copy_(target)
            self.cursor.load(extra)
            self.state.step = self._last_step = step
            self.note("restored", step=step, tier="durable")
        elif known < 0:
            self.state.step = 0
            self.note("restored", step=0, tier="none")
        else:
            self.note("restored", step=known, tier="hot")

    def close(self, *, remove: bool) -> None:
        """End the threads; `remove`: shared memory, too, since the state is safe elsewhere or the run is over."""
        self.durable.closing.set()
        if self._thread:
            self._thread.join()
        self.snapshots.close(remove=remove)

    def _recall(self, path: Any, identity: str, layout: str, fingerprint: str) -> hot.Hot | None:
        """The file of this worker, its newest whole snapshot loaded. Raises ConfigError."""
        memory = self.state.memory
        size = memory.numel() * memory.element_size()
        hot.sweep()
        try:
            file = hot.Hot(path, identity, layout, fingerprint, size)
        except OSError as error:
            self._say(f"no snapshots in shared memory: {path} cannot be used ({error.strerror}).")
            return None
        found = next(file.read(), None)
        for text in file.damage:
            self._say(f"{text}: it is not used.")
            self.note("torn", object=str(path), why=text)
        if found:
            snapshot, extra = found
            target = memory if memory.device.type == "cpu" else torch.empty_like(memory, device="cpu")
            file.load(snapshot, raw(target))
            if target is not memory:
                memory.copy_(target)
            self.cursor.load(extra)
            self.state.step, self.crc = snapshot.step, snapshot.crc
            self._say(f"step {snapshot.step} was found in shared memory ({path})")
        return file

    def _save(self, place: Place) -> None:
        rank, _ = place
        step, extra = self.state.step, self.cursor.dump()
        slot = self.snapshots.take(extra, pin=True)
        if slot is None:
            return
        if rank or step <= self.durable.saved_step:
            self.snapshots.unpin(slot)
            return
        self._last, self._last_step = time.monotonic(), step

        def upload() -> None:
            self.durable.write(step, self.snapshots.view(slot), extra)
            self.snapshots.unpin(slot)

        self._thread = threading.Thread(target=upload, name="checkpoint", daemon=True)
        self._thread.start()

    def _say(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
