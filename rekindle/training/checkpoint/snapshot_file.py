"""Snapshots of a worker's state in shared memory, which survive the death of all processes.

    /dev/shm/rekindle-<run>-<node>      ($REKINDLE_SHM: another directory)

Each worker has one file: a header page (run, model, machine, a record per slot) and three slots for
the state. One slot holds the newest complete snapshot, the next snapshot is written to the second,
and an upload may read the third. Since the process may die at any moment, a slot's record is
cleared before the slot is written, and made valid afterwards by one flag, which is also the
record's checksum. A reader of a snapshot verifies every byte. The launcher imports this module, so
this module does not import torch.
"""

import fcntl
import hashlib
import mmap
import os
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import ConfigError, RekindleError
from rekindle.kubernetes_names import POD_NAME

# number of slots in a snapshot file
SLOT_COUNT = 3
# bytes of a memory page
PAGE_BYTES = 4096
# bytes that each slot reserves for the state of the workload's own data loader
MAX_LOADER_STATE_BYTES = 1 << 18
# age in seconds from which a snapshot file without a live process is removed
STALE_AFTER_S = 3600.0
# number of bytes that are read at once
READ_BYTES = 16 << 20
# Python's mmap lacks this constant
MADV_POPULATE_WRITE = 23
FILE_MAGIC = b"rekindle hot 1\n\0"
# magic, identity, layout, fingerprint, size of the state in bytes
HEADER_STRUCT = struct.Struct("<16s 32s 32s 32s Q")
# step, size of the loader's state in bytes, crc32 of the slot
RECORD_STRUCT = struct.Struct("<q I I")
FLAG_STRUCT = struct.Struct("<I")
# positions of the slots' records, in bytes
FIRST_RECORD_OFFSET = 512
RECORD_DISTANCE_BYTES = 64
# newest completed step, and Unix time of its end
LAST_STEP_STRUCT = struct.Struct("<q d")
# position of two records of the newest step, which are written alternately
LAST_STEP_OFFSET = 1024


@dataclass(frozen=True)
class CommittedSnapshot:
    """A slot with a complete snapshot: its index, the step, the length of the data loader's state,
    and the checksum of the slot."""

    slot: int
    step: int
    length: int
    crc: int


def find_snapshot_directory() -> Path:
    return Path(os.environ.get("REKINDLE_SHM", "/dev/shm"))


def hash_run_name(run_identity: str, checkpoint_prefix: str) -> str:
    """Return the part of the file name that identifies the run: a hash of its identity and its
    checkpoint prefix."""
    return hashlib.sha256((run_identity + checkpoint_prefix).encode()).hexdigest()[:12]


def read_worker_name() -> str:
    """Return the name of this worker, which a restart does not change: the pod's name, and the
    index of the worker in the pod."""
    # Rekindle's launcher appends the index to POD_NAME; torchrun sets LOCAL_RANK
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local_rank = os.environ.get("LOCAL_RANK", "0")
    else:
        local_rank = "0"
    return (os.environ.get(POD_NAME) or socket.gethostname()) + (
        "" if local_rank == "0" else f"/{local_rank}"
    )


def hash_worker_name() -> str:
    """Return the part of the file name that identifies this worker: a hash of its name."""
    return hashlib.sha256(read_worker_name().encode()).hexdigest()[:12]


def make_snapshot_path(run_hash: str, worker_hash: str) -> Path:
    return find_snapshot_directory() / f"rekindle-{run_hash}-{worker_hash}"


def read_newest_step(path: Path) -> int:
    """Return the step of the newest committed snapshot in a file, or -1. The bytes of the newest
    snapshot are not verified.

    The process that owns the snapshot file must not call read_newest_step, which would release the
    process's lock.
    """
    with suppress(OSError), open(path, "rb") as file:
        return max(
            (
                snapshot_record.step
                for snapshot_record in _parse_records(file.read(PAGE_BYTES))
                if snapshot_record
            ),
            default=-1,
        )
    return -1


def remove_stale_files(run_hash: str) -> list[Path]:
    """Remove snapshot files that no process holds and that are older than STALE_AFTER_S; return
    their paths.

    The files of the run `run_hash` are never removed, because the run may resume from its snapshots
    after any time.
    """
    return _remove_unlocked_files(
        "rekindle-*",
        lambda snapshot_file_path: (
            not snapshot_file_path.name.startswith(f"rekindle-{run_hash}-")
            and time.time() - snapshot_file_path.stat().st_mtime > STALE_AFTER_S
        ),
    )


