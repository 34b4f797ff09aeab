"""Durable checkpoints in the object store: chunks named by their hash, a manifest, and one conditional write.

    <prefix>/chunks/<sha256>              CHUNK bytes of the state; what is there already is not uploaded again
    <prefix>/manifests/<step>-<sha>.json  a checkpoint exists when its manifest does: {identity, step, chunks, ...}
    <prefix>/latest                       {manifest}: moved by compare-and-swap only, and only forward

The loop waits for a copy of the state in memory; a thread does the rest, one checkpoint at a time. A reader checks
every chunk against its name and falls back to the checkpoint before, saying what was wrong.
"""

import hashlib
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from steps.errors import ConfigError, Conflict, StorageError
from steps.storage import NotFound, Store
from steps.training.state import State, raw

CHUNK = 8 << 20  # bytes; also what one request carries
PARALLEL = 4

Manifest = dict[str, Any]


class Checkpoints:
    """The checkpoints of one run (`identity`) below one prefix. Only the group's rank 0 saves."""

    def __init__(self, store: Store, prefix: str, identity: str, fingerprint: dict[str, Any], state: State) -> None:
        self.store, self.prefix, self.identity, self.fingerprint = store, prefix, identity, fingerprint
        self.state, self.config = state, state.config
        self.saved_step = -1  # of the newest durable checkpoint that we know of
        self._layout = hashlib.sha256(json.dumps(state.layout).encode()).hexdigest()
        self._copy = torch.empty(0)
        self._present: set[str] = set()  # chunks known to be whole in the store
        self._etag: str | None = None  # of `latest`, as we know it
        self._newest = ""  # the whole manifest it names
        self._last = time.monotonic()
        self._last_step = 0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def save(self, *, now: bool = False) -> None:
        """Begin a checkpoint if one is due and none is under way; `now`: make one in any case, and wait for it."""
        step, config = self.state.step, self.config
        steps_due = config.checkpoint_steps and step - self._last_step >= config.checkpoint_steps
        if not (now or steps_due or time.monotonic() - self._last >= config.checkpoint_seconds):
            return
        if self._thread and self._thread.is_alive():
            if not now:
                return
            self._thread.join()
        if step > self.saved_step:
            self._last, self._last_step = time.monotonic(), step
            if not self._copy.numel():
                self._copy = torch.empty_like(self.state.memory, device="cpu")
            self._copy.copy_(self.state.memory)
            self._thread = threading.Thread(target=self._upload, args=(step,), name="checkpoint", daemon=True)
            self._thread.start()
            if now:
                self._thread.join()

    def close(self) -> None:
        """End the thread: after the last step no checkpoint is worth waiting for."""
        self._closing.set()
        if self._thread:
            self._thread.join()

    def restore(self) -> None:
        """Load the newest whole checkpoint into the state, or leave it as it is at step 0.

        Raises ConfigError if the prefix belongs to another run, StorageError if the store cannot be read.
        """
        newest = self._latest()
        listed = sorted((entry.key for entry in self.store.list(f"{self.prefix}/manifests/")), reverse=True)
        for name in [*([newest] if newest else []), *(name for name in listed if name != newest)]:
            try:
                manifest = self._read(name)
                self._load(manifest)
            except (NotFound, _Damaged) as error:
                self._say(f"the checkpoint {self.store.uri(name)} cannot be used: {error}. Trying the one before.")
                continue
            self.state.step = self.saved_step = self._last_step = manifest["step"]
            self._present.update(manifest["chunks"])
            self._say(f"going on from step {self.state.step} ({self.store.uri(name)})")
            if manifest["fingerprint"] != self.fingerprint:
                self._say(f"it was written on another kind of machine ({manifest['fingerprint']}): bits may differ.")
            return
        if listed:
            self._say(f"no checkpoint below {self.store.uri(self.prefix)} is whole: beginning again at step 0")
        self.state.step = 0

    def _latest(self) -> str:
        """The manifest that `latest` names ("": none), and what its compare-and-swap needs. Raises ConfigError."""
        key = f"{self.prefix}/latest"
        self._etag, self._newest = None, ""
        try:
            data, etag = self.store.get_with_etag(key)
        except NotFound:
            return ""
        try:
            name = str(json.loads(data)["manifest"])
            self._read(name)
        except (NotFound, _Damaged, ValueError, KeyError, TypeError) as error:
            self._say(f"{self.store.uri(key)} names no whole manifest ({error}): it will be written anew")
            name = ""
        self._etag, self._newest = etag, name
        return name

    def _read(self, name: str) -> Manifest:
        """A manifest, whole and of this run. Raises NotFound, _Damaged, ConfigError."""
        data = self.store.get(name)
        if not name.endswith(f"-{_short(data)}.json"):
            raise _Damaged("its manifest is damaged, its hash is not the one in its name")
        manifest = json.loads(data)
        if (manifest["identity"], manifest["layout"]) != (self.identity, self._layout):
            raise ConfigError(
                f"{self.store.uri(name)} belongs to another run (identity {manifest['identity'][:12]}, this run's is "
                f"{self.identity[:12]}, made of config, data digest and model): nothing was changed. "
                "Give this run another `checkpoints` prefix, or delete that one."
            )
        return manifest

    def _load(self, manifest: Manifest) -> None:
        memory = self.state.memory
        target = torch.empty_like(memory, device="cpu")
        view = raw(target)
        if manifest["bytes"] != len(view):
            raise _Damaged(f"it holds {manifest['bytes']} bytes and not {len(view)}")

        def fetch(number: int) -> None:
            name = manifest["chunks"][number]
            data = self.store.get(f"{self.prefix}/chunks/{name}")
            if (found := hashlib.sha256(data).hexdigest()) != name:
                raise _Damaged(f"chunk {number} ({name}) is damaged: its sha256 is {found}")
            view[number * CHUNK : (number + 1) * CHUNK] = data

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(fetch, range(len(manifest["chunks"]))))
        memory.copy_(target)

    def _upload(self, step: int) -> None:
        pause = 0.5
        while not self._closing.is_set():
            try:
                self._write(step)
                return
            except Conflict:
                self._etag = None
            except StorageError as error:
                self._say(f"the checkpoint of step {step} is not written yet: {error}")
            except ConfigError as error:  # another run took the prefix meanwhile; ours goes on without
                self._say(f"the checkpoint of step {step} is not written: {error}")
                return
            self._closing.wait(pause)
            pause = min(2 * pause, 30)

    def _write(self, step: int) -> None:
        if self._etag is None:
            self._latest()  # nothing is written below another run's prefix
        view = raw(self._copy)

        def put(at: int) -> str:
            data = view[at : at + CHUNK]
            name = hashlib.sha256(data).hexdigest()
            if name not in self._present:
                self.store.put(f"{self.prefix}/chunks/{name}", data)
            return name

        with ThreadPoolExecutor(PARALLEL) as pool:
            chunks = list(pool.map(put, range(0, len(view), CHUNK)))
        self._present.update(chunks)
        manifest = {
            "identity": self.identity,
            "layout": self._layout,
            "step": step,
            "bytes": len(view),
            "chunks": chunks,
            "fingerprint": self.fingerprint,
        }
        data = json.dumps(manifest).encode()
        key = f"{self.prefix}/manifests/{step:010d}-{_short(data)}.json"
        self.store.put(key, data)
        if key > self._newest:  # the step leads the name; another process may be ahead of us
            value = json.dumps({"manifest": key}).encode()
            condition: Any = {"if_match": self._etag} if self._etag else {"if_absent": True}
            self._etag = self.store.put(f"{self.prefix}/latest", value, **condition)
            self._newest, self.saved_step = key, step
            self._retain()

    def _retain(self) -> None:
        """Delete all but the newest checkpoints: first the manifests, then the chunks that only they needed."""
        names = sorted(entry.key for entry in self.store.list(f"{self.prefix}/manifests/"))
        old, kept = names[: -self.config.keep_checkpoints], names[-self.config.keep_checkpoints :]
        if not old:
            return
        needed = {chunk for name in kept for chunk in self._chunks(name)}
        unneeded = {chunk for name in old for chunk in self._chunks(name)} - needed
        self.store.delete(old)
        self.store.delete([f"{self.prefix}/chunks/{chunk}" for chunk in sorted(unneeded)])
        self._present -= unneeded

    def _chunks(self, manifest: str) -> list[str]:
        try:
            return json.loads(self.store.get(manifest))["chunks"]
        except (NotFound, ValueError, KeyError, TypeError):
            return []  # damaged, or deleted by another rank 0: nothing can be read by it

    def _say(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class _Damaged(Exception):
    """A checkpoint that does not hold what it says."""


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
