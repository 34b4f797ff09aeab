"""Looks entries up in bulk: a listing instead of a request for each, and a book of what was read the last time.

The book is a copy: an entry of it counts only while the object that it was read from is unchanged.
"""

import json
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING

from rekindle.cache import entries
from rekindle.cache.entries import FOLDER, Entry
from rekindle.errors import Conflict, StorageError

if TYPE_CHECKING:
    from rekindle.storage import Store

BOOK = "cache-book.json"
MANY = 20  # tasks from which a listing is cheaper


class Shelf:
    """The entries of a store, for the look-up of `tasks` tasks. Methods raise StorageError."""

    def __init__(self, store: "Store", tasks: int) -> None:
        self.store, self.many = store, tasks >= MANY
        self.sizes: dict[str, dict[str, tuple[int, int]]] = {}  # by run: files and bytes of RUN/TASK/ARTIFACT
        if self.many:
            self.etags = {item.key.removeprefix(FOLDER): item.etag for item in store.list(FOLDER)}
            self.book = self._book()
            self.new = 0

    def find(self, key: str) -> Entry | None:
        """As `entries.find`."""
        if not self.many:
            return entries.find(self.store, key)
        if key not in self.etags:
            return None
        etag, entry = self.book.get(key, ("", None))
        if etag != self.etags[key]:
            entry = entries.read(self.store, key)
            if not entry:
                return None
            self.new += 1
            self.book[key] = self.etags[key], entry
        return entry if entry and not entries.gone(entry, self._size) else None

    def close(self) -> None:
        """Write the book, if that spares the next one enough."""
        if self.many and self.new >= MANY:
            kept = {key: (etag, asdict(entry)) for key, (etag, entry) in self.book.items() if key in self.etags}
            self.store.put(BOOK, json.dumps(kept).encode())

    def _book(self) -> dict[str, tuple[str, Entry]]:
        try:
            return {key: (etag, Entry(**entry)) for key, (etag, entry) in json.loads(self.store.get(BOOK)).items()}
        except (Conflict, StorageError, ValueError, TypeError, AttributeError):  # there is none, or of another version
            return {}

    def _size(self, place: str) -> tuple[int, int]:
        run = place.partition("/")[0]
        if run not in self.sizes:
            found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
            for item in self.store.list(f"{run}/"):
                artifact = "/".join(item.key.split("/")[:3])
                files, size = found[artifact]
                found[artifact] = files + 1, size + item.size
            self.sizes[run] = found
        return self.sizes[run].get(place, (0, 0))
