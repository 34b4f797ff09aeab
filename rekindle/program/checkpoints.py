"""The checkpoints of a foreign training program on one node: found, uploaded and restored.

checkpoints = ProgramCheckpoints(store, "runs/7", Path("/checkpoints"), is_alive)
restored = checkpoints.restore(Generation(1, node=0, nodes=2, processes=8))
checkpoints.begin()                   # before the processes start
...                                   # a thread looks at the folder and uploads
checkpoints.end(succeeded=False)      # after all processes have ended
checkpoints.flush(timeout_s=60)       # waits for the uploads
"""

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rekindle.errors import RekindleError, say
from rekindle.program.formats import DISTRIBUTED_CHECKPOINT, HUGGING_FACE
from rekindle.program.held_files import ChangedFile, hidden_folder, remove_leftovers
from rekindle.program.paths import without_numbers
from rekindle.program.pointers import describe_pointers, write_pointer
from rekindle.program.records import CheckpointRecord, ShareRecord, unit_key
from rekindle.program.restore import RestoreCounts, restore_records, set_aside
from rekindle.program.store import MissingChunks, ProgramStore
from rekindle.program.watch import LocalCheckpoint, Watch, WatchSettings
from rekindle.storage import Store

LOOK_INTERVAL_S = 1.0
MAX_PAUSE_S = 30.0  # longest pause after an error of the object store
LOG_INTERVAL_S = 10.0
NICENESS = 10
IDLE_IO_CLASS = 3
IO_PRIORITY_CALLS = {"x86_64": 251, "aarch64": 30}  # numbers of the system call ioprio_set


class Generation(NamedTuple):
    """One start of the program's processes. `nodes`: number of nodes; `node`: index of this node;
    `processes`: number of processes on all nodes, 0 if unknown."""

    number: int = 0
    node: int = 0
    nodes: int = 1
    processes: int = 0


class Restored(NamedTuple):
    """The checkpoint for the program to continue. `path`: its path, None if no checkpoint
    exists; `kept_bytes`, `fetched_bytes`: bytes that the folder had, and bytes from the store."""

    path: Path | None
    step: int | None = None
    kept_bytes: int = 0
    fetched_bytes: int = 0


