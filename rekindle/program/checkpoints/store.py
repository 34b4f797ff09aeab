"""The checkpoints of a program in the object store: upload, commit, listing and removal."""

import hashlib
import os
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from argolocal.errors import InvalidDocument
from rekindle.documents import parse, read_object, seal
from rekindle.errors import Conflict, NotFound, RekindleError
from rekindle.program.checkpoints.folder import Unit
from rekindle.program.checkpoints.held_files import check_unchanged, hold
from rekindle.program.checkpoints.paths import family_of
from rekindle.program.checkpoints.records import (
    ENDED_NAME,
    SHARE_NAME,
    CheckpointRecord,
    EndedNode,
    FileRecord,
    Files,
    Latest,
    PointerRecord,
    ShareRecord,
    find_contradiction,
    parse_node,
    parse_order,
    parse_sequence,
)
from rekindle.program.checkpoints.saves import choose_versions
from rekindle.storage import Store
from rekindle.training.checkpoint import chunks
from rekindle.training.checkpoint.checkpoint_retention import READER_TIMEOUT_S, UNFINISHED_TIMEOUT_S
from rekindle.training.checkpoint.chunks import PARALLEL_REQUESTS, run_parallel

DELETION_TIMEOUT_S = 60.0  # time in seconds after which a running deletion stops itself
# time in seconds that a commit waits for another node's deletion, since that node may be lost
LEASE_TIMEOUT_S = 3.0
DELETED_OBJECTS = 1000  # maximum number of objects per delete request
COMMIT_ATTEMPTS = 20


class MissingChunks(Exception):
    """Raised if a deletion removed chunks before a record referred to them. The chunks must be
    uploaded again."""


class UploadStopped(Exception):
    """Raised if an upload must stop, because the program is started again."""


