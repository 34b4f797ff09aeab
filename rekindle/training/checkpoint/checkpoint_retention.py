"""Deletes durable checkpoints beyond the configured number or age, except the latest one, and only
while no process reads a checkpoint.

If the process of rank 0 was frozen for a while, its listing of the object store is outdated.
Because its listing may be outdated, `delete_expired` deletes only chunks without a manifest, only
within a minute after the listing, and chunks of an unfinished checkpoint only an hour after their
upload.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from argolocal.errors import InvalidDocument
from rekindle.errors import RekindleError
from rekindle.storage import NotFound, Store, StoredObject
from rekindle.training.checkpoint import manifest as manifest_file

# age from which the lease of a reader is ignored
READER_TIMEOUT_S = 900.0
# age from which an unfinished checkpoint counts as abandoned
UNFINISHED_TIMEOUT_S = 3600.0
# age from which a listing counts as outdated
LISTING_TIMEOUT_S = 60.0


@dataclass
class CheckpointRetention:
    """The limits on the number and age of the checkpoints below one key prefix."""

    store: Store
    prefix: str
    # maximum number of checkpoints to keep
    max_checkpoints: int
    # maximum age of a checkpoint in hours; 0 if unlimited
    max_hours: float
    # key of a manifest → names of its chunks
    _chunk_names: dict[str, list[str]] = field(default_factory=dict)

    def delete_expired(self, latest_key: str, chunk_names: list[str]) -> None:
        """Delete expired checkpoints; called after the manifest `latest_key`, which refers to
        `chunk_names`, was published.

        Errors of the object store are ignored, because the next call tries again.
        """
        self._chunk_names[latest_key] = chunk_names
        with suppress(RekindleError):
            self._delete_unneeded(latest_key)

    def _delete_unneeded(self, latest_key: str) -> None:
        listing_start_s = time.monotonic()
        # kinds of objects in the order of their listing, so that a reader or checkpoint that
        # appears during the listing is not overlooked
        object_kinds = ("readers", "manifests", "chunks")
        reader_entries, manifest_entries, chunk_entries = (
            list(self.store.list(f"{self.prefix}/{object_kind}/")) for object_kind in object_kinds
        )
        # the current time by the clock of the object store, which also sets the objects' times
        store_time_s = max(
            (object_entry.modified for object_entry in manifest_entries), default=0.0
        )

        dead_lease_keys = [
            object_entry.key
            for object_entry in reader_entries
            if object_entry.modified < store_time_s - READER_TIMEOUT_S
        ]
        if len(dead_lease_keys) == len(reader_entries):
            expired_keys = self._find_expired_manifests(latest_key, manifest_entries, store_time_s)
            needed_chunks = {
                chunk_name
                for object_entry in manifest_entries
                if object_entry.key not in expired_keys
                for chunk_name in self._read_chunk_names(object_entry.key)
            }

            expired_chunks = {
                chunk_name
                for manifest_key in expired_keys
                for chunk_name in self._read_chunk_names(manifest_key)
            }
            expired_chunks.update(
                {
                    _extract_object_name(object_entry)
                    for object_entry in chunk_entries
                    if object_entry.modified < store_time_s - UNFINISHED_TIMEOUT_S
                }
            )

            unneeded_keys = [
                object_entry.key
                for object_entry in chunk_entries
                if _extract_object_name(object_entry) in expired_chunks - needed_chunks
            ]
            # manifests are deleted first, so that no reader finds a manifest without its chunks
            for deleted_keys in (sorted(expired_keys), unneeded_keys):
                if time.monotonic() - listing_start_s < LISTING_TIMEOUT_S:
                    self.store.delete(deleted_keys)

            self._chunk_names = {
                object_entry.key: self._chunk_names[object_entry.key]
                for object_entry in manifest_entries
                if object_entry.key not in expired_keys
            }

        self.store.delete(dead_lease_keys)

    def _find_expired_manifests(
        self, latest_key: str, manifest_entries: Sequence[StoredObject], store_time_s: float
    ) -> set[str]:
        earlier_manifests = [
            manifest_entry for manifest_entry in manifest_entries if manifest_entry.key < latest_key
        ][::-1]
        expired_manifests = set(earlier_manifests[self.max_checkpoints - 1 :])

        if self.max_hours:
            expired_manifests.update(
                {
                    manifest_entry
                    for manifest_entry in earlier_manifests
                    if manifest_entry.modified < store_time_s - 3600 * self.max_hours
                }
            )

        # manifests newer than `latest` are being written now, or were left by an interrupted write
        expired_manifests.update(
            {
                manifest_entry
                for manifest_entry in manifest_entries
                if manifest_entry.key > latest_key
                and manifest_entry.modified < store_time_s - UNFINISHED_TIMEOUT_S
            }
        )
        return {manifest_entry.key for manifest_entry in expired_manifests}

    def _read_chunk_names(self, manifest_key: str) -> list[str]:
        if manifest_key not in self._chunk_names:
            try:
                self._chunk_names[manifest_key] = manifest_file.parse_manifest(
                    manifest_key, self.store.get(manifest_key)
                )["chunks"]
            except (NotFound, InvalidDocument, manifest_file.DamagedCheckpoint):
                # the manifest is damaged, or was deleted by another process that has rank 0
                self._chunk_names[manifest_key] = []
        return self._chunk_names[manifest_key]


def _extract_object_name(object_entry: StoredObject) -> str:
    return object_entry.key.rpartition("/")[2]
