"""List the artifacts of a run, based on the run's status alone, and read their content from the
object store."""

import gzip
import io
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from argolocal.common import causes, object_names
from argolocal.errors import ConfigError, NotFound, StorageError
from argolocal.page.failure import address_of, step_name
from argolocal.page.sources import Run
from argolocal.store import FolderStore, ListedObject

MAX_FILES = 1000
# maximum time for reading the sizes of all artifacts of a page
SIZES_TIMEOUT_S = 0.5
# maximum number of unpacked bytes to read from an archive, because it may be a decompression bomb
MAX_UNPACKED_BYTES = 32 << 20
TAR_SUFFIXES = (".tgz", ".tar.gz")
BROKEN_ARCHIVE = (tarfile.TarError, EOFError, OSError, zlib.error, ValueError)


class Stream(Protocol):
    """A readable stream with the content of a file."""

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ArtifactRow:
    """An artifact of a run. `name`: unique name in the run. `node`: identifier of the artifact's
    step in URLs of the graph. `artifact`: name of the artifact in the template. `key`: key of the
    artifact in the object store. `note`: reason why the content of the artifact is missing, or
    ""."""

    name: str
    step: str
    node: str
    artifact: str
    key: str
    size: int | None = None
    note: str = ""


@dataclass(frozen=True)
class ArtifactFile:
    """A file of an artifact. `path`: path in the artifact, or "" if the artifact is a single
    file."""

    path: str
    size: int | None


@dataclass(frozen=True)
class Files:
    """The files of an artifact. `is_cut` is True if the artifact has more files than listed."""

    files: list[ArtifactFile]
    is_cut: bool = False


@dataclass(frozen=True)
class OpenFile:
    """A file that is open for reading. `name`: last segment of the file's path."""

    name: str
    stream: Stream
    size: int | None


class ArtifactSource(Protocol):
    """The artifacts of runs. All methods may be called from several threads."""

    def list(self, run: Run) -> list[ArtifactRow]:
        """Return the artifacts of a run, without calling the object store."""
        ...

    def sizes(self, run: Run, rows: Sequence[ArtifactRow]) -> dict[str, int]:
        """Return the sizes of artifacts in bytes, by name. Artifacts whose sizes cannot be found
        quickly are left out."""
        ...

    def files(self, run: Run, row: ArtifactRow) -> Files:
        """Return the files of an artifact. Raises StorageError."""
        ...

    def open(self, run: Run, row: ArtifactRow, path: str) -> OpenFile:
        """Open the file `path` of an artifact. The path "" means the stored object itself. Raises
        NotFound or another StorageError."""
        ...


class ObjectLister(Protocol):
    """The method of an object store that lists objects."""

    def list(self, prefix: str) -> Iterable[ListedObject]: ...


class ObjectReader(Protocol):
    """The methods of an object store that read objects."""

    def list(self, prefix: str) -> Iterator[ListedObject]: ...

    def open(self, key: str) -> tuple[Stream, int]:
        """Return the content and the size of an object. Raises NotFound."""
        ...


class StoredArtifacts:
    """The artifacts that the nodes of runs record. The content of these artifacts is in an object
    store.

    `open_store`: function that returns the store for the field `s3` of an artifact.
    `open_listing`: function that returns the same store for listing, without starting a service; it
    returns None if the store should not be listed.
    """

    def __init__(
        self,
        open_store: Callable[[Mapping[str, Any]], ObjectReader],
        open_listing: Callable[[Mapping[str, Any]], ObjectLister | None] | None = None,
    ) -> None:
        self.open_store = open_store
        self.open_listing = open_listing or open_store

    @classmethod
    def in_home(cls, home: Path, default_bucket: str) -> "StoredArtifacts":
        """Return a source for the artifacts of a home, a directory of runs whose folder `store`
        contains the buckets."""

        def open_store(s3: Mapping[str, Any]) -> ObjectReader:
            bucket = str(s3.get("bucket") or default_bucket)
            object_names.BUCKET_NAME_RULE.check(bucket, "the bucket of an artifact")
            return FolderStore(home / "store", bucket)

        return cls(open_store)

    def list(self, run: Run) -> list[ArtifactRow]:
        rows: dict[str, ArtifactRow] = {}
        names: set[str] = set()
        for node, artifact in _recorded_artifacts(run):
            key = str((artifact.get("s3") or {}).get("key") or "")
            # skip duplicates, because a group or a retried step repeats the artifacts of its steps
            if key and key in rows:
                continue
            attempt_address = address_of(run.name, node["name"])
            address = causes.ATTEMPT_NUMBER.sub("", attempt_address)
            name = f"{address}/{artifact['name']}"
            if name in names:
                name = f"{attempt_address}/{artifact['name']}"
            names.add(name)

            note = "deleted" if artifact.get("deleted") else ""
            rows[key or name] = ArtifactRow(
                name=name,
                step=step_name(run.name, node["name"]),
                node=address,
                artifact=artifact["name"],
                key=key,
                note=note or ("" if key else "not in the object store"),
            )
        return list(rows.values())

    def sizes(self, run: Run, rows: Sequence[ArtifactRow]) -> dict[str, int]:
        deadline = time.monotonic() + SIZES_TIMEOUT_S
        sizes: dict[str, int] = {}
        for row in rows:
            if not row.key or row.note:
                continue
            if time.monotonic() > deadline:
                break
            try:
                size = self._size(run, row)
            except (StorageError, ConfigError):
                # the user sees the error when he opens the artifact
                continue
            if size is not None:
                sizes[row.name] = size
        return sizes

    def _size(self, run: Run, row: ArtifactRow) -> int | None:
        """Return the total size of the objects of an artifact in bytes. Return None if the artifact
        has no objects, or too many of them."""
        store = self.open_listing(self._location(run, row))
        if store is None:
            return None

        key = row.key.rstrip("/")
        # the listing also contains objects of other artifacts whose keys only start with `key`
        objects = list(islice(store.list(key), MAX_FILES + 1))
        sizes = [
            listed_object.size
            for listed_object in objects
            if listed_object.key == key or listed_object.key.startswith(f"{key}/")
        ]
        if not sizes or len(objects) > MAX_FILES:
            return None
        return sum(sizes)

    def files(self, run: Run, row: ArtifactRow) -> Files:
        store = self.open_store(self._location(run, row))
        if row.key.endswith(TAR_SUFFIXES):
            stream, size = store.open(row.key)
            with closing(stream):
                return _files_of_archive(stream, size)

        objects = list(islice(store.list(f"{row.key.rstrip('/')}/"), MAX_FILES + 1))
        if objects:
            prefix = f"{row.key.rstrip('/')}/"
            files = [
                ArtifactFile(listed_object.key.removeprefix(prefix), listed_object.size)
                for listed_object in objects
            ]
            return Files(
                [file for file in files[:MAX_FILES] if file.path], len(objects) > MAX_FILES
            )

        stream, size = store.open(row.key)
        stream.close()
        return Files([ArtifactFile("", size)])

    def open(self, run: Run, row: ArtifactRow, path: str) -> OpenFile:
        store = self.open_store(self._location(run, row))
        name = (path or row.key).rstrip("/").rpartition("/")[2]
        if path and row.key.endswith(TAR_SUFFIXES):
            stream, _ = store.open(row.key)
            try:
                return replace(_open_in_archive(stream, path), name=name)
            except BaseException:
                stream.close()
                raise

        stream, size = store.open(f"{row.key.rstrip('/')}/{path}" if path else row.key)
        return OpenFile(name, stream, size)

    def _location(self, run: Run, row: ArtifactRow) -> Mapping[str, Any]:
        for _, artifact in _recorded_artifacts(run):
            location = artifact.get("s3") or {}
            if location.get("key") == row.key:
                return location
        return {}


