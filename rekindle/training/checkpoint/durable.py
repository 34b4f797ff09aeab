"""Durable checkpoints in the object store: chunks of the state, and a manifest per checkpoint.

    <prefix>/chunks/<sha256>              CHUNK_BYTES of the state; stored once for all checkpoints
    <prefix>/manifests/<step>-<sha>.json  the manifest {identity, step, chunks, ...}; a checkpoint
                                          exists if its manifest does
    <prefix>/latest                       {manifest}: the newest; changed by compare-and-swap
    <prefix>/readers/<id>                 the lease of a reader, which prevents deletions

Every member of a group uploads its share of the chunks. Rank 0 waits for the other members (and
uploads missing chunks itself if they stall), then writes the manifest and `latest`. A reader
compares the sha256 of every chunk with the name of the chunk; if a checkpoint is damaged, the
reader reports the damage and reads the previous checkpoint. This module does not import torch.
"""

import base64
import hashlib
import json
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from argolocal.common.json_text import to_json
from argolocal.errors import InvalidDocument
from rekindle.errors import ConfigError, Conflict, RekindleError, StorageError, say
from rekindle.storage import NotFound, Store
from rekindle.training.checkpoint import manifest as manifest_file
from rekindle.training.checkpoint.checkpoint_retention import Retention
from rekindle.training.checkpoint.chunks import (
    CHUNK_BYTES,
    DamagedChunk,
    fetch_chunk,
    run_parallel,
)
from rekindle.training.checkpoint.manifest import (
    DamagedCheckpoint,
    IntervalFacts,
    Manifest,
    parse_step,
)
from rekindle.training.group.tree import rank_leaves
from rekindle.training.spec import Fingerprint

# after this time without a new chunk from other members, rank 0 uploads the missing chunks
STALL_TIMEOUT_S = 5.0


class RankSize(NamedTuple):
    """The rank of a process in its group, and the size of the group."""

    rank: int
    size: int


