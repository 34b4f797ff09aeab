"""The checkpoints of a program in the object store: upload, commit, listing and removal."""

import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from argolocal.errors import InvalidDocument
from rekindle.documents import parse, read_object, seal
from rekindle.errors import Conflict, NotFound, RekindleError
from rekindle.program.folder import Unit
from rekindle.program.held_files import check_unchanged, hold
from rekindle.program.paths import without_numbers
from rekindle.program.records import (
    CheckpointRecord,
    FileRecord,
    Files,
    Latest,
    PointerRecord,
    ShareRecord,
    parse_order,
    unit_key,
)
from rekindle.storage import Store
from rekindle.training.checkpoint import chunks
from rekindle.training.checkpoint.checkpoint_retention import READER_TIMEOUT_S, UNFINISHED_TIMEOUT_S
from rekindle.training.checkpoint.chunks import PARALLEL_REQUESTS, run_parallel

DELETION_TIMEOUT_S = 60.0  # time within which a deletion ends, or is given up
COMMIT_ATTEMPTS = 20


class MissingChunks(Exception):
    """A deletion removed chunks before they were referred to: upload them again."""


@dataclass
class ProgramStore:
    """The checkpoints below `prefix` of the object store. `keep`: number of checkpoints of each
    family that stay. Not thread-safe."""

    store: Store
    prefix: str
    keep: int = 2
    uploaded_bytes: int = 0
    _stored_chunks: set[str] = field(default_factory=set)

    @property
    def root(self) -> str:
        return f"{self.prefix}/program"

    def upload_files(self, folder: Path, unit: Unit, node: int) -> list[FileRecord]:
        """Upload the chunks of a unit's files that the store does not have. Raises ChangedFile if
        the program changes a file in the meantime, StorageError."""
        self._stored_chunks = self._list_chunks()
        with hold(folder, unit) as paths:
            records = [self._upload_file(unit, file, path, node) for file, path in paths.items()]
            # the program may have written in place after the file was read
            for file, path in paths.items():
                check_unchanged(path, unit, file)
        return records

    def _upload_file(self, unit: Unit, file: str, path: Path, node: int) -> FileRecord:
        chunk_bytes = chunks.CHUNK_BYTES
        names: list[str] = []
        whole = hashlib.sha256()
        size = 0

        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as content:
            check_unchanged(descriptor, unit, file)
            while batch := list(_read_chunks(content.fileno(), size, chunk_bytes)):
                batch_names = [hashlib.sha256(data).hexdigest() for data in batch]
                for data in batch:
                    whole.update(data)
                    size += len(data)

                self._put_chunks(dict(zip(batch_names, batch, strict=True)))
                names += batch_names
            check_unchanged(descriptor, unit, file)

        return FileRecord(
            path=file,
            size=size,
            sha256=whole.hexdigest(),
            chunks=names,
            chunk_bytes=chunk_bytes,
            mode=unit.files[file].mode & 0o777,
            node=node,
        )

    def _put_chunks(self, batch: Mapping[str, bytes]) -> None:
        missing = [name for name in batch if name not in self._stored_chunks]

        def put(number: int) -> None:
            name = missing[number]
            self.store.put(f"{self.root}/chunks/{name}", batch[name])

        run_parallel(put, range(len(missing)))
        self._stored_chunks.update(missing)
        self.uploaded_bytes += sum(len(batch[name]) for name in missing)

    def _list_chunks(self) -> set[str]:
        start = f"{self.root}/chunks/"
        return {entry.key[len(start) :] for entry in self.store.list(start)}

    def check_chunks(self, files: list[FileRecord]) -> None:
        """Wait for the deletions that run, and raise MissingChunks if they removed a chunk."""
        deletions = f"{self.root}/deletions/"
        running = {entry.key for entry in self.store.list(deletions)}
        end = time.monotonic() + DELETION_TIMEOUT_S
        while running and time.monotonic() < end:
            time.sleep(0.2)
            running &= {entry.key for entry in self.store.list(deletions)}
        # left by nodes that died: a deletion gives up after this time
        self.store.delete(sorted(running))

        if not {name for file in files for name in file.chunks} <= self._list_chunks():
            raise MissingChunks

    def write_share(self, generation: int, share: ShareRecord) -> None:
        """Record the files of one node, in place of its earlier share of this unit."""
        folder = f"{self.root}/shares/{generation:08d}/{unit_key(share.path)}/{share.node}-"
        key = f"{folder}{share.sequence:012d}.json"
        self.store.put(key, seal(share.model_dump(exclude={"checksum"})))
        self.store.delete([entry.key for entry in self.store.list(folder) if entry.key < key])

    def list_shares(self, generation: int) -> dict[str, dict[int, str]]:
        """Return the keys of the newest shares: key of the unit → node → key of the share."""
        shares: dict[str, dict[int, str]] = {}
        start = f"{self.root}/shares/{generation:08d}/"
        for entry in self.store.list(start):
            unit, _, name = entry.key[len(start) :].partition("/")
            node = name.partition("-")[0]
            if node.isdigit():
                shares.setdefault(unit, {})[int(node)] = entry.key
        return shares

    def commit_shares(self, keys: Mapping[int, str], nodes: int) -> CheckpointRecord | None:
        """Commit the checkpoint of these shares if it is complete. Returns None if it is not.

        Raises MissingChunks, StorageError.
        """
        # a share may be replaced or damaged; its node writes it again
        shares = [share for key in keys.values() if (share := self._try_read_share(key))]
        contents = [share for share in shares if share.files]
        if not contents or not _are_complete(shares, nodes):
            return None

        first = contents[0]
        files = [file for share in contents for file in share.files]
        pointers = {pointer.path: pointer for share in contents for pointer in share.pointers}
        return self.commit(
            first.path,
            first.format,
            next((share.step for share in contents if share.step is not None), None),
            nodes,
            files,
            list(pointers.values()),
            max(share.newest_ns for share in contents) / 1e9,
        )

    def commit(
        self,
        path: str,
        kind: str,
        step: int | None,
        nodes: int,
        files: list[FileRecord],
        pointers: list[PointerRecord],
        created: float,
    ) -> CheckpointRecord:
        """Write the record of a complete checkpoint and `latest`.

        Raises MissingChunks, StorageError.
        """
        self.check_chunks(files)
        for _ in range(COMMIT_ATTEMPTS):
            latest, etag = self._read_latest()
            keys = self.list_keys()
            order = max([parse_order(key) for key in [*keys, latest]], default=-1) + 1
            record = CheckpointRecord(
                path=path,
                format=kind,
                step=step,
                nodes=nodes,
                files=files,
                pointers=pointers,
                order=order,
                created=created,
            )

            suffix = f"-{record.content_id()}.json"
            earlier = next((key for key in keys if key.endswith(suffix)), "")
            if earlier and parse_order(latest) >= parse_order(earlier):
                return read_object(CheckpointRecord, self.store, earlier)

            key = earlier or record.key(self.root)
            if not earlier:
                data = seal(record.model_dump(exclude={"checksum"}))
                self.store.put(key, data)

            try:
                data = seal(Latest(checkpoint=key).model_dump())
                self.store.put(f"{self.root}/latest", data, if_match=etag, if_absent=not etag)
            except Conflict:
                continue

            with suppress(RekindleError):
                self._delete_expired()
            return record

        raise Conflict(f"{self.store.uri(self.root)}/latest was changed {COMMIT_ATTEMPTS} times.")

    def _read_latest(self) -> tuple[str, str]:
        """Return the key of the newest checkpoint and the etag of `latest`, or ""."""
        try:
            data, etag = self.store.get_with_etag(f"{self.root}/latest")
        except NotFound:
            return "", ""
        try:
            return parse(Latest, data, "latest").checkpoint, etag
        except InvalidDocument:
            return "", etag

    def list_keys(self) -> list[str]:
        """Return the keys of all checkpoints, in their order."""
        entries = self.store.list(f"{self.root}/checkpoints/")
        return [entry.key for entry in entries if parse_order(entry.key) >= 0]

    def read_record(self, key: str) -> CheckpointRecord:
        """Return a checkpoint. Raises NotFound, InvalidDocument, StorageError."""
        record = read_object(CheckpointRecord, self.store, key)
        if record.key(self.root) != key:
            raise InvalidDocument(f"{self.store.uri(key)} does not match its name. Remove it.")
        return record

    def read_share(self, key: str) -> ShareRecord:
        """Return the share of one node. Raises NotFound, InvalidDocument, StorageError."""
        return read_object(ShareRecord, self.store, key)

    def find_newest(self, family: str) -> CheckpointRecord | None:
        """Return the newest readable checkpoint of a family."""
        for key in reversed(self.list_keys()):
            record = self._try_read(key)
            if record and without_numbers(record.path) == family:
                return record
        return None

    @contextmanager
    def lease(self, kind: str) -> Iterator[None]:
        """Announce a reader (`readers`) or a deletion (`deletions`) to the other nodes."""
        key = f"{self.root}/{kind}/{uuid.uuid4().hex}"
        self.store.put(key, b"")
        try:
            yield
        finally:
            # a lease that is not deleted expires
            with suppress(RekindleError):
                self.store.delete([key])

    def _delete_expired(self) -> None:
        """Delete the checkpoints beyond `keep`, and the chunks and shares that nothing needs."""
        keys = self.list_keys()
        with self.lease("deletions"):
            start = time.monotonic()
            readers = list(self.store.list(f"{self.root}/readers/"))
            shares = list(self.store.list(f"{self.root}/shares/"))
            stored = list(self.store.list(f"{self.root}/chunks/"))
            records = {key: self._try_read(key) for key in keys}
            now = max([entry.modified for entry in [*stored, *shares, *readers]], default=0.0)
            dead_readers = [
                entry.key for entry in readers if entry.modified < now - READER_TIMEOUT_S
            ]
            self.store.delete(dead_readers)
            if len(dead_readers) < len(readers):
                return

            expired = self._find_expired(records)
            kept_files = _files_of(record for key, record in records.items() if key not in expired)
            known_files = _files_of(records.values())

            unneeded_shares: list[str] = []
            for entry in shares:
                share = self._try_read_share(entry.key)
                is_old = entry.modified < now - UNFINISHED_TIMEOUT_S
                if share is None or is_old or (share.files and _files_of([share]) <= known_files):
                    unneeded_shares.append(entry.key)
                else:
                    kept_files |= _files_of([share])

            kept_chunks = {name for file in kept_files for name in file[1]}
            known_chunks = {name for file in known_files for name in file[1]}
            unneeded_chunks = [
                entry.key
                for entry in stored
                if (name := entry.key.rpartition("/")[2]) not in kept_chunks
                and (name in known_chunks or entry.modified < now - UNFINISHED_TIMEOUT_S)
            ]

            # records are deleted first, so that no reader finds a record without its chunks
            for objects in (sorted(expired), unneeded_shares, unneeded_chunks):
                if time.monotonic() - start < DELETION_TIMEOUT_S:
                    self.store.delete(objects)

    def _find_expired(self, records: Mapping[str, CheckpointRecord | None]) -> set[str]:
        counts: dict[str, int] = {}
        expired: set[str] = set()
        for key in reversed(list(records)):
            record = records[key]
            family = without_numbers(record.path) if record else ""
            counts[family] = counts.get(family, 0) + 1
            if counts[family] > self.keep:
                expired.add(key)
        return expired

    def _try_read(self, key: str) -> CheckpointRecord | None:
        try:
            return self.read_record(key)
        except (NotFound, InvalidDocument):
            return None

    def _try_read_share(self, key: str) -> ShareRecord | None:
        try:
            return self.read_share(key)
        except (NotFound, InvalidDocument):
            return None


def _read_chunks(descriptor: int, offset: int, chunk_bytes: int) -> Iterator[bytes]:
    """Yield the next chunks of a file, as many as are uploaded in parallel."""
    for number in range(PARALLEL_REQUESTS):
        data = os.pread(descriptor, chunk_bytes, offset + number * chunk_bytes)
        if not data:
            return
        yield data
        if len(data) < chunk_bytes:
            return


def _files_of(records: Iterable[Files | None]) -> set[tuple[str, tuple[str, ...]]]:
    return {
        (file.sha256, tuple(file.chunks)) for record in records if record for file in record.files
    }


def _are_complete(shares: list[ShareRecord], nodes: int) -> bool:
    """Return True if the shares of all nodes together are a checkpoint."""
    sizes = {file.path: file.size for share in shares for file in share.files}
    demands = {path: size for share in shares for path, size in share.demands.items()}
    if any(sizes.get(path, -1) < size for path, size in demands.items()):
        return False

    # a share from before the save that overwrote the checkpoint
    earlier_ns = max(share.earlier_ns for share in shares)
    if any(share.files and share.newest_ns <= earlier_ns for share in shares):
        return False

    return (
        any(share.proves_end for share in shares) or len({share.node for share in shares}) == nodes
    )
