"""Snapshots of a worker's state in shared memory, which survive the death of all processes.

    /dev/shm/rekindle-<run>-<node>      ($REKINDLE_SHM: another directory)

Each worker has one file: a header page (run, model, machine, a record per slot) and three slots for
the state. One slot holds the newest complete snapshot, the next snapshot is written to the second,
and an upload may read the third. Since the process may die at any moment, a slot's record is
cleared before the slot is written, and committed afterwards by one flag, which is also the record's
checksum. A reader verifies every byte. The launcher imports this module, so this module does not
import torch.
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

SLOT_COUNT = 3  # number of slots in a file
PAGE_BYTES = 4096  # bytes of a memory page
# bytes that each slot reserves for the state of the workload's own data loader
MAX_LOADER_STATE_BYTES = 1 << 18
STALE_AFTER_S = 3600.0  # age from which a file without a live process is removed
READ_BYTES = 16 << 20  # bytes per read
MADV_POPULATE_WRITE = 23  # Python's mmap lacks this constant
MAGIC = b"rekindle hot 1\n\0"
# magic, identity, layout, fingerprint, size of the state in bytes
HEADER = struct.Struct("<16s 32s 32s 32s Q")
RECORD = struct.Struct("<q I I")  # step, size of the loader's state in bytes, crc32 of the slot
FLAG = struct.Struct("<I")
# positions of the slots' records, in bytes
FIRST_RECORD_OFFSET = 512
RECORD_DISTANCE = 64
LAST_STEP = struct.Struct("<q d")  # newest completed step, and Unix time of its end
# position of two records of the newest step, which are written alternately
LAST_STEP_OFFSET = 1024


@dataclass(frozen=True)
class Snapshot:
    """A committed slot: its index, the step, the length of the data loader's state, and the
    checksum of the slot."""

    slot: int
    step: int
    length: int
    crc: int


def snapshot_directory() -> Path:
    return Path(os.environ.get("REKINDLE_SHM", "/dev/shm"))


def hash_run_name(identity: str, prefix: str) -> str:
    """Return the part of the file name that identifies the run: a hash of its identity and its
    checkpoint prefix."""
    return hashlib.sha256((identity + prefix).encode()).hexdigest()[:12]


def worker_name() -> str:
    """Return the name of this worker, which a restart does not change: the pod's name, and the
    index of the worker in the pod."""
    # Rekindle's launcher appends the index to POD_NAME; torchrun sets LOCAL_RANK
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = os.environ.get("LOCAL_RANK", "0")
    else:
        local = "0"
    return (os.environ.get(POD_NAME) or socket.gethostname()) + (
        "" if local == "0" else f"/{local}"
    )


def hash_worker_name() -> str:
    """Return the part of the file name that identifies this worker: a hash of its name."""
    return hashlib.sha256(worker_name().encode()).hexdigest()[:12]


def snapshot_path(run: str, node: str) -> Path:
    return snapshot_directory() / f"rekindle-{run}-{node}"


def newest_step(path: Path) -> int:
    """Return the step of the newest committed snapshot in a file, or -1. The data of the snapshot
    is not verified.

    The process that owns the file must not call this function, which would release its lock.
    """
    with suppress(OSError), open(path, "rb") as file:
        return max(
            (record.step for record in _parse_records(file.read(PAGE_BYTES)) if record), default=-1
        )
    return -1


def remove_stale_files(run: str) -> list[Path]:
    """Remove files that no process holds and that are older than STALE_AFTER_S.

    Never removes the files of `run`, which may resume from them after any time.
    """
    return _remove_unlocked_files(
        "rekindle-*",
        lambda file: (
            not file.name.startswith(f"rekindle-{run}-")
            and time.time() - file.stat().st_mtime > STALE_AFTER_S
        ),
    )


def remove_run_files(run: str) -> list[Path]:
    """Remove the files of a completed run, except those that a live process holds."""
    return _remove_unlocked_files(f"rekindle-{run}-*", lambda file: True)


def _remove_unlocked_files(pattern: str, is_selected: Callable[[Path], bool]) -> list[Path]:
    removed = []
    for file in snapshot_directory().glob(pattern):
        # raised for a file that is already removed, locked by a process, or owned by another user
        with suppress(OSError):
            if not is_selected(file):
                continue  # not even locked briefly, because a worker may be about to lock it
            with open(file, "r+b") as opened:
                fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_selected(file):  # the file may have changed before we locked it
                    file.unlink()
                    removed.append(file)
    return removed


class SnapshotFile:
    """The snapshot file of this worker. The constructor raises OSError if the file cannot be
    opened, ConfigError if it belongs to another run.

    Call `read` first to find the snapshots. Then `reserve` prepares the file for writing, which
    takes as long as filling all slots.
    """

    def __init__(self, path: Path, identity: str, layout: str, fingerprint: str, size: int) -> None:
        """The three hashes are sha256 in hex; `size`: bytes of the state."""
        self.path = path
        self.size = size
        self.slot_bytes = -(-(size + MAX_LOADER_STATE_BYTES) // PAGE_BYTES) * PAGE_BYTES
        self.damage: list[str] = []  # messages about damage found while reading
        self.loaded_slot: int | None = None  # slot of the loaded snapshot
        self._header = HEADER.pack(
            MAGIC, *(bytes.fromhex(digest) for digest in (identity, layout, fingerprint)), size
        )
        self._file, self.is_locked = open_and_lock(path)  # True if this process holds the lock
        self._map: mmap.mmap | None = None
        page = os.pread(self._file, PAGE_BYTES, 0)
        self._records = _parse_records(page)
        # the last step that the previous process recorded, and the Unix time of its end
        self.last_step = _parse_last_step(page)
        self.is_foreign = False  # True if the file is from a worker with another fingerprint
        self._is_valid = self._check_header(page)

    def _check_header(self, page: bytes) -> bool:
        """Return True if the header is intact. Raises ConfigError if the slots belong to another
        run."""
        if not page:
            return False

        end = HEADER.size
        if (
            len(page) < PAGE_BYTES
            or FLAG.unpack_from(page, end)[0] != _compute_flag(page[:end])
            or page[:16] != MAGIC
        ):
            self.damage.append(f"the header of {self.path} is damaged")
            return False

        actual = HEADER.unpack(page[:end])
        expected = HEADER.unpack(self._header)
        if (actual[1], actual[2], actual[4]) != (expected[1], expected[2], expected[4]):
            raise ConfigError(
                f"{self.path} holds the state of another run or model (identity"
                f" {actual[1].hex()[:12]}, this run has {expected[1].hex()[:12]}): nothing was"
                " changed. Give this run another `checkpoints` prefix, or delete that file."
            )

        self.is_foreign = actual[3] != expected[3]
        return True

    def read(self) -> Iterator[tuple[Snapshot, bytes]]:
        """Yield the intact snapshots, newest first, each with the data loader's state. Adds
        messages about damaged snapshots to `damage`."""
        if not self._is_valid:
            return

        for slot, record in enumerate(self._records):
            if record is None:
                self.damage.append(f"the record of slot {slot} of {self.path} is damaged")

        committed = [record for record in self._records if record and record.step >= 0]
        for snapshot in sorted(committed, key=lambda snapshot: snapshot.step, reverse=True):
            if self._compute_crc(snapshot) == snapshot.crc:
                offset = PAGE_BYTES + snapshot.slot * self.slot_bytes + self.size
                yield snapshot, os.pread(self._file, snapshot.length, offset)
            else:
                self.damage.append(
                    f"the snapshot of step {snapshot.step} in {self.path} is damaged"
                )

    def load(self, snapshot: Snapshot, target: memoryview) -> None:
        """Read the state of a snapshot, which `read` has yielded, into `target`."""
        start = PAGE_BYTES + snapshot.slot * self.slot_bytes
        for offset in range(0, self.size, READ_BYTES):
            block = target[offset : min(self.size, offset + READ_BYTES)]
            if os.preadv(self._file, [block], start + offset) != len(block):
                raise RekindleError(
                    f"{self.path} became shorter while this worker read it: restart this worker."
                )
        self.loaded_slot = snapshot.slot

    def _compute_crc(self, snapshot: Snapshot) -> int:
        """Return the checksum of a slot, or -1 if the file is too short. The file is read without a
        memory mapping, which would crash the process if the file is truncated."""
        offset = PAGE_BYTES + snapshot.slot * self.slot_bytes
        crc = 0
        missing = self.size + snapshot.length
        buffer = memoryview(bytearray(min(READ_BYTES, missing)))

        while missing:
            count = os.preadv(self._file, [buffer[: min(READ_BYTES, missing)]], offset)
            if not count:
                return -1

            crc = zlib.crc32(buffer[:count], crc)
            offset = offset + count
            missing = missing - count

        return crc

    def reserve(self) -> None:
        """Allocate and map all slots without changing intact snapshots. Raises OSError if memory is
        insufficient."""
        total = PAGE_BYTES + SLOT_COUNT * self.slot_bytes
        # without this allocation, a full file system would later kill this process by SIGBUS
        os.posix_fallocate(self._file, 0, total)
        os.ftruncate(self._file, total)

        self._map = mapped = mmap.mmap(self._file, total)
        if not self._is_valid:
            mapped[:PAGE_BYTES] = bytes(PAGE_BYTES)
            mapped[: HEADER.size] = self._header
            FLAG.pack_into(mapped, HEADER.size, _compute_flag(self._header))

        # each slot contains the state, followed by the data loader's state
        view = memoryview(mapped)
        self.slots = [
            view[start : start + self.slot_bytes]
            for start in range(PAGE_BYTES, total, self.slot_bytes)
        ]
        for slot, record in enumerate(self._records):
            if record is None:
                self.clear_slot(slot)

        # pages are faulted in now, so that later copies do not wait for page faults
        for start in range(0, total, READ_BYTES):
            fault_in_pages(mapped, start, min(READ_BYTES, total - start))

    def record_step(self, step: int) -> None:
        """Record that `step` was completed now. Call after `reserve`."""
        assert self._map
        record = LAST_STEP.pack(step, time.time())
        # written alternately to two records: if the process dies here, the other record stays
        # intact
        offset = LAST_STEP_OFFSET + step % 2 * RECORD_DISTANCE
        self._map[offset : offset + LAST_STEP.size] = record
        FLAG.pack_into(self._map, offset + LAST_STEP.size, _compute_flag(record))

    def clear_slot(self, slot: int) -> None:
        """Mark the slot as empty until `commit_slot` is called."""
        assert self._map
        offset = FIRST_RECORD_OFFSET + slot * RECORD_DISTANCE
        FLAG.pack_into(self._map, offset + RECORD.size, 0)
        self._map[offset : offset + RECORD.size] = bytes(RECORD.size)

    def commit_slot(self, slot: int, step: int, loader_state: bytes) -> Snapshot:
        """Write the data loader's state to the slot, and mark the slot as complete."""
        assert self._map
        view = self.slots[slot]
        view[self.size : self.size + len(loader_state)] = loader_state
        crc = zlib.crc32(view[: self.size + len(loader_state)])
        record = RECORD.pack(step, len(loader_state), crc)
        offset = FIRST_RECORD_OFFSET + slot * RECORD_DISTANCE
        self._map[offset : offset + RECORD.size] = record
        FLAG.pack_into(self._map, offset + RECORD.size, _compute_flag(record))
        os.utime(self._file)
        return Snapshot(slot, step, len(loader_state), crc)

    def close(self, *, deletes_file: bool = False) -> None:
        if deletes_file and self.is_locked:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def fault_in_pages(mapped: mmap.mmap, start: int, length: int) -> None:
    """Fault in the pages of a shared mapping for writing, without changing their contents."""
    try:
        mapped.madvise(MADV_POPULATE_WRITE, start, length)
    except OSError:  # a kernel before 5.14 lacks MADV_POPULATE_WRITE
        for page in range(start, start + length, PAGE_BYTES):
            mapped[page]


