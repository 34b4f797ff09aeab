"""The durable tier: checkpoints in the object store, as chunks named by their hash, a manifest, a conditional write.

    <prefix>/chunks/<sha256>              CHUNK bytes of the state; what is there already is not uploaded again
    <prefix>/manifests/<step>-<sha>.json  a checkpoint exists when its manifest does: {identity, step, chunks, ...}
    <prefix>/latest                       {manifest}: moved by compare-and-swap only, and only forward
    <prefix>/readers/<id>                 somebody is reading: nothing is deleted meanwhile

Every member of a group uploads its share of the chunks; rank 0 waits for those of the others (or uploads them itself
if they do not come), then writes manifest and `latest`. A reader checks every chunk against its name and falls back
to the checkpoint before, saying what was wrong. Needs no torch.
"""

import base64
import hashlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rekindle.errors import ConfigError, Conflict, RekindleError, StorageError, say
from rekindle.storage import NotFound, Store
from rekindle.training.checkpoint.retention import Retention
from rekindle.training.group.tree import share

CHUNK = 8 << 20  # bytes; also what one request carries
PARALLEL = 4  # requests at once, of each worker
STALL = 5.0  # seconds in which no chunk of another member arrives, after which rank 0 uploads what is missing

Manifest = dict[str, Any]
Place = tuple[int, int]  # rank and size of a group


