"""Snapshots in shared memory: the newest states of one worker, which survive the death of every process.

    /dev/shm/rekindle-<run>-<node>      ($REKINDLE_SHM: another directory)

One file per worker: a header page (run, model, machine; a record per slot) and three slots of the state's size: one
holds the newest complete snapshot while another is written and a third may be pinned by an upload. A record is cleared
before its slot is written and committed afterwards, by one flag that is also the record's checksum; so the process may
die at any moment. A reader verifies every byte. Imports no torch: the launcher and the doctor use it, too.
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

SLOTS = 3
PAGE = 4096
ROOM = 1 << 18  # bytes in each slot for the state of the workload's own data loader
STALE = 3600.0  # seconds after which a file that no process holds is abandoned
BLOCK = 16 << 20  # bytes read at once
POPULATE = 23  # MADV_POPULATE_WRITE, which Python does not know yet
MAGIC = b"rekindle hot 1\n\0"
HEADER = struct.Struct("<16s 32s 32s 32s Q")  # magic, identity, layout, fingerprint, bytes of state
RECORD = struct.Struct("<q I I")  # step, bytes of loader state, crc32 of the slot
FLAG = struct.Struct("<I")
RECORDS, STRIDE = 512, 64  # offset of the first, and the distance between two


@dataclass(frozen=True)
class Snapshot:
    """One committed slot: its index, the step, the bytes of loader state, and the checksum of both states."""

    slot: int
    step: int
    length: int
    crc: int


def directory() -> Path:
    """The directory of the files."""
    return Path(os.environ.get("REKINDLE_SHM", "/dev/shm"))


def run_name(identity: str, prefix: str) -> str:
    """The name of a run: `identity` is its identity hash, `prefix` that of its checkpoints."""
    return hashlib.sha256((identity + prefix).encode()).hexdigest()[:12]


def worker_name() -> str:
    """The name of this worker, unchanged by a restart: its pod's, and its index in the pod."""
    # our launcher puts the index into POD_NAME
    local = os.environ.get("LOCAL_RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    return (os.environ.get("POD_NAME") or socket.gethostname()) + ("" if local == "0" else f"/{local}")


def node_name() -> str:
    """This worker's part of its file name."""
    return hashlib.sha256(worker_name().encode()).hexdigest()[:12]


def path(run: str, node: str) -> Path:
    """The file of one worker of one run."""
    return directory() / f"rekindle-{run}-{node}"


def newest_step(path: Path) -> int:
    """The step of the newest committed snapshot in a file, its data unverified; -1: none. Not for the process that owns
    the file: closing it here would release its lock."""
    with suppress(OSError), open(path, "rb") as file:
        return max((record.step for record in _records(file.read(PAGE)) if record), default=-1)
    return -1


def sweep(run: str) -> list[Path]:
    """Remove the files that no process holds and that were last written over an hour ago, except those of `run`:
    it resumes from them, however long it was interrupted."""
    return _remove(
        "rekindle-*",
        lambda file: not file.name.startswith(f"rekindle-{run}-") and time.time() - file.stat().st_mtime > STALE,
    )


def discard(run: str) -> list[Path]:
    """Remove all files of a completed run, except those that a live process still holds."""
    return _remove(f"rekindle-{run}-*", lambda file: True)


def _remove(pattern: str, selected: Callable[[Path], bool]) -> list[Path]:
    removed = []
    for file in directory().glob(pattern):
        with suppress(OSError):  # removed meanwhile, locked by a process, or another user's
            if not selected(file):
                continue  # without locking it: a worker that starts may be about to
            with open(file, "r+b") as locked:
                fcntl.lockf(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if selected(file):  # still
                    file.unlink()
                    removed.append(file)
    return removed


class SnapshotFile:
    """The file of this worker. Raises OSError if it cannot be opened, ConfigError if it is another run's.

    Read it first; `reserve` then prepares it for writing, which may take as long as filling that much memory.
    """

    def __init__(self, path: Path, identity: str, layout: str, fingerprint: str, size: int) -> None:
        """`identity`, `layout` and `fingerprint` are hex sha256; `size`: bytes of the state."""
        self.path, self.size = path, size
        self.stride = -(-(size + ROOM) // PAGE) * PAGE
        self.damage: list[str] = []  # found on reading, in words
        self.loaded: int | None = None  # slot
        self._header = HEADER.pack(MAGIC, *(bytes.fromhex(digest) for digest in (identity, layout, fingerprint)), size)
        self._file, self.ours = _open(path)
        self._map: mmap.mmap | None = None
        page = os.pread(self._file, PAGE, 0)
        self._records = _records(page)
        self.foreign = False  # whether the fingerprint differs
        self._valid = self._check(page)

    def _check(self, page: bytes) -> bool:
        """Whether the slots may be read. Raises ConfigError."""
        if not page:
            return False
        end = HEADER.size
        if len(page) < PAGE or FLAG.unpack_from(page, end)[0] != _flag(page[:end]) or page[:16] != MAGIC:
            self.damage.append(f"the header of {self.path} is damaged")
            return False
        theirs, ours = HEADER.unpack(page[:end]), HEADER.unpack(self._header)
        if (theirs[1], theirs[2], theirs[4]) != (ours[1], ours[2], ours[4]):
            raise ConfigError(
                f"{self.path} holds the state of another run or model (identity {theirs[1].hex()[:12]}, this run's is "
                f"{ours[1].hex()[:12]}): nothing was changed. Give this run another `checkpoints` prefix, or delete "
                "that file."
            )
        self.foreign = theirs[3] != ours[3]
        return True

    def read(self) -> Iterator[tuple[Snapshot, bytes]]:
        """Intact snapshots, newest first, each with the loader's state; damaged ones are reported in `damage`."""
        if not self._valid:
            return
        for slot, record in enumerate(self._records):
            if record is None:
                self.damage.append(f"the record of slot {slot} of {self.path} is damaged")
        committed = [record for record in self._records if record and record.step >= 0]
        for snapshot in sorted(committed, key=lambda snapshot: snapshot.step, reverse=True):
            if self._crc(snapshot) == snapshot.crc:
                at = PAGE + snapshot.slot * self.stride + self.size
                yield snapshot, os.pread(self._file, snapshot.length, at)
            else:
                self.damage.append(f"the snapshot of step {snapshot.step} in {self.path} is damaged")

    def load(self, snapshot: Snapshot, target: memoryview) -> None:
        """Read the state of a snapshot that `read` yielded into `target`."""
        at = PAGE + snapshot.slot * self.stride
        for offset in range(0, self.size, BLOCK):
            part = target[offset : min(self.size, offset + BLOCK)]
            if os.preadv(self._file, [part], at + offset) != len(part):
                raise RekindleError(f"{self.path} became shorter while it was read: start this worker again.")
        self.loaded = snapshot.slot

    def _crc(self, snapshot: Snapshot) -> int:
        """The checksum of the slot's contents; read, not mapped: the file may be shorter than its header says."""
        at, crc, left = PAGE + snapshot.slot * self.stride, 0, self.size + snapshot.length
        buffer = memoryview(bytearray(min(BLOCK, left)))
        while left:
            got = os.preadv(self._file, [buffer[: min(BLOCK, left)]], at)
            if not got:
                return -1
            crc, at, left = zlib.crc32(buffer[:got], crc), at + got, left - got
        return crc

    def reserve(self) -> None:
        """Allocate all slots and map them; intact snapshots stay. Raises OSError if there is not enough memory."""
        total = PAGE + SLOTS * self.stride
        os.posix_fallocate(self._file, 0, total)  # otherwise a full file system would kill us by SIGBUS later
        os.ftruncate(self._file, total)
        self._map = mapped = mmap.mmap(self._file, total)
        if not self._valid:
            mapped[:PAGE] = bytes(PAGE)
            mapped[: HEADER.size] = self._header
            FLAG.pack_into(mapped, HEADER.size, _flag(self._header))
        view = memoryview(mapped)
        self.slots = [view[at : at + self.stride] for at in range(PAGE, total, self.stride)]  # state, loader state
        for slot, record in enumerate(self._records):
            if record is None:
                self.begin(slot)
        for at in range(0, total, BLOCK):  # so that no copy waits for page faults
            touch(mapped, at, min(BLOCK, total - at))

    def begin(self, slot: int) -> None:
        """Mark the slot as empty until `commit`."""
        assert self._map
        at = RECORDS + slot * STRIDE
        FLAG.pack_into(self._map, at + RECORD.size, 0)
        self._map[at : at + RECORD.size] = bytes(RECORD.size)

    def commit(self, slot: int, step: int, extra: bytes) -> Snapshot:
        """Mark the slot's state as complete, with `extra` as the loader's."""
        assert self._map
        view = self.slots[slot]
        view[self.size : self.size + len(extra)] = extra
        crc = zlib.crc32(view[: self.size + len(extra)])
        record = RECORD.pack(step, len(extra), crc)
        at = RECORDS + slot * STRIDE
        self._map[at : at + RECORD.size] = record
        FLAG.pack_into(self._map, at + RECORD.size, _flag(record))
        os.utime(self._file)
        return Snapshot(slot, step, len(extra), crc)

    def close(self, *, remove: bool = False) -> None:
        """Close the file; `remove`: delete it, too."""
        if remove and self.ours:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def touch(mapped: mmap.mmap, at: int, length: int) -> None:
    """Fault in the pages of a shared mapping for writing; their contents stay."""
    try:
        mapped.madvise(POPULATE, at, length)
    except OSError:  # a kernel before 5.14
        for page in range(at, at + length, PAGE):
            mapped[page]


def _open(path: Path) -> tuple[int, bool]:
    """The file, and whether we hold its lock (a frozen predecessor may still hold it)."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if (owner := os.fstat(file).st_uid) != os.geteuid():  # everybody may create files in /dev/shm
            os.close(file)
            raise PermissionError(f"{path} belongs to another user ({owner})")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # per process: children do not inherit it
        except OSError:
            return file, False
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                return file, True
        os.close(file)  # removed before we locked it


def _records(page: bytes) -> list[Snapshot | None]:
    """The record of each slot; step -1: empty or unfinished; None: damaged."""
    records: list[Snapshot | None] = []
    for slot in range(SLOTS if len(page) == PAGE else 0):
        at = RECORDS + slot * STRIDE
        record, (flag,) = page[at : at + RECORD.size], FLAG.unpack_from(page, at + RECORD.size)
        step, length, crc = RECORD.unpack(record)
        if flag == 0:
            records.append(Snapshot(slot, -1, 0, 0))
        else:
            records.append(Snapshot(slot, step, length, crc) if flag == _flag(record) and length <= ROOM else None)
    return records


def _flag(data: bytes) -> int:
    """A checksum without a zero byte: no single damaged byte makes it look like an empty record."""
    return zlib.crc32(data) | 0x01010101