def open_and_lock(path: Path) -> tuple[int, bool]:
    """Open the file. Return its descriptor, and True if this process holds its lock, or False if an
    earlier process still holds it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        # every user may create files in /dev/shm
        owner = os.fstat(file).st_uid
        if owner != os.geteuid():
            os.close(file)
            raise PermissionError(f"{path} belongs to another user ({owner})")

        try:
            # this lock belongs to the process: children do not inherit it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return file, False

        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                return file, True

        os.close(file)  # the file was removed before we locked it


def _parse_records(page: bytes) -> list[Snapshot | None]:
    """Return the record of each slot. Step -1: the slot is empty or unfinished; None: the record is
    damaged."""
    records: list[Snapshot | None] = []

    for slot in range(SLOT_COUNT if len(page) == PAGE_BYTES else 0):
        offset = FIRST_RECORD_OFFSET + slot * RECORD_DISTANCE
        record, (flag,) = (
            page[offset : offset + RECORD.size],
            FLAG.unpack_from(page, offset + RECORD.size),
        )
        step, length, crc = RECORD.unpack(record)
        is_intact = flag == _compute_flag(record) and length <= MAX_LOADER_STATE_BYTES
        committed = Snapshot(slot, step, length, crc) if is_intact else None
        records.append(committed if flag else Snapshot(slot, -1, 0, 0))

    return records


def _parse_last_step(page: bytes) -> tuple[int, float] | None:
    """Return the newest completed step and the time of its end; None if no intact record exists."""
    records: list[tuple[int, float]] = []
    for number in range(2 if len(page) == PAGE_BYTES else 0):
        offset = LAST_STEP_OFFSET + number * RECORD_DISTANCE
        record, (flag,) = (
            page[offset : offset + LAST_STEP.size],
            FLAG.unpack_from(page, offset + LAST_STEP.size),
        )
        if flag == _compute_flag(record):
            records.append(LAST_STEP.unpack(record))
    return max(records, default=None)


def _compute_flag(data: bytes) -> int:
    """Return a checksum without zero bytes, since a damaged byte must not make a record look
    empty."""
    return zlib.crc32(data) | 0x01010101
