"""Durable checkpoints in the object store: chunks of the state, and a manifest per checkpoint.

    <prefix>/chunks/<sha256>              CHUNK_BYTES of the state; stored once for all checkpoints
    <prefix>/manifests/<step>-<sha>.json  the manifest {identity, step, chunks, ...}; a checkpoint
                                          exists if its manifest does
    <prefix>/latest                       {manifest}: the newest; changed by compare-and-swap
    <prefix>/readers/<id>                 the lease of a reader, which prevents deletions

Every member of a group uploads its share of the chunks. The worker with rank 0 waits for the other
members (and uploads missing chunks itself if the other members stall), then writes the manifest and
the object `latest`. A reader compares the sha256 of every chunk with the name of the chunk; if a
checkpoint is damaged, the reader reports the damage and reads the previous checkpoint. The module
durable.py does not import torch.
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
from rekindle.errors import ConfigError, Conflict, RekindleError, StorageError, write_stderr
from rekindle.storage import NotFound, Store
from rekindle.training.checkpoint import manifest as manifest_file
from rekindle.training.checkpoint.checkpoint_retention import CheckpointRetention
from rekindle.training.checkpoint.chunks import (
    CHUNK_BYTES,
    DamagedChunk,
    fetch_chunk,
    run_for_chunks,
)
from rekindle.training.checkpoint.manifest import (
    DamagedCheckpoint,
    IntervalFacts,
    Manifest,
    parse_step,
)
from rekindle.training.group.tree import list_rank_leaves
from rekindle.training.spec import Fingerprint

# after this time without a new chunk from other members, rank 0 uploads the missing chunks
STALL_TIMEOUT_S = 5.0


class RankAndGroupSize(NamedTuple):
    """The rank of a process in its group, and the size of the group."""

    rank: int
    size: int


@dataclass
class CheckpointUpload:
    """The upload of one checkpoint, and its progress. The state must not change during the
    upload."""

    step: int
    state: memoryview
    # state of the workload's own data loader
    loader: bytes = b""
    facts: IntervalFacts = field(
        default_factory=lambda: IntervalFacts(trained_seconds=0.0, losses=0)
    )
    # event that is set to cancel the upload
    stop: threading.Event = field(default_factory=threading.Event)
    # CPU time of this worker's upload threads
    cpu_seconds: float = 0.0
    # reason why the checkpoint is not written yet; "" once it is written
    problem: str = "not started"
    # chunk number → hash, which is the name of the chunk in the store
    chunk_names: dict[int, str] = field(default_factory=dict)
    # names of the chunks that were already in the store when the upload started
    existing_chunks: set[str] | None = None

    @property
    def chunk_count(self) -> int:
        return -(-len(self.state) // CHUNK_BYTES)

    def chunk(self, chunk_number: int) -> memoryview:
        return self.state[chunk_number * CHUNK_BYTES : (chunk_number + 1) * CHUNK_BYTES]

    def hash_chunk(self, chunk_number: int) -> str:
        if chunk_number not in self.chunk_names:
            self.chunk_names[chunk_number] = hashlib.sha256(self.chunk(chunk_number)).hexdigest()
        return self.chunk_names[chunk_number]

    @property
    def uploaded_bytes(self) -> int:
        """Number of bytes that all workers have uploaded, without chunks that already existed."""
        existing_chunks = self.existing_chunks or set()
        return sum(
            len(self.chunk(chunk_number))
            for chunk_number, stored_chunk_name in self.chunk_names.items()
            if stored_chunk_name not in existing_chunks
        )


class RemoteCheckpoints:
    """The durable checkpoints below a key prefix, of the run with this `identity` and `layout` of
    its state. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        key_prefix: str,
        run_identity: str,
        layout_hash: str,
        fingerprint: Fingerprint,
        retention: CheckpointRetention,
    ) -> None:
        self.store = store
        self.prefix = key_prefix
        self.identity = run_identity
        self.layout = layout_hash
        self.fingerprint = fingerprint
        self.retention = retention
        # (uri, reason) of damaged objects
        self.damage: list[tuple[str, str]] = []
        # keys of damaged manifests and names of damaged chunks, which are treated as missing
        self._damaged_names: set[str] = set()
        # etag of the object `latest`, as last read or written
        self._etag: str | None = None
        # the manifest that `latest` names
        self._newest_manifest = ""

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint, or -1. The chunks of the newest checkpoint are
        not verified. Raises ConfigError, StorageError."""
        return parse_step(self._read_latest())

    def restore(self, state_bytes: memoryview, after_step: int) -> Manifest | None:
        """Load the newest intact checkpoint, if its step is after `after_step`, into `state_bytes`.

        Logs damaged checkpoints and adds them to `damage`. Returns None if no intact checkpoint
        after `after_step` exists. Raises StorageError, or ConfigError if the prefix belongs to
        another run.
        """
        if not self._read_latest() and not self._list_manifest_keys():
            return None

        lease_key = f"{self.prefix}/readers/{uuid.uuid4().hex}"
        self.store.put(lease_key, b"")
        try:
            return self._restore(state_bytes, after_step, self._read_latest())
        finally:
            # a lease that is not deleted expires
            with suppress(RekindleError):
                self.store.delete([lease_key])

    def _restore(
        self, state_bytes: memoryview, after_step: int, newest_key: str
    ) -> Manifest | None:
        manifest_keys = self._list_manifest_keys()
        for manifest_key in [
            *([newest_key] if newest_key else []),
            *(
                manifest_key
                for manifest_key in reversed(manifest_keys)
                if manifest_key != newest_key
            ),
        ]:
            if parse_step(manifest_key) <= after_step:
                continue

            try:
                manifest = self._read_manifest(manifest_key)
                self._load_chunks(manifest, state_bytes)
            except (NotFound, DamagedCheckpoint) as error:
                # retention may have deleted the checkpoint after a newer checkpoint was written
                latest_key = self._read_latest()
                if latest_key != newest_key and latest_key:
                    return self._restore(state_bytes, after_step, latest_key)

                self._report_damage(manifest_key, error)
                continue

            if manifest["fingerprint"] != self.fingerprint:
                write_stderr(
                    f"the checkpoint is from another kind of machine ({manifest['fingerprint']}):"
                    " the bits may differ."
                )

            return manifest

        if manifest_keys and after_step < 0:
            write_stderr(
                f"no checkpoint below {self.store.uri(self.prefix)} is intact: restarting at step 0"
            )

        return None

    def _report_damage(self, object_name: str, error: Exception) -> None:
        write_stderr(
            f"the checkpoint {self.store.uri(object_name)} cannot be used: {error}. Trying the"
            " previous checkpoint."
        )
        self.damage.append((self.store.uri(object_name), str(error)))
        self._damaged_names.add(object_name)
        if object_name == self._newest_manifest:
            # clear the name, so that the next checkpoint replaces the damaged checkpoint even if
            # its step is lower
            self._newest_manifest = ""

    def _read_latest(self) -> str:
        """Return the key of the manifest that the object `latest` names; "" if no intact manifest
        is named.

        The etag of `latest` is stored in `_etag`, for a later conditional write. Raises
        ConfigError.
        """
        latest_object_key = f"{self.prefix}/latest"
        self._etag = None
        self._newest_manifest = ""

        try:
            latest_bytes, etag = self.store.get_with_etag(latest_object_key)
        except NotFound:
            return ""

        try:
            manifest_key = str(json.loads(latest_bytes)["manifest"])
            if manifest_key not in self._damaged_names:
                self._read_manifest(manifest_key)
        except (
            NotFound,
            DamagedCheckpoint,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ) as error:
            write_stderr(
                f"{self.store.uri(latest_object_key)} does not name an intact manifest ({error}):"
                " the next checkpoint overwrites it"
            )
            self.damage.append((self.store.uri(latest_object_key), str(error)))
            manifest_key = ""

        self._etag = etag
        self._newest_manifest = "" if manifest_key in self._damaged_names else manifest_key
        return self._newest_manifest

    def _list_manifest_keys(self) -> list[str]:
        return sorted(
            manifest_entry.key for manifest_entry in self.store.list(f"{self.prefix}/manifests/")
        )

    def _read_manifest(self, manifest_key: str) -> Manifest:
        """Return an intact manifest of this run.

        Raises NotFound, DamagedCheckpoint, ConfigError.
        """
        if not manifest_key.startswith(f"{self.prefix}/manifests/") or parse_step(manifest_key) < 0:
            raise DamagedCheckpoint(f"{manifest_key[:200]!r} is not a manifest of this run")
        try:
            manifest_bytes = self.store.get(manifest_key)
        except InvalidDocument as error:
            raise DamagedCheckpoint(str(error)) from None

        manifest = manifest_file.parse_manifest(manifest_key, manifest_bytes)
        if (manifest["identity"], manifest["layout"]) != (self.identity, self.layout):
            raise ConfigError(
                f"{self.store.uri(manifest_key)} belongs to another run (identity"
                f" {manifest['identity'][:12]}, this run has {self.identity[:12]}, computed from"
                " config, data digest and model): nothing was changed. Give this run another"
                " `checkpoints` prefix, or delete the checkpoints of the other run."
            )
        return manifest

    def _load_chunks(self, manifest: Manifest, state_bytes: memoryview) -> None:
        chunk_bytes = manifest["chunk"]
        chunk_names = manifest["chunks"]
        if manifest["bytes"] != len(state_bytes):
            raise DamagedCheckpoint(
                f"the state has {manifest['bytes']} bytes instead of {len(state_bytes)}"
            )

        def fetch(chunk_number: int) -> None:
            chunk_name = chunk_names[chunk_number]
            chunk_view = state_bytes[chunk_number * chunk_bytes : (chunk_number + 1) * chunk_bytes]
            chunk_key = f"{self.prefix}/chunks/{chunk_name}"
            try:
                chunk_view[:] = fetch_chunk(self.store, chunk_key, chunk_name, len(chunk_view))
            except DamagedChunk as error:
                self._damaged_names.add(chunk_name)
                raise DamagedCheckpoint(
                    f"chunk {chunk_number} ({chunk_name}) is damaged: its sha256 is {error.sha256}"
                ) from None

        run_for_chunks(fetch, range(len(chunk_names)))

    def write(self, upload: CheckpointUpload, rank_and_group_size: RankAndGroupSize) -> bool:
        """Upload this worker's share of a checkpoint; rank 0 also publishes it. Failed requests are
        retried until `upload.stop` is set; `write` then returns False.

        Raises ConfigError if the prefix belongs to another run.
        """
        pause_s = 0.2
        last_log_s = time.monotonic() - 5

        while not upload.stop.is_set():
            try:
                return self._write(upload, rank_and_group_size)
            except (Conflict, DamagedCheckpoint):
                # another process has changed `latest`, or this process has changed it and the
                # response was lost
                self._etag = None
                upload.stop.wait(0.05)
            except StorageError as error:
                upload.problem = str(error)
                if time.monotonic() - last_log_s >= 10:
                    write_stderr(
                        f"the checkpoint of step {upload.step} is not written yet: {error}"
                    )
                    last_log_s = time.monotonic()

                upload.stop.wait(pause_s)
                pause_s = min(2 * pause_s, 10)

        return False

    def _write(self, upload: CheckpointUpload, rank_and_group_size: RankAndGroupSize) -> bool:
        if self._etag is None:
            # raises ConfigError if the prefix belongs to another run
            self._read_latest()

        stored_chunk_names = self._list_chunk_names()
        if parse_step(self._newest_manifest) >= upload.step and stored_chunk_names.issuperset(
            self._read_manifest(self._newest_manifest)["chunks"]
        ):
            # a checkpoint of the same step or a later step exists
            return True

        if upload.existing_chunks is None:
            upload.existing_chunks = set(stored_chunk_names)

        own_chunk_numbers = list_rank_leaves(
            upload.chunk_count, rank_and_group_size.size, rank_and_group_size.rank
        )

        # also hashes the chunks of other members, whose names rank 0 needs for the manifest
        def hash_and_upload(chunk_number: int) -> None:
            if (
                not upload.stop.is_set()
                and upload.hash_chunk(chunk_number) not in stored_chunk_names
                and chunk_number in own_chunk_numbers
            ):
                self._upload_chunk(upload, stored_chunk_names, chunk_number)

        other_chunk_numbers = []
        if rank_and_group_size.rank == 0:
            other_chunk_numbers = [
                chunk_number
                for chunk_number in range(upload.chunk_count)
                if chunk_number not in own_chunk_numbers
            ]

        upload.cpu_seconds += run_for_chunks(
            hash_and_upload, [*own_chunk_numbers, *other_chunk_numbers]
        )
        if rank_and_group_size.rank > 0:
            return not upload.stop.is_set()

        self._wait_for_other_members(upload, other_chunk_numbers, stored_chunk_names)
        return not upload.stop.is_set() and self._publish_manifest(upload)

    def _upload_chunk(
        self, upload: CheckpointUpload, stored_chunk_names: set[str], chunk_number: int
    ) -> None:
        chunk_name = upload.hash_chunk(chunk_number)
        self.store.put(f"{self.prefix}/chunks/{chunk_name}", upload.chunk(chunk_number))
        stored_chunk_names.add(chunk_name)
        self._damaged_names.discard(chunk_name)

    def _list_chunk_names(self) -> set[str]:
        """Return the names (hashes) of the chunks in the object store. Each listed chunk is
        complete, since writes are atomic."""
        key_prefix = f"{self.prefix}/chunks/"
        return {
            chunk_entry.key[len(key_prefix) :] for chunk_entry in self.store.list(key_prefix)
        } - self._damaged_names

    def _wait_for_other_members(
        self, upload: CheckpointUpload, other_chunk_numbers: list[int], stored_chunk_names: set[str]
    ) -> None:
        """Wait until the other members have uploaded their chunks; if the other members stall,
        upload the missing chunks."""
        last_arrival_s = time.monotonic()
        missing_count = len(other_chunk_numbers) + 1

        while missing_chunk_numbers := [
            chunk_number
            for chunk_number in other_chunk_numbers
            if upload.hash_chunk(chunk_number) not in stored_chunk_names
        ]:
            if len(missing_chunk_numbers) < missing_count:
                last_arrival_s = time.monotonic()
                missing_count = len(missing_chunk_numbers)
            elif time.monotonic() - last_arrival_s > STALL_TIMEOUT_S:
                run_for_chunks(
                    partial(self._upload_chunk, upload, stored_chunk_names), missing_chunk_numbers
                )

            if upload.stop.wait(0.1):
                return

            stored_chunk_names.update(self._list_chunk_names())

    def _publish_manifest(self, upload: CheckpointUpload) -> bool:
        manifest: Manifest = {
            "identity": self.identity,
            "layout": self.layout,
            "step": upload.step,
            "bytes": len(upload.state),
            "chunk": CHUNK_BYTES,
            "chunks": [
                upload.hash_chunk(chunk_number) for chunk_number in range(upload.chunk_count)
            ],
            "loader": base64.b64encode(upload.loader).decode(),
            "facts": upload.facts,
            "fingerprint": self.fingerprint,
        }

        manifest_name, manifest_bytes = manifest_file.encode_manifest(manifest)
        manifest_key = f"{self.prefix}/manifests/{manifest_name}"
        self.store.put(manifest_key, manifest_bytes)
        write_condition: Any = {"if_match": self._etag} if self._etag else {"if_absent": True}
        self._etag = self.store.put(
            f"{self.prefix}/latest", to_json({"manifest": manifest_key}).encode(), **write_condition
        )
        self._newest_manifest = manifest_key
        self.retention.delete_expired(manifest_key, manifest["chunks"])

        return True