@dataclass
class Upload:
    """The upload of one checkpoint, and its progress. The state must not change during the
    upload."""

    step: int
    state: memoryview
    loader: bytes = b""  # state of the workload's own data loader
    facts: IntervalFacts = field(
        default_factory=lambda: IntervalFacts(trained_seconds=0.0, losses=0)
    )
    # set to cancel the upload
    stop: threading.Event = field(default_factory=threading.Event)
    cpu_seconds: float = 0.0  # CPU time of this worker's upload threads
    # reason why the checkpoint is not written yet; "" once it is written
    problem: str = "not started"
    chunk_names: dict[int, str] = field(default_factory=dict)  # chunk number → hash
    # names of the chunks that were already in the store when the upload started
    existing_chunks: set[str] | None = None

    @property
    def chunk_count(self) -> int:
        return -(-len(self.state) // CHUNK_BYTES)

    def chunk(self, number: int) -> memoryview:
        return self.state[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    def chunk_name(self, number: int) -> str:
        if number not in self.chunk_names:
            self.chunk_names[number] = hashlib.sha256(self.chunk(number)).hexdigest()
        return self.chunk_names[number]

    @property
    def uploaded_bytes(self) -> int:
        """Number of bytes that all workers have uploaded, without chunks that already existed."""
        existing_chunks = self.existing_chunks or set()
        return sum(
            len(self.chunk(number))
            for number, name in self.chunk_names.items()
            if name not in existing_chunks
        )


class RemoteCheckpoints:
    """The durable checkpoints below a key prefix, of the run with this `identity` and `layout` of
    its state. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        identity: str,
        layout: str,
        fingerprint: Fingerprint,
        retention: Retention,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self.identity = identity
        self.layout = layout
        self.fingerprint = fingerprint
        self.retention = retention
        self.damage: list[tuple[str, str]] = []  # (uri, reason) of damaged objects
        # keys of damaged manifests and names of damaged chunks, which are treated as missing
        self._damaged_names: set[str] = set()
        self._etag: str | None = None  # etag of `latest`, as last read or written
        self._newest_manifest = ""  # the manifest that `latest` names

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint, or -1. The chunks of the checkpoint are not
        verified. Raises ConfigError, StorageError."""
        return parse_step(self._read_latest())

    def restore(self, target: memoryview, after_step: int) -> Manifest | None:
        """Load the newest intact checkpoint, if its step is after `after_step`, into `target`.

        Logs damaged checkpoints and adds them to `damage`. Returns None if no such checkpoint
        exists. Raises StorageError, or ConfigError if the prefix belongs to another run.
        """
        if not self._read_latest() and not self._list_manifests():
            return None

        lease = f"{self.prefix}/readers/{uuid.uuid4().hex}"
        self.store.put(lease, b"")
        try:
            return self._restore(target, after_step, self._read_latest())
        finally:
            with suppress(RekindleError):  # a lease that is not deleted expires
                self.store.delete([lease])

    def _restore(self, target: memoryview, after_step: int, newest: str) -> Manifest | None:
        names = self._list_manifests()
        for name in [
            *([newest] if newest else []),
            *(name for name in reversed(names) if name != newest),
        ]:
            if parse_step(name) <= after_step:
                continue

            try:
                manifest = self._read_manifest(name)
                self._load_chunks(manifest, target)
            except (NotFound, DamagedCheckpoint) as error:
                # retention may have deleted this checkpoint after a newer one was written
                latest = self._read_latest()
                if latest != newest and latest:
                    return self._restore(target, after_step, latest)

                self._report_damage(name, error)
                continue

            if manifest["fingerprint"] != self.fingerprint:
                say(
                    f"the checkpoint is from another kind of machine ({manifest['fingerprint']}):"
                    " the bits may differ."
                )

            return manifest

        if names and after_step < 0:
            say(
                f"no checkpoint below {self.store.uri(self.prefix)} is intact: restarting at step 0"
            )

        return None

    def _report_damage(self, name: str, error: Exception) -> None:
        say(
            f"the checkpoint {self.store.uri(name)} cannot be used: {error}. Trying the previous"
            " checkpoint."
        )
        self.damage.append((self.store.uri(name), str(error)))
        self._damaged_names.add(name)
        if name == self._newest_manifest:
            # cleared, so that the next checkpoint replaces the damaged one even if its step is
            # lower
            self._newest_manifest = ""

    def _read_latest(self) -> str:
        """Return the key of the manifest that the object `latest` names; "" if no intact manifest
        is named.

        Remembers the etag of `latest` in `_etag`, for compare-and-swap. Raises ConfigError.
        """
        key = f"{self.prefix}/latest"
        self._etag = None
        self._newest_manifest = ""

        try:
            data, etag = self.store.get_with_etag(key)
        except NotFound:
            return ""

        try:
            name = str(json.loads(data)["manifest"])
            if name not in self._damaged_names:
                self._read_manifest(name)
        except (
            NotFound,
            DamagedCheckpoint,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ) as error:
            say(
                f"{self.store.uri(key)} does not name an intact manifest ({error}): the next"
                " checkpoint overwrites it"
            )
            self.damage.append((self.store.uri(key), str(error)))
            name = ""

        self._etag = etag
        self._newest_manifest = "" if name in self._damaged_names else name
        return self._newest_manifest

    def _list_manifests(self) -> list[str]:
        return sorted(entry.key for entry in self.store.list(f"{self.prefix}/manifests/"))

    def _read_manifest(self, name: str) -> Manifest:
        """Return an intact manifest of this run.

        Raises NotFound, DamagedCheckpoint, ConfigError.
        """
        if not name.startswith(f"{self.prefix}/manifests/") or parse_step(name) < 0:
            raise DamagedCheckpoint(f"{name[:200]!r} is not a manifest of this run")
        try:
            data = self.store.get(name)
        except InvalidDocument as error:
            raise DamagedCheckpoint(str(error)) from None

        manifest = manifest_file.parse_manifest(name, data)
        if (manifest["identity"], manifest["layout"]) != (self.identity, self.layout):
            raise ConfigError(
                f"{self.store.uri(name)} belongs to another run (identity"
                f" {manifest['identity'][:12]}, this run has {self.identity[:12]}, computed from"
                " config, data digest and model): nothing was changed. Give this run another"
                " `checkpoints` prefix, or delete the checkpoints of the other run."
            )
        return manifest

    def _load_chunks(self, manifest: Manifest, target: memoryview) -> None:
        size = manifest["chunk"]
        chunks = manifest["chunks"]
        if manifest["bytes"] != len(target):
            raise DamagedCheckpoint(
                f"the state has {manifest['bytes']} bytes instead of {len(target)}"
            )

        def fetch(number: int) -> None:
            name = chunks[number]
            view = target[number * size : (number + 1) * size]
            key = f"{self.prefix}/chunks/{name}"
            try:
                view[:] = fetch_chunk(self.store, key, name, len(view))
            except DamagedChunk as error:
                self._damaged_names.add(name)
                raise DamagedCheckpoint(
                    f"chunk {number} ({name}) is damaged: its sha256 is {error.sha256}"
                ) from None

        run_parallel(fetch, range(len(chunks)))

    def write(self, upload: Upload, rank_size: RankSize) -> bool:
        """Upload this worker's share of a checkpoint; rank 0 also publishes it. Retries until
        `upload.stop` is set, then returns False.

        Raises ConfigError if the prefix belongs to another run.
        """
        pause_s = 0.2
        last_log = time.monotonic() - 5

        while not upload.stop.is_set():
            try:
                return self._write(upload, rank_size)
            except (Conflict, DamagedCheckpoint):
                # another process has changed `latest`, or this process did and the response was
                # lost
                self._etag = None
                upload.stop.wait(0.05)
            except StorageError as error:
                upload.problem = str(error)
                if time.monotonic() - last_log >= 10:
                    say(f"the checkpoint of step {upload.step} is not written yet: {error}")
                    last_log = time.monotonic()

                upload.stop.wait(pause_s)
                pause_s = min(2 * pause_s, 10)

        return False

    def _write(self, upload: Upload, rank_size: RankSize) -> bool:
        if self._etag is None:
            self._read_latest()  # raises ConfigError if the prefix belongs to another run

        stored_chunks = self._list_chunks()
        if parse_step(self._newest_manifest) >= upload.step and stored_chunks.issuperset(
            self._read_manifest(self._newest_manifest)["chunks"]
        ):
            return True  # a checkpoint of this or a later step exists

        if upload.existing_chunks is None:
            upload.existing_chunks = set(stored_chunks)

        own_numbers = rank_leaves(upload.chunk_count, rank_size.size, rank_size.rank)

        def call(number: int) -> None:
            if (
                not upload.stop.is_set()
                and upload.chunk_name(number) not in stored_chunks
                and number in own_numbers
            ):
                self._upload_chunk(upload, stored_chunks, number)

        other_numbers = []
        if rank_size.rank == 0:
            other_numbers = [
                number for number in range(upload.chunk_count) if number not in own_numbers
            ]

        upload.cpu_seconds += run_parallel(call, [*own_numbers, *other_numbers])
        if rank_size.rank > 0:
            return not upload.stop.is_set()

        self._wait_for_other_members(upload, other_numbers, stored_chunks)
        return not upload.stop.is_set() and self._publish_manifest(upload)

    def _upload_chunk(self, upload: Upload, stored_chunks: set[str], number: int) -> None:
        name = upload.chunk_name(number)
        self.store.put(f"{self.prefix}/chunks/{name}", upload.chunk(number))
        stored_chunks.add(name)
        self._damaged_names.discard(name)

    def _list_chunks(self) -> set[str]:
        """Return the names (hashes) of the chunks in the store. Each listed chunk is complete,
        since writes are atomic."""
        start = f"{self.prefix}/chunks/"
        return {entry.key[len(start) :] for entry in self.store.list(start)} - self._damaged_names

    def _wait_for_other_members(
        self, upload: Upload, other_numbers: list[int], stored_chunks: set[str]
    ) -> None:
        """Wait until the other members have uploaded their chunks; if they stall, upload the
        missing chunks."""
        last_arrival = time.monotonic()
        missing_count = len(other_numbers) + 1

        while missing_numbers := [
            number for number in other_numbers if upload.chunk_name(number) not in stored_chunks
        ]:
            if len(missing_numbers) < missing_count:
                last_arrival = time.monotonic()
                missing_count = len(missing_numbers)
            elif time.monotonic() - last_arrival > STALL_TIMEOUT_S:
                run_parallel(partial(self._upload_chunk, upload, stored_chunks), missing_numbers)

            if upload.stop.wait(0.1):
                return

            stored_chunks.update(self._list_chunks())

    def _publish_manifest(self, upload: Upload) -> bool:
        manifest: Manifest = {
            "identity": self.identity,
            "layout": self.layout,
            "step": upload.step,
            "bytes": len(upload.state),
            "chunk": CHUNK_BYTES,
            "chunks": [upload.chunk_name(number) for number in range(upload.chunk_count)],
            "loader": base64.b64encode(upload.loader).decode(),
            "facts": upload.facts,
            "fingerprint": self.fingerprint,
        }

        name, data = manifest_file.encode_manifest(manifest)
        key = f"{self.prefix}/manifests/{name}"
        self.store.put(key, data)
        condition: Any = {"if_match": self._etag} if self._etag else {"if_absent": True}
        self._etag = self.store.put(
            f"{self.prefix}/latest", to_json({"manifest": key}).encode(), **condition
        )
        self._newest_manifest = key
        self.retention.delete_expired(key, manifest["chunks"])

        return True
