"""The hot tier: the newest states of one worker in shared memory, where they survive the death of every process.

    /dev/shm/rekindle-<run>-<node>      ($REKINDLE_SHM: another directory)

One file a worker: a page of header (whose it is; a record for each slot) and three slots of the state's size, so that
one holds the newest whole snapshot while another is written and a third may be pinned by an upload. A record is
emptied before its slot is written and committed after it, by one flag that is also the record's own checksum; so a
process may die at any moment. A reader checks every byte. Needs no torch: launcher and doctor use it, too.
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
STALE = 3600.0  # seconds after which a file that no process holds is nobody's any more
BLOCK = 16 << 20  # bytes read at once
POPULATE = 23  # MADV_POPULATE_WRITE, which Python does not know yet
MAGIC = b"rekindle hot 1\n\0"
HEADER = struct.Struct("<16s 32s 32s 32s Q")  # magic, identity, layout, fingerprint, bytes of state
RECORD = struct.Struct("<q I I")  # step, bytes of loader state, crc32 of the slot
FLAG = struct.Struct("<I")
RECORDS, STRIDE = 512, 64  # where they begin, and the distance from one to the next


@dataclass(frozen=True)
class Snapshot:
    """One committed slot: its place, the step, the loader's state, and the checksum of both."""

    slot: int
    step: int
    length: int
    crc: int


def directory() -> Path:
    """Where the files lie."""
    return Path(os.environ.get("REKINDLE_SHM", "/dev/shm"))


def run_name(identity: str, prefix: str) -> str:
    """The name of a run: `identity` is its identity hash, `prefix` that of its checkpoints."""
    return hashlib.sha256((identity + prefix).encode()).hexdigest()[:12]


