"""Which durable checkpoints are deleted: by number and age, never what `latest` names or somebody may be reading.

A rank 0 that was frozen for a while acts on an old listing. So it deletes only what no manifest refers to, only within
a minute after the listing, and chunks of an unfinished checkpoint only an hour after their upload.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rekindle.errors import RekindleError
from rekindle.storage import Entry, NotFound, Store
from rekindle.training.checkpoint import manifest as form

LEASE = 900.0  # seconds after which a reader is presumed dead
YOUNG = 3600.0  # seconds in which an unfinished checkpoint may still be completed
FRESH = 60.0  # seconds after which a listing is too old to act on


@dataclass
class Retention:
    """The retention rule of one prefix."""

    store: Store
    prefix: str
    number: int  # checkpoints kept
    hours: float  # 0: of any age
    _known: dict[str, list[str]] = field(default_factory=dict)  # chunks by manifest

    def keep(self, latest: str, chunks: list[str]) -> None:
        """`latest` names this manifest now: delete what is expired. Failures are left to the next call."""
        self._known[latest] = chunks
        try:
            self._delete(latest)
        except RekindleError:
            return

    def _delete(self, latest: str) -> None:
        listed = time.monotonic()
        kinds = ("readers", "manifests", "chunks")  # in the order in which they must be listed
        readers, manifests, chunks = (list(self.store.list(f"{self.prefix}/{kind}/")) for kind in kinds)
        now = max((entry.modified for entry in manifests), default=0.0)  # by the store's clock, like all times here
        dead = [entry.key for entry in readers if entry.modified < now - LEASE]
        if len(dead) == len(readers):
            old = self._old(latest, manifests, now)
            needed = {chunk for entry in manifests if entry.key not in old for chunk in self._chunks(entry.key)}
            expired = {chunk for key in old for chunk in self._chunks(key)}
            unneeded = [entry for entry in chunks if _name(entry) not in needed]
            unneeded = [entry.key for entry in unneeded if _name(entry) in expired or entry.modified < now - YOUNG]
            for keys in (sorted(old), unneeded):  # manifests first: without one nobody reads its chunks
                if time.monotonic() - listed < FRESH:
                    self.store.delete(keys)
            self._known = {entry.key: self._known[entry.key] for entry in manifests if entry.key not in old}
        self.store.delete(dead)

    def _old(self, latest: str, manifests: Sequence[Entry], now: float) -> set[str]:
        """The manifests to delete."""
        before = [entry for entry in manifests if entry.key < latest][::-1]
        old = set(before[self.number - 1 :])
        if self.hours:
            old |= {entry for entry in before if entry.modified < now - 3600 * self.hours}
        # newer ones: being written now, or unreadable leftovers
        old |= {entry for entry in manifests if entry.key > latest and entry.modified < now - YOUNG}
        return {entry.key for entry in old}

    def _chunks(self, manifest: str) -> list[str]:
        if manifest not in self._known:
            try:
                self._known[manifest] = form.read(manifest, self.store.get(manifest))["chunks"]
            except (NotFound, form.Damaged):
                self._known[manifest] = []  # damaged, or deleted by another rank 0: useless
        return self._known[manifest]


def _name(entry: Entry) -> str:
    return entry.key.rpartition("/")[2]
