"""Deletes old durable checkpoints by number and age, except `latest`, and not while readers are active.

A rank 0 that was frozen for a while acts on an old listing. So it deletes only chunks without a manifest, only within a
minute of the listing, and chunks of an unfinished checkpoint only an hour after their upload.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rekindle.errors import RekindleError
from rekindle.storage import Entry, NotFound, Store
from rekindle.training.checkpoint import manifest as form

READER_TIMEOUT_S = 900.0  # the lease of an older reader is ignored
UNFINISHED_TIMEOUT_S = 3600.0  # an older unfinished checkpoint is never completed
LISTING_TIMEOUT_S = 60.0  # an older listing may be outdated


@dataclass
class Retention:
    """The retention rule of one prefix."""

    store: Store
    prefix: str
    number: int  # of checkpoints to keep
    hours: float  # maximum age; 0: unlimited
    _chunk_names: dict[str, list[str]] = field(default_factory=dict)  # by manifest

    def keep(self, latest: str, chunks: list[str]) -> None:
        """Delete expired checkpoints, after `latest` was set to this manifest. On failures, the next call retries."""
        self._chunk_names[latest] = chunks
        with suppress(RekindleError):
            self._delete(latest)

    def _delete(self, latest: str) -> None:
        listed = time.monotonic()
        kinds = ("readers", "manifests", "chunks")  # must be listed in this order
        readers, manifests, chunks = (list(self.store.list(f"{self.prefix}/{kind}/")) for kind in kinds)
        now = max((entry.modified for entry in manifests), default=0.0)  # by the store's clock, like all times here
        dead = [entry.key for entry in readers if entry.modified < now - READER_TIMEOUT_S]
        if len(dead) == len(readers):
            old = self._old(latest, manifests, now)
            needed = {chunk for entry in manifests if entry.key not in old for chunk in self._chunks(entry.key)}
            expired = {chunk for key in old for chunk in self._chunks(key)}
            expired |= {_name(entry) for entry in chunks if entry.modified < now - UNFINISHED_TIMEOUT_S}
            unneeded = [entry.key for entry in chunks if _name(entry) in expired - needed]
            for keys in (sorted(old), unneeded):  # manifests first: chunks without a manifest are not read
                if time.monotonic() - listed < LISTING_TIMEOUT_S:
                    self.store.delete(keys)
            self._chunk_names = {entry.key: self._chunk_names[entry.key] for entry in manifests if entry.key not in old}
        self.store.delete(dead)

    def _old(self, latest: str, manifests: Sequence[Entry], now: float) -> set[str]:
        previous = [entry for entry in manifests if entry.key < latest][::-1]
        old = set(previous[self.number - 1 :])
        if self.hours:
            old |= {entry for entry in previous if entry.modified < now - 3600 * self.hours}
        # newer manifests are being written now, or are unreadable leftovers
        old |= {entry for entry in manifests if entry.key > latest and entry.modified < now - UNFINISHED_TIMEOUT_S}
        return {entry.key for entry in old}

    def _chunks(self, manifest: str) -> list[str]:
        if manifest not in self._chunk_names:
            try:
                self._chunk_names[manifest] = form.read(manifest, self.store.get(manifest))["chunks"]
            except (NotFound, form.Damaged):
                self._chunk_names[manifest] = []  # damaged, or deleted by another rank 0
        return self._chunk_names[manifest]


def _name(entry: Entry) -> str:
    return entry.key.rpartition("/")[2]
