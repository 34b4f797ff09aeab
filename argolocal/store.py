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

# part of an object's key that cannot be a file name → file name to use
ESCAPED_NAMES = {"": "%2F", ".": "%2E", "..": "%2E%2E"}
# if the key of an object is the path of a folder, the object is the file with this name in the
# folder
FOLDER_OBJECT = "%"


class ListedObject(Protocol):
    """The interface of an object in the result of `list`."""

    @property
    def key(self) -> str: ...

    @property
    def size(self) -> int: ...


class ObjectStore(Protocol):
    """The objects of one bucket. Every method raises StorageError, or ConfigError if a retry cannot
    help."""

    def upload(self, path: Path, key: str, links: bool = True) -> None:
        """Upload a file to `key`, or the files of a directory to keys below `key`. `links`: follow
        symbolic links."""
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
class Entry:
    """One object in a listing."""

    key: str
    size: int


class FolderStore:
    """A bucket that is stored as a folder. The object a/b is the file a/b or, if an object a/b/c
    exists, the file a/b/%."""

    def __init__(self, root: Path, bucket: str) -> None:
        self.root = root / bucket
        self.bucket = bucket
        self.lock = threading.Lock()

    def upload(self, path: Path, key: str, links: bool = True) -> None:
        if path.is_file():
            self._write(path, key)
            return
        for file in sorted(path.rglob("*")):
            if file.is_file() and (links or not file.is_symlink()):
                self._write(file, f"{key.rstrip('/')}/{file.relative_to(path)}")

    def download(self, key: str, path: Path) -> None:
        file = self._file(key)
        if file.is_file() and not key.endswith("/"):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, path)
            return

        prefix = f"{key.rstrip('/')}/"
        root = path.resolve()

        entries = list(self.list(prefix))
        if not entries:
            raise NotFound(f"{self.uri(key)} does not exist, neither as an object nor as a prefix.")

        for entry in entries:
            target = path / entry.key.removeprefix(prefix)
            if not target.resolve().is_relative_to(root):
                raise StorageError(
                    f"{self.uri(entry.key)} would leave the folder {path}: its key is not a safe"
                    " path."
                )

            target.parent.mkdir(parents=True, exist_ok=True)
            if not entry.key.endswith("/"):
                shutil.copyfile(self._file(entry.key), target)

    def open(self, key: str) -> tuple[BinaryIO, int]:
        """Return the content and the size of an object. Raises NotFound."""
        try:
            file = self._file(key).open("rb")
        except (OSError, ValueError):
            raise NotFound(f"{self.uri(key)} does not exist.") from None
        return file, os.fstat(file.fileno()).st_size

    def list(self, prefix: str) -> Iterator[Entry]:
        folder, _, _ = prefix.rpartition("/")
        files = (self._folder(folder) if folder else self._bucket()).rglob("*")
        entries = (Entry(self._key(file), file.stat().st_size) for file in files if file.is_file())
        matches = (entry for entry in entries if entry.key.startswith(prefix))
        yield from sorted(matches, key=lambda entry: entry.key.encode())

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._file(key).unlink(missing_ok=True)

    def uri(self, key: str) -> str:
        """Return the URI s3://bucket/key of an object."""
        return f"s3://{self.bucket}/{key}"

    def _bucket(self) -> Path:
        if not self.root.is_dir():
            raise ConfigError(
                f'bucket "{self.bucket}" does not exist: correct the name, or create {self.root}.'
            )
        return self.root

    def _folder(self, key: str) -> Path:
        names = (
            ESCAPED_NAMES.get(name) or name.replace("%", "%25").replace("\0", "%00")
            for name in key.split("/")
        )
        return self._bucket().joinpath(*names)

    def _file(self, key: str) -> Path:
        path = self._folder(key)
        if path.is_dir():
            return path / FOLDER_OBJECT
        return path

    def _key(self, file: Path) -> str:
        names = [name for name in file.relative_to(self.root).parts if name != FOLDER_OBJECT]
        return "/".join("" if name == ESCAPED_NAMES[""] else unquote(name) for name in names)

    def _write(self, source: Path, key: str) -> None:
        """Copy a file to an object atomically."""
        draft = self._bucket().with_name(f".{uuid.uuid4().hex}")

        try:
            shutil.copyfile(source, draft)
            with self.lock:
                for parent in reversed(self._folder(key).relative_to(self.root).parents[:-1]):
                    self._make_folder(self.root / parent)

                os.replace(draft, self._file(key))
        except OSError as error:
            raise StorageError(
                f"{self.uri(key)} cannot be written: {error.strerror} ({error.filename})."
            ) from error
        finally:
            draft.unlink(missing_ok=True)

    def _make_folder(self, path: Path) -> None:
        # a file, the object with this key, is in the place of the new folder, so move it into the
        # folder
        if path.is_file():
            temporary_file = path.with_name(f"%{uuid.uuid4().hex}")
            path.rename(temporary_file)
            path.mkdir()
            temporary_file.rename(path / FOLDER_OBJECT)
        path.mkdir(exist_ok=True)
