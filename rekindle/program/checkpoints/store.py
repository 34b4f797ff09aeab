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
from rekindle.documents import parse, read_object, seal_fields
from rekindle.errors import Conflict, NotFound, RekindleError
from rekindle.program.checkpoints.deletion import StoredObjects
from rekindle.program.checkpoints.folder import CheckpointUnit
from rekindle.program.checkpoints.held_files import check_file_unchanged, hold_files
from rekindle.program.checkpoints.paths import make_family_path
from rekindle.program.checkpoints.records import (
    ENDED_NODE_PATTERN,
    MAX_ORDER,
    SHARE_NAME_PATTERN,
    CheckpointRecord,
    EndedNode,
    FileRecord,
    LatestCheckpoint,
    PointerRecord,
    ShareRecord,
    find_contradiction,
    parse_node,
    parse_order,
    parse_sequence,
)
from rekindle.program.checkpoints.saves import choose_versions
from rekindle.storage import Store, StoredObject
from rekindle.training.checkpoint import chunks
from rekindle.training.checkpoint.checkpoint_retention import READER_TIMEOUT_S, UNFINISHED_TIMEOUT_S
from rekindle.training.checkpoint.chunks import PARALLEL_REQUESTS, run_for_chunks

# seconds after which a running deletion stops itself
DELETION_TIMEOUT_S = 60.0
# maximum time that a commit waits for another node's deletion, since that node may be lost
LEASE_TIMEOUT_S = 3.0
# maximum number of objects per delete request
MAX_DELETED_OBJECTS = 1000
COMMIT_ATTEMPTS = 20


