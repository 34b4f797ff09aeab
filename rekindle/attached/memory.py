"""Snapshots of a program's state in shared memory, which survive the death of its processes.

    /dev/shm/rekindle-<run>-<host>-<index>.<slot>      ($REKINDLE_SHM: another directory)

Each process has three snapshot files. Two files hold the newest snapshots; the third file receives
the next snapshot, or is read by the writer of a durable checkpoint. A snapshot file starts with a
record, which is cleared before the snapshot is written, and is written again after the snapshot,
with a checksum of every byte.
"""

import hashlib
import mmap
import os
import struct
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from rekindle.attached.encoding.payload import Payload
from rekindle.errors import write_stderr
from rekindle.training.checkpoint.snapshot_file import (
    PAGE_BYTES,
    READ_BYTES,
    fault_in_pages,
    find_snapshot_directory,
    open_and_lock,
)

SLOT_COUNT = 3
FILE_MAGIC = b"rekindle attach1"
# fields of a snapshot's record: magic, run, lineage, step, shard, world, size, crc32 of the
# snapshot
RECORD_STRUCT = struct.Struct("<16s 12s 12s q q q Q I")
CHECKSUM_STRUCT = struct.Struct("<I")
# number of bytes that a growing file gets in addition to the size of the state
SPARE_BYTES = 64 << 10
# for a snapshot larger than this, the thread reserves the memory while the training continues
MAX_INLINE_BYTES = 16 << 20


class SnapshotRecord(NamedTuple):
    """The record of a complete snapshot. `lineage`: random id that the program drew at its start,
    before it wrote the snapshot; `shard`: the rank whose shards the snapshot contains, -1 for the
    whole state; `world`: number of ranks; `size`: in bytes."""

    lineage: str
    step: int
    shard: int
    world: int
    size: int
    crc: int


def list_slot_paths(run_id: str, host_name: str, process_index: int) -> list[Path]:
    """Return the snapshot files of the process `process_index` of a host."""
    host_hash = hashlib.sha256(host_name.encode()).hexdigest()[:12]
    directory = find_snapshot_directory()
    return [
        directory / f"rekindle-{run_id}-{host_hash}-{process_index}.{slot_index}"
        for slot_index in range(SLOT_COUNT)
    ]


def read_snapshot_record(path: Path, run_id: str) -> SnapshotRecord | None:
    """Return the record in a snapshot file of this training and user; None if the file does not
    have a valid record. The bytes of the snapshot are not verified."""
    with suppress(OSError):
        file_descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(file_descriptor, "rb") as file:
            # ignore files of other users, since every user may create files in /dev/shm
            if os.fstat(file_descriptor).st_uid == os.geteuid():
                return _parse_snapshot_record(file.read(PAGE_BYTES), run_id)
    return None


def read_snapshot(path: Path, run_id: str, snapshot_record: SnapshotRecord) -> torch.Tensor | None:
    """Return the bytes of a snapshot, uint8 [size]; None if the bytes are damaged."""
    if read_snapshot_record(path, run_id) != snapshot_record:
        return None

    try:
        snapshot_bytes = torch.empty(snapshot_record.size, dtype=torch.uint8)
        with open(path, "rb") as file:
            file.seek(PAGE_BYTES)
            snapshot_buffer = snapshot_bytes.numpy().data
            for start_byte in range(0, snapshot_record.size, READ_BYTES):
                buffer_chunk = snapshot_buffer[start_byte : start_byte + READ_BYTES]
                if file.readinto(buffer_chunk) != len(buffer_chunk):
                    return None
    except OSError:
        return None
    return snapshot_bytes if zlib.crc32(snapshot_buffer) == snapshot_record.crc else None


