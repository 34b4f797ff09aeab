"""Defines the file format of objects, and the errors of the embedded S3 endpoint.

An object's file contains the bytes of the object, its metadata as JSON, and the length of the JSON.
The name of an object's file is the sha256 of the object's key, so any key is possible.
"""

import errno
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, TypedDict

from pydantic import Field

from argolocal.common.checked_names import format_untrusted
from rekindle.documents import Document, parse_and_validate

BLOCK_BYTES = 1 << 20
# maximum size of an object's metadata, since S3 allows 2 KB of headers and a key of 1 KB
MAX_METADATA_BYTES = 16 << 10
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# unix time of the end of the year 9999, the last one that a date in an answer can have
MAX_UNIX_SECONDS = 253402300799

UnixSeconds = Annotated[float, Field(ge=0, lt=MAX_UNIX_SECONDS)]
# the names and values that an HTTP header can have
HeaderName = Annotated[str, Field(pattern=r"^[-!#$%&'*+.^_`|~0-9A-Za-z]+$")]
HeaderValue = Annotated[str, Field(pattern=r"^[\t\x20-\x7e\u{80}-\u{ff}]*$")]
StoredHeaders = dict[HeaderName, HeaderValue]


class S3Error(Exception):
    """An error response with HTTP status, S3 code, message and additional headers."""

    def __init__(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


class ClientMetadata(TypedDict):
    """The metadata that a client sends with an object."""

    key: str
    etag: str
    headers: dict[str, str]


class ObjectMetadata(ClientMetadata):
    """The metadata of an object."""

    size: int
    modified: float


class MetadataRecord(Document):
    """The metadata in an object's file. The types allow only values that an HTTP answer can
    contain, so that a damaged object does not break the answers about other objects."""

    key: str
    etag: str = Field(pattern=r"^[0-9a-f]{32}(-[0-9]+)?$")
    headers: StoredHeaders
    size: int
    modified: UnixSeconds

    def as_metadata(self) -> ObjectMetadata:
        return {
            "key": self.key,
            "etag": self.etag,
            "headers": self.headers,
            "size": self.size,
            "modified": self.modified,
        }


def make_file_name(object_key: str) -> str:
    return hashlib.sha256(object_key.encode()).hexdigest()


def read_metadata(object_path: Path) -> ObjectMetadata | None:
    """Return the metadata of an object's file; None if the file is missing or damaged, for example
    incomplete after a power cut."""
    try:
        with open(object_path, "rb", buffering=0) as object_file:
            return read_file_metadata(object_file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(
            f"{object_path} is damaged and counts as absent ({error})", file=sys.stderr, flush=True
        )
        return None


def read_file_metadata(object_file: BinaryIO, object_key: str | None = None) -> ObjectMetadata:
    """Return the metadata at the end of an object's file. Raises ValueError if the file is damaged,
    or if it is the file of another key than `object_key`."""
    file_bytes = os.fstat(object_file.fileno()).st_size
    tail_bytes = os.pread(
        object_file.fileno(), MAX_METADATA_BYTES, max(0, file_bytes - MAX_METADATA_BYTES)
    )
    metadata_length = int.from_bytes(tail_bytes[-4:], "big")
    record = parse_and_validate(MetadataRecord, tail_bytes[-4 - metadata_length : -4])
    if record.size + metadata_length + 4 != file_bytes:
        raise ValueError("the file does not end with its metadata")
    if object_key not in (None, record.key):
        raise ValueError(f"its key is {format_untrusted(record.key)}, not that of its object")
    return record.as_metadata()


def read_file_blocks(files: list[tuple[BinaryIO, int]], start_offset: int = 0) -> Iterator[bytes]:
    """Yield the bytes of several files, one after the other, in blocks. `files`: each file with the
    offset at which its bytes end; `start_offset`: offset at which the bytes of each file begin."""
    for file, end_offset in files:
        for offset in range(start_offset, end_offset, BLOCK_BYTES):
            yield os.pread(file.fileno(), min(BLOCK_BYTES, end_offset - offset), offset)


def list_folder(folder: Path, only_folders: bool = True) -> list[Path]:
    """Return the folders in `folder` or, if `only_folders` is False, the files. Symbolic links are
    left out."""
    with os.scandir(folder) as directory_entries:
        is_wanted_kind = os.DirEntry.is_dir if only_folders else os.DirEntry.is_file
        return [
            Path(directory_entry.path)
            for directory_entry in directory_entries
            if is_wanted_kind(directory_entry, follow_symlinks=False)
        ]
