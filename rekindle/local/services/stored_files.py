"""Reads the buckets of the embedded object store from the store's files, so that the S3 service
need not run.

Each change of the store is one rename, so a reader sees complete objects. StoredFiles neither
writes nor locks files.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import NotFound
from rekindle.local.services.s3.format import make_file_name, read_file_metadata

# if a folder is read this soon after a change, a later change may have the same timestamp, so the
# folder is read again
CLOCK_TICK_S = 0.05

# inode, size and modification time of a file
FileVersion = tuple[int, int, int]


@dataclass(frozen=True)
class StoredObject:
    """An object in a listing, like `rekindle.storage.StoredObject`, which is not used because
    its module imports boto3."""

    key: str
    size: int
    etag: str
    modified: float


class StoredFiles:
    """A bucket of the store in the directory `root_folder`, with the reading methods of
    `rekindle.storage.Store`."""

    def __init__(self, root_folder: Path, bucket_name: str) -> None:
        self.folder = root_folder / "buckets" / bucket_name
        self.bucket = bucket_name
        self._lock = threading.Lock()
        self._files: dict[str, tuple[FileVersion, StoredObject | None]] = {}
        self._sorted_objects: Sequence[StoredObject] = ()
        self._folder_time = 0.0

    def get(self, key: str) -> bytes:
        """Return the bytes of an object. Raises NotFound."""
        return self.get_with_etag(key)[0]

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """Return the bytes of an object and its ETag. Raises NotFound."""
        try:
            with (self.folder / make_file_name(key)).open("rb") as object_file:
                metadata = read_file_metadata(object_file, key)
                return object_file.read(metadata["size"]), f'"{metadata["etag"]}"'
        except (OSError, ValueError):
            raise NotFound(f"{self.uri(key)} does not exist.") from None

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield all objects whose key starts with `prefix`, in key order."""
        with self._lock:
            self._read_changes()
            stored_objects = self._sorted_objects
        return (
            stored_object
            for stored_object in stored_objects
            if stored_object.key.startswith(prefix)
        )

    def uri(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def head(self, key: str) -> StoredObject | None:
        """Return the size, etag and time of an object; None if it does not exist."""
        return _read_object(self.folder / make_file_name(key))

    def _read_changes(self) -> None:
        """Read the metadata of the objects that were written since the last listing."""
        try:
            folder_change_seconds = self.folder.stat().st_mtime
        except FileNotFoundError:
            return

        if folder_change_seconds == self._folder_time:
            return

        start_seconds = time.time()
        current_files: dict[str, tuple[FileVersion, StoredObject | None]] = {}
        with os.scandir(self.folder) as directory_entries:
            for directory_entry in directory_entries:
                try:
                    file_status = directory_entry.stat()
                except FileNotFoundError:
                    continue

                file_version = file_status.st_ino, file_status.st_size, file_status.st_mtime_ns
                previous_version, stored_object = self._files.get(
                    directory_entry.name, (None, None)
                )
                if file_version != previous_version:
                    stored_object = _read_object(Path(directory_entry.path))
                current_files[directory_entry.name] = file_version, stored_object

        self._files = current_files
        stored_objects = [
            stored_object for _, stored_object in current_files.values() if stored_object
        ]
        self._sorted_objects = sorted(
            stored_objects, key=lambda stored_object: stored_object.key.encode()
        )
        if folder_change_seconds < start_seconds - CLOCK_TICK_S:
            self._folder_time = folder_change_seconds


def _read_object(object_path: Path) -> StoredObject | None:
    try:
        with object_path.open("rb", buffering=0) as object_file:
            metadata = read_file_metadata(object_file)
        if object_path.name != make_file_name(metadata["key"]):
            return None
        return StoredObject(
            metadata["key"], metadata["size"], f'"{metadata["etag"]}"', metadata["modified"]
        )
    except (OSError, ValueError):
        # the object's file was removed since the listing, or is damaged
        return None