class MissingChunks(Exception):
    """Raised if a deletion removed chunks of a checkpoint before a record referred to the chunks.
    The removed chunks must be uploaded again."""


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
        self,
        folder: Path,
        checkpoint_unit: CheckpointUnit,
        node: int,
        stop_event: Event | None = None,
    ) -> list[FileRecord]:
        """Upload the chunks of a unit's files that the object store does not have. Raises
        ChangedFile if the program changes a file in the meantime, UploadStopped once `stop_event`
        is set, StorageError."""
        self._stored_chunks = self._list_chunk_names()
        with hold_files(folder, checkpoint_unit) as held_paths:
            file_records = [
                self._upload_file(
                    checkpoint_unit, relative_path, held_path, node, stop_event or Event()
                )
                for relative_path, held_path in held_paths.items()
            ]
            # the program may have changed a file in place after it was read
            for relative_path, held_path in held_paths.items():
                check_file_unchanged(held_path, checkpoint_unit, relative_path)
        return file_records

    def _upload_file(
        self,
        checkpoint_unit: CheckpointUnit,
        relative_path: str,
        held_path: Path,
        node: int,
        stop_event: Event,
    ) -> FileRecord:
        chunk_bytes = chunks.CHUNK_BYTES
        chunk_names: list[str] = []
        file_hash = hashlib.sha256()
        file_bytes = 0

        file_descriptor = os.open(held_path, os.O_RDONLY | os.O_CLOEXEC)
        with open(file_descriptor, "rb", buffering=0) as file_stream:
            check_file_unchanged(file_descriptor, checkpoint_unit, relative_path)
            while chunk_batch := list(_read_chunks(file_stream.fileno(), file_bytes, chunk_bytes)):
                if stop_event.is_set():
                    raise UploadStopped
                batch_chunk_names = [hashlib.sha256(chunk).hexdigest() for chunk in chunk_batch]
                for chunk in chunk_batch:
                    file_hash.update(chunk)
                    file_bytes += len(chunk)

                self._upload_chunks(dict(zip(batch_chunk_names, chunk_batch, strict=True)))
                chunk_names += batch_chunk_names
            check_file_unchanged(file_descriptor, checkpoint_unit, relative_path)

        return FileRecord(
            path=relative_path,
            size=file_bytes,
            sha256=file_hash.hexdigest(),
            chunks=chunk_names,
            chunk_bytes=chunk_bytes,
            mode=checkpoint_unit.files[relative_path].mode & 0o777,
            node=node,
        )

    def _upload_chunks(self, chunks_by_name: Mapping[str, bytes]) -> None:
        missing_names = [
            chunk_name for chunk_name in chunks_by_name if chunk_name not in self._stored_chunks
        ]

        def put(chunk_index: int) -> None:
            chunk_name = missing_names[chunk_index]
            self.store.put(f"{self.root}/chunks/{chunk_name}", chunks_by_name[chunk_name])

        run_for_chunks(put, range(len(missing_names)))
        self._stored_chunks.update(missing_names)
        self.uploaded_bytes += sum(len(chunks_by_name[chunk_name]) for chunk_name in missing_names)

    def _list_chunk_names(self) -> set[str]:
        key_prefix = f"{self.root}/chunks/"
        return {object_entry.key[len(key_prefix) :] for object_entry in self.store.list(key_prefix)}

    def end_deletions(self) -> None:
        """Delete the leases of all running deletions, including deletions of lost nodes. A deletion
        without a lease stops, and no commit waits for it."""
        self.store.delete(sorted(self._list_deletion_keys()))

    def _list_deletion_keys(self) -> set[str]:
        return {object_entry.key for object_entry in self.store.list(f"{self.root}/deletions/")}

    def verify_chunks_exist(self, file_records: list[FileRecord]) -> None:
        """Wait for running deletions, but at most LEASE_TIMEOUT_S; then make the deletions stop.

        Raises MissingChunks if a chunk of the given files is not in the object store.
        """
        running_deletions = self._list_deletion_keys()
        deadline_s = time.monotonic() + LEASE_TIMEOUT_S
        while running_deletions and time.monotonic() < deadline_s:
            time.sleep(0.2)
            running_deletions &= self._list_deletion_keys()
        # a deletion stops before its next request when its lease is gone
        self.store.delete(sorted(running_deletions))

        if (
            not {chunk_name for file_record in file_records for chunk_name in file_record.chunks}
            <= self._list_chunk_names()
        ):
            raise MissingChunks

    def read_clock(self) -> int:
        """Return the current time of the object store in nanoseconds, which is the same for all
        nodes. The returned time is the modification time of an object that `read_clock` writes.
        Raises StorageError."""
        clock_key = f"{self.root}/clock"
        self.store.put(clock_key, b"")
        modification_times_s = [
            object_entry.modified
            for object_entry in self.store.list(clock_key)
            if object_entry.key == clock_key
        ]
        return int(modification_times_s[0] * 1e9) if modification_times_s else time.time_ns()

    def write_share(self, generation: str, share: ShareRecord) -> str:
        """Record which files of a unit one node has, and delete the node's earlier record of this
        unit; return the key of the record. `generation`: key of the generation."""
        share_key = f"{self.root}/shares/{generation}/{share.name}"
        share_prefix = share_key.rpartition("-")[0] + "-"
        self.store.put(share_key, seal_fields(share.model_dump(exclude={"checksum"})))
        self.store.delete(
            [
                object_entry.key
                for object_entry in self.store.list(share_prefix)
                if object_entry.key < share_key
            ]
        )
        return share_key

    def write_ended_node(self, generation: str, node: int, unit_keys: Iterable[str]) -> None:
        """Record that a node's processes have ended, and the keys of the units that it has."""
        record_bytes = seal_fields(
            EndedNode(units=sorted(unit_keys)).model_dump(exclude={"checksum"})
        )
        self.store.put(f"{self.root}/ended/{generation}/{node}.json", record_bytes)

    def commit_ended_generation(self, generation: str) -> None:
        """Commit the complete checkpoints of a generation whose processes have ended. A node that
        has not recorded the end of its processes was lost. Raises StorageError."""
        for unit_name, share_keys in self.list_shares(generation).items():
            with suppress(MissingChunks):
                self.commit_shares(generation, unit_name, share_keys, has_ended=True)

        key_prefix = f"{self.root}/ended/{generation}/"
        self.store.delete([object_entry.key for object_entry in self.store.list(key_prefix)])

    def list_shares(self, generation: str) -> dict[str, dict[int, str]]:
        """Return the keys of the newest shares: key of the unit → node → key of the share. The
        units are sorted by upload time, because an older version cannot be committed after a newer
        version."""
        share_keys_by_unit: dict[str, dict[int, str]] = {}
        key_prefix = f"{self.root}/shares/{generation}/"
        for object_entry in self.store.list(key_prefix):
            unit_name = object_entry.key[len(key_prefix) :].partition("/")[0]
            node = parse_node(SHARE_NAME_PATTERN, object_entry.key)
            if node is not None:
                share_keys_by_unit.setdefault(unit_name, {})[node] = object_entry.key
        return dict(
            sorted(
                share_keys_by_unit.items(),
                key=lambda unit_shares: min(map(parse_sequence, unit_shares[1].values())),
            )
        )

    def commit_shares(
        self,
        generation: str,
        unit_name: str,
        share_keys: Mapping[int, str],
        *,
        has_ended: bool = False,
    ) -> CheckpointRecord | None:
        """Commit the checkpoint to which the given shares belong if the checkpoint is complete.
        `unit_name`: key of the unit; `share_keys`: keys of the shares by node; `has_ended` is True
        if no node will write another share. Returns None if the checkpoint is incomplete, or older
        than a committed checkpoint.

        Raises MissingChunks, StorageError.
        """
        # ignore replaced or damaged shares, which their nodes write again
        share_records = [
            share for share_key in share_keys.values() if (share := self._try_read_share(share_key))
        ]
        nonempty_shares = [share for share in share_records if share.files]
        if not nonempty_shares:
            return None

        first_share = nonempty_shares[0]
        created_s = max(share.newest_ns for share in nonempty_shares) / 1e9
        newest_record = self.find_newest_record(make_family_path(first_share.path))
        if newest_record and newest_record.created > created_s:
            return None

        absent_nodes = self._find_absent_nodes(generation, unit_name, first_share.nodes)
        # if the checkpoint is a single file, a copy of one node is enough, so lost nodes do not
        # matter
        is_single_file = has_ended and all(
            file_record.path == "" for share in nonempty_shares for file_record in share.files
        )
        if is_single_file:
            absent_nodes |= set(range(first_share.nodes))
        if not _are_shares_complete(share_records, absent_nodes, newest_record):
            return None

        file_records = [file_record for share in nonempty_shares for file_record in share.files]
        if find_contradiction(file_records):
            return None

        pointers_by_path = {
            pointer.path: pointer for share in nonempty_shares for pointer in share.pointers
        }
        return self.commit(
            first_share.path,
            first_share.format,
            next(
                (share.step for share in nonempty_shares if share.step is not None),
                None,
            ),
            first_share.nodes,
            file_records,
            list(pointers_by_path.values()),
            created_s,
        )

    def _find_absent_nodes(self, generation: str, unit_name: str, node_count: int) -> set[int]:
        """Return the nodes that have recorded the end of their processes and do not have the
        unit."""
        key_prefix = f"{self.root}/ended/{generation}/"
        absent_nodes: set[int] = set()
        for object_entry in self.store.list(key_prefix):
            node = parse_node(ENDED_NODE_PATTERN, object_entry.key)
            if node is None or node >= node_count:
                continue
            with suppress(NotFound, InvalidDocument):
                if unit_name not in read_object(EndedNode, self.store, object_entry.key).units:
                    absent_nodes.add(node)
        return absent_nodes

    def commit(
        self,
        unit_path: str,
        format_name: str,
        step: int | None,
        node_count: int,
        file_records: list[FileRecord],
        pointer_records: list[PointerRecord],
        created_s: float,
    ) -> CheckpointRecord:
        """Write the record of a complete checkpoint, let `latest` name it, and delete expired
        checkpoints.

        Raises MissingChunks, StorageError.
        """
        self.verify_chunks_exist(file_records)
        for _ in range(COMMIT_ATTEMPTS):
            latest_key, etag = self._read_latest()
            checkpoint_keys = self.list_checkpoint_keys()
            newest_order = self._find_newest_order([*checkpoint_keys, latest_key])
            if newest_order == MAX_ORDER:
                raise InvalidDocument(
                    f"{self.store.uri(self.root)}/checkpoints/ contains a checkpoint with the last"
                    f" possible number, {MAX_ORDER}: remove it, so that others can follow."
                )
            checkpoint_record = CheckpointRecord(
                path=unit_path,
                format=format_name,
                step=step,
                nodes=node_count,
                files=file_records,
                pointers=pointer_records,
                order=newest_order + 1,
                created=created_s,
            )

            key_suffix = f"-{checkpoint_record.content_id()}.json"
            same_records = (
                self._try_read_record(key) for key in checkpoint_keys if key.endswith(key_suffix)
            )
            earlier_record = next(filter(None, same_records), None)
            if earlier_record and self._find_newest_order([latest_key]) >= earlier_record.order:
                return earlier_record

            key = (earlier_record or checkpoint_record).key(self.root)
            if not earlier_record:
                record_bytes = seal_fields(checkpoint_record.model_dump(exclude={"checksum"}))
                self.store.put(key, record_bytes)

            try:
                record_bytes = seal_fields(LatestCheckpoint(checkpoint=key).model_dump())
                self.store.put(
                    f"{self.root}/latest", record_bytes, if_match=etag, if_absent=not etag
                )
            except Conflict:
                continue

            with suppress(RekindleError):
                self._delete_expired()
            return checkpoint_record

        raise Conflict(f"{self.store.uri(self.root)}/latest was changed {COMMIT_ATTEMPTS} times.")

    def _find_newest_order(self, keys: Iterable[str]) -> int:
        """Return the number of the newest readable checkpoint; -1 if no checkpoint can be read."""
        checkpoint_keys = [key for key in keys if parse_order(key) >= 0]
        for key in sorted(checkpoint_keys, key=parse_order, reverse=True):
            checkpoint_record = self._try_read_record(key)
            if checkpoint_record:
                return checkpoint_record.order
        return -1

    def _read_latest(self) -> tuple[str, str]:
        """Return the checkpoint key in `latest` and the etag of `latest`; "" for a value that does
        not exist."""
        try:
            latest_bytes, etag = self.store.get_with_etag(f"{self.root}/latest")
        except NotFound:
            return "", ""
        try:
            return parse(LatestCheckpoint, latest_bytes, "latest").checkpoint, etag
        except InvalidDocument:
            return "", etag

    def list_checkpoint_keys(self) -> list[str]:
        """Return the keys of all checkpoints in the order of their commits."""
        object_entries = self.store.list(f"{self.root}/checkpoints/")
        return [
            object_entry.key
            for object_entry in object_entries
            if parse_order(object_entry.key) >= 0
        ]

    def read_record(self, key: str) -> CheckpointRecord:
        """Return the record of a checkpoint. Raises NotFound, InvalidDocument, StorageError."""
        checkpoint_record = read_object(CheckpointRecord, self.store, key)
        if checkpoint_record.key(self.root) != key:
            raise InvalidDocument(f"{self.store.uri(key)} does not match its name. Remove it.")
        return checkpoint_record

    def read_share(self, key: str) -> ShareRecord:
        """Return the share of one node (the files that it has of a checkpoint). Raises NotFound,
        InvalidDocument, StorageError."""
        share = read_object(ShareRecord, self.store, key)
        if not key.endswith(f"/{share.name}"):
            raise InvalidDocument(f"{self.store.uri(key)} does not match its name. Remove it.")
        return share

    def list_newest_keys(self, damaged_keys: Collection[str] = ()) -> list[str]:
        """Return the keys of the checkpoints to restore, newest first: the newest readable
        checkpoint of each family, so that all returned checkpoints belong to the same save. Keys in
        `damaged_keys` are skipped. Raises StorageError."""
        readable_records = [
            readable_record
            for key, readable_record in self.read_records()
            if key not in damaged_keys
        ]
        return [
            readable_record.key(self.root) for readable_record in choose_versions(readable_records)
        ]

    def read_records(self) -> Iterator[tuple[str, CheckpointRecord]]:
        """Yield the readable records of checkpoints and their keys, newest first. Raises
        StorageError."""
        for key in reversed(self.list_checkpoint_keys()):
            if checkpoint_record := self._try_read_record(key):
                yield key, checkpoint_record

    def find_newest_record(self, family: str) -> CheckpointRecord | None:
        """Return the newest readable checkpoint of a family."""
        checkpoint_records = (checkpoint_record for _, checkpoint_record in self.read_records())
        return next(
            (
                checkpoint_record
                for checkpoint_record in checkpoint_records
                if make_family_path(checkpoint_record.path) == family
            ),
            None,
        )

    @contextmanager
    def lease(self, lease_kind: str) -> Iterator[str]:
        """Announce a reader (`readers`) or a deletion (`deletions`) to the other nodes; yield the
        key of the lease."""
        lease_key = f"{self.root}/{lease_kind}/{uuid.uuid4().hex}"
        self.store.put(lease_key, b"")
        try:
            yield lease_key
        finally:
            # an error is harmless, because a lease that is not deleted expires
            with suppress(RekindleError):
                self.store.delete([lease_key])

    def _delete_expired(self) -> None:
        """Delete the checkpoints beyond `keep`, and the chunks and shares that no checkpoint needs.
        While a node restores a checkpoint, no object is deleted."""
        checkpoint_keys = self.list_checkpoint_keys()
        with self.lease("deletions") as lease_key:
            start_s = time.monotonic()
            reader_entries = list(self.store.list(f"{self.root}/readers/"))
            share_entries = list(self.store.list(f"{self.root}/shares/"))
            chunk_entries = list(self.store.list(f"{self.root}/chunks/"))
            records_by_key = {key: self._try_read_record(key) for key in checkpoint_keys}

            # the newest object shows the current time by the clock of the object store
            store_time_s = max(
                (entry.modified for entry in [*chunk_entries, *share_entries, *reader_entries]),
                default=0.0,
            )
            dead_reader_keys = _list_older_keys(reader_entries, store_time_s - READER_TIMEOUT_S)
            self.store.delete(dead_reader_keys)
            if len(dead_reader_keys) < len(reader_entries):
                return

            stored_objects = StoredObjects(
                root=self.root,
                records_by_key=records_by_key,
                shares_by_key={
                    entry.key: self._try_read_share(entry.key) for entry in share_entries
                },
                chunk_keys=[entry.key for entry in chunk_entries],
                old_keys=set(
                    _list_older_keys(
                        [*share_entries, *chunk_entries], store_time_s - UNFINISHED_TIMEOUT_S
                    )
                ),
            )
            expired_keys = stored_objects.find_expired_checkpoints(self.keep)
            unneeded_keys = stored_objects.find_unneeded_objects(expired_keys)

            # records are deleted first, so that no reader finds a record without its chunks
            for object_keys in (sorted(expired_keys), unneeded_keys):
                for batch_start in range(0, len(object_keys), MAX_DELETED_OBJECTS):
                    # stop if the lease is gone, because another node has then ended this deletion
                    # and no longer waits for it
                    is_late = time.monotonic() - start_s > DELETION_TIMEOUT_S
                    if is_late or lease_key not in self._list_deletion_keys():
                        return
                    self.store.delete(object_keys[batch_start : batch_start + MAX_DELETED_OBJECTS])

    def _try_read_record(self, key: str) -> CheckpointRecord | None:
        try:
            return self.read_record(key)
        except (NotFound, InvalidDocument):
            return None

    def find_unit_path(self, share_keys: Iterable[str]) -> str | None:
        """Return the path of the unit to which the given shares belong; None if no share can be
        read."""
        share_records = (self._try_read_share(share_key) for share_key in share_keys)
        return next((share.path for share in share_records if share), None)

    def _try_read_share(self, key: str) -> ShareRecord | None:
        try:
            return self.read_share(key)
        except (NotFound, InvalidDocument):
            return None


