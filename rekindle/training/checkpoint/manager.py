"""Checkpoints in two tiers: snapshots in shared memory every moment, durable ones in the object store now and then.

Survivors carry the state, so both are for the loss of everyone. Every worker calls `keep` after each step: a snapshot
is due by its own clock. That a durable checkpoint is due, rank 0 decides; it rides on the gradients of the next step,
so that all copy the same state. The loop waits for a copy in memory, threads do the rest: see hot.py, durable.py.
"""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any, TypeVar

import torch

from rekindle.errors import ConfigError, StorageError, say
from rekindle.storage import Store, retry_until
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.checkpoint.interval import Interval
from rekindle.training.checkpoint.remote import Draft, Durable, Manifest, Place
from rekindle.training.checkpoint.retention import Retention
from rekindle.training.checkpoint.snapshots import Snapshots
from rekindle.training.data import LoaderState
from rekindle.training.group.interruptible import Broken
from rekindle.training.state import State, raw

SHARE = 0.01  # of the time that training may wait for snapshots, unless hot_seconds says how often
SHORTEST = 0.25  # seconds between two snapshots then, at least
PATIENCE = 3.0  # seconds for the object store to say whether it knows a newer step than shared memory
T = TypeVar("T")
Run = Callable[[Callable[[], Manifest | None]], Manifest | None]


