"""Reads the buckets of the embedded object store from its files, so that the service need not run.

Each change of the store is one rename, so a reader sees complete objects. Reading neither writes
nor locks files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rekindle.errors import NotFound
from rekindle.local.services.s3.format import file_name, meta_of


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
            raise NotFound(f"s3://{self.bucket}/{key} does not exist.") from None

    def list(self, prefix: str) -> Iterator[Item]:
        """Yield all objects whose key starts with `prefix`, in key order."""
        return (item for item in self._items if item.key.startswith(prefix))

    def head(self, key: str) -> Item | None:
        """Return the object's entry, or None if it does not exist."""
        return _item(self.folder / file_name(key))

    @cached_property
    def _items(self) -> Sequence[Item]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(filter(None, map(_item, paths)), key=lambda item: item.key.encode())


def _item(path: Path) -> Item | None:
    try:
        with path.open("rb", buffering=0) as file:
            meta = meta_of(file)
        return Item(meta["key"], meta["size"], f'"{meta["etag"]}"', meta["modified"])
    except (OSError, ValueError, KeyError):
        # the file was removed since the listing, or a power cut left it incomplete
        return None
