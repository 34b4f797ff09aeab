"""Deletes durable checkpoints that are too many or too old, except `latest`, and not while readers
are active.

A rank 0 that was frozen for a while acts on an outdated listing. So `keep` deletes only chunks
without a manifest, only within a minute of the listing, and chunks of an unfinished checkpoint only
an hour after their upload.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rekindle.errors import RekindleError
from rekindle.storage import Entry, NotFound, Store
from rekindle.training.checkpoint import manifest as manifest_file

READER_TIMEOUT_S = 900.0  # the lease of a reader is ignored from this age on
UNFINISHED_TIMEOUT_S = 3600.0  # an unfinished checkpoint of this age is never completed
LISTING_TIMEOUT_S = 60.0  # a listing of this age may be outdated


@dataclass
class Retention:
    """The retention rule of one prefix."""

    store: Store
    prefix: str
    max_checkpoints: int  # maximum number of checkpoints to keep
    max_hours: float  # maximum age of a checkpoint; 0: unlimited
    _chunk_names: dict[str, list[str]] = field(default_factory=dict)  # manifest → its chunks

    def keep(self, latest: str, chunks: list[str]) -> None:
        """Delete expired checkpoints, after the manifest `latest` was published.

        The next call retries failed deletions.
        """
        self._chunk_names[latest] = chunks
        with suppress(RekindleError):
            self._delete(latest)

    def _delete(self, latest: str) -> None:
        list_time = time.monotonic()
        # the order matters: leases are listed first, chunks last
        kinds = ("readers", "manifests", "chunks")
        readers, manifests, chunks = (
            list(self.store.list(f"{self.prefix}/{kind}/")) for kind in kinds
        )
        # by the store's clock, like the times of all objects
        now = max((entry.modified for entry in manifests), default=0.0)

        dead_leases = [entry.key for entry in readers if entry.modified < now - READER_TIMEOUT_S]
        if len(dead_leases) == len(readers):
            expired_keys = self._expired_manifests(latest, manifests, now)
            needed_chunks = {
                chunk
                for entry in manifests
                if entry.key not in expired_keys
                for chunk in self._chunks(entry.key)
            }

            expired_chunks = {chunk for key in expired_keys for chunk in self._chunks(key)}
            expired_chunks.update(
                {_name(entry) for entry in chunks if entry.modified < now - UNFINISHED_TIMEOUT_S}
            )

            unneeded_keys = [
                entry.key for entry in chunks if _name(entry) in expired_chunks - needed_chunks
            ]
            # manifests are deleted first: chunks without a manifest are never read
            for keys in (sorted(expired_keys), unneeded_keys):
                if time.monotonic() - list_time < LISTING_TIMEOUT_S:
                    self.store.delete(keys)

            self._chunk_names = {
                entry.key: self._chunk_names[entry.key]
                for entry in manifests
                if entry.key not in expired_keys
            }

        self.store.delete(dead_leases)

    def _expired_manifests(self, latest: str, manifests: Sequence[Entry], now: float) -> set[str]:
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

        # newer manifests are being written now, or are unreadable leftovers
        expired.update(
            {
                entry
                for entry in manifests
                if entry.key > latest and entry.modified < now - UNFINISHED_TIMEOUT_S
            }
        )
        return {entry.key for entry in expired}

    def _chunks(self, manifest: str) -> list[str]:
        if manifest not in self._chunk_names:
            try:
                self._chunk_names[manifest] = manifest_file.read(
                    manifest, self.store.get(manifest)
                )["chunks"]
            except (NotFound, manifest_file.Damaged):
                # the manifest is damaged, or was deleted by another rank 0
                self._chunk_names[manifest] = []
        return self._chunk_names[manifest]


def _name(entry: Entry) -> str:
    return entry.key.rpartition("/")[2]