class SnapshotSlot:
    """A snapshot file that this process has locked and mapped. `record`: record of the committed
    snapshot, if any."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Raises OSError if the file cannot be opened, or another process uses it."""
        self.path = path
        self.record: SnapshotRecord | None = None
        self.is_pinned = False
        self.capacity = 0
        self.data = torch.empty(0, dtype=torch.uint8)

        self._map: mmap.mmap | None = None
        self._file, is_locked = open_and_lock(path)
        if not is_locked:
            os.close(self._file)
            raise BlockingIOError(f"another process uses {path}")
        self.record = _parse_snapshot_record(os.pread(self._file, PAGE_BYTES, 0), run_id)

    def reserve(self, size_bytes: int) -> None:
        """Allocate memory for a snapshot of `size_bytes` bytes. Raises OSError."""
        if size_bytes <= self.capacity:
            return

        capacity_bytes = -(-(size_bytes + SPARE_BYTES) // PAGE_BYTES) * PAGE_BYTES
        file_bytes = PAGE_BYTES + capacity_bytes
        # without this allocation, a full file system would later kill this process by SIGBUS
        os.posix_fallocate(self._file, 0, file_bytes)
        os.ftruncate(self._file, file_bytes)

        # an earlier mapping stays alive while tensors still refer to it
        self._map = mapped_memory = mmap.mmap(self._file, file_bytes)
        for start_byte in range(0, file_bytes, READ_BYTES):
            fault_in_pages(mapped_memory, start_byte, min(READ_BYTES, file_bytes - start_byte))

        mapped_tensor = torch.frombuffer(mapped_memory, dtype=torch.uint8)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # copies from a GPU to registered memory are several times faster
            cuda_runtime: Any = torch.cuda.cudart()
            cuda_runtime.cudaHostRegister(mapped_tensor.data_ptr(), file_bytes, 0)
        self.data = mapped_tensor[PAGE_BYTES:]
        self.capacity = capacity_bytes

    def clear(self) -> None:
        """Overwrite the record with zeros, so that the file counts as empty."""
        self.record = None
        if self._map is not None:
            self._map[: RECORD_STRUCT.size + CHECKSUM_STRUCT.size] = bytes(
                RECORD_STRUCT.size + CHECKSUM_STRUCT.size
            )
        else:
            os.pwrite(self._file, bytes(RECORD_STRUCT.size + CHECKSUM_STRUCT.size), 0)

    def commit(self, snapshot_record: SnapshotRecord, run_id: str) -> None:
        """Write the record, which marks the snapshot in the file as complete."""
        assert self._map is not None
        packed_record = RECORD_STRUCT.pack(
            FILE_MAGIC, run_id.encode(), snapshot_record.lineage.encode(), *snapshot_record[1:]
        )
        self._map[: RECORD_STRUCT.size] = packed_record
        CHECKSUM_STRUCT.pack_into(self._map, RECORD_STRUCT.size, zlib.crc32(packed_record))
        self.record = snapshot_record
        os.utime(self._file)

    def close(self, *, remove: bool) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


class SnapshotMemory:
    """The snapshots that this process writes. A thread computes the checksums of the snapshots, and
    marks each snapshot as complete."""

    def __init__(self, run_id: str, host_name: str, process_index: int, newest_step: int) -> None:
        """`newest_step`: the step that the program continues from; newer snapshots are removed.
        Raises OSError if the snapshot files cannot be opened."""
        self.run_id = run_id
        # CPU time of the last commit, in seconds
        self.commit_s = 0.0
        self.problem: OSError | None = None
        self._thread: threading.Thread | None = None

        self.slots: list[SnapshotSlot] = []
        try:
            for path in list_slot_paths(run_id, host_name, process_index):
                self.slots.append(SnapshotSlot(path, run_id))
        except OSError:
            self.close(remove=False)
            raise

        for slot in self.slots:
            if slot.record and slot.record.step > newest_step:
                slot.clear()

        # set while the thread is idle: it neither completes a snapshot nor reserves memory
        self._idle = threading.Event()
        self._idle.set()
        self._jobs: SimpleQueue[tuple[SnapshotSlot, SnapshotRecord] | int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self._thread.start()

    def save(self, payload: Payload, snapshot_record: SnapshotRecord) -> SnapshotSlot | None:
        """Copy a training state to the oldest slot (snapshot file), and let the thread mark the
        snapshot as complete; return the slot. Return None without a copy while the thread still
        commits the previous snapshot or reserves memory, or if the memory could not be reserved."""
        if not self._idle.is_set() or self.problem:
            return None

        free_slots = [slot for slot in self.slots if not slot.is_pinned]
        slot = min(free_slots, key=lambda slot: slot.record.step if slot.record else -1)
        if slot.capacity < payload.size:
            if payload.size > MAX_INLINE_BYTES:
                self._idle.clear()
                self._jobs.put(payload.size)
                return None
            self._reserve([slot], payload.size)
            if self.problem:
                return None

        slot.clear()
        payload.write(slot.data)
        self._idle.clear()
        self._jobs.put((slot, snapshot_record._replace(size=payload.size)))
        return slot

    def wait(self) -> None:
        """Wait until the last snapshot is committed."""
        self._idle.wait()

    def close(self, *, remove: bool) -> None:
        """Mark the last snapshot as complete and close the snapshot files; if `remove` is True,
        delete the files."""
        if self._thread:
            self._jobs.put(None)
            self._thread.join()
        for slot in self.slots:
            slot.close(remove=remove)
        self.slots = []

    def _run(self) -> None:
        while (commit_job := self._jobs.get()) is not None:
            start_s = time.thread_time()
            if isinstance(commit_job, int):
                self._reserve([slot for slot in self.slots if not slot.is_pinned], commit_job)
            else:
                slot, snapshot_record = commit_job
                checksum = zlib.crc32(slot.data[: snapshot_record.size].numpy().data)
                slot.commit(snapshot_record._replace(crc=checksum), self.run_id)
                self.commit_s = time.thread_time() - start_s
            self._idle.set()

    def _reserve(self, slots: list[SnapshotSlot], size_bytes: int) -> None:
        try:
            for slot in slots:
                slot.reserve(size_bytes)
        except OSError as error:
            self.problem = error
            write_stderr(
                f"no snapshots in shared memory ({error}): {find_snapshot_directory()} needs"
                f" {SLOT_COUNT} times {size_bytes >> 20} MiB. Give it more memory, or set"
                " REKINDLE_SHM to another directory. Until then, a failure costs the steps since"
                " the last durable checkpoint."
            )


def _parse_snapshot_record(header_page: bytes, run_id: str) -> SnapshotRecord | None:
    if len(header_page) < RECORD_STRUCT.size + CHECKSUM_STRUCT.size:
        return None

    packed_record = header_page[: RECORD_STRUCT.size]
    (checksum,) = CHECKSUM_STRUCT.unpack_from(header_page, RECORD_STRUCT.size)
    file_magic, recorded_run_id, lineage, *record_numbers = RECORD_STRUCT.unpack(packed_record)
    if (
        file_magic != FILE_MAGIC
        or checksum != zlib.crc32(packed_record)
        or recorded_run_id != run_id.encode()
    ):
        return None
    return SnapshotRecord(lineage.decode(), *record_numbers)
