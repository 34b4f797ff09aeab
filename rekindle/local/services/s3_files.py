"""Objects as files: the storage of `rekindle.local.services.s3`.

An object is one file: its bytes, its metadata as JSON, and the length of that JSON. The file is written under a
temporary name and renamed, so it is complete or absent after `kill -9` of any process. Files are not synced: a power
cut may lose the last seconds. The file's name is the sha256 of the key, so every key is possible; the listing is kept
in memory and read from the files at start. One process owns a root (flock), so check-and-rename is atomic.
"""

import bisect
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

BLOCK_BYTES = 1 << 20
MAX_METADATA_BYTES = 16 << 10  # maximum size of the metadata: S3 allows 2 KB of headers and a key of 1 KB
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MIN_PART_BYTES = 5 << 20
UPLOAD_LIFE_S = 7 * 86400.0  # maximum age of a multipart upload when the server starts


class S3Error(Exception):
    """An error response: HTTP status, S3 code, message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Hash(Protocol):
    """The methods of hashlib's objects that the S3 endpoint uses."""

    def update(self, data: Any, /) -> None: ...
    def digest(self) -> bytes: ...


class Crc32:
    """zlib's CRC-32 as a hash."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: Any, /) -> None:
        self.value = zlib.crc32(data, self.value)

    def digest(self) -> bytes:
        return self.value.to_bytes(4, "big")


CHECKSUMS: dict[str, Callable[[], Hash]] = {"crc32": Crc32, "sha256": hashlib.sha256, "sha1": hashlib.sha1}


@dataclass(frozen=True)
class Page:
    """Part of a listing: metadata of objects, common prefixes, and the token of the next page ("" at the end)."""

    entries: list[dict]
    common_prefixes: list[str]
    next_after: str


def _entries(folder: Path, folders: bool = True) -> list[Path]:
    """Return the folders or the files in `folder`, without links."""
    with os.scandir(folder) as entries:
        has_kind = os.DirEntry.is_dir if folders else os.DirEntry.is_file
        return [Path(entry.path) for entry in entries if has_kind(entry, follow_symlinks=False)]


class Files:
    """Buckets of objects under one directory; every change is one rename. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root, self.buckets, self.uploads, self.temporary = root, root / "buckets", root / "uploads", root / "tmp"
        for folder in (self.buckets, self.uploads, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        self.lock_file = open(root / "lock", "w")  # noqa: SIM115 - this process holds the lock until it ends
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SystemExit(
                f"{root} is in use by another S3 endpoint: only one endpoint may use it. Stop the other endpoint."
            ) from error
        self.lock = threading.Lock()
        self.index: dict[str, dict[str, dict]] = {}
        self.keys: dict[str, list[str]] = {}
        # entries of other kinds, such as links, are ignored: another program created them (when it copied the home)
        for leftover in _entries(self.temporary, folders=False):
            leftover.unlink()
        for upload in _entries(self.uploads):
            if upload.stat().st_mtime < time.time() - UPLOAD_LIFE_S:
                shutil.rmtree(upload)
        for bucket in _entries(self.buckets):
            metas = [meta for file in _entries(bucket, folders=False) if (meta := read_meta(file))]
            self.index[bucket.name] = {meta["key"]: meta for meta in metas}
            self.keys[bucket.name] = sorted(self.index[bucket.name], key=str.encode)

    def create(self, bucket: str) -> None:
        """Create a bucket, unless it exists."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            raise S3Error(400, "InvalidBucketName", f'"{bucket}" must be 3 to 63 letters (a-z), digits, dots, hyphens.')
        with self.lock:
            (self.buckets / bucket).mkdir(exist_ok=True)
            self.index.setdefault(bucket, {})
            self.keys.setdefault(bucket, [])

    def write(self, blocks: Iterator[Any], finish: Callable[[int], dict]) -> Path:
        """Write a temporary file with the blocks, and then the metadata that `finish(size)` returns."""
        path = self.temporary / uuid.uuid4().hex
        try:
            with open(path, "xb") as file:
                size = 0
                for block in blocks:
                    size += len(block)
                    file.write(block)
                meta = json.dumps({**finish(size), "size": size, "modified": time.time()}).encode()
                if len(meta) > MAX_METADATA_BYTES - 4:
                    raise S3Error(400, "MetadataTooLarge", "an object's metadata headers may have at most 2 KB.")
                file.write(meta + len(meta).to_bytes(4, "big"))
            return path
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def commit(self, bucket: str, key: str, temporary: Path, check: Callable[[dict | None], None]) -> dict:
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

    def assemble(self, folder: Path, parts: list[tuple[int, str]], meta: dict) -> Path:
        """Write a temporary file from the uploaded `parts` (number, ETag) in `folder`."""
        if not parts or [number for number, _ in parts] != sorted({number for number, _ in parts}):
            raise S3Error(400, "InvalidPartOrder", "parts must be listed once each, in ascending order.")
        with ExitStack() as stack:
            files = []
            for number, etag in parts:
                path = folder / f"{number:05d}"
                part_meta = read_meta(path) if path.exists() else None
                if not part_meta or part_meta["etag"] != etag.strip('"'):
                    raise S3Error(400, "InvalidPart", f"part {number} with ETag {etag} was not uploaded.")
                if part_meta["size"] < MIN_PART_BYTES and number != parts[-1][0]:
                    raise S3Error(400, "EntityTooSmall", "every part except the last must have at least 5 MiB.")
                files.append((stack.enter_context(open(path, "rb", buffering=0)), part_meta["size"]))
            tags = b"".join(bytes.fromhex(etag.strip('"')) for _, etag in parts)
            etag = f"{hashlib.md5(tags, usedforsecurity=False).hexdigest()}-{len(parts)}"
            return self.write(blocks(files), lambda _: {**meta, "etag": etag})

    def open(self, bucket: str, key: str) -> tuple[BinaryIO, dict]:
        """Open the object's file, which no later write changes; return it and its metadata."""
        self.find(bucket, key)
        try:
            file = open(self._path(bucket, key), "rb", buffering=0)  # noqa: SIM115 - the caller closes it
            return file, meta_of(file)
        except (FileNotFoundError, ValueError):
            raise S3Error(404, "NoSuchKey", f"{bucket}/{key} does not exist.") from None

    def find(self, bucket: str, key: str) -> dict | None:
        """Return the metadata of an object, or None. Raises S3Error for an unknown bucket."""
        with self.lock:
            return self._bucket(bucket)[1].get(key)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object, if it exists."""
        with self.lock:
            keys, index = self._bucket(bucket)
            if key in index:
                self._path(bucket, key).unlink(missing_ok=True)
                keys.pop(bisect.bisect_left(keys, key.encode(), key=str.encode))
                del index[key]

    def page(self, bucket: str, prefix: str, delimiter: str, after: str, limit: int) -> Page:
        """Return up to `limit` keys after `after` (a key, or a common prefix and NUL) in UTF-8 byte order."""
        page = Page([], [], "")
        with self.lock:
            keys, index = self._bucket(bucket)
            i = max(bisect.bisect_left(keys, prefix.encode(), key=str.encode), _index_after(keys, after))
            while i < len(keys) and keys[i].startswith(prefix) and limit > 0:
                if len(page.entries) + len(page.common_prefixes) == limit:
                    return replace(page, next_after=after)
                end = keys[i].find(delimiter, len(prefix)) if delimiter else -1
                if end < 0:
                    page.entries.append(index[keys[i]])
                    after = keys[i]
                else:
                    page.common_prefixes.append(keys[i][: end + len(delimiter)])
                    after = page.common_prefixes[-1] + "\0"
                i = _index_after(keys, after)
        return page

    def _bucket(self, bucket: str) -> tuple[list[str], dict[str, dict]]:
        if bucket not in self.index:
            raise S3Error(404, "NoSuchBucket", f'The bucket "{bucket}" does not exist. Create it first.')
        return self.keys[bucket], self.index[bucket]

    def _path(self, bucket: str, key: str) -> Path:
        return self.buckets / bucket / file_name(key)


def file_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_meta(path: Path) -> dict | None:
    """Return the metadata of a file; None for a file that a power cut left incomplete, which counts as absent."""
    with open(path, "rb", buffering=0) as file:
        try:
            return meta_of(file)
        except ValueError:
            print(f"{path} is incomplete and counts as absent", file=sys.stderr, flush=True)
            return None


def blocks(files: list[tuple[BinaryIO, int]]) -> Iterator[bytes]:
    """Yield the first `size` bytes of each file, in order."""
    for file, size in files:
        for offset in range(0, size, BLOCK_BYTES):
            yield os.pread(file.fileno(), min(BLOCK_BYTES, size - offset), offset)


def meta_of(file: BinaryIO) -> dict:
    """Return the metadata at the end of an object's file. Raises ValueError if it is incomplete."""
    end = os.fstat(file.fileno()).st_size
    tail = os.pread(file.fileno(), MAX_METADATA_BYTES, max(0, end - MAX_METADATA_BYTES))
    length = int.from_bytes(tail[-4:], "big")
    meta = json.loads(tail[-4 - length : -4])
    if not isinstance(meta, dict) or meta.get("size", 0) + length + 4 != end:
        raise ValueError("the file does not end with its metadata")
    return meta


def _index_after(keys: list[str], token: str) -> int:
    """Return the index of the first key after a token; a token that ends in NUL covers all keys with that prefix."""
    if token.endswith("\0"):
        prefix = token[:-1].encode()
        return bisect.bisect_right(keys, prefix, key=lambda key: key.encode()[: len(prefix)])
    return bisect.bisect_right(keys, token.encode(), key=str.encode) if token else 0
