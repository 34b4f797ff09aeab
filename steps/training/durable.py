"""Durable checkpoints in the object store: chunks named by their hash, a manifest, and one conditional write.

    <prefix>/chunks/<sha256>              CHUNK bytes of the state; what is there already is not uploaded again
    <prefix>/manifests/<step>-<sha>.json  a checkpoint exists when its manifest does: {identity, step, chunks, ...}
    <prefix>/latest                       {manifest}: moved by compare-and-swap only, and only forward

A reader checks every chunk against its name and falls back to the checkpoint before, saying what was wrong.
"""

import base64
import hashlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from steps.errors import ConfigError, Conflict, StorageError
from steps.storage import NotFound, Store
from steps.training.config import TrainConfig

CHUNK = 8 << 20  # bytes; also what one request carries
PARALLEL = 4

Manifest = dict[str, Any]


class Durable:
    """The checkpoints of one run (`identity`, and `layout` of its state) below one prefix."""

    def __init__(
        self, store: Store, prefix: str, identity: str, layout: str, fingerprint: dict[str, Any], config: TrainConfig
    ) -> None:
        self.store, self.prefix, self.identity, self.fingerprint = store, prefix, identity, fingerprint
        self.config = config
        self.saved_step = -1  # of the newest durable checkpoint that we know of
        self._layout = layout
        self._present: set[str] = set()  # chunks known to be whole in the store
        self._etag: str | None = None  # of `latest`, as we know it
        self._newest = ""  # the whole manifest it names
        self.closing = threading.Event()

    def restore(self, target: memoryview, beyond: int) -> tuple[int, bytes]:
        """Load the newest whole checkpoint after step `beyond`; gives its step (-1: none) and the loader's state.

        Raises ConfigError if the prefix belongs to another run, StorageError if the store cannot be read.
        """
        newest = self._latest()
        listed = sorted((entry.key for entry in self.store.list(f"{self.prefix}/manifests/")), reverse=True)
        for name in [*([newest] if newest else []), *(name for name in listed if name != newest)]:
            try:
                manifest = self._read(name)
                if manifest["step"] <= beyond:
                    return -1, b""
                self._load(manifest, target)
            except (NotFound, _Damaged) as error:
                self._say(f"the checkpoint {self.store.uri(name)} cannot be used: {error}. Trying the one before.")
                continue
            self.saved_step = manifest["step"]
            self._present.update(manifest["chunks"])
            if manifest["fingerprint"] != self.fingerprint:
                self._say(f"it was written on another kind of machine ({manifest['fingerprint']}): bits may differ.")
            self._say(f"going on from step {self.saved_step} ({self.store.uri(name)})")
            return self.saved_step, base64.b64decode(manifest.get("loader", ""))
        if listed:
            self._say(f"no checkpoint below {self.store.uri(self.prefix)} is whole")
        return -1, b""

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

    def _load(self, manifest: Manifest, target: memoryview) -> None:
        view = memoryview(bytearray(len(target)))
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
        target[:] = view

    def write(self, step: int, view: memoryview, extra: bytes) -> None:
        pause = 0.5
        while not self.closing.is_set():
            try:
                self._write(step, view, extra)
                return
            except Conflict:
                self._etag = None
            except StorageError as error:
                self._say(f"the checkpoint of step {step} is not written yet: {error}")
            except ConfigError as error:  # another run took the prefix meanwhile; ours goes on without
                self._say(f"the checkpoint of step {step} is not written: {error}")
                return
            self.closing.wait(pause)
            pause = min(2 * pause, 30)

    def _write(self, step: int, view: memoryview, extra: bytes) -> None:
        if self._etag is None:
            self._latest()  # nothing is written below another run's prefix

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
            "loader": base64.b64encode(extra).decode(),
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
