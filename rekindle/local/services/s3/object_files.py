"""Objects as files: the storage of `rekindle.local.services.s3`.

An object's file (format.py) is written under a temporary name and renamed, so the file is complete
or absent after `kill -9` of any process. Files are not synced to the disk, so a power cut may lose
the writes of the last seconds. The listing of all objects is read from the files at the start, and
then kept in memory. A file lock ensures that only one process uses a root folder, so that checking
a condition and renaming a file is atomic.
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
    ClientMetadata,
    ObjectMetadata,
    S3Error,
    list_folder,
    make_file_name,
    read_file_metadata,
    read_metadata,
)
from rekindle.local.services.s3.uploads import Uploads

# function that raises S3Error unless the current object, given its metadata, may be changed
WriteCheck = Callable[[ObjectMetadata | None], None]


@dataclass(frozen=True)
class ListingPosition:
    """A position in a listing: after a key, or after all keys with a common prefix."""

    text: str
    is_prefix: bool = False


START_POSITION = ListingPosition("")


@dataclass
class ListingPage:
    """A page of a listing: metadata of objects, common prefixes, and the position of the next
    page."""

    entries: list[ObjectMetadata]
    common_prefixes: list[str]
    next_after: ListingPosition | None = None


class ObjectFiles:
    """Buckets of objects under one directory; every change is one rename. Thread-safe."""

    def __init__(self, root_folder: Path) -> None:
        self.root = root_folder
        self.buckets = root_folder / "buckets"

        self.temporary = root_folder / "tmp"
        for folder in (self.buckets, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)

        self.lock_file = open(root_folder / "lock", "w")  # noqa: SIM115 - this process holds the lock until it ends
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SystemExit(
                f"{root_folder} is in use by another S3 endpoint: only one endpoint may use it."
                " Stop the other endpoint."
            ) from error

        self.lock = threading.Lock()
        self.index: dict[str, dict[str, ObjectMetadata]] = {}
        self.keys: dict[str, list[str]] = {}

        self.uploads = Uploads(root_folder / "uploads", self.write)
        # links are ignored, because only another program can have created them, for example when it
        # copied REKINDLE_HOME
        for leftover_file in list_folder(self.temporary, only_folders=False):
            leftover_file.unlink()

        for bucket_folder in list_folder(self.buckets):
            object_metadata = (
                _read_object_metadata(object_file)
                for object_file in list_folder(bucket_folder, only_folders=False)
            )
            self.index[bucket_folder.name] = {
                metadata["key"]: metadata for metadata in object_metadata if metadata
            }
            self.keys[bucket_folder.name] = sorted(self.index[bucket_folder.name], key=str.encode)

    def create(self, bucket_name: str) -> None:
        """Create a bucket, unless it exists."""
        with self.lock:
            (self.buckets / bucket_name).mkdir(exist_ok=True)
            self.index.setdefault(bucket_name, {})
            self.keys.setdefault(bucket_name, [])

    def write(
        self, data_blocks: Iterator[Any], make_metadata: Callable[[int], ClientMetadata]
    ) -> Path:
        """Write a temporary file with the blocks, and then the metadata that
        `make_metadata(size)` returns. Return the path of the file."""
        temporary_path = self.temporary / uuid.uuid4().hex

        try:
            with open(temporary_path, "xb") as temporary_file:
                written_bytes = 0
                for data_block in data_blocks:
                    written_bytes += len(data_block)
                    temporary_file.write(data_block)

                metadata_json = to_json(
                    {**make_metadata(written_bytes), "size": written_bytes, "modified": time.time()}
                ).encode()
                if len(metadata_json) > MAX_METADATA_BYTES - 4:
                    raise S3Error(
                        400,
                        "MetadataTooLarge",
                        "the headers that are stored with an object are too long.",
                    )

                temporary_file.write(metadata_json + len(metadata_json).to_bytes(4, "big"))

            return temporary_path
        except BaseException:
            temporary_path.unlink(missing_ok=True)
            raise

    def commit(
        self, bucket_name: str, object_key: str, temporary_path: Path, check_current: WriteCheck
    ) -> ObjectMetadata:
        """Rename a temporary file to the object `object_key`, unless `check_current` raises for the
        metadata of the current object. If `check_current` raises, delete the temporary file."""
        try:
            metadata = read_metadata(temporary_path)
            if not metadata:
                raise S3Error(500, "InternalError", f"{temporary_path} cannot be read back.")

            with self.lock:
                sorted_keys, metadata_by_key = self._get_bucket(bucket_name)
                check_current(metadata_by_key.get(object_key))
                os.replace(temporary_path, self._make_object_path(bucket_name, object_key))

                if object_key not in metadata_by_key:
                    bisect.insort(sorted_keys, object_key, key=str.encode)

                metadata_by_key[object_key] = metadata

            return metadata
        finally:
            temporary_path.unlink(missing_ok=True)

    def open(self, bucket_name: str, object_key: str) -> tuple[BinaryIO, ObjectMetadata]:
        """Open the object's file, which no later write changes; return the open file and its
        metadata."""
        self.find(bucket_name, object_key)
        try:
            object_file = open(self._make_object_path(bucket_name, object_key), "rb", buffering=0)  # noqa: SIM115 - the caller closes it
            return object_file, read_file_metadata(object_file, object_key)
        except (FileNotFoundError, ValueError):
            raise S3Error(
                404, "NoSuchKey", f"{bucket_name}/{quote(object_key)} does not exist."
            ) from None

    def find(self, bucket_name: str, object_key: str) -> ObjectMetadata | None:
        """Return the metadata of an object, or None. Raises S3Error for an unknown bucket."""
        with self.lock:
            return self._get_bucket(bucket_name)[1].get(object_key)

    def delete(self, bucket_name: str, object_key: str, check_current: WriteCheck) -> None:
        """Remove an object, if it exists, unless `check_current` raises for its metadata."""
        with self.lock:
            sorted_keys, metadata_by_key = self._get_bucket(bucket_name)
            check_current(metadata_by_key.get(object_key))
            if object_key in metadata_by_key:
                self._make_object_path(bucket_name, object_key).unlink(missing_ok=True)
                sorted_keys.pop(
                    bisect.bisect_left(sorted_keys, object_key.encode(), key=str.encode)
                )
                del metadata_by_key[object_key]

    def page(
        self,
        bucket_name: str,
        key_prefix: str,
        delimiter: str,
        after_position: ListingPosition,
        max_entries: int,
    ) -> ListingPage:
        """Return up to `max_entries` keys and common prefixes after a position, in UTF-8 byte
        order."""
        listing_page = ListingPage([], [])

        with self.lock:
            sorted_keys, metadata_by_key = self._get_bucket(bucket_name)
            key_index = max(
                bisect.bisect_left(sorted_keys, key_prefix.encode(), key=str.encode),
                _find_index_after(sorted_keys, after_position),
            )
            while (
                key_index < len(sorted_keys)
                and sorted_keys[key_index].startswith(key_prefix)
                and max_entries > 0
            ):
                if len(listing_page.entries) + len(listing_page.common_prefixes) == max_entries:
                    listing_page.next_after = after_position
                    break

                delimiter_index = (
                    sorted_keys[key_index].find(delimiter, len(key_prefix)) if delimiter else -1
                )
                if delimiter_index < 0:
                    listing_page.entries.append(metadata_by_key[sorted_keys[key_index]])
                    after_position = ListingPosition(sorted_keys[key_index])
                else:
                    listing_page.common_prefixes.append(
                        sorted_keys[key_index][: delimiter_index + len(delimiter)]
                    )
                    after_position = ListingPosition(
                        listing_page.common_prefixes[-1], is_prefix=True
                    )

                key_index = _find_index_after(sorted_keys, after_position)

        return listing_page

    def _get_bucket(self, bucket_name: str) -> tuple[list[str], dict[str, ObjectMetadata]]:
        if bucket_name not in self.index:
            raise S3Error(
                404, "NoSuchBucket", f'The bucket "{bucket_name}" does not exist. Create it first.'
            )
        return self.keys[bucket_name], self.index[bucket_name]

    def _make_object_path(self, bucket_name: str, object_key: str) -> Path:
        return self.buckets / bucket_name / make_file_name(object_key)


def _read_object_metadata(object_file: Path) -> ObjectMetadata | None:
    """Return the metadata of an object's file; None if the file is incomplete, or if its name does
    not match the key."""
    metadata = read_metadata(object_file)
    has_own_name = metadata and object_file.name == make_file_name(metadata["key"])
    if has_own_name:
        return metadata
    return None


def _find_index_after(sorted_keys: list[str], position: ListingPosition) -> int:
    """Return the index of the first key after a position."""
    position_bytes = position.text.encode()
    if position.is_prefix:
        return bisect.bisect_right(
            sorted_keys, position_bytes, key=lambda key: key.encode()[: len(position_bytes)]
        )
    return bisect.bisect_right(sorted_keys, position_bytes, key=str.encode)
