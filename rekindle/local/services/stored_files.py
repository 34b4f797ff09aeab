"""Reads the buckets of the embedded object store from its files, so that the service need not run.

Each change of the store is one rename, so a reader sees complete objects. Reading neither writes
nor locks files.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import NotFound
from rekindle.local.services.s3.format import file_name, meta_of

# if a folder was changed less than this time before it was read, a further change may have the same
# timestamp
CLOCK_TICK_S = 0.05

Version = tuple[int, int, int]  # inode, size and modification time of a file


@dataclass(frozen=True)
class Item:
    """An object in a listing, like `rekindle.storage.Entry`, which is not used because its module
    imports boto3."""

    key: str
    size: int
    etag: str
    modified: float


class StoredFiles:
    """A bucket of the store in the directory `root`, with the reading methods of
    `rekindle.storage.Store`."""

    def __init__(self, root: Path, bucket: str) -> None:
        self.folder = root / "buckets" / bucket
        self.bucket = bucket
        self._lock = threading.Lock()
        self._files: dict[str, tuple[Version, Item | None]] = {}
        self._items: Sequence[Item] = ()
        self._folder_time = 0.0

    def get(self, key: str) -> bytes:
        """Return the bytes of an object. Raises NotFound."""
        return self.get_with_etag(key)[0]

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """Return the bytes of an object and its ETag. Raises NotFound."""
        try:
            with (self.folder / file_name(key)).open("rb") as file:
                meta = meta_of(file)
                return file.read(meta["size"]), f'"{meta["etag"]}"'
        except (OSError, ValueError):
            raise NotFound(f"{self.uri(key)} does not exist.") from None

    def list(self, prefix: str) -> Iterator[Item]:
        """Yield all objects whose key starts with `prefix`, in key order."""
        with self._lock:
            self._read_changes()
            items = self._items
        return (item for item in items if item.key.startswith(prefix))

    def uri(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def head(self, key: str) -> Item | None:
        """Return the object's entry, or None if it does not exist."""
        return _item(self.folder / file_name(key))

    def _read_changes(self) -> None:
        """Read the metadata of the objects that were written since the last listing."""
        try:
            folder_time = self.folder.stat().st_mtime
        except FileNotFoundError:
            return

        if folder_time == self._folder_time:
            return

        start = time.time()
        files: dict[str, tuple[Version, Item | None]] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    state = entry.stat()
                except FileNotFoundError:
                    continue

                version = state.st_ino, state.st_size, state.st_mtime_ns
                previous_version, item = self._files.get(entry.name, (None, None))
                if version != previous_version:
                    item = _item(Path(entry.path))
                files[entry.name] = version, item

        self._files = files
        items = [item for _, item in files.values() if item]
        self._items = sorted(items, key=lambda item: item.key.encode())
        if folder_time < start - CLOCK_TICK_S:
            self._folder_time = folder_time


def _item(path: Path) -> Item | None:
    try:
        with path.open("rb", buffering=0) as file:
            meta = meta_of(file)
        return Item(meta["key"], meta["size"], f'"{meta["etag"]}"', meta["modified"])
    except (OSError, ValueError, KeyError):
        # the file was removed since the listing, or a power cut left it incomplete
        return None
