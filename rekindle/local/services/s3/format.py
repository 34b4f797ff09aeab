"""Defines the file format of objects, and the errors of the embedded S3 endpoint.

An object's file contains the bytes of the object, its metadata as JSON, and the length of the JSON.
The file's name is the sha256 of the key, so any key is possible.
"""

import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypedDict

BLOCK_BYTES = 1 << 20
# maximum size of the metadata: S3 allows 2 KB of headers and a key of 1 KB
MAX_METADATA_BYTES = 16 << 10
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class S3Error(Exception):
    """An error response: HTTP status, S3 code, message, additional headers."""

    def __init__(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


class Content(TypedDict):
    """The metadata that a client sends with an object."""

    key: str
    etag: str
    headers: dict[str, str]


class Meta(Content):
    """The metadata of an object."""

    size: int
    modified: float


def file_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_meta(path: Path) -> Meta | None:
    """Return the metadata of a file; None if it is missing or a power cut left it incomplete."""
    try:
        with open(path, "rb", buffering=0) as file:
            return meta_of(file)
    except FileNotFoundError:
        return None
    except ValueError:
        print(f"{path} is incomplete and counts as absent", file=sys.stderr, flush=True)
        return None


def meta_of(file: BinaryIO) -> Meta:
    """Return the metadata at the end of an object's file. Raises ValueError if it is incomplete."""
    end = os.fstat(file.fileno()).st_size
    tail = os.pread(file.fileno(), MAX_METADATA_BYTES, max(0, end - MAX_METADATA_BYTES))
    length = int.from_bytes(tail[-4:], "big")
    meta = json.loads(tail[-4 - length : -4])
    if not _is_object_metadata(meta) or meta["size"] + length + 4 != end:
        raise ValueError("the file does not end with its metadata")
    meta["key"].encode()  # raises ValueError for a key that is not UTF-8
    return meta


def _is_object_metadata(value: object) -> bool:
    if not isinstance(value, dict):
        return False

    has_content = isinstance(value.get("key"), str) and re.fullmatch(
        r"[0-9a-f]{32}(-\d+)?", str(value.get("etag"))
    )
    has_numbers = isinstance(value.get("size"), int) and isinstance(
        value.get("modified"), int | float
    )
    return bool(has_content) and has_numbers and isinstance(value.get("headers"), dict)


def blocks(files: list[tuple[BinaryIO, int]], start: int = 0) -> Iterator[bytes]:
    """Yield the bytes from `start` to `size` of each file, in order."""
    for file, size in files:
        for offset in range(start, size, BLOCK_BYTES):
            yield os.pread(file.fileno(), min(BLOCK_BYTES, size - offset), offset)


def entries(folder: Path, folders: bool = True) -> list[Path]:
    """Return the folders or the files in `folder`, without links."""
    with os.scandir(folder) as listing:
        has_kind = os.DirEntry.is_dir if folders else os.DirEntry.is_file
        return [Path(entry.path) for entry in listing if has_kind(entry, follow_symlinks=False)]
