"""Finds, uploads and restores the checkpoints of a user's training program on one node.

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
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rekindle.errors import RekindleError, say
from rekindle.program.checkpoints.formats import DISTRIBUTED_CHECKPOINT, HUGGING_FACE
from rekindle.program.checkpoints.held_files import ChangedFile, hidden_folder, remove_leftovers
from rekindle.program.checkpoints.paths import family_of
from rekindle.program.checkpoints.pointers import describe_pointers, write_pointer
from rekindle.program.checkpoints.records import CheckpointRecord, ShareRecord, unit_key
from rekindle.program.checkpoints.restore import (
    RestoreCounts,
    restore_keys,
    restore_newest,
    set_aside,
)
from rekindle.program.checkpoints.saves import choose_versions
from rekindle.program.checkpoints.store import MissingChunks, ProgramStore, UploadStopped
from rekindle.program.checkpoints.watch import LocalCheckpoint, Watch, WatchSettings
from rekindle.storage import Store

LOOK_INTERVAL_S = 1.0
SAME_TIME_S = 0.1  # tolerance for equal times: two clock conversions differ slightly
# interval while another node waits for this node to record that it lacks a checkpoint
WAITED_FOR_INTERVAL_S = 0.2
MAX_PAUSE_S = 30.0  # longest pause after an error of the object store
LOG_INTERVAL_S = 10.0
FULL_DISK_BYTES = 1 << 20  # free space of a disk that counts as full
NODES = "nodes"  # name of the file with the number of nodes
NICENESS = 10
IDLE_IO_CLASS = 3
IO_PRIORITY_CALLS = {"x86_64": 251, "aarch64": 30}  # number of ioprio_set by CPU


class Generation(NamedTuple):
    """One start of the program's processes. `group`: id of its group of nodes; `nodes`: number of
    nodes; `node`: index of this node; `processes`: number of processes on all nodes, 0 if
    unknown."""

    number: int = 0
    node: int = 0
    nodes: int = 1
    processes: int = 0
    group: str = "0"

    @property
    def key(self) -> str:
        """The name of the generation in keys. It contains the group, since a new coordinator
        numbers generations from 1 again."""
        return f"{self.number:08d}-{self.group}"


class Restored(NamedTuple):
    """The checkpoint from which the program continues. `path`: its path, None if no checkpoint
    exists; `kept_bytes`: bytes that the folder already had; `fetched_bytes`: bytes from the object
    store."""

    path: Path | None
    step: int | None = None
    kept_bytes: int = 0
    fetched_bytes: int = 0


class _LocalVersion(NamedTuple):
    """A complete checkpoint in the folder. `created`: time of its last change in seconds."""

    path: str
    nodes: int
    created: float


class ProgramCheckpoints:
    """The checkpoints in `folder`, and their copies below `prefix` of the object store.

    `is_alive` returns True while all processes of the program on this node run; `keep`: number of
    checkpoints of each kind that stay in the store; `marker`: name of a file that the program
    writes into each complete checkpoint, or ""; `result`: path of the program's result below the
    folder, or "".
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
        result: str = "",
        look_interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        self.folder = folder
        self.store = ProgramStore(store, prefix, keep)
        self.generation = Generation()
        self.saves = 0  # number of complete checkpoints of the run that this node knows
        self.last_change_s = time.monotonic()  # time of the last change of the folder
        self.last_save_s = time.monotonic()  # time of the last save, or else of the program's start
        self.problem = ""  # reason why the newest checkpoint is not in the store yet

        self._clock_offset_ns = 0  # clock of the object store minus clock of this node
        self._look_interval_s = look_interval_s
        self._marker = marker
        self._result = result
        self._watch = Watch(folder, WatchSettings(marker=marker), is_alive)
        self._lock = threading.Lock()  # protects the watch
        self._files: Mapping[str, object] = {}  # path of a unit → its files when last listed
        self._counted: dict[str, object] = {}  # path → files of the last version in `saves`
        self._uploaded: dict[str, object] = {}  # path → files of the version that is in the store
        self._absent_since: dict[str, float] = {}  # key of a unit → time when first missed
        self._last_log_s = -LOG_INTERVAL_S
        self._uploads: threading.Thread | None = None
        self._stop = threading.Event()  # set to stop the threads that `begin` has started
        self._has_news = threading.Event()  # set to wake the thread that uploads

        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    @property
    def complete(self) -> dict[str, LocalCheckpoint]:
        """The complete checkpoints in the folder, by path."""
        with self._lock:
            return dict(self._watch.complete)

    @property
    def incomplete(self) -> dict[str, str]:
        """The reasons why the other checkpoints in the folder are incomplete, by path."""
        with self._lock:
            return dict(self._watch.incomplete)

    @property
    def newest_step(self) -> int:
        """Step of the newest complete checkpoint; the number of saves if no step is known, and -1
        before the first save."""
        steps = self._list_steps()
        if steps:
            return max(steps)
        return self.saves or -1

    @property
    def counts_saves(self) -> bool:
        """True if `newest_step` is a number of saves, because no checkpoint contains its step."""
        return self.saves > 0 and not self._list_steps()

    def newest_complete(self) -> Path | None:
        """Return the path of the newest complete checkpoint in the folder."""
        newest = max(self._list_usable(), key=_age_key, default=None)
        return self.folder / newest.path if newest else None

    def choose(self, generations: Iterable[str], damaged: Collection[str]) -> list[str]:
        """Return the keys of the checkpoints that all nodes restore: the newest of each family that
        is not in `damaged`. `generations`: keys of the last generations of all nodes, whose
        checkpoints are committed first.

        Raises StorageError.
        """
        # the nodes of earlier generations have finished their uploads, or are lost
        self.store.end_deletions()
        for generation in sorted(set(generations)):
            self.store.commit_ended(generation)
        return self.store.list_newest(damaged)

    def read_clock(self) -> int:
        """Return the time of the object store in nanoseconds. Raises StorageError."""
        return self.store.read_clock()

    def set_clock(self, time_ns: int) -> None:
        """Set the clock offset from the object store's current time, which one node has read for
        all nodes."""
        self._clock_offset_ns = time_ns - time.time_ns()

    def to_store_time(self, time_ns: int) -> int:
        """Convert a time of this node's clock to the clock of the object store."""
        return max(time_ns + self._clock_offset_ns, 0)

    def restore(self, generation: Generation, keys: list[str] | None = None) -> Restored:
        """Restore the checkpoints `keys` (default: the newest complete ones) on this node. The
        program must not be running. Incomplete checkpoints are moved out of the folder.

        Raises UnusableCheckpoint if one of `keys` is damaged, UnwritableDisk if this node cannot
        write, StorageError if the object store is unavailable.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        may_use_local = generation.nodes == 1 and self._read_nodes() == 1
        self.generation = generation
        with self._lock:
            self._watch.settings = self._watch_settings()
            self._watch.settle(succeeded=False)
            counts = RestoreCounts()
            is_cut_off = generation.nodes == 1 and self._is_cut_off()
            local = self._find_newer_local() if may_use_local and not is_cut_off else None
            if local:
                self._set_aside_incomplete([])
                return Restored(self.folder / local.path, local.step)

            if keys is None:
                records = restore_newest(self.store, self.folder, generation.node, counts)
            else:
                records = restore_keys(self.store, self.folder, generation.node, keys, counts)
            self._adopt(records)
            self._set_aside_incomplete(records, is_cut_off=is_cut_off)

        newest = next((record for record in records if self._is_for_resume(record.path)), None)
        if newest is None:
            return Restored(None)
        self.saves = max(self.saves, newest.order + 1)
        path = self.folder / newest.path
        return Restored(path, newest.step, counts.kept_bytes, counts.fetched_bytes)

    def begin(self) -> None:
        """Start the threads that list the folder and upload checkpoints. Call directly before the
        program starts."""
        self._write_nodes()
        self.last_save_s = time.monotonic()
        with self._lock:
            self._watch.begin(self._watch_settings())
            if self.generation.nodes > 1:
                # upload only new versions: other nodes may have had shares of an earlier
                # generation's checkpoint
                for path, checkpoint in self._watch.complete.items():
                    if not self._proves_end(checkpoint):
                        self._uploaded[path] = checkpoint.unit.files

            self._files = self._watch.files
            self._counted = {path: item.unit.files for path, item in self._watch.complete.items()}

        stop = self._stop = threading.Event()
        looks = threading.Thread(target=self._run_looks, args=(stop,), daemon=True)
        self._uploads = threading.Thread(
            target=self._run_uploads, args=(stop, self._uploads), daemon=True
        )
        looks.start()
        self._uploads.start()

    def end(self, *, succeeded: bool) -> None:
        """Decide, after all processes of the program have ended, which checkpoints are complete.
        `succeeded`: True if all exit codes are 0."""
        with self._lock:
            self._watch.settle(succeeded=succeeded)
            self._count_saves()
        self._has_news.set()

    def is_disk_full(self) -> bool:
        # the program may have deleted the folder
        self.folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.folder).free < FULL_DISK_BYTES

    def remove(self) -> None:
        """Remove all files of the program's checkpoints on this node."""
        with suppress(OSError):
            shutil.rmtree(hidden_folder(self.folder), ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the newest complete checkpoints are in the store, then stop the threads.
        Returns False if `timeout_s` seconds were not enough."""
        end = time.monotonic() + timeout_s
        while (is_pending := bool(self._find_pending())) and time.monotonic() < end:
            time.sleep(0.05)

        self._stop.set()
        self._has_news.set()
        if self._uploads:
            self._uploads.join(max(end - time.monotonic(), 0.1))

        if self.generation.nodes > 1:
            try:
                self.store.write_ended(
                    self.generation.key, self.generation.node, self._list_own_units()
                )
                self._commit_shares()
            except RekindleError as error:
                say(f"the last checkpoint is not in the store: {error}")
        return not is_pending

    def _watch_settings(self) -> WatchSettings:
        return WatchSettings(self.generation.processes, self.generation.nodes, self._marker)

    def _run_looks(self, stop: threading.Event) -> None:
        """List the folder periodically, even during a long upload."""
        _lower_priority()
        while not stop.is_set():
            try:
                with self._lock:
                    if not self._watch.has_ended:
                        self._watch.look()
                        self._count_saves()
                if not self.problem and self._find_pending():
                    self._has_news.set()
            # a file of the program can cause any error; the thread must look at the other files
            except Exception as error:
                self._log_problem(error)
            stop.wait(self._look_interval_s)

    def _run_uploads(self, stop: threading.Event, previous: threading.Thread | None) -> None:
        """Wait until the upload thread of the previous start has ended, then upload complete
        checkpoints."""
        _lower_priority()
        if previous:
            previous.join()

        pause_s = self._look_interval_s
        while not stop.is_set():
            self._has_news.clear()
            try:
                self._upload_pending(stop)
                pause_s = self._look_interval_s
                self.problem = ""
            # not only errors of the store: a file can, for example, have a path that is too long
            # for a record
            except Exception as error:
                self.problem = str(error)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                self._log_problem(error)

            if self._watch.has_ended:
                # retry soon, because little time is left for the last upload
                pause_s = min(pause_s, self._look_interval_s)
            is_waited_for = not self.problem and bool(self._absent_since)
            self._has_news.wait(WAITED_FOR_INTERVAL_S if is_waited_for else pause_s)

    def _log_problem(self, error: Exception) -> None:
        if time.monotonic() - self._last_log_s >= LOG_INTERVAL_S:
            say(f"a checkpoint of the program is not in the store yet: {error}")
            self._last_log_s = time.monotonic()

    def _count_saves(self) -> None:
        """Count new complete checkpoints, and record when the folder last changed."""
        files = self._watch.files
        if files != self._files:
            self._files = files
            self.last_change_s = time.monotonic()

        for path, item in self._watch.complete.items():
            if self._counted.get(path) != item.unit.files and self._is_for_resume(path):
                self.saves += 1
                self.last_save_s = time.monotonic()
            self._counted[path] = item.unit.files

    def _is_for_resume(self, path: str) -> bool:
        """Return True if a program can continue from the checkpoint, which is neither the result
        nor a copy of the best weights."""
        is_result = path == self._result or path.startswith(f"{self._result}/")
        return not (self._result and is_result) and "best" not in path.rpartition("/")[2].lower()

    def _list_steps(self) -> list[int]:
        return [item.step for item in self._list_usable() if item.step is not None]

    def _list_usable(self) -> list[LocalCheckpoint]:
        return [item for item in self.complete.values() if self._is_for_resume(item.path)]

    def _write_nodes(self) -> None:
        """Record in the hidden folder on how many nodes the program runs."""
        hidden = hidden_folder(self.folder)
        hidden.mkdir(parents=True, exist_ok=True)
        (hidden / NODES).write_text(str(self.generation.nodes))

    def _read_nodes(self) -> int:
        """Return the number of nodes of the last generation that used this folder; 1 if the folder
        is new."""
        try:
            return int((hidden_folder(self.folder) / NODES).read_text())
        except (OSError, ValueError):
            return 1

    def _list_own_units(self) -> set[str]:
        with self._lock:
            return {unit_key(path) for path in [*self._watch.complete, *self._watch.incomplete]}

    def _find_pending(self) -> list[LocalCheckpoint]:
        """Return the complete checkpoints to upload, oldest first: the newest of each family. With
        several nodes, after the program's end, also the second newest, since the newest may be
        complete only on this node."""
        count = 2 if self.generation.nodes > 1 and self._watch.has_ended else 1
        families: dict[str, list[LocalCheckpoint]] = {}
        complete = sorted(self.complete.values(), key=_age_key)
        if not self._watch.has_ended:
            # while the program is writing a save, upload the files of the previous save
            versions = [
                _LocalVersion(item.path, 1, item.unit.newest_ns / 1e9) for item in complete[::-1]
            ]
            chosen = {version.path for version in choose_versions(versions)}
            complete = [item for item in complete if item.path in chosen]
        for checkpoint in complete:
            families.setdefault(checkpoint.family, []).append(checkpoint)

        return [
            checkpoint
            for family in families.values()
            for checkpoint in family[-count:]
            if self._uploaded.get(checkpoint.path) != checkpoint.unit.files
        ]

    def _upload_pending(self, stop: threading.Event) -> None:
        generation = self.generation
        for checkpoint in self._find_pending():
            try:
                self._upload(checkpoint, generation, stop)
            except (ChangedFile, MissingChunks):
                # the program replaced or deleted the checkpoint; the next listing finds a newer
                # version
                continue
            except UploadStopped:
                return
            self._uploaded[checkpoint.path] = checkpoint.unit.files

        if generation.nodes > 1 and not stop.is_set():
            self._commit_shares()

    def _upload(
        self, checkpoint: LocalCheckpoint, generation: Generation, stop: threading.Event
    ) -> None:
        unit = checkpoint.unit
        files = self.store.upload_files(self.folder, unit, generation.node, stop)
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
                self.to_store_time(unit.newest_ns) / 1e9,
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
            newest_ns=self.to_store_time(unit.newest_ns),
            earlier_ns=self.to_store_time(earlier_ns) if earlier_ns else 0,
        )
        self.store.write_share(generation.key, share)
        self.store.check_chunks(files)

    def _proves_end(self, checkpoint: LocalCheckpoint) -> bool:
        """Return True if the demands of the checkpoint list the files of all nodes."""
        if checkpoint.format == DISTRIBUTED_CHECKPOINT:
            return True
        return checkpoint.format == HUGGING_FACE and self.generation.processes > 0

    def _commit_shares(self) -> None:
        """Commit the checkpoints whose shares are all in the store, and record which units this
        node lacks."""
        generation = self.generation
        own_units = self._list_own_units()
        absent_since = self._absent_since
        self._absent_since = {}
        for unit, keys in self.store.list_shares(generation.key).items():
            if generation.node not in keys and unit not in own_units:
                now = time.monotonic()
                first = absent_since.get(unit, now)
                if now - first >= self._watch.settings.quiet_s:
                    keys = {**keys, **self._write_absence(keys)}
                else:
                    self._absent_since[unit] = first

            with suppress(MissingChunks):
                self.store.commit_shares(generation.key, unit, keys)

    def _write_absence(self, keys: dict[int, str]) -> dict[int, str]:
        """Record that this node lacks the unit of these shares; return {index of this node: key of
        the record}."""
        path = self.store.find_path(keys.values())
        if path is None:
            return {}

        share = ShareRecord(
            path=path,
            format="absent",
            step=None,
            nodes=self.generation.nodes,
            files=[],
            node=self.generation.node,
            sequence=time.time_ns(),
        )
        return {share.node: self.store.write_share(self.generation.key, share)}

    def _find_newer_local(self) -> LocalCheckpoint | None:
        """Return the newest complete checkpoint in the folder if it is newer than its family's
        checkpoints in the store, else None."""
        local = max(
            (item for item in self._watch.complete.values() if self._is_for_resume(item.path)),
            key=_age_key,
            default=None,
        )
        if local is None:
            return None

        record = self.store.find_newest(local.family)
        if record is None:
            return local
        is_newer = self.to_store_time(local.unit.newest_ns) / 1e9 > record.created
        if local.step is not None and record.step is not None and local.step != record.step:
            is_newer = local.step > record.step
        return local if is_newer else None

    def _is_cut_off(self) -> bool:
        """Return True if the program was killed between two files of a save, so that it must
        continue from an earlier save."""
        records = [record for _, record in self.store.read_records()]
        local: list[_LocalVersion | CheckpointRecord] = []
        for item in sorted(self._watch.complete.values(), key=_age_key, reverse=True):
            created = self.to_store_time(item.unit.newest_ns) / 1e9
            if not any(
                record.path == item.path and abs(record.created - created) < SAME_TIME_S
                for record in records
            ):
                local.append(_LocalVersion(item.path, 1, created))

        chosen = choose_versions([*local, *records])
        newest = {family_of(version.path): version for version in reversed([*local, *records])}
        return any(newest[family_of(version.path)] is not version for version in chosen)

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

    def _set_aside_incomplete(
        self, records: list[CheckpointRecord], *, is_cut_off: bool = False
    ) -> None:
        """Move incomplete checkpoints out of the folder, so that the program ignores them.
        `is_cut_off`: True if the program was killed between two files of a save."""
        restored = {record.path for record in records}
        reasons = {
            path: reason for path, reason in self._watch.incomplete.items() if path not in restored
        }
        if self.generation.nodes > 1 or is_cut_off:
            # a checkpoint that is newer than the restored ones is incomplete: other nodes or other
            # files of its save lack their parts, so the program would mix different steps
            for path, item in self._watch.complete.items():
                if path not in restored and _is_newer(item, records):
                    reasons[path] = (
                        "other files of its save are missing"
                        if is_cut_off
                        else "not all pods have their files of it"
                    )
        if not reasons:
            return

        for path, reason in reasons.items():
            say(f"the checkpoint {path} is not complete ({reason}): the program does not see it")
        set_aside(self.folder, reasons)
        self._watch.forget(list(reasons))


def _is_newer(item: LocalCheckpoint, records: list[CheckpointRecord]) -> bool:
    """Return True if a local checkpoint is newer than all records of its family."""
    return all(
        record.step is None or item.step is None or item.step > record.step
        for record in records
        if family_of(record.path) == item.family
    )


def _age_key(checkpoint: LocalCheckpoint) -> tuple[int, int]:
    """Return a key that sorts the checkpoints of one family from the oldest to the newest."""
    step = -1 if checkpoint.step is None else checkpoint.step
    return step, checkpoint.unit.newest_ns


def _lower_priority() -> None:
    """Lower the CPU and disk priority of this thread and the threads that it starts, so that the
    program has priority."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

    number = IO_PRIORITY_CALLS.get(platform.machine())
    if number and platform.system() == "Linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, IDLE_IO_CLASS << 13)