def _read_chunks(file_descriptor: int, offset_bytes: int, chunk_bytes: int) -> Iterator[bytes]:
    """Yield the next PARALLEL_REQUESTS chunks of a file from `offset_bytes` on."""
    for chunk_index in range(PARALLEL_REQUESTS):
        chunk = os.pread(file_descriptor, chunk_bytes, offset_bytes + chunk_index * chunk_bytes)
        if not chunk:
            return
        yield chunk
        if len(chunk) < chunk_bytes:
            return


def _list_older_keys(object_entries: Iterable[StoredObject], limit_s: float) -> list[str]:
    """Return the keys of the objects that were last modified before the time `limit_s`."""
    return [object_entry.key for object_entry in object_entries if object_entry.modified < limit_s]


def _are_shares_complete(
    share_records: list[ShareRecord], absent_nodes: set[int], newest_record: CheckpointRecord | None
) -> bool:
    """Return True if the given shares together are a complete checkpoint. `absent_nodes`: nodes
    that have no files of this checkpoint; `newest_record`: the newest complete checkpoint of the
    family."""
    sizes_by_path = {
        file_record.path: file_record.size for share in share_records for file_record in share.files
    }
    demanded_sizes = {
        path: demanded_bytes
        for share in share_records
        for path, demanded_bytes in share.demands.items()
    }
    if any(
        sizes_by_path.get(path, -1) < demanded_bytes
        for path, demanded_bytes in demanded_sizes.items()
    ):
        return False

    # if a save has overwritten an earlier version of the checkpoint, reject the shares of the
    # earlier version, whose times are nearer to the earlier save than to the new save
    nonempty_shares = [share for share in share_records if share.files]
    overwriting_shares = [share for share in nonempty_shares if share.earlier_ns]
    limit_ns = max(
        ((share.earlier_ns + share.newest_ns) // 2 for share in overwriting_shares),
        default=0,
    )
    if any(share.newest_ns < limit_ns for share in nonempty_shares):
        return False
    if any(share.proves_end for share in share_records):
        return True

    sharing_nodes = {share.node for share in share_records}
    node_count = share_records[0].nodes
    if sharing_nodes | absent_nodes >= set(range(node_count)):
        return True

    # accept if all nodes that wrote files of the previous checkpoint have written files again
    if newest_record is None or newest_record.nodes != node_count:
        return False
    writer_nodes = {share.node for share in share_records if share.files}
    return writer_nodes >= {file_record.node for file_record in newest_record.files}
