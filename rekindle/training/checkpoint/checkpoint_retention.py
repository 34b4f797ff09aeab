"""Deletes durable checkpoints beyond the configured number or age, except the latest one, and only
while no process reads a checkpoint.

If the process of rank 0 was frozen for a while, its listing of the object store is outdated. So
`delete_expired` deletes only chunks without a manifest, only within a minute after the listing, and
chunks of an unfinished checkpoint only an hour after their upload.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from argolocal.errors import InvalidDocument
from rekindle.errors import RekindleError
from rekindle.storage import Entry, NotFound, Store
from rekindle.training.checkpoint import manifest as manifest_file

READER_TIMEOUT_S = 900.0  # age from which the lease of a reader is ignored
UNFINISHED_TIMEOUT_S = 3600.0  # age from which an unfinished checkpoint counts as abandoned
LISTING_TIMEOUT_S = 60.0  # age from which a listing counts as outdated


@dataclass
class Retention:
    """The limits on the number and age of the checkpoints below one key prefix."""

    store: Store
    prefix: str
    max_checkpoints: int  # maximum number of checkpoints to keep
    max_hours: float  # maximum age of a checkpoint; 0: unlimited
    # key of a manifest → names of its chunks
    _chunk_names: dict[str, list[str]] = field(default_factory=dict)

    def delete_expired(self, latest: str, chunks: list[str]) -> None:
        """Delete expired checkpoints; called after the manifest `latest`, which refers to `chunks`,
        was published.

        Ignores errors of the object store: the next call tries again.
        """
        self._chunk_names[latest] = chunks
        with suppress(RekindleError):
            self._delete_unneeded(latest)

    def _delete_unneeded(self, latest: str) -> None:
        list_time = time.monotonic()
        # listed in this order, so that a reader or checkpoint that appears during the listing is
        # not overlooked
        kinds = ("readers", "manifests", "chunks")
        readers, manifests, chunks = (
            list(self.store.list(f"{self.prefix}/{kind}/")) for kind in kinds
        )
        # the current time by the clock of the object store, which also sets the objects' times
        now = max((entry.modified for entry in manifests), default=0.0)

        dead_leases = [entry.key for entry in readers if entry.modified < now - READER_TIMEOUT_S]
        if len(dead_leases) == len(readers):
            expired_keys = self._find_expired_manifests(latest, manifests, now)
            needed_chunks = {
                chunk
                for entry in manifests
                if entry.key not in expired_keys
                for chunk in self._read_chunk_names(entry.key)
            }

            expired_chunks = {
                chunk for key in expired_keys for chunk in self._read_chunk_names(key)
            }
            expired_chunks.update(
                {
                    _object_name(entry)
                    for entry in chunks
                    if entry.modified < now - UNFINISHED_TIMEOUT_S
                }
            )

            unneeded_keys = [
                entry.key
                for entry in chunks
                if _object_name(entry) in expired_chunks - needed_chunks
            ]
            # manifests are deleted first, so that no reader finds a manifest without its chunks
            for keys in (sorted(expired_keys), unneeded_keys):
                if time.monotonic() - list_time < LISTING_TIMEOUT_S:
                    self.store.delete(keys)

            self._chunk_names = {
                entry.key: self._chunk_names[entry.key]
                for entry in manifests
                if entry.key not in expired_keys
            }

        self.store.delete(dead_leases)

    def _find_expired_manifests(
        self, latest: str, manifests: Sequence[Entry], now: float
    ) -> set[str]:
        earlier_manifests = [entry for entry in manifests if entry.key < latest][::-1]
        expired = set(earlier_manifests[self.max_checkpoints - 1 :])

        if self.max_hours:
            expired.update(
                {
                    entry
                    for entry in earlier_manifests
                    if entry.modified < now - 3600 * self.max_hours
                }
            )

        # manifests newer than `latest` are being written now, or were left by an interrupted write
        expired.update(
            {
                entry
                for entry in manifests
                if entry.key > latest and entry.modified < now - UNFINISHED_TIMEOUT_S
            }
        )
        return {entry.key for entry in expired}

    def _read_chunk_names(self, manifest: str) -> list[str]:
        if manifest not in self._chunk_names:
            try:
                self._chunk_names[manifest] = manifest_file.parse_manifest(
                    manifest, self.store.get(manifest)
                )["chunks"]
            except (NotFound, InvalidDocument, manifest_file.DamagedCheckpoint):
                # the manifest is damaged, or was deleted by another process that has rank 0
                self._chunk_names[manifest] = []
        return self._chunk_names[manifest]


def _object_name(entry: Entry) -> str:
    return entry.key.rpartition("/")[2]