def worker_name() -> str:
    """The name of this worker, the same after its restart: its pod's, and which of the pod's workers it is."""
    # our launcher puts the slot into POD_NAME
    local = os.environ.get("LOCAL_RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    return (os.environ.get("POD_NAME") or socket.gethostname()) + ("" if local == "0" else f"/{local}")


def node_name() -> str:
    """What stands for this worker in the name of its file."""
    return hashlib.sha256(worker_name().encode()).hexdigest()[:12]


def path(run: str, node: str) -> Path:
    """The file of one worker of one run."""
    return directory() / f"rekindle-{run}-{node}"


def newest_step(path: Path) -> int:
    """The step of the newest committed snapshot in a file, its data unread; -1: none. Not for the file's own worker,
    whose lock would go with the end of this reading."""
    with suppress(OSError), open(path, "rb") as file:
        return max((found.step for found in _records(file.read(PAGE)) if found), default=-1)
    return -1


def sweep(run: str) -> list[Path]:
    """Remove the files that no process holds and that were last written over an hour ago, but for those of `run`,
    which begins: they are what it goes on from, however long it was away."""
    return _remove(
        "rekindle-*",
        lambda file: not file.name.startswith(f"rekindle-{run}-") and time.time() - file.stat().st_mtime > STALE,
    )


def discard(run: str) -> list[Path]:
    """Remove all files of a run that is over, but for those that a living process still holds."""
    return _remove(f"rekindle-{run}-*", lambda file: True)


def _remove(pattern: str, wanted: Callable[[Path], bool]) -> list[Path]:
    removed = []
    for file in directory().glob(pattern):
        with suppress(OSError):  # gone meanwhile, held by a process, or another user's
            if not wanted(file):
                continue  # unlocked: a worker that starts may want to hold it
            with open(file, "r+b") as held:
                fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if wanted(file):  # still
                    file.unlink()
                    removed.append(file)
    return removed


class Hot:
    """The file of this worker. Raises OSError if there can be none, ConfigError if it is another run's.

    Read it first; `reserve` then makes it ready to be written, which may take as long as filling that much memory.
    """

    def __init__(self, path: Path, identity: str, layout: str, fingerprint: str, size: int) -> None:
        """All three names are hex sha256; `size`: bytes of the state."""
        self.path, self.size = path, size
        self.stride = -(-(size + ROOM) // PAGE) * PAGE
        self.damage: list[str] = []  # what was found on reading, in words
        self.kept: int | None = None  # the slot that was loaded
        self._header = HEADER.pack(MAGIC, *(bytes.fromhex(name) for name in (identity, layout, fingerprint)), size)
        self._file, self.ours = _open(path)
        self._map: mmap.mmap | None = None
        page = os.pread(self._file, PAGE, 0)
        self._found = _records(page)
        self.foreign = False  # whether the fingerprint differs
        self._whole = self._check(page)

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
        """Whole snapshots, newest first, each with the loader's state; what is damaged is noted in `damage`."""
        if not self._whole:
            return
        for slot, found in enumerate(self._found):
            if found is None:
                self.damage.append(f"the record of slot {slot} of {self.path} is damaged")
        known = [found for found in self._found if found and found.step >= 0]
        for found in sorted(known, key=lambda each: each.step, reverse=True):
            if self._crc(found) == found.crc:
                at = PAGE + found.slot * self.stride + self.size
                yield found, os.pread(self._file, found.length, at)
            else:
                self.damage.append(f"the snapshot of step {found.step} in {self.path} is damaged")

    def load(self, found: Snapshot, target: memoryview) -> None:
        """The state of a snapshot that `read` gave, into `target`."""
        at = PAGE + found.slot * self.stride
        for place in range(0, self.size, BLOCK):
            part = target[place : min(self.size, place + BLOCK)]
            if os.preadv(self._file, [part], at + place) != len(part):
                raise RekindleError(f"{self.path} became shorter while it was read: start this worker again.")
        self.kept = found.slot

    def _crc(self, found: Snapshot) -> int:
        """The checksum of what the slot holds now; read, not mapped: a file may be shorter than it says."""
        at, crc, left = PAGE + found.slot * self.stride, 0, self.size + found.length
        buffer = memoryview(bytearray(min(BLOCK, left)))
        while left:
            got = os.preadv(self._file, [buffer[: min(BLOCK, left)]], at)
            if not got:
                return -1
            crc, at, left = zlib.crc32(buffer[:got], crc), at + got, left - got
        return crc

    def reserve(self) -> None:
        """Make room for all slots and map them; whole snapshots stay. Raises OSError if there is not enough room."""
        total = PAGE + SLOTS * self.stride
        os.posix_fallocate(self._file, 0, total)  # or a full file system would end us by SIGBUS, later
        os.ftruncate(self._file, total)
        self._map = mapped = mmap.mmap(self._file, total)
        if not self._whole:
            mapped[:PAGE] = bytes(PAGE)
            mapped[: HEADER.size] = self._header
            FLAG.pack_into(mapped, HEADER.size, _flag(self._header))
        view = memoryview(mapped)
        self.slots = [
            view[at : at + self.stride] for at in range(PAGE, total, self.stride)
        ]  # a state, then the loader's
        for slot, found in enumerate(self._found):
            if found is None:
                self.begin(slot)
        for at in range(0, total, BLOCK):  # so that no copy has to wait for a page fault
            touch(mapped, at, min(BLOCK, total - at))

    def begin(self, slot: int) -> None:
        """From now on, and until `commit`, the slot holds nothing."""
        assert self._map
        at = RECORDS + slot * STRIDE
        FLAG.pack_into(self._map, at + RECORD.size, 0)
        self._map[at : at + RECORD.size] = bytes(RECORD.size)

    def commit(self, slot: int, step: int, extra: bytes) -> Snapshot:
        """The slot's state is whole now, with `extra` as the loader's."""
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
        """Let go of the file; `remove`: nobody needs it any more."""
        if remove and self.ours:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def touch(mapped: mmap.mmap, at: int, length: int) -> None:
    """Have the pages of a shared mapping ready to be written, their contents as they are."""
    try:
        mapped.madvise(POPULATE, at, length)
    except OSError:  # a kernel before 5.14
        for page in range(at, at + length, PAGE):
            mapped[page]


def _open(path: Path) -> tuple[int, bool]:
    """The file, and whether it is ours to write (a frozen predecessor may hold it still)."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a process's own: children do not inherit it
        except OSError:
            return file, False
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                return file, True
        os.close(file)  # swept away before we held it


def _records(page: bytes) -> list[Snapshot | None]:
    """What the header says of each slot: step -1: empty or unfinished; None: damaged."""
    found: list[Snapshot | None] = []
    for slot in range(SLOTS if len(page) == PAGE else 0):
        at = RECORDS + slot * STRIDE
        record, (flag,) = page[at : at + RECORD.size], FLAG.unpack_from(page, at + RECORD.size)
        step, length, crc = RECORD.unpack(record)
        if flag == 0:
            found.append(Snapshot(slot, -1, 0, 0))
        else:
            found.append(Snapshot(slot, step, length, crc) if flag == _flag(record) and length <= ROOM else None)
    return found


def _flag(data: bytes) -> int:
    """A checksum no byte of which is 0: no single damaged byte makes it look like none."""
    return zlib.crc32(data) | 0x01010101