def remove_run_files(run_hash: str) -> list[Path]:
    """Remove the snapshot files of a completed run, except the files that a live process holds;
    return their paths."""
    return _remove_unlocked_files(f"rekindle-{run_hash}-*", lambda file: True)


def _remove_unlocked_files(file_pattern: str, is_selected: Callable[[Path], bool]) -> list[Path]:
    removed_files = []
    for file in find_snapshot_directory().glob(file_pattern):
        # OSError is raised for a file that is already removed, locked by a process, or owned by
        # another user
        with suppress(OSError):
            if not is_selected(file):
                # do not lock the file of this run, not even briefly, because a worker may be about
                # to lock it
                continue
            with open(file, "r+b") as opened_file:
                fcntl.lockf(opened_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # check the age again, because the file may have changed before it was locked
                if is_selected(file):
                    file.unlink()
                    removed_files.append(file)
    return removed_files


class SnapshotFile:
    """The snapshot file of this worker. The constructor raises OSError if the snapshot file cannot
    be opened, ConfigError if the file belongs to another run.

    Call `read` first to find the snapshots. After `read`, `reserve` prepares the file for writing,
    which takes as long as filling all slots.
    """

    def __init__(
        self,
        path: Path,
        identity_hash: str,
        layout_hash: str,
        fingerprint_hash: str,
        state_bytes: int,
    ) -> None:
        """The arguments that are hashes are sha256 in hex; `state_bytes`: bytes of the state."""
        self.path = path
        self.size = state_bytes
        self.slot_bytes = -(-(state_bytes + MAX_LOADER_STATE_BYTES) // PAGE_BYTES) * PAGE_BYTES
        # messages about damage that was found while reading
        self.damage: list[str] = []
        # slot of the loaded snapshot
        self.loaded_slot: int | None = None
        self._header = HEADER_STRUCT.pack(
            FILE_MAGIC,
            *(
                bytes.fromhex(hex_digest)
                for hex_digest in (identity_hash, layout_hash, fingerprint_hash)
            ),
            state_bytes,
        )
        # `is_locked`: True if this process holds the lock of the file
        self._file, self.is_locked = open_and_lock(path)
        self._map: mmap.mmap | None = None
        header_page = os.pread(self._file, PAGE_BYTES, 0)
        self._records = _parse_records(header_page)
        # the last step that the previous process recorded, and the Unix time of its end
        self.last_step = _parse_last_step(header_page)
        # True if the file is from a worker with another fingerprint
        self.is_foreign = False
        self._is_valid = self._check_header(header_page)

    def _check_header(self, header_page: bytes) -> bool:
        """Return True if the header of the snapshot file is intact. Raises ConfigError if the slots
        belong to another run."""
        if not header_page:
            return False

        header_end = HEADER_STRUCT.size
        if (
            len(header_page) < PAGE_BYTES
            or FLAG_STRUCT.unpack_from(header_page, header_end)[0]
            != _compute_flag(header_page[:header_end])
            or header_page[:16] != FILE_MAGIC
        ):
            self.damage.append(f"the header of {self.path} is damaged")
            return False

        actual_fields = HEADER_STRUCT.unpack(header_page[:header_end])
        expected_fields = HEADER_STRUCT.unpack(self._header)
        if (actual_fields[1], actual_fields[2], actual_fields[4]) != (
            expected_fields[1],
            expected_fields[2],
            expected_fields[4],
        ):
            raise ConfigError(
                f"{self.path} holds the state of another run or model (identity"
                f" {actual_fields[1].hex()[:12]}, this run has {expected_fields[1].hex()[:12]}):"
                " nothing was changed. Give this run another `checkpoints` prefix, or delete that"
                " file."
            )

        self.is_foreign = actual_fields[3] != expected_fields[3]
        return True

    def read(self) -> Iterator[tuple[CommittedSnapshot, bytes]]:
        """Yield the intact snapshots, newest first, each with the data loader's state. Messages
        about damaged snapshots are added to `damage`."""
        if not self._is_valid:
            return

        for slot_index, slot_record in enumerate(self._records):
            if slot_record is None:
                self.damage.append(f"the record of slot {slot_index} of {self.path} is damaged")

        committed_snapshots = [
            slot_record for slot_record in self._records if slot_record and slot_record.step >= 0
        ]
        for snapshot in sorted(
            committed_snapshots, key=lambda snapshot: snapshot.step, reverse=True
        ):
            if self._compute_slot_checksum(snapshot) == snapshot.crc:
                loader_state_offset = PAGE_BYTES + snapshot.slot * self.slot_bytes + self.size
                yield snapshot, os.pread(self._file, snapshot.length, loader_state_offset)
            else:
                self.damage.append(
                    f"the snapshot of step {snapshot.step} in {self.path} is damaged"
                )

    def load(self, snapshot: CommittedSnapshot, state_bytes: memoryview) -> None:
        """Read the state of a snapshot, which `read` has yielded, into `state_bytes`."""
        slot_offset = PAGE_BYTES + snapshot.slot * self.slot_bytes
        for block_offset in range(0, self.size, READ_BYTES):
            state_block = state_bytes[block_offset : min(self.size, block_offset + READ_BYTES)]
            if os.preadv(self._file, [state_block], slot_offset + block_offset) != len(state_block):
                raise RekindleError(
                    f"{self.path} became shorter while this worker read it: restart this worker."
                )
        self.loaded_slot = snapshot.slot

    def _compute_slot_checksum(self, snapshot: CommittedSnapshot) -> int:
        """Return the checksum of a slot, or -1 if the file is too short. The file is read without a
        memory mapping, which would crash the process if the file is truncated."""
        read_offset = PAGE_BYTES + snapshot.slot * self.slot_bytes
        checksum = 0
        remaining_bytes = self.size + snapshot.length
        read_buffer = memoryview(bytearray(min(READ_BYTES, remaining_bytes)))

        while remaining_bytes:
            read_bytes = os.preadv(
                self._file, [read_buffer[: min(READ_BYTES, remaining_bytes)]], read_offset
            )
            if not read_bytes:
                return -1

            checksum = zlib.crc32(read_buffer[:read_bytes], checksum)
            read_offset = read_offset + read_bytes
            remaining_bytes = remaining_bytes - read_bytes

        return checksum

    def reserve(self) -> None:
        """Allocate and map the memory of all slots without changing intact snapshots. Raises
        OSError if memory is insufficient."""
        file_bytes = PAGE_BYTES + SLOT_COUNT * self.slot_bytes
        # without this allocation, a full file system would later kill this process by SIGBUS
        os.posix_fallocate(self._file, 0, file_bytes)
        os.ftruncate(self._file, file_bytes)

        self._map = mapped_memory = mmap.mmap(self._file, file_bytes)
        if not self._is_valid:
            mapped_memory[:PAGE_BYTES] = bytes(PAGE_BYTES)
            mapped_memory[: HEADER_STRUCT.size] = self._header
            FLAG_STRUCT.pack_into(mapped_memory, HEADER_STRUCT.size, _compute_flag(self._header))

        # each slot contains the state, followed by the data loader's state
        memory_view = memoryview(mapped_memory)
        self.slots = [
            memory_view[slot_offset : slot_offset + self.slot_bytes]
            for slot_offset in range(PAGE_BYTES, file_bytes, self.slot_bytes)
        ]
        for slot_index, slot_record in enumerate(self._records):
            if slot_record is None:
                self.clear_slot(slot_index)

        # fault the pages in now, so that later copies do not wait for page faults
        for slot_offset in range(0, file_bytes, READ_BYTES):
            fault_in_pages(mapped_memory, slot_offset, min(READ_BYTES, file_bytes - slot_offset))

    def record_step(self, step: int) -> None:
        """Record that `step` was completed now. Call `record_step` only after `reserve`."""
        assert self._map
        packed_record = LAST_STEP_STRUCT.pack(step, time.time())
        # write the last step alternately to two records, so that one record stays intact if the
        # process dies during the write
        record_offset = LAST_STEP_OFFSET + step % 2 * RECORD_DISTANCE_BYTES
        self._map[record_offset : record_offset + LAST_STEP_STRUCT.size] = packed_record
        FLAG_STRUCT.pack_into(
            self._map, record_offset + LAST_STEP_STRUCT.size, _compute_flag(packed_record)
        )

    def clear_slot(self, slot_index: int) -> None:
        """Mark the slot as empty until `commit_slot` is called."""
        assert self._map
        record_offset = FIRST_RECORD_OFFSET + slot_index * RECORD_DISTANCE_BYTES
        FLAG_STRUCT.pack_into(self._map, record_offset + RECORD_STRUCT.size, 0)
        self._map[record_offset : record_offset + RECORD_STRUCT.size] = bytes(RECORD_STRUCT.size)

    def commit_slot(self, slot_index: int, step: int, loader_state: bytes) -> CommittedSnapshot:
        """Write the data loader's state to the slot, and mark the slot as complete."""
        assert self._map
        slot_view = self.slots[slot_index]
        slot_view[self.size : self.size + len(loader_state)] = loader_state
        checksum = zlib.crc32(slot_view[: self.size + len(loader_state)])
        packed_record = RECORD_STRUCT.pack(step, len(loader_state), checksum)
        record_offset = FIRST_RECORD_OFFSET + slot_index * RECORD_DISTANCE_BYTES
        self._map[record_offset : record_offset + RECORD_STRUCT.size] = packed_record
        FLAG_STRUCT.pack_into(
            self._map, record_offset + RECORD_STRUCT.size, _compute_flag(packed_record)
        )
        os.utime(self._file)
        return CommittedSnapshot(slot_index, step, len(loader_state), checksum)

    def close(self, *, deletes_file: bool = False) -> None:
        if deletes_file and self.is_locked:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def fault_in_pages(mapped_memory: mmap.mmap, start_byte: int, length_bytes: int) -> None:
    """Fault in the pages of a shared mapping for writing, without changing their contents."""
    try:
        mapped_memory.madvise(MADV_POPULATE_WRITE, start_byte, length_bytes)
    except OSError:
        # a kernel before 5.14 lacks MADV_POPULATE_WRITE
        for page_offset in range(start_byte, start_byte + length_bytes, PAGE_BYTES):
            mapped_memory[page_offset]


def open_and_lock(path: Path) -> tuple[int, bool]:
    """Open a snapshot file. Return the file descriptor, and True if this process holds the lock of
    the file, or False if an earlier process still holds the lock."""
    while True:
        file_descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        # check the owner, because every user may create files in /dev/shm
        owner_uid = os.fstat(file_descriptor).st_uid
        if owner_uid != os.geteuid():
            os.close(file_descriptor)
            raise PermissionError(f"{path} belongs to another user ({owner_uid})")

        try:
            # a lock of lockf belongs to the process, and child processes do not inherit the lock
            fcntl.lockf(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return file_descriptor, False

        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file_descriptor).st_ino:
                return file_descriptor, True

        # the file was removed before it was locked
        os.close(file_descriptor)


def _parse_records(header_page: bytes) -> list[CommittedSnapshot | None]:
    """Return the record of each slot. The step -1 means that the slot is empty or unfinished; None
    means that the record is damaged."""
    slot_records: list[CommittedSnapshot | None] = []

    for slot_index in range(SLOT_COUNT if len(header_page) == PAGE_BYTES else 0):
        record_offset = FIRST_RECORD_OFFSET + slot_index * RECORD_DISTANCE_BYTES
        flag_offset = record_offset + RECORD_STRUCT.size
        packed_record = header_page[record_offset:flag_offset]
        (record_flag,) = FLAG_STRUCT.unpack_from(header_page, flag_offset)
        step, loader_state_bytes, checksum = RECORD_STRUCT.unpack(packed_record)
        is_intact = (
            record_flag == _compute_flag(packed_record)
            and loader_state_bytes <= MAX_LOADER_STATE_BYTES
        )
        committed_snapshot = (
            CommittedSnapshot(slot_index, step, loader_state_bytes, checksum) if is_intact else None
        )
        slot_records.append(
            committed_snapshot if record_flag else CommittedSnapshot(slot_index, -1, 0, 0)
        )

    return slot_records


def _parse_last_step(header_page: bytes) -> tuple[int, float] | None:
    """Return the newest completed step and the time of its end; None if no intact record exists."""
    step_records: list[tuple[int, float]] = []
    for record_number in range(2 if len(header_page) == PAGE_BYTES else 0):
        record_offset = LAST_STEP_OFFSET + record_number * RECORD_DISTANCE_BYTES
        flag_offset = record_offset + LAST_STEP_STRUCT.size
        packed_record = header_page[record_offset:flag_offset]
        (record_flag,) = FLAG_STRUCT.unpack_from(header_page, flag_offset)
        if record_flag == _compute_flag(packed_record):
            step_records.append(LAST_STEP_STRUCT.unpack(packed_record))
    return max(step_records, default=None)


def _compute_flag(record_bytes: bytes) -> int:
    """Return a checksum without zero bytes, since a damaged byte must not make a record look
    empty."""
    return zlib.crc32(record_bytes) | 0x01010101