class Checkpoints:
    """What one worker keeps of its state, and where it begins: its newest snapshot is loaded at once."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        identity: str,
        fingerprint: dict[str, Any],
        state: State,
        cursor: LoaderState,
        note: Callable[..., None],
        leaving: threading.Event,
    ) -> None:
        self.state, self.config, self.cursor, self.note, self.leaving = state, state.config, cursor, note, leaving
        config, layout = state.config, _hash(state.layout)
        retention = Retention(store, prefix, config.keep_checkpoints, config.keep_hours)
        self.durable = Durable(store, prefix, identity, layout, fingerprint, retention)
        self.interval = Interval(config.checkpoint_seconds, config.checkpoint_steps)
        self.crc = 0  # of the state, if it comes from shared memory: equal ones need not be sent around
        run = snapshot_file.run_name(identity, prefix)
        self.snapshots = Snapshots(state, self._recall(run, identity, layout, _hash(fingerprint)))
        self._hot_due = 0.0
        self._followed = False  # the last durable checkpoint was not ours to complete
        self._draft: Draft | None = None
        self._thread: threading.Thread | None = None

    # -- while training -----------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether it is time for a durable checkpoint after this step, and it can be made. (Rank 0 asks.)"""
        if not self.snapshots.ready.is_set() or self._busy:
            return False
        return self._followed or self.interval.due(self.state.step + 1)

    def keep(self, place: Place, *, durable: bool) -> None:
        """A step is made, and equally by all: snapshot the state if that is due."""
        self.cursor.advance(self.state.step)
        now = time.monotonic()
        if durable:
            self._save(place, commit=False)  # its checksum would slow the upload
            self.interval.cost = time.monotonic() - now
        elif now >= self._hot_due and self.snapshots.idle:
            self.snapshots.take(self.cursor.dump())
            end = time.monotonic()
            self._hot_due = end + (self.config.hot_seconds or max(SHORTEST, (end - now) / SHARE))

    def flush(self, place: Place, seconds: Callable[[], float]) -> bool:
        """Make the state durable as it is now, and wait, until `seconds()` is 0: nobody else carries it on."""
        self.snapshots.ready.wait(max(0.0, min(seconds(), 3600.0)))
        if self._draft and self._draft.step < self.state.step:
            self._draft.stop.set()
        self._join(seconds)
        if not self._busy:
            self._save(place, commit=True)
        self._join(seconds)
        draft, step = self._draft, self.state.step
        if draft and draft.step == step and not draft.problem and (place[0] == 0 or self._completed(step, seconds)):
            return True
        problem = draft.problem if draft and draft.problem else "rank 0 did not complete it"
        where = f" It remains in {self.snapshots.file.path}." if self.snapshots.file else ""
        say(f"the state of step {step} is not in the object store: {problem}.{where}")
        return False

    def _join(self, seconds: Callable[[], float]) -> None:
        if self._thread:
            self._thread.join(max(0.0, min(seconds(), 3600.0)))

    def _completed(self, step: int, seconds: Callable[[], float]) -> bool:
        """Whether rank 0 has completed the checkpoint that we gave our share to."""
        while seconds() > 0:
            with suppress(StorageError):
                if self.durable.newest() >= step:
                    return True
            time.sleep(0.2)
        return False

    def close(self, *, remove: bool) -> None:
        """Stop; `remove`: shared memory, too, since the state is safe elsewhere or the run is over."""
        if self._draft:
            self._draft.stop.set()  # its threads end with the process, if not before
        self.snapshots.close(remove=remove)

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _save(self, place: Place, *, commit: bool) -> None:
        self.interval.began(self.state.step)
        self._followed = place[0] > 0
        if self._busy and self._draft:  # as a follower: a slow store must not delay training
            self._draft.stop.set()
            return
        loader = self.cursor.dump()
        slot = self.snapshots.take(loader, pin=True, commit=commit)
        if slot is None:
            return
        draft = self._draft = Draft(self.state.step, self.snapshots.view(slot), loader, self.interval.facts())
        self._thread = threading.Thread(target=self._write, args=(draft, place, slot), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, draft: Draft, place: Place, slot: int) -> None:
        began = time.monotonic()
        try:
            if self.durable.write(draft, place):
                draft.problem = ""
        except ConfigError as error:  # another run took the prefix meanwhile; ours goes on without
            draft.problem = str(error)
            say(f"the checkpoint of step {draft.step} is not written: {error}")
        finally:
            self.snapshots.unpin(slot)
        if place[0] == 0 and not draft.problem:
            seconds = time.monotonic() - began
            self.interval.cost, self.interval.duration = self.interval.cost + draft.cpu, seconds
            self.note(
                "checkpoint",
                step=draft.step,
                seconds=round(seconds, 3),
                bytes=len(draft.state),
                uploaded=draft.uploaded,
                name=snapshot_file.worker_name(),
            )

    # -- where to begin -----------------------------------------------------------------------------------------------

    def restore(self, known: int, run: Run = lambda read: read(), over: Callable[[], bool] = lambda: False) -> None:
        """Nobody was training: take the newest durable checkpoint, if it is newer than step `known` of a snapshot.

        It is read by `run`, which may raise Broken at any moment; while the store is away, `over` says whether to wait.
        """
        found = self._newer(known, run, over)
        while self.durable.damage:
            uri, why = self.durable.damage.pop(0)
            self.note("torn", object=uri, why=why)
        if found:
            say(f"going on from step {self.state.step} ({self.durable.store.uri(self.durable.prefix)})")
        elif known < 0:
            self.state.step = 0
        tier = "durable" if found else "hot" if known >= 0 else "none"
        self.note("restored", step=max(known, self.state.step), tier=tier, name=snapshot_file.worker_name())

    def _newer(self, known: int, run: Run, over: Callable[[], bool]) -> bool:
        """Load a durable checkpoint newer than `known`, if there is one; without a snapshot, wait for the store."""
        try:
            if known >= 0 and _within(PATIENCE, copy(self.durable).newest) <= known:
                return False
        except (StorageError, TimeoutError) as error:
            say(f"going on from step {known} of shared memory; whether there is a newer checkpoint: {error}")
            return False
        target, given_up = torch.empty_like(self.state.memory, device="cpu"), threading.Event()
        durable = copy(self.durable)  # which one that is given up may use for a while

        def read() -> Manifest | None:
            try:
                return durable.restore(raw(target), known)
            except StorageError as error:
                if given_up.is_set() or over():
                    raise Broken("the group is about to change; nobody waits in it for the object store") from error
                raise

        try:
            manifest = run(lambda: retry_until(read, self.leaving, "for the newest checkpoint"))
        finally:
            given_up.set()
        if manifest:
            self.state.memory.copy_(target)
            self.cursor.load(base64.b64decode(manifest["loader"]))
            self.state.step, self.crc = manifest["step"], 0
            self.interval.resume(self.state.step, manifest["facts"])
        return manifest is not None

    def _recall(self, run: str, identity: str, layout: str, fingerprint: str) -> snapshot_file.Hot | None:
        """The file of this worker, its newest whole snapshot loaded. Raises ConfigError."""
        memory, path = self.state.memory, snapshot_file.path(run, snapshot_file.node_name())
        try:
            snapshot_file.sweep(run)
            file = snapshot_file.Hot(path, identity, layout, fingerprint, memory.numel() * memory.element_size())
        except OSError as error:
            say(f"no snapshots in shared memory: {error}.")
            return None
        found = next(file.read(), None)
        for text in file.damage:
            say(f"{text}: it is not used.")
            self.note("torn", object=str(path), why=text)
        if found:
            snapshot, loader = found
            target = memory if memory.device.type == "cpu" else torch.empty_like(memory, device="cpu")
            file.load(snapshot, raw(target))
            if target is not memory:
                memory.copy_(target)
            self.cursor.load(loader)
            self.state.step, self.crc = snapshot.step, snapshot.crc
            say(f"step {snapshot.step} was found in shared memory ({path})")
            if file.foreign:
                say("it was written by another kind of worker (torch build, threads, ...): bits may differ.")
        if file.ours:
            return file
        say(f"no snapshots in shared memory: another process holds {path}.")
        file.close()
        return None


def _within(seconds: float, call: Callable[[], T]) -> T:
    """`call()`, or TimeoutError after some seconds."""
    found: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="patience", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return found[0]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
