"""The interface of the object store for artifacts, and an implementation that uses a local folder
instead of S3.

    store = FolderStore(Path(".argolocal/store"), "argolocal")
    store.upload(Path("report.csv"), "run/report.csv")
"""

import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote

from argolocal.errors import ConfigError, NotFound, StorageError

# segment of an object's key that cannot be a file name → file name that is used instead
ESCAPED_NAMES = {"": "%2F", ".": "%2E", "..": "%2E%2E"}
# An object whose key is also the path of a folder is stored in this folder, as a file of this name.
FOLDER_OBJECT_NAME = "%"


class ListedObject(Protocol):
    """The interface of an object in the result of `list`."""

    @property
    def key(self) -> str: ...

    @property
    def size(self) -> int: ...


class ObjectStore(Protocol):
    """The objects of one bucket. Every method of an object store raises StorageError, or
    ConfigError if a retry cannot help."""

    def upload(self, path: Path, key: str, links: bool = True) -> None:
        """Upload a file to `key`, or the files of a directory to keys below `key`. The value True
        of `links` uploads the targets of symbolic links in a directory, and False leaves the links
        out."""
        ...

    def download(self, key: str, path: Path) -> None:
        """Download the object `key` to a file, or all objects below `key` to a directory. Raises
        NotFound."""
        ...

    def list(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose key starts with `prefix`, in key order."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing object is not an error."""
        ...


@dataclass(frozen=True)
class FolderEntry:
    """One object in a listing."""

    key: str
    size: int


class FolderStore:
    """A bucket that is stored as a folder. In a FolderStore, the object a/b is the file a/b or, if
    an object a/b/c exists, the file a/b/%."""

    def __init__(self, root: Path, bucket: str) -> None:
        self.root = root / bucket
        self.bucket = bucket
        self.lock = threading.Lock()

    def upload(self, path: Path, key: str, links: bool = True) -> None:
        if path.is_file():
            self._write(path, key)
            return
        for source_file in sorted(path.rglob("*")):
            if source_file.is_file() and (links or not source_file.is_symlink()):
                self._write(source_file, f"{key.rstrip('/')}/{source_file.relative_to(path)}")

    def download(self, key: str, path: Path) -> None:
        object_file = self._object_path(key)
        if object_file.is_file() and not key.endswith("/"):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(object_file, path)
            return

        prefix = f"{key.rstrip('/')}/"
        target_root = path.resolve()

        listed_objects = list(self.list(prefix))
        if not listed_objects:
            raise NotFound(f"{self.uri(key)} does not exist, neither as an object nor as a prefix.")

        for listed_object in listed_objects:
            target_path = path / listed_object.key.removeprefix(prefix)
            if not target_path.resolve().is_relative_to(target_root):
                raise StorageError(
                    f"{self.uri(listed_object.key)} would leave the folder {path}: its key is not"
                    " a safe path."
                )

            target_path.parent.mkdir(parents=True, exist_ok=True)
            if not listed_object.key.endswith("/"):
                shutil.copyfile(self._object_path(listed_object.key), target_path)

    def open(self, key: str) -> tuple[BinaryIO, int]:
        """Return the content and the size of an object. Raises NotFound."""
        try:
            object_file = self._object_path(key).open("rb")
        except (OSError, ValueError):
            raise NotFound(f"{self.uri(key)} does not exist.") from None
        return object_file, os.fstat(object_file.fileno()).st_size

    def list(self, prefix: str) -> Iterator[FolderEntry]:
        folder, _, _ = prefix.rpartition("/")
        object_files = (self._escaped_path(folder) if folder else self._bucket_folder()).rglob("*")
        listed_objects = (
            FolderEntry(self._parse_key(object_file), object_file.stat().st_size)
            for object_file in object_files
            if object_file.is_file()
        )
        matching_objects = (
            listed_object
            for listed_object in listed_objects
            if listed_object.key.startswith(prefix)
        )
        yield from sorted(matching_objects, key=lambda listed_object: listed_object.key.encode())

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._object_path(key).unlink(missing_ok=True)

    def uri(self, key: str) -> str:
        """Return the URI s3://bucket/key of an object."""
        return f"s3://{self.bucket}/{key}"

    def _bucket_folder(self) -> Path:
        """Return the folder of the bucket. Raises ConfigError if the folder does not exist."""
        if not self.root.is_dir():
            raise ConfigError(
                f'bucket "{self.bucket}" does not exist: correct the name, or create {self.root}.'
            )
        return self.root

    def _escaped_path(self, key: str) -> Path:
        """Return the path for a key; the path is a folder if longer keys start with `key` and
        "/"."""
        name_parts = (
            ESCAPED_NAMES.get(name_part) or name_part.replace("%", "%25").replace("\0", "%00")
            for name_part in key.split("/")
        )
        return self._bucket_folder().joinpath(*name_parts)

    def _object_path(self, key: str) -> Path:
        """Return the path of the file that contains, or would contain, the object."""
        escaped_path = self._escaped_path(key)
        if escaped_path.is_dir():
            return escaped_path / FOLDER_OBJECT_NAME
        return escaped_path

    def _parse_key(self, object_file: Path) -> str:
        """Return the key of the object that a file contains."""
        name_parts = [
            name_part
            for name_part in object_file.relative_to(self.root).parts
            if name_part != FOLDER_OBJECT_NAME
        ]
        return "/".join(
            "" if name_part == ESCAPED_NAMES[""] else unquote(name_part) for name_part in name_parts
        )

    def _write(self, source_file: Path, key: str) -> None:
        """Copy a file to an object atomically."""
        draft_path = self._bucket_folder().with_name(f".{uuid.uuid4().hex}")

        try:
            shutil.copyfile(source_file, draft_path)
            with self.lock:
                for parent_folder in reversed(
                    self._escaped_path(key).relative_to(self.root).parents[:-1]
                ):
                    self._make_folder(self.root / parent_folder)

                os.replace(draft_path, self._object_path(key))
        except OSError as error:
            raise StorageError(
                f"{self.uri(key)} cannot be written: {error.strerror} ({error.filename})."
            ) from error
        finally:
            draft_path.unlink(missing_ok=True)

    def _make_folder(self, path: Path) -> None:
        """Create a folder if it does not exist."""
        # The path may be the file of an object. A file of an object at the path is moved into the
        # new folder.
        if path.is_file():
            temporary_file = path.with_name(f"%{uuid.uuid4().hex}")
            path.rename(temporary_file)
            path.mkdir()
            temporary_file.rename(path / FOLDER_OBJECT_NAME)
        path.mkdir(exist_ok=True)
