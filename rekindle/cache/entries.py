"""What is known of finished steps: one object a key in the object store, below `cache/`.

An entry names the run and task whose artifacts it stands for; they stay where that run left them. It counts only while
they are there, whole: so it may be written before them, and pruning a run ends what it stands for.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rekindle.errors import Conflict, NotFound, StorageError

if TYPE_CHECKING:
    from rekindle.storage import Store

FOLDER = "cache/"
BOOK = "cache-book.json"
MANY = 20  # tasks from which a listing is cheaper
DAYS = 90  # older entries do not count
DAY = 86400


@dataclass(frozen=True)
class Entry:
    """The outputs of one step: `outputs` as text, `artifacts` with sha256, files and bytes of each."""

    key: str
    at: str  # WORKFLOW/TASK, below which its artifacts lie
    outputs: dict[str, str]
    artifacts: dict[str, dict[str, Any]]
    facts: dict[str, Any]  # what the key is made of
    seconds: float  # that it took
    made: float = field(default_factory=time.time)  # Unix seconds

    @property
    def workflow(self) -> str:
        return self.at.partition("/")[0]

    @property
    def task(self) -> str:
        return self.at.partition("/")[2]


def find(store: "Store", key: str, days: float = DAYS) -> Entry | None:
    """The entry of `key`, if its artifacts are there and it is not older than `days`. Raises StorageError."""
    entry = read(store, key)
    return entry if entry and not gone(entry, partial(_size, store), days) else None


def record(store: "Store", entry: Entry) -> bool:
    """Write an entry unless there is one that counts; whether it was written. Raises StorageError."""
    place, data = _place(entry.key), json.dumps(asdict(entry)).encode()
    try:
        store.put(place, data, if_absent=True)
        return True
    except Conflict:
        pass
    with suppress(Conflict):  # another wrote it in the meantime: it is as good
        _, etag = store.get_with_etag(place)
        if find(store, entry.key) is None:
            store.put(place, data, if_match=etag)
            return True
    return False


def entries(store: "Store") -> Iterator[Entry]:
    """All entries, also those that do not count any more. Raises StorageError."""
    for listed in store.list(FOLDER):
        if entry := read(store, listed.key.removeprefix(FOLDER)):
            yield entry


def stale(store: "Store", keep: int, days: float) -> list[tuple[Entry, str]]:
    """What `prune` removes, and why: not among the newest `keep`, older than `days`, or without its artifacts."""
    rows = []
    for number, entry in enumerate(sorted(entries(store), key=lambda entry: -entry.made)):
        why = f"more than {keep}" if number >= keep else gone(entry, partial(_size, store), days)
        rows += [(entry, why)] if why else []
    return rows


def remove(store: "Store", known: Iterable[Entry]) -> None:
    """Forget entries; what they stand for stays."""
    store.delete([_place(entry.key) for entry in known])


def _place(key: str) -> str:
    return f"{FOLDER}{key}"


def read(store: "Store", key: str) -> Entry | None:
    """The entry of `key`, whether it counts or not. Raises StorageError."""
    try:
        return Entry(**json.loads(store.get(_place(key))))
    except (NotFound, ValueError, TypeError):  # there is none, or one of another version
        return None


def gone(entry: Entry, size: Callable[[str], tuple[int, int]], days: float = DAYS) -> str:
    """Why an entry does not count; "" if it does. `size` gives the files and bytes of an artifact."""
    if time.time() - entry.made > days * DAY:
        return f"older than {days:g} days"
    for name, known in entry.artifacts.items():
        place = f"{entry.at}/{name}"
        if size(place) != (known["files"], known["bytes"]):
            return f"{place} is not there any more"
    return ""


def _size(store: "Store", place: str) -> tuple[int, int]:
    listed = [item for item in store.list(place) if item.key == place or item.key.startswith(f"{place}/")]
    return len(listed), sum(item.size for item in listed)


def safely(call: Any, *arguments: Any) -> Any:
    """`call`, or None: what is known of earlier runs may be out of reach, and then everything is computed."""
    try:
        return call(*arguments)
    except StorageError:
        return None


class Shelf:
    """Looks up the entries of `tasks` tasks: a listing instead of a request for each, and a book of what was read the
    last time. The book is a copy: an entry of it counts only while the object that it was read from is unchanged.

    Methods raise StorageError.
    """

    def __init__(self, store: "Store", tasks: int) -> None:
        self.store, self.many = store, tasks >= MANY
        self.sizes: dict[str, dict[str, tuple[int, int]]] = {}  # by run: files and bytes of RUN/TASK/ARTIFACT
        if self.many:
            self.etags = {item.key.removeprefix(FOLDER): item.etag for item in store.list(FOLDER)}
            self.book = self._book()
            self.new = 0

    def find(self, key: str) -> Entry | None:
        """As the function `find`."""
        if not self.many:
            return find(self.store, key)
        if key not in self.etags:
            return None
        etag, entry = self.book.get(key, ("", None))
        if etag != self.etags[key]:
            entry = read(self.store, key)
            if not entry:
                return None
            self.new += 1
            self.book[key] = self.etags[key], entry
        return entry if entry and not gone(entry, self._size) else None

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