class ProgramCheckpoints:
    """The checkpoints in `folder`, and their copies below `prefix` of the object store.

    `is_alive` returns True while all processes of the program on this node run; `keep`: number of
    checkpoints of each kind that stay in the store; `marker`: name of a file that the program
    writes into each complete checkpoint, or "".
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        folder: Path,
        is_alive: Callable[[], bool],
        *,
        keep: int = 2,
        marker: str = "",
        look_interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        self.folder = folder
        self.store = ProgramStore(store, prefix, keep)
        self.generation = Generation()
        self.problem = ""  # reason why the newest checkpoint is not in the store yet

        self._look_interval_s = look_interval_s
        self._marker = marker
        self._watch = Watch(folder, WatchSettings(marker=marker), is_alive)
        self._lock = threading.Lock()  # protects the watch
        self._uploaded: dict[str, object] = {}  # path → files of the version in the store
        self._absent_since: dict[str, float] = {}  # key of a unit → time of the first look
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    @property
    def complete(self) -> dict[str, LocalCheckpoint]:
        """The complete checkpoints in the folder, by path."""
        with self._lock:
            return dict(self._watch.complete)

    @property
    def incomplete(self) -> dict[str, str]:
        """The reasons why the other checkpoints in the folder are not complete, by path."""
        with self._lock:
            return dict(self._watch.incomplete)

    def restore(self, generation: Generation) -> Restored:
        """Give this node the files of the newest complete checkpoint, while the program does not
        run. Checkpoints that are not complete are moved out of the folder.

        Raises StorageError if the object store is unavailable.
        """
        self.generation = generation
        with self._lock:
            self._watch.settings = self._watch_settings()
            self._watch.settle(succeeded=False)
            counts = RestoreCounts()
            local = self._find_newer_local()
            if local:
                self._set_aside_incomplete([])
                return Restored(self.folder / local.path, local.step)

            records = restore_records(self.store, self.folder, generation.node, counts)
            self._adopt(records)
            self._set_aside_incomplete(records)

        newest = next((record for record in records if not _is_best(record.path)), None)
        if newest is None:
            return Restored(None)
        path = self.folder / newest.path
        return Restored(path, newest.step, counts.kept_bytes, counts.fetched_bytes)

    def begin(self) -> None:
        """Start the looks and uploads, directly before the program starts."""
        with self._lock:
            self._watch.begin(self._watch_settings())
            if self.generation.nodes > 1:
                # another node may have had a share of a checkpoint of an earlier generation
                for path, checkpoint in self._watch.complete.items():
                    if not self._proves_end(checkpoint):
                        self._uploaded[path] = checkpoint.unit.files

        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def end(self, *, succeeded: bool) -> None:
        """Decide which checkpoints are complete, after all processes of the program have ended.
        `succeeded`: True if all exit codes are 0."""
        with self._lock:
            self._watch.settle(succeeded=succeeded)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the newest complete checkpoints are in the store; then stop the thread.
        Returns False after `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        while (is_pending := bool(self._find_pending())) and time.monotonic() < end:
            time.sleep(0.05)

        self._stop.set()
        if self._thread:
            self._thread.join(max(end - time.monotonic(), 0.1))
        return not is_pending

    def _watch_settings(self) -> WatchSettings:
        return WatchSettings(self.generation.processes, self.generation.nodes, self._marker)

    def _run(self) -> None:
        _lower_priority()
        pause_s = self._look_interval_s
        last_log_s = -LOG_INTERVAL_S

        while not self._stop.is_set():
            try:
                with self._lock:
                    if not self._watch.has_ended:
                        self._watch.look()
                self._upload_pending()
                pause_s = self._look_interval_s
                self.problem = ""
            except (RekindleError, OSError) as error:
                self.problem = str(error)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                if time.monotonic() - last_log_s >= LOG_INTERVAL_S:
                    say(f"a checkpoint of the program is not in the store yet: {error}")
                    last_log_s = time.monotonic()

            self._stop.wait(pause_s)

    def _find_pending(self) -> list[LocalCheckpoint]:
        """Return the newest complete checkpoint of each family that is not in the store."""
        newest: dict[str, LocalCheckpoint] = {}
        for checkpoint in self.complete.values():
            other = newest.get(checkpoint.family)
            if other is None or _age_key(checkpoint) > _age_key(other):
                newest[checkpoint.family] = checkpoint
        return [
            checkpoint
            for checkpoint in newest.values()
            if self._uploaded.get(checkpoint.path) != checkpoint.unit.files
        ]

    def _upload_pending(self) -> None:
        for checkpoint in self._find_pending():
            try:
                self._upload(checkpoint)
            except (ChangedFile, MissingChunks):
                # the program replaced or deleted it; the next look finds its newer version
                continue
            self._uploaded[checkpoint.path] = checkpoint.unit.files

        if self.generation.nodes > 1:
            self._commit_shares()

    def _upload(self, checkpoint: LocalCheckpoint) -> None:
        unit = checkpoint.unit
        generation = self.generation
        files = self.store.upload_files(self.folder, unit, generation.node)
        with self._lock:
            pointers = describe_pointers(self.folder, self._watch.pointers, unit)

        if generation.nodes == 1:
            self.store.commit(
                unit.path,
                checkpoint.format,
                checkpoint.step,
                1,
                files,
                pointers,
                unit.newest_ns / 1e9,
            )
            return

        with self._lock:
            earlier_ns = self._watch.earlier_ns(unit.path)
        share = ShareRecord(
            path=unit.path,
            format=checkpoint.format,
            step=checkpoint.step,
            nodes=generation.nodes,
            files=files,
            pointers=pointers,
            node=generation.node,
            sequence=time.time_ns(),
            demands=dict(checkpoint.demands),
            proves_end=self._proves_end(checkpoint),
            newest_ns=unit.newest_ns,
            earlier_ns=earlier_ns,
        )
        self.store.write_share(generation.number, share)
        self.store.check_chunks(files)

    def _proves_end(self, checkpoint: LocalCheckpoint) -> bool:
        """Return True if the demands name the files of all nodes."""
        if checkpoint.format == DISTRIBUTED_CHECKPOINT:
            return True
        return checkpoint.format == HUGGING_FACE and self.generation.processes > 0

    def _commit_shares(self) -> None:
        """Commit the checkpoints whose shares are all in the store, and say which units this node
        does not have."""
        generation = self.generation
        with self._lock:
            own_units = {
                unit_key(path) for path in [*self._watch.complete, *self._watch.incomplete]
            }

        for unit, keys in self.store.list_shares(generation.number).items():
            if generation.node not in keys and unit not in own_units:
                now = time.monotonic()
                first = self._absent_since.setdefault(unit, now)
                if now - first >= self._watch.settings.quiet_s:
                    self._write_absence(keys)
            else:
                self._absent_since.pop(unit, None)

            with suppress(MissingChunks):
                self.store.commit_shares(keys, generation.nodes)

    def _write_absence(self, keys: dict[int, str]) -> None:
        path = self.store.read_share(next(iter(keys.values()))).path
        share = ShareRecord(
            path=path,
            format="absent",
            step=None,
            nodes=self.generation.nodes,
            files=[],
            node=self.generation.node,
            sequence=time.time_ns(),
        )
        self.store.write_share(self.generation.number, share)

    def _find_newer_local(self) -> LocalCheckpoint | None:
        """Return the newest complete checkpoint of the folder, if it is newer than the newest one
        of the store and no other node has a share of it."""
        local = max(
            (item for item in self._watch.complete.values() if not _is_best(item.path)),
            key=_age_key,
            default=None,
        )
        if local is None or self.generation.nodes > 1:
            return None

        record = self.store.find_newest(local.family)
        if record is None:
            return local
        is_newer = local.unit.newest_ns / 1e9 > record.created
        if local.step is not None and record.step is not None and local.step != record.step:
            is_newer = local.step > record.step
        return local if is_newer else None

    def _adopt(self, records: list[CheckpointRecord]) -> None:
        """Record that restored checkpoints are complete and in the store, and update the pointers
        to them."""
        for record in records:
            for pointer in record.pointers:
                with suppress(OSError):
                    write_pointer(self.folder, pointer, record.path)

            self._watch.adopt(record.path, record.format, record.step)
            if record.path in self._watch.complete:
                self._uploaded[record.path] = self._watch.complete[record.path].unit.files

    def _set_aside_incomplete(self, records: list[CheckpointRecord]) -> None:
        restored = {record.path for record in records}
        families = {without_numbers(path) for path in restored}
        paths = [path for path in self._watch.incomplete if path not in restored]
        if self.generation.nodes > 1:
            # complete on this node, but not on all: the program must not continue from it
            paths += [
                path
                for path, item in self._watch.complete.items()
                if path not in restored and item.family in families and _is_newer(item, records)
            ]

        for path in paths:
            with suppress(OSError):
                set_aside(self.folder / path, hidden_folder(self.folder))
        self._watch.forget(paths)


def _is_newer(item: LocalCheckpoint, records: list[CheckpointRecord]) -> bool:
    return all(
        record.step is None or item.step is None or item.step > record.step for record in records
    )


def _age_key(checkpoint: LocalCheckpoint) -> tuple[int, int]:
    """Return a key that sorts the checkpoints of one family from the oldest to the newest."""
    step = -1 if checkpoint.step is None else checkpoint.step
    return step, checkpoint.unit.newest_ns


def _is_best(path: str) -> bool:
    """Return True for a copy of the best weights: programs do not continue from it."""
    return "best" in path.rpartition("/")[2].lower()


def _lower_priority() -> None:
    """Let the processes of the program use the CPU and the disk first; for this thread and the
    threads that it starts."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

    number = IO_PRIORITY_CALLS.get(platform.machine())
    if number and platform.system() == "Linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, IDLE_IO_CLASS << 13)