def _recorded_artifacts(run: Run) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield (node, artifact) for each output artifact of a run that is not the artifact of a group
    of steps."""
    for node in list((run.status.get("nodes") or {}).values()):
        if node["type"] in ("Retry", "DAG", "Steps", "StepGroup", "TaskGroup"):
            continue
        for artifact in (node.get("outputs") or {}).get("artifacts") or []:
            if isinstance(artifact, dict) and isinstance(artifact.get("name"), str):
                yield node, artifact


class _LimitedGzip(io.RawIOBase):
    """The decompressed content of a gzip stream. Reading raises _TooLarge after MAX_UNPACKED_BYTES
    bytes."""

    def __init__(self, stream: Stream) -> None:
        self.source = stream
        self.unpacked = gzip.GzipFile(fileobj=_Readable(stream))  # type: ignore[arg-type]
        self.remaining = MAX_UNPACKED_BYTES

    def read(self, size: int = -1, /) -> bytes:
        data = self.unpacked.read(min(size if size >= 0 else self.remaining, self.remaining + 1))
        self.remaining -= len(data)
        if self.remaining < 0:
            raise _TooLarge
        return data

    def close(self) -> None:
        self.source.close()
        super().close()


class _TooLarge(ValueError):
    """The content of an archive is larger than MAX_UNPACKED_BYTES."""


class _Readable:
    """A file object that reads a stream, for GzipFile."""

    def __init__(self, stream: Stream) -> None:
        self.read = stream.read


def _files_of_archive(stream: Stream, size: int) -> Files:
    """Return the files in a gzipped tar. Any object other than a gzipped tar counts as a single
    file."""
    files: list[ArtifactFile] = []
    try:
        with tarfile.open(fileobj=_LimitedGzip(stream), mode="r|") as archive:
            for entry in archive:
                if entry.isfile():
                    if len(files) == MAX_FILES:
                        return Files(files, is_cut=True)
                    files.append(ArtifactFile(entry.name, entry.size))
    except _TooLarge:
        return Files(files, is_cut=True)
    except BROKEN_ARCHIVE:
        return Files(files or [ArtifactFile("", size)], is_cut=bool(files))
    return Files(files)


def _open_in_archive(stream: Stream, path: str) -> OpenFile:
    """Open a file in a gzipped tar. Raises NotFound."""
    try:
        archive = tarfile.open(fileobj=_LimitedGzip(stream), mode="r|")  # noqa: SIM115
        for entry in archive:
            content: BinaryIO | None = None
            if entry.isfile() and entry.name == path:
                content = archive.extractfile(entry)  # type: ignore[assignment]
            if content:
                return OpenFile(path, _EntryStream(content, stream), entry.size)
    except _TooLarge:
        raise StorageError(
            f"{path} is after the first {MAX_UNPACKED_BYTES >> 20} MiB of its archive: download the"
            " archive."
        ) from None
    except BROKEN_ARCHIVE as error:
        raise StorageError(f"the archive with {path} is malformed ({error}).") from None
    raise NotFound(f"{path} does not exist in the archive.")


class _EntryStream:
    """The content of a file in an archive."""

    def __init__(self, content: BinaryIO, source: Stream) -> None:
        self.content = content
        self.source = source

    def read(self, size: int, /) -> bytes:
        try:
            return self.content.read(size)
        except BROKEN_ARCHIVE as error:
            raise StorageError(f"the archive cannot be read to its end ({error}).") from None

    def close(self) -> None:
        self.source.close()
