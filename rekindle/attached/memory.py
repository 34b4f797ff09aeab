"""Snapshots of a program's state in shared memory, which survive the death of its processes.

    /dev/shm/rekindle-<run>-<host>-<index>.<slot>      ($REKINDLE_SHM: another directory)

Each process has three files. Two hold the newest snapshots; the third receives the next snapshot,
or is read by the writer of a durable checkpoint. A file starts with a record, which is cleared
before the snapshot is written and committed after it, with a checksum of every byte.
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
from rekindle.errors import say
from rekindle.training.checkpoint.snapshot_file import (
    PAGE_BYTES,
    READ_BYTES,
    fault_in_pages,
    open_and_lock,
    snapshot_directory,
)

SLOT_COUNT = 3
MAGIC = b"rekindle attach1"
# magic, run, lineage, step, shard, world, size, crc32 of the snapshot
RECORD = struct.Struct("<16s 12s 12s q q q Q I")
CHECKSUM = struct.Struct("<I")
# number of bytes that a growing file gets in addition to the size of the state
SPARE_BYTES = 64 << 10
# memory for a snapshot larger than this is reserved in the thread, while the training continues
INLINE_BYTES = 16 << 20


class Record(NamedTuple):
    """A committed snapshot. `lineage`: id of the start of the program that wrote the snapshot;
    `shard`: the rank whose shards the snapshot contains, -1 for the whole state; `world`: number of
    ranks; `size`: in bytes."""

    lineage: str
    step: int
    shard: int
    world: int
    size: int
    crc: int


def slot_paths(run: str, host: str, index: int) -> list[Path]:
    """Return the files of the process `index` of a host."""
    host_hash = hashlib.sha256(host.encode()).hexdigest()[:12]
    directory = snapshot_directory()
    return [directory / f"rekindle-{run}-{host_hash}-{index}.{slot}" for slot in range(SLOT_COUNT)]


def read_record(path: Path, run: str) -> Record | None:
    """Return the record of a file of this run and user; None if the file has no valid record. The
    snapshot itself is not verified."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            # ignore files of other users, since every user may create files in /dev/shm
            if os.fstat(descriptor).st_uid == os.geteuid():
                return _parse_record(file.read(PAGE_BYTES), run)
    return None


def read_snapshot(path: Path, run: str, record: Record) -> torch.Tensor | None:
    """Return the bytes of a snapshot, uint8 [size]; None if they are not intact."""
    if read_record(path, run) != record:
        return None

    try:
        data = torch.empty(record.size, dtype=torch.uint8)
        with open(path, "rb") as file:
            file.seek(PAGE_BYTES)
            target = data.numpy().data
            for start in range(0, record.size, READ_BYTES):
                piece = target[start : start + READ_BYTES]
                if file.readinto(piece) != len(piece):
                    return None
    except OSError:
        return None
    return data if zlib.crc32(target) == record.crc else None