@dataclass
class ProgramStore:
    """The checkpoints below `prefix` of the object store. `keep`: number of checkpoints of each
    family to keep. Not thread-safe."""

    store: Store
    prefix: str
    keep: int = 2
    uploaded_bytes: int = 0
    _stored_chunks: set[str] = field(default_factory=set)

    @property
    def root(self) -> str:
        return f"{self.prefix}/program"

    def upload_files(
        self, folder: Path, unit: Unit, node: int, stop: Event | None = None
    ) -> list[FileRecord]:
        """Upload the chunks of a unit's files that the store does not have. Raises ChangedFile if
        the program changes a file in the meantime, UploadStopped once `stop` is set,
        StorageError."""
        self._stored_chunks = self._list_chunks()
        with hold(folder, unit) as paths:
            records = [
                self._upload_file(unit, file, path, node, stop or Event())
                for file, path in paths.items()
            ]
            # the program may have changed a file in place after it was read
            for file, path in paths.items():
                check_unchanged(path, unit, file)
        return records

    def _upload_file(self, unit: Unit, file: str, path: Path, node: int, stop: Event) -> FileRecord:
        chunk_bytes = chunks.CHUNK_BYTES
        names: list[str] = []
        whole = hashlib.sha256()
        size = 0

        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as content:
            check_unchanged(descriptor, unit, file)
            while batch := list(_read_chunks(content.fileno(), size, chunk_bytes)):
                if stop.is_set():
                    raise UploadStopped
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

    def end_deletions(self) -> None:
        """End the deletions of all nodes, including lost nodes, so that no commit waits for a
        deletion."""
        self.store.delete(sorted(self._list_deletions()))

    def _list_deletions(self) -> set[str]:
        return {entry.key for entry in self.store.list(f"{self.root}/deletions/")}

    def check_chunks(self, files: list[FileRecord]) -> None:
        """Wait for running deletions. Raises MissingChunks if a chunk of these files was
        removed."""
        running = self._list_deletions()
        end = time.monotonic() + LEASE_TIMEOUT_S
        while running and time.monotonic() < end:
            time.sleep(0.2)
            running &= self._list_deletions()
        # a deletion stops before its next request when its lease is gone
        self.store.delete(sorted(running))

        if not {name for file in files for name in file.chunks} <= self._list_chunks():
            raise MissingChunks

    def read_clock(self) -> int:
        """Return the current time of the object store in nanoseconds, which is the same for all
        nodes. Raises StorageError."""
        key = f"{self.root}/clock"
        self.store.put(key, b"")
        times = [entry.modified for entry in self.store.list(key) if entry.key == key]
        return int(times[0] * 1e9) if times else time.time_ns()

    def write_share(self, generation: str, share: ShareRecord) -> str:
        """Record which files of a unit one node has, and delete its earlier record of this unit;
        return the key of the record. `generation`: key of the generation."""
        key = f"{self.root}/shares/{generation}/{share.name}"
        folder = key.rpartition("-")[0] + "-"
        self.store.put(key, seal(share.model_dump(exclude={"checksum"})))
        self.store.delete([entry.key for entry in self.store.list(folder) if entry.key < key])
        return key

    def write_ended(self, generation: str, node: int, units: Iterable[str]) -> None:
        """Record that a node's processes have ended, and the keys of the units that it has."""
        data = seal(EndedNode(units=sorted(units)).model_dump(exclude={"checksum"}))
        self.store.put(f"{self.root}/ended/{generation}/{node}.json", data)

    def commit_ended(self, generation: str) -> None:
        """Commit the complete checkpoints of a generation whose processes have ended. A node that
        has not recorded its end was lost. Raises StorageError."""
        for unit, keys in self.list_shares(generation).items():
            with suppress(MissingChunks):
                self.commit_shares(generation, unit, keys, has_ended=True)

        folder = f"{self.root}/ended/{generation}/"
        self.store.delete([entry.key for entry in self.store.list(folder)])

    def list_shares(self, generation: str) -> dict[str, dict[int, str]]:
        """Return the keys of the newest shares: key of the unit → node → key of the share. The
        units are sorted by upload time, because an older version cannot be committed after a newer
        one."""
        shares: dict[str, dict[int, str]] = {}
        start = f"{self.root}/shares/{generation}/"
        for entry in self.store.list(start):
            unit = entry.key[len(start) :].partition("/")[0]
            node = parse_node(SHARE_NAME, entry.key)
            if node is not None:
                shares.setdefault(unit, {})[node] = entry.key
        return dict(
            sorted(shares.items(), key=lambda item: min(map(parse_sequence, item[1].values())))
        )

    def commit_shares(
        self, generation: str, unit: str, keys: Mapping[int, str], *, has_ended: bool = False
    ) -> CheckpointRecord | None:
        """Commit the checkpoint of these shares if it is complete. `unit`: key of the unit; `keys`:
        keys of the shares by node; `has_ended`: True if no node will write another share. Returns
        None if the checkpoint is incomplete, or older than a committed one.

        Raises MissingChunks, StorageError.
        """
        # ignore replaced or damaged shares, which their nodes write again
        shares = [share for key in keys.values() if (share := self._try_read_share(key))]
        contents = [share for share in shares if share.files]
        if not contents:
            return None

        first = contents[0]
        created = max(share.newest_ns for share in contents) / 1e9
        newest = self.find_newest(family_of(first.path))
        if newest and newest.created > created:
            return None

        absent = self._find_absent_nodes(generation, unit, first.nodes)
        # a checkpoint of a single file does not need the versions of lost nodes
        is_whole_file = has_ended and all(
            file.path == "" for share in contents for file in share.files
        )
        if is_whole_file:
            absent |= set(range(first.nodes))
        if not _are_complete(shares, absent, newest):
            return None

        files = [file for share in contents for file in share.files]
        if find_contradiction(files):
            return None

        pointers = {pointer.path: pointer for share in contents for pointer in share.pointers}
        return self.commit(
            first.path,
            first.format,
            next((share.step for share in contents if share.step is not None), None),
            first.nodes,
            files,
            list(pointers.values()),
            created,
        )

    def _find_absent_nodes(self, generation: str, unit: str, nodes: int) -> set[int]:
        """Return the nodes that have recorded their end and do not have this unit."""
        folder = f"{self.root}/ended/{generation}/"
        absent: set[int] = set()
        for entry in self.store.list(folder):
            node = parse_node(ENDED_NAME, entry.key)
            if node is None or node >= nodes:
                continue
            with suppress(NotFound, InvalidDocument):
                if unit not in read_object(EndedNode, self.store, entry.key).units:
                    absent.add(node)
        return absent

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
        """Write the record of a complete checkpoint, and let `latest` name it.

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
            same_records = (self._try_read(key) for key in keys if key.endswith(suffix))
            earlier = next(filter(None, same_records), None)
            if earlier and parse_order(latest) >= earlier.order:
                return earlier

            key = (earlier or record).key(self.root)
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
        """Return the checkpoint key in `latest` and the etag of `latest`; "" for a value that does
        not exist."""
        try:
            data, etag = self.store.get_with_etag(f"{self.root}/latest")
        except NotFound:
            return "", ""
        try:
            return parse(Latest, data, "latest").checkpoint, etag
        except InvalidDocument:
            return "", etag

    def list_keys(self) -> list[str]:
        """Return the keys of all checkpoints in the order of their commits."""
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
        share = read_object(ShareRecord, self.store, key)
        if not key.endswith(f"/{share.name}"):
            raise InvalidDocument(f"{self.store.uri(key)} does not match its name. Remove it.")
        return share

    def list_newest(self, damaged: Collection[str] = ()) -> list[str]:
        """Return the keys of the checkpoints to restore, newest first: the newest readable
        checkpoint of each family, so that all belong to the same save. Keys in `damaged` are
        skipped. Raises StorageError."""
        records = [record for key, record in self.read_records() if key not in damaged]
        return [record.key(self.root) for record in choose_versions(records)]

    def read_records(self) -> Iterator[tuple[str, CheckpointRecord]]:
        """Yield the readable checkpoints and their keys, newest first. Raises StorageError."""
        for key in reversed(self.list_keys()):
            if record := self._try_read(key):
                yield key, record

    def find_newest(self, family: str) -> CheckpointRecord | None:
        """Return the newest readable checkpoint of a family."""
        records = (record for _, record in self.read_records())
        return next((record for record in records if family_of(record.path) == family), None)

    @contextmanager
    def lease(self, kind: str) -> Iterator[str]:
        """Announce a reader (`readers`) or a deletion (`deletions`) to the other nodes; yield the
        key of the lease."""
        key = f"{self.root}/{kind}/{uuid.uuid4().hex}"
        self.store.put(key, b"")
        try:
            yield key
        finally:
            # a lease that is not deleted expires
            with suppress(RekindleError):
                self.store.delete([key])

    def _delete_expired(self) -> None:
        """Delete the checkpoints beyond `keep`, and the chunks and shares that nothing needs."""
        keys = self.list_keys()
        with self.lease("deletions") as lease:
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
            # compare paths, too: a copy with another path, such as `latest.pt`, is a separate
            # checkpoint
            known_paths = {
                (record.path, file)
                for record in records.values()
                if record
                for file in _files_of([record])
            }

            unneeded_shares: list[str] = []
            for entry in shares:
                share = self._try_read_share(entry.key)
                is_old = entry.modified < now - UNFINISHED_TIMEOUT_S
                files = _files_of([share])
                is_known = (
                    share is not None and {(share.path, file) for file in files} <= known_paths
                )
                if share is None or is_old or (share.files and is_known):
                    unneeded_shares.append(entry.key)
                else:
                    kept_files |= files

            kept_chunks = {name for file in kept_files for name in file[1]}
            known_chunks = {name for file in known_files for name in file[1]}
            unneeded_chunks = [
                entry.key
                for entry in stored
                if (name := entry.key.rpartition("/")[2]) not in kept_chunks
                and (name in known_chunks or entry.modified < now - UNFINISHED_TIMEOUT_S)
            ]

            # records are deleted first, so that no reader finds a record without its chunks
            for objects in (sorted(expired), [*unneeded_shares, *unneeded_chunks]):
                for first in range(0, len(objects), DELETED_OBJECTS):
                    # stop if the lease is gone: another node has ended this deletion and no longer
                    # waits
                    is_late = time.monotonic() - start > DELETION_TIMEOUT_S
                    if is_late or lease not in self._list_deletions():
                        return
                    self.store.delete(objects[first : first + DELETED_OBJECTS])

    def _find_expired(self, records: Mapping[str, CheckpointRecord | None]) -> set[str]:
        newest_first = [record for key in reversed(list(records)) if (record := records[key])]
        needed = {record.key(self.root) for record in choose_versions(newest_first)}
        counts: dict[str, int] = {}
        expired: set[str] = set()
        for key in reversed(list(records)):
            record = records[key]
            family = family_of(record.path) if record else ""
            counts[family] = counts.get(family, 0) + 1
            if counts[family] > self.keep and key not in needed:
                expired.add(key)
        return expired

    def _try_read(self, key: str) -> CheckpointRecord | None:
        try:
            return self.read_record(key)
        except (NotFound, InvalidDocument):
            return None

    def find_path(self, keys: Iterable[str]) -> str | None:
        """Return the path of the unit to which these shares belong; None if no share can be
        read."""
        shares = (self._try_read_share(key) for key in keys)
        return next((share.path for share in shares if share), None)

    def _try_read_share(self, key: str) -> ShareRecord | None:
        try:
            return self.read_share(key)
        except (NotFound, InvalidDocument):
            return None


def _read_chunks(descriptor: int, offset: int, chunk_bytes: int) -> Iterator[bytes]:
    """Yield the next PARALLEL_REQUESTS chunks of a file from `offset` on."""
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


def _are_complete(
    shares: list[ShareRecord], absent: set[int], newest: CheckpointRecord | None
) -> bool:
    """Return True if these shares together are a complete checkpoint. `absent`: nodes that have no
    files of this checkpoint; `newest`: the newest complete checkpoint of the family."""
    sizes = {file.path: file.size for share in shares for file in share.files}
    demands = {path: size for share in shares for path, size in share.demands.items()}
    if any(sizes.get(path, -1) < size for path, size in demands.items()):
        return False

    # if a save has overwritten the checkpoint, reject shares from before: their times are nearer to
    # the earlier save
    contents = [share for share in shares if share.files]
    overwriting = [share for share in contents if share.earlier_ns]
    limit_ns = max(((share.earlier_ns + share.newest_ns) // 2 for share in overwriting), default=0)
    if any(share.newest_ns < limit_ns for share in contents):
        return False
    if any(share.proves_end for share in shares):
        return True

    sharing_nodes = {share.node for share in shares}
    nodes = shares[0].nodes
    if sharing_nodes | absent >= set(range(nodes)):
        return True

    # accept if all nodes that wrote files of the previous checkpoint have written files again
    if newest is None or newest.nodes != nodes:
        return False
    writers = {share.node for share in shares if share.files}
    return writers >= {file.node for file in newest.files}
