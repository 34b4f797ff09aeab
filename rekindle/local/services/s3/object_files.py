"""Objects as files: the storage of `rekindle.local.services.s3`.

An object's file (format.py) is written under a temporary name and renamed, so it is complete or
absent after `kill -9` of any process. Files are not synced: a power cut may lose the last seconds.
The listing is kept in memory and read from the files at start. One process owns a root (flock), so
check-and-rename is atomic.
"""

import bisect
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from argolocal.common.json_text import to_json
from rekindle.local.services.s3.format import (
    MAX_METADATA_BYTES,
    Content,
    Meta,
    S3Error,
    entries,
    file_name,
    meta_of,
    read_meta,
)
from rekindle.local.services.s3.uploads import Uploads

Check = Callable[[Meta | None], None]  # raises S3Error unless the current object may be changed


@dataclass(frozen=True)
class Position:
    """A position in a listing: after a key, or after all keys with a common prefix."""

    text: str
    is_prefix: bool = False


START = Position("")


@dataclass
class Page:
    """Part of a listing: metadata of objects, common prefixes, and the position of the next
    page."""

    entries: list[Meta]
    common_prefixes: list[str]
    next_after: Position | None = None


class Files:
    """Buckets of objects under one directory; every change is one rename. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.buckets = root / "buckets"

        self.temporary = root / "tmp"
        for folder in (self.buckets, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)

        self.lock_file = open(root / "lock", "w")  # noqa: SIM115 - this process holds the lock until it ends
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SystemExit(
                f"{root} is in use by another S3 endpoint: only one endpoint may use it. Stop the"
                " other endpoint."
            ) from error

        self.lock = threading.Lock()
        self.index: dict[str, dict[str, Meta]] = {}
        self.keys: dict[str, list[str]] = {}

        self.uploads = Uploads(root / "uploads", self.write)
        # entries of other kinds, such as links, are ignored: another program created them (when it
        # copied the home)
        for leftover in entries(self.temporary, folders=False):
            leftover.unlink()

        for bucket in entries(self.buckets):
            metas = (_object_in(file) for file in entries(bucket, folders=False))
            self.index[bucket.name] = {meta["key"]: meta for meta in metas if meta}
            self.keys[bucket.name] = sorted(self.index[bucket.name], key=str.encode)

    def create(self, bucket: str) -> None:
        """Create a bucket, unless it exists."""
        with self.lock:
            (self.buckets / bucket).mkdir(exist_ok=True)
            self.index.setdefault(bucket, {})
            self.keys.setdefault(bucket, [])

    def write(self, blocks: Iterator[Any], finish: Callable[[int], Content]) -> Path:
        """Write a temporary file with the blocks, and then the metadata that `finish(size)`
        returns."""
        path = self.temporary / uuid.uuid4().hex

        try:
            with open(path, "xb") as file:
                size = 0
                for block in blocks:
                    size += len(block)
                    file.write(block)

                meta = to_json({**finish(size), "size": size, "modified": time.time()}).encode()
                if len(meta) > MAX_METADATA_BYTES - 4:
                    raise S3Error(
                        400,
                        "MetadataTooLarge",
                        "the headers that are stored with an object are too long.",
                    )

                file.write(meta + len(meta).to_bytes(4, "big"))

            return path
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def commit(self, bucket: str, key: str, temporary: Path, check: Check) -> Meta:
        """Rename a temporary file to the object `key`, unless `check(current metadata)` raises."""
        try:
            meta = read_meta(temporary)
            if not meta:
                raise S3Error(500, "InternalError", f"{temporary} cannot be read back.")

            with self.lock:
                keys, index = self._bucket(bucket)
                check(index.get(key))
                os.replace(temporary, self._path(bucket, key))

                if key not in index:
                    bisect.insort(keys, key, key=str.encode)

                index[key] = meta

            return meta
        finally:
            temporary.unlink(missing_ok=True)

    def open(self, bucket: str, key: str) -> tuple[BinaryIO, Meta]:
        """Open the object's file, which no later write changes; return it and its metadata."""
        self.find(bucket, key)
        try:
            file = open(self._path(bucket, key), "rb", buffering=0)  # noqa: SIM115 - the caller closes it
            return file, meta_of(file)
        except (FileNotFoundError, ValueError):
            raise S3Error(404, "NoSuchKey", f"{bucket}/{quote(key)} does not exist.") from None

    def find(self, bucket: str, key: str) -> Meta | None:
        """Return the metadata of an object, or None. Raises S3Error for an unknown bucket."""
        with self.lock:
            return self._bucket(bucket)[1].get(key)

    def delete(self, bucket: str, key: str, check: Check) -> None:
        """Remove an object, if it exists, unless `check(current metadata)` raises."""
        with self.lock:
            keys, index = self._bucket(bucket)
            check(index.get(key))
            if key in index:
                self._path(bucket, key).unlink(missing_ok=True)
                keys.pop(bisect.bisect_left(keys, key.encode(), key=str.encode))
                del index[key]

    def page(self, bucket: str, prefix: str, delimiter: str, after: Position, limit: int) -> Page:
        """Return up to `limit` keys and common prefixes after a position, in UTF-8 byte order."""
        page = Page([], [])

        with self.lock:
            keys, index = self._bucket(bucket)
            i = max(
                bisect.bisect_left(keys, prefix.encode(), key=str.encode), _index_after(keys, after)
            )
            while i < len(keys) and keys[i].startswith(prefix) and limit > 0:
                if len(page.entries) + len(page.common_prefixes) == limit:
                    page.next_after = after
                    break

                end = keys[i].find(delimiter, len(prefix)) if delimiter else -1
                if end < 0:
                    page.entries.append(index[keys[i]])
                    after = Position(keys[i])
                else:
                    page.common_prefixes.append(keys[i][: end + len(delimiter)])
                    after = Position(page.common_prefixes[-1], is_prefix=True)

                i = _index_after(keys, after)

        return page

    def _bucket(self, bucket: str) -> tuple[list[str], dict[str, Meta]]:
        if bucket not in self.index:
            raise S3Error(
                404, "NoSuchBucket", f'The bucket "{bucket}" does not exist. Create it first.'
            )
        return self.keys[bucket], self.index[bucket]

    def _path(self, bucket: str, key: str) -> Path:
        return self.buckets / bucket / file_name(key)


def _object_in(file: Path) -> Meta | None:
    """Return the metadata of an object's file; None if the file is incomplete, or if its name does
    not match the key."""
    meta = read_meta(file)
    is_own_name = meta and file.name == file_name(meta["key"])
    if is_own_name:
        return meta
    return None


def _index_after(keys: list[str], position: Position) -> int:
    """Return the index of the first key after a position."""
    text = position.text.encode()
    if position.is_prefix:
        return bisect.bisect_right(keys, text, key=lambda key: key.encode()[: len(text)])
    return bisect.bisect_right(keys, text, key=str.encode)