@dataclass
class Draft:
    """A checkpoint on its way: the state (which must not change meanwhile), and what is done of it."""

    step: int
    state: memoryview
    loader: bytes = b""  # state of the workload's own data loader
    facts: dict[str, Any] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)  # it is not worth the trouble any more
    cpu: float = 0.0  # seconds that our threads needed
    problem: str = "there was no time for it"
    names: dict[int, str] = field(default_factory=dict)
    before: set[str] | None = None  # chunks that were in the store when we began

    @property
    def count(self) -> int:
        return -(-len(self.state) // CHUNK)

    def chunk(self, number: int) -> memoryview:
        return self.state[number * CHUNK : (number + 1) * CHUNK]

    def name(self, number: int) -> str:
        """The hash of a chunk, computed once."""
        if number not in self.names:
            self.names[number] = hashlib.sha256(self.chunk(number)).hexdigest()
        return self.names[number]

    @property
    def uploaded(self) -> int:
        """Bytes that were not there before, whoever brought them."""
        before = self.before or set()
        return sum(len(self.chunk(number)) for number, name in self.names.items() if name not in before)


class Durable:
    """The checkpoints of one run (`identity`, and `layout` of its state) below one prefix. For one thread at a time."""

    def __init__(
        self, store: Store, prefix: str, identity: str, layout: str, fingerprint: dict[str, Any], retention: Retention
    ) -> None:
        self.store, self.prefix, self.identity, self.layout = store, prefix, identity, layout
        self.fingerprint, self.retention = fingerprint, retention
        self.damage: list[tuple[str, str]] = []  # objects found damaged, and in what way
        self._damaged: set[str] = set()  # names of manifests and chunks that are as good as absent
        self._etag: str | None = None  # of `latest`, as we know it
        self._newest = ""  # the manifest it names

    # -- reading ------------------------------------------------------------------------------------------------------

    def newest(self) -> int:
        """The step of the newest checkpoint, its chunks unread; -1: none. Raises ConfigError, StorageError."""
        return _step(self._latest())

    def restore(self, target: memoryview, beyond: int) -> Manifest | None:
        """Load the newest whole checkpoint after step `beyond`; what is damaged is said and noted in `damage`.

        Raises ConfigError if the prefix belongs to another run, StorageError if the store cannot be read.
        """
        if not self._latest() and not self._manifests():
            return None
        lease = f"{self.prefix}/readers/{uuid.uuid4().hex}"
        self.store.put(lease, b"")
        try:
            return self._restore(target, beyond, self._latest())
        finally:
            with suppress(RekindleError):  # what is read is read; the lease runs out
                self.store.delete([lease])

    def _restore(self, target: memoryview, beyond: int, newest: str) -> Manifest | None:
        names = self._manifests()
        for name in [*([newest] if newest else []), *(name for name in reversed(names) if name != newest)]:
            if _step(name) <= beyond:
                continue
            try:
                manifest = self._read(name)
                self._load(manifest, target)
            except (NotFound, _Damaged, KeyError) as error:
                if (now := self._latest()) != newest and now:  # it went because there is a newer one
                    return self._restore(target, beyond, now)
                self._spoilt(name, error)
                continue
            if manifest["fingerprint"] != self.fingerprint:
                say(f"it was written on another kind of machine ({manifest['fingerprint']}): bits may differ.")
            return manifest
        if names and beyond < 0:
            say(f"no checkpoint below {self.store.uri(self.prefix)} is whole: beginning again at step 0")
        return None

    def _spoilt(self, name: str, error: Exception) -> None:
        say(f"the checkpoint {self.store.uri(name)} cannot be used: {error}. Trying the one before.")
        self.damage.append((self.store.uri(name), str(error)))
        self._damaged.add(name)
        if name == self._newest:
            self._newest = ""  # the next one takes its place, whatever its step

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
            if name not in self._damaged:
                self._read(name)
        except (NotFound, _Damaged, ValueError, KeyError, TypeError) as error:
            say(f"{self.store.uri(key)} names no whole manifest ({error}): it will be written anew")
            self.damage.append((self.store.uri(key), str(error)))
            name = ""
        self._etag, self._newest = etag, "" if name in self._damaged else name
        return self._newest

    def _manifests(self) -> list[str]:
        return sorted(entry.key for entry in self.store.list(f"{self.prefix}/manifests/"))

    def _read(self, name: str) -> Manifest:
        """A manifest, whole and of this run. Raises NotFound, _Damaged, ConfigError."""
        data = self.store.get(name)
        if not name.endswith(f"-{_short(data)}.json"):
            raise _Damaged("its manifest is damaged, its hash is not the one in its name")
        manifest = json.loads(data)
        if (manifest["identity"], manifest["layout"]) != (self.identity, self.layout):
            raise ConfigError(
                f"{self.store.uri(name)} belongs to another run (identity {manifest['identity'][:12]}, this run's is "
                f"{self.identity[:12]}, made of config, data digest and model): nothing was changed. "
                "Give this run another `checkpoints` prefix, or delete that one."
            )
        return manifest

    def _load(self, manifest: Manifest, target: memoryview) -> None:
        size, chunks = manifest["chunk"], manifest["chunks"]
        if manifest["bytes"] != len(target):
            raise _Damaged(f"it holds {manifest['bytes']} bytes and not {len(target)}")

        def fetch(number: int) -> None:
            name, place = chunks[number], target[number * size : (number + 1) * size]
            key = f"{self.prefix}/chunks/{name}"
            found = ""
            for _ in range(2):  # what was damaged on its way only is not in the second answer
                data = self.store.get(key)
                found = hashlib.sha256(data).hexdigest()
                if found == name and len(data) == len(place):
                    place[:] = data
                    return
            self._damaged.add(name)
            with suppress(RekindleError):  # so that whoever writes next knows, too, that it is not there
                self.store.delete([key])
            raise _Damaged(f"chunk {number} ({name}) is damaged: its sha256 is {found}")

        parallel(fetch, range(len(chunks)))

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, draft: Draft, place: Place) -> bool:
        """Upload our share of a checkpoint, and as rank 0 complete it; tries again until `draft.stop`: then False.

        Raises ConfigError if the prefix belongs to another run.
        """
        pause, said = 0.2, time.monotonic() - 5
        while not draft.stop.is_set():
            try:
                return self._write(draft, place)
            except Conflict:
                self._etag = None  # somebody else moved `latest`; or we did, and did not hear of it
                draft.stop.wait(0.05)
            except StorageError as error:
                draft.problem = str(error)
                if time.monotonic() - said >= 10:
                    say(f"the checkpoint of step {draft.step} is not written yet: {error}")
                    said = time.monotonic()
                draft.stop.wait(pause)
                pause = min(2 * pause, 10)
        return False

    def _write(self, draft: Draft, place: Place) -> bool:
        if self._etag is None:
            self._latest()  # nothing is written below another run's prefix
        there = self._there()
        if _step(self._newest) >= draft.step and there.issuperset(self._read(self._newest)["chunks"]):
            return True  # as new a one is there
        draft.before = set(there) if draft.before is None else draft.before
        mine = share(draft.count, place[1], place[0])

        def work(number: int) -> None:
            if not draft.stop.is_set() and draft.name(number) not in there and number in mine:
                self._put(draft, there, number)

        others = [] if place[0] else [number for number in range(draft.count) if number not in mine]
        draft.cpu += parallel(work, [*mine, *others])
        if place[0]:
            return not draft.stop.is_set()
        self._gather(draft, others, there)
        return not draft.stop.is_set() and self._commit(draft)

    def _put(self, draft: Draft, there: set[str], number: int) -> None:
        name = draft.name(number)
        self.store.put(f"{self.prefix}/chunks/{name}", draft.chunk(number))
        there.add(name)
        self._damaged.discard(name)

    def _there(self) -> set[str]:
        """The chunks that are in the store: a write is all or nothing."""
        start = f"{self.prefix}/chunks/"
        return {entry.key[len(start) :] for entry in self.store.list(start)} - self._damaged

    def _gather(self, draft: Draft, others: list[int], there: set[str]) -> None:
        """Have the chunks of the other members, whatever becomes of them."""
        moved, missing = time.monotonic(), len(others) + 1
        while left := [number for number in others if draft.name(number) not in there]:
            if len(left) < missing:
                moved, missing = time.monotonic(), len(left)
            elif time.monotonic() - moved > STALL:
                parallel(partial(self._put, draft, there), left)
            if draft.stop.wait(0.1):
                return
            there |= self._there()

    def _commit(self, draft: Draft) -> bool:
        about = {
            "identity": self.identity,
            "layout": self.layout,
            "step": draft.step,
            "bytes": len(draft.state),
            "chunk": CHUNK,
            "chunks": [draft.name(number) for number in range(draft.count)],
            "loader": base64.b64encode(draft.loader).decode(),
            "facts": draft.facts,
            "fingerprint": self.fingerprint,
        }
        data = json.dumps(about).encode()
        key = f"{self.prefix}/manifests/{draft.step:010d}-{_short(data)}.json"
        self.store.put(key, data)
        condition: Any = {"if_match": self._etag} if self._etag else {"if_absent": True}
        self._etag = self.store.put(f"{self.prefix}/latest", json.dumps({"manifest": key}).encode(), **condition)
        self._newest = key
        self.retention.keep(key, about["chunks"])
        return True


class _Damaged(Exception):
    """A checkpoint that does not hold what it says."""


def parallel(work: Callable[[int], None], numbers: Iterable[int]) -> float:
    """`work` on each number, a few at once; gives the CPU seconds, raises the first error.

    Its threads never hold up the end of the process.
    """
    errors: list[BaseException] = []
    seconds: list[float] = []
    todo, lock = iter(numbers), threading.Lock()

    def run() -> None:
        while not errors:
            with lock:
                number = next(todo, None)
            if number is None:
                break
            try:
                work(number)
            except BaseException as error:
                errors.append(error)
        seconds.append(time.thread_time())

    threads = [threading.Thread(target=run, name="chunks", daemon=True) for _ in range(PARALLEL)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(seconds)


def _step(name: str) -> int:
    """The step that a manifest's name tells; -1 of no name."""
    return int(name.rpartition("/")[2].partition("-")[0]) if name else -1


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