class Slot:
    """A snapshot file that this process has locked and mapped. `record`: record of the committed
    snapshot, if any."""

    def __init__(self, path: Path, run: str) -> None:
        """Raises OSError if the file cannot be opened, or another process uses it."""
        self.path = path
        self.record: Record | None = None
        self.is_pinned = False
        self.capacity = 0
        self.data = torch.empty(0, dtype=torch.uint8)

        self._map: mmap.mmap | None = None
        self._file, is_locked = open_and_lock(path)
        if not is_locked:
            os.close(self._file)
            raise BlockingIOError(f"another process uses {path}")
        self.record = _parse_record(os.pread(self._file, PAGE_BYTES, 0), run)

    def reserve(self, size: int) -> None:
        """Allocate memory for a snapshot of `size` bytes. Raises OSError."""
        if size <= self.capacity:
            return

        capacity = -(-(size + SPARE_BYTES) // PAGE_BYTES) * PAGE_BYTES
        total = PAGE_BYTES + capacity
        # without this allocation, a full file system would later kill this process by SIGBUS
        os.posix_fallocate(self._file, 0, total)
        os.ftruncate(self._file, total)

        # an earlier mapping stays alive while tensors still refer to it
        self._map = mapped = mmap.mmap(self._file, total)
        for start in range(0, total, READ_BYTES):
            fault_in_pages(mapped, start, min(READ_BYTES, total - start))

        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # copies from a GPU to registered memory are several times faster
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostRegister(whole.data_ptr(), total, 0)
        self.data = whole[PAGE_BYTES:]
        self.capacity = capacity

    def clear(self) -> None:
        """Mark the file as empty."""
        self.record = None
        if self._map is not None:
            self._map[: RECORD.size + CHECKSUM.size] = bytes(RECORD.size + CHECKSUM.size)
        else:
            os.pwrite(self._file, bytes(RECORD.size + CHECKSUM.size), 0)

    def commit(self, record: Record, run: str) -> None:
        """Mark the file as complete."""
        assert self._map is not None
        packed = RECORD.pack(MAGIC, run.encode(), record.lineage.encode(), *record[1:])
        self._map[: RECORD.size] = packed
        CHECKSUM.pack_into(self._map, RECORD.size, zlib.crc32(packed))
        self.record = record
        os.utime(self._file)

    def close(self, *, remove: bool) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


class Memory:
    """The snapshots that this process writes. A thread computes their checksums and commits
    them."""

    def __init__(self, run: str, host: str, index: int, newest_step: int) -> None:
        """`newest_step`: the step that the program continues from; newer snapshots are removed.
        Raises OSError if the files cannot be opened."""
        self.run = run
        self.commit_s = 0.0  # CPU time of the last commit, in seconds
        self.problem: OSError | None = None

        self.slots: list[Slot] = []
        try:
            for path in slot_paths(run, host, index):
                self.slots.append(Slot(path, run))
        except OSError:
            self.close(remove=False)
            raise

        for slot in self.slots:
            if slot.record and slot.record.step > newest_step:
                slot.clear()

        # set while the thread has no snapshot to commit and no memory to reserve
        self._idle = threading.Event()
        self._idle.set()
        self._jobs: SimpleQueue[tuple[Slot, Record] | int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self._thread.start()

    def save(self, payload: Payload, record: Record) -> Slot | None:
        """Copy a state to the oldest slot. Returns None, without a copy, while the thread still
        commits the previous snapshot or reserves memory."""
        if not self._idle.is_set() or self.problem:
            return None

        free_slots = [slot for slot in self.slots if not slot.is_pinned]
        slot = min(free_slots, key=lambda slot: slot.record.step if slot.record else -1)
        if slot.capacity < payload.size:
            if payload.size > INLINE_BYTES:
                self._idle.clear()
                self._jobs.put(payload.size)
                return None
            self._reserve([slot], payload.size)
            if self.problem:
                return None

        slot.clear()
        payload.write(slot.data)
        self._idle.clear()
        self._jobs.put((slot, record._replace(size=payload.size)))
        return slot

    def wait(self) -> None:
        """Wait until the last snapshot is committed."""
        self._idle.wait()

    def close(self, *, remove: bool) -> None:
        """Commit the last snapshot and close the files; if `remove` is True, delete the files."""
        if thread := getattr(self, "_thread", None):
            self._jobs.put(None)
            thread.join()
        for slot in self.slots:
            slot.close(remove=remove)
        self.slots = []

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            start = time.thread_time()
            if isinstance(job, int):
                self._reserve([slot for slot in self.slots if not slot.is_pinned], job)
            else:
                slot, record = job
                crc = zlib.crc32(slot.data[: record.size].numpy().data)
                slot.commit(record._replace(crc=crc), self.run)
                self.commit_s = time.thread_time() - start
            self._idle.set()

    def _reserve(self, slots: list[Slot], size: int) -> None:
        try:
            for slot in slots:
                slot.reserve(size)
        except OSError as error:
            self.problem = error
            say(
                f"no snapshots in shared memory ({error}): {snapshot_directory()} needs"
                f" {SLOT_COUNT} times {size >> 20} MiB. Give it more memory, or set REKINDLE_SHM to"
                " another directory. Until then, a failure costs the steps since the last durable"
                " checkpoint."
            )


def _parse_record(page: bytes, run: str) -> Record | None:
    if len(page) < RECORD.size + CHECKSUM.size:
        return None

    packed = page[: RECORD.size]
    (checksum,) = CHECKSUM.unpack_from(page, RECORD.size)
    magic, record_run, lineage, *numbers = RECORD.unpack(packed)
    if magic != MAGIC or checksum != zlib.crc32(packed) or record_run != run.encode():
        return None
    return Record(lineage.decode(), *numbers)
