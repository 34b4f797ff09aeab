"""Finds, uploads and restores the checkpoints of a user's training program on one node.

checkpoints = ProgramCheckpoints(store, "runs/7", Path("/checkpoints"), is_alive)
restored = checkpoints.restore(Generation(1, node=0, nodes=2, processes=8))
checkpoints.begin()                    # before the processes start
...                                    # threads list the folder and upload new checkpoints
checkpoints.end(has_succeeded=False)   # after all processes have ended
checkpoints.flush(timeout_s=60)        # waits for the uploads
"""

import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from rekindle.errors import RekindleError, write_stderr
from rekindle.program.checkpoints.formats import DISTRIBUTED_CHECKPOINT, HUGGING_FACE
from rekindle.program.checkpoints.held_files import (
    ChangedFile,
    choose_hidden_folder,
    remove_leftover_links,
)
from rekindle.program.checkpoints.pointers import describe_pointers, write_pointer
from rekindle.program.checkpoints.records import (
    CheckpointRecord,
    Generation,
    ShareRecord,
    make_unit_key,
)
from rekindle.program.checkpoints.restore import (
    RestoreCounts,
    RestoredCheckpoint,
    is_newer_than_records,
    move_units_aside,
    restore_checkpoints,
    restore_newest_checkpoints,
)
from rekindle.program.checkpoints.saves import LocalVersion, choose_versions, is_save_cut_off
from rekindle.program.checkpoints.store import MissingChunks, ProgramStore, UploadStopped
from rekindle.program.checkpoints.watch import FolderWatch, LocalCheckpoint, WatchSettings
from rekindle.storage import Store
from rekindle.training.launch.thread_priority import lower_thread_priority

# seconds between two listings of the checkpoint folder
LISTING_INTERVAL_S = 1.0
# two times that differ by less than this number of seconds count as equal, because clock
# conversions differ slightly
SAME_TIME_TOLERANCE_S = 0.1
# time between two uploads while another node waits for this node to record that it lacks a unit
WAITED_FOR_INTERVAL_S = 0.2
# longest pause in seconds after an error of the object store
MAX_PAUSE_S = 30.0
LOG_INTERVAL_S = 10.0
# free space of a disk that counts as full
FULL_DISK_BYTES = 1 << 20
# name of the file with the number of nodes
NODE_COUNT_FILE = "nodes"


class ProgramCheckpoints:
    """The checkpoints in `folder`, and their copies below `prefix` of the object store.

    `is_alive` returns True while all processes of the program on this node run; `keep_count`:
    number of checkpoints of each family that stay in the store; `marker_name`: name of a file that
    the program writes into each complete checkpoint, or ""; `result_path`: path of the program's
    result relative to the folder, or "".
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        folder: Path,
        is_alive: Callable[[], bool],
        *,
        keep_count: int = 2,
        marker_name: str = "",
        result_path: str = "",
        listing_interval_s: float = LISTING_INTERVAL_S,
    ) -> None:
        self.folder = folder
        self.store = ProgramStore(store, prefix, keep_count)
        self.generation = Generation()
        # number of complete checkpoints of the run that this node knows
        self.saves = 0
        # time of the last change in the checkpoint folder
        self.last_change_s = time.monotonic()
        # time of the last save, or else of the program's start
        self.last_save_s = time.monotonic()
        # reason why the newest checkpoint is not in the store yet
        self.problem = ""

        # clock of the object store minus clock of this node
        self._clock_offset_ns = 0
        self._listing_interval_s = listing_interval_s
        self._marker_name = marker_name
        self._result_path = result_path
        self._watch = FolderWatch(folder, WatchSettings(marker=marker_name), is_alive)
        # the lock protects the FolderWatch `_watch`
        self._lock = threading.Lock()
        # path of a unit → its files when last listed
        self._files: Mapping[str, object] = {}
        # path of a unit → files of the version that `saves` counted last
        self._counted: dict[str, object] = {}
        # path of a unit → files of the version that is in the store
        self._uploaded: dict[str, object] = {}
        # key of a unit that other nodes have → time when this node first noticed that it lacks the
        # unit
        self._absent_since: dict[str, float] = {}
        self._last_log_s = -LOG_INTERVAL_S
        self._uploads: threading.Thread | None = None
        # set to stop the threads that `begin` has started
        self._stop = threading.Event()
        # set to wake the thread that uploads
        self._has_news = threading.Event()

        folder.mkdir(parents=True, exist_ok=True)
        remove_leftover_links(folder)

    @property
    def complete(self) -> dict[str, LocalCheckpoint]:
        """The complete checkpoints in the checkpoint folder, by path."""
        with self._lock:
            return dict(self._watch.complete)

    @property
    def incomplete(self) -> dict[str, str]:
        """The reasons why checkpoints in the checkpoint folder are incomplete, by path."""
        with self._lock:
            return dict(self._watch.incomplete)

    @property
    def newest_step(self) -> int:
        """Step of the newest complete checkpoint; the number of saves if no step is known, and -1
        before the first save."""
        known_steps = self._list_steps()
        if known_steps:
            return max(known_steps)
        return self.saves or -1

    @property
    def is_counting_saves(self) -> bool:
        """True if `newest_step` is a number of saves, because no checkpoint contains its step."""
        return self.saves > 0 and not self._list_steps()

    def newest_complete(self) -> Path | None:
        """Return the path of the newest complete checkpoint in the checkpoint folder, or None."""
        newest_checkpoint = max(
            self._list_usable_checkpoints(), key=attrgetter("age_key"), default=None
        )
        return self.folder / newest_checkpoint.path if newest_checkpoint else None

    def choose(self, generations: Iterable[str], damaged_keys: Collection[str]) -> list[str]:
        """Return the keys of the checkpoints that all nodes restore: the newest of each family that
        is not in `damaged_keys`. `generations`: keys of the last generations (starts of the
        program) of all nodes, whose checkpoints are committed first.

        Raises StorageError.
        """
        # the nodes of earlier generations no longer upload, because they have finished or are lost
        self.store.end_deletions()
        for generation in sorted(set(generations)):
            self.store.commit_ended_generation(generation)
        return self.store.list_newest_keys(damaged_keys)

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

    def restore(
        self, generation: Generation, checkpoint_keys: list[str] | None = None
    ) -> RestoredCheckpoint:
        """Restore the checkpoints `checkpoint_keys` (default: the newest complete ones) on this
        node. The program must not run during a restore. Incomplete checkpoints are moved out of the
        checkpoint folder.

        Raises UnusableCheckpoint if one of `checkpoint_keys` is damaged, UnwritableDisk if this
        node cannot write, StorageError if the object store is unavailable.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        may_use_local = generation.nodes == 1 and self._read_node_count() == 1
        self.generation = generation
        with self._lock:
            self._watch.settings = self._watch_settings()
            self._watch.settle(has_succeeded=False)
            restore_counts = RestoreCounts()
            is_cut_off = generation.nodes == 1 and self._is_save_cut_off()
            if may_use_local and not is_cut_off:
                checkpoint = self._find_newer_checkpoint()
                if checkpoint:
                    self._set_aside_incomplete([])
                    return RestoredCheckpoint(self.folder / checkpoint.path, checkpoint.step)

            if checkpoint_keys is None:
                restored_records = restore_newest_checkpoints(
                    self.store, self.folder, generation.node, restore_counts
                )
            else:
                restored_records = restore_checkpoints(
                    self.store, self.folder, generation.node, checkpoint_keys, restore_counts
                )
            self._adopt(restored_records)
            self._set_aside_incomplete(restored_records, is_cut_off=is_cut_off)

        resumable_records = [
            record for record in restored_records if self._is_for_resume(record.path)
        ]
        if not resumable_records:
            return RestoredCheckpoint(None)

        newest_record = resumable_records[0]
        self.saves = max(self.saves, newest_record.order + 1)
        return RestoredCheckpoint(
            self.folder / newest_record.path,
            newest_record.step,
            restore_counts.kept_bytes,
            restore_counts.fetched_bytes,
        )

    def begin(self) -> None:
        """Start the threads that list the checkpoint folder and upload checkpoints. Call `begin`
        directly before the program starts."""
        self._write_node_count()
        self.last_save_s = time.monotonic()
        with self._lock:
            self._watch.begin(self._watch_settings())
            if self.generation.nodes > 1:
                # do not upload existing versions of checkpoints, because their other files may be
                # on nodes that have left the group
                for path, checkpoint in self._watch.complete.items():
                    if not self._proves_end(checkpoint):
                        self._uploaded[path] = checkpoint.unit.files

            self._files = self._watch.files
            self._counted = {
                path: checkpoint.unit.files for path, checkpoint in self._watch.complete.items()
            }

        stop_event = self._stop = threading.Event()
        listing_thread = threading.Thread(
            target=self._run_listings, args=(stop_event,), daemon=True
        )
        self._uploads = threading.Thread(
            target=self._run_uploads, args=(stop_event, self._uploads), daemon=True
        )
        listing_thread.start()
        self._uploads.start()

    def end(self, *, has_succeeded: bool) -> None:
        """Decide, after all processes of the program have ended, which checkpoints are complete.
        `has_succeeded` is True if all exit codes are 0."""
        with self._lock:
            self._watch.settle(has_succeeded=has_succeeded)
            self._count_saves()
        self._has_news.set()

    def is_disk_full(self) -> bool:
        """Return True if the disk of the checkpoint folder is full. The folder is created if the
        program has deleted it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.folder).free < FULL_DISK_BYTES

    def remove(self) -> None:
        """Remove all files of the program's checkpoints on this node."""
        with suppress(OSError):
            shutil.rmtree(choose_hidden_folder(self.folder), ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the newest complete checkpoints are in the object store, then stop the
        threads. With several nodes, also record in the store that this node's processes have ended.

        Returns False if the upload takes more than `timeout_s` seconds.
        """
        deadline_s = time.monotonic() + timeout_s
        while (
            is_pending := bool(self._find_pending_checkpoints())
        ) and time.monotonic() < deadline_s:
            time.sleep(0.05)

        self._stop.set()
        self._has_news.set()
        if self._uploads:
            self._uploads.join(max(deadline_s - time.monotonic(), 0.1))

        if self.generation.nodes > 1:
            try:
                self.store.write_ended_node(
                    self.generation.key, self.generation.node, self._list_own_units()
                )
                self._commit_shares()
            except RekindleError as error:
                write_stderr(f"the last checkpoint is not in the store: {error}")
        return not is_pending

    def _watch_settings(self) -> WatchSettings:
        return WatchSettings(self.generation.processes, self.generation.nodes, self._marker_name)

    def _run_listings(self, stop_event: threading.Event) -> None:
        """List the checkpoint folder periodically until `stop_event` is set. The listings are made
        by a separate thread, so that a long upload does not delay them."""
        lower_thread_priority()
        while not stop_event.is_set():
            try:
                with self._lock:
                    if not self._watch.has_ended:
                        self._watch.look()
                        self._count_saves()
                if not self.problem and self._find_pending_checkpoints():
                    self._has_news.set()
            # a file of the program can cause any error, and the thread must still look at the other
            # files
            except Exception as error:
                self._log_problem(error)
            stop_event.wait(self._listing_interval_s)

    def _run_uploads(
        self, stop_event: threading.Event, previous_thread: threading.Thread | None
    ) -> None:
        """Wait until the upload thread of the program's previous start has ended, then upload
        complete checkpoints until `stop_event` is set."""
        lower_thread_priority()
        if previous_thread:
            previous_thread.join()

        pause_s = self._listing_interval_s
        while not stop_event.is_set():
            self._has_news.clear()
            try:
                self._upload_pending(stop_event)
                pause_s = self._listing_interval_s
                self.problem = ""
            # catch all errors, because a file can, for example, have a path that is too long for a
            # record
            except Exception as error:
                self.problem = str(error)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                self._log_problem(error)

            if self._watch.has_ended:
                # after the program's end, retry soon, because little time is left for the last
                # upload
                pause_s = min(pause_s, self._listing_interval_s)
            is_waited_for = not self.problem and bool(self._absent_since)
            self._has_news.wait(WAITED_FOR_INTERVAL_S if is_waited_for else pause_s)

    def _log_problem(self, error: Exception) -> None:
        if time.monotonic() - self._last_log_s >= LOG_INTERVAL_S:
            write_stderr(f"a checkpoint of the program is not in the store yet: {error}")
            self._last_log_s = time.monotonic()

    def _count_saves(self) -> None:
        """Count new complete checkpoints, and record when the checkpoint folder last changed."""
        watched_files = self._watch.files
        if watched_files != self._files:
            self._files = watched_files
            self.last_change_s = time.monotonic()

        for path, checkpoint in self._watch.complete.items():
            if self._counted.get(path) != checkpoint.unit.files and self._is_for_resume(path):
                self.saves += 1
                self.last_save_s = time.monotonic()
            self._counted[path] = checkpoint.unit.files

    def _is_for_resume(self, path: str) -> bool:
        """Return True if a program can continue from the checkpoint, which must be neither the
        result nor a copy of the best weights."""
        is_result = path == self._result_path or path.startswith(f"{self._result_path}/")
        return (
            not (self._result_path and is_result) and "best" not in path.rpartition("/")[2].lower()
        )

    def _list_steps(self) -> list[int]:
        return [
            checkpoint.step
            for checkpoint in self._list_usable_checkpoints()
            if checkpoint.step is not None
        ]

    def _list_usable_checkpoints(self) -> list[LocalCheckpoint]:
        return [
            checkpoint
            for checkpoint in self.complete.values()
            if self._is_for_resume(checkpoint.path)
        ]

    def _write_node_count(self) -> None:
        """Record in the hidden folder on how many nodes the program runs."""
        hidden_path = choose_hidden_folder(self.folder)
        hidden_path.mkdir(parents=True, exist_ok=True)
        (hidden_path / NODE_COUNT_FILE).write_text(str(self.generation.nodes))

    def _read_node_count(self) -> int:
        """Return the number of nodes of the last generation (start of the program) that used this
        checkpoint folder; 1 if the folder is new."""
        try:
            return int((choose_hidden_folder(self.folder) / NODE_COUNT_FILE).read_text())
        except (OSError, ValueError):
            return 1

    def _list_own_units(self) -> set[str]:
        with self._lock:
            return {
                make_unit_key(path) for path in [*self._watch.complete, *self._watch.incomplete]
            }

    def _find_pending_checkpoints(self) -> list[LocalCheckpoint]:
        """Return the complete checkpoints to upload, oldest first: the newest of each family. After
        the program's end on several nodes, the second newest checkpoint of each family is also
        returned, since the newest may be complete only on this node."""
        version_count = 2 if self.generation.nodes > 1 and self._watch.has_ended else 1
        checkpoints_by_family: dict[str, list[LocalCheckpoint]] = {}
        complete_checkpoints = sorted(self.complete.values(), key=attrgetter("age_key"))
        if not self._watch.has_ended:
            # while the program is writing a save, upload the files of the previous save
            local_versions = [
                LocalVersion(checkpoint.path, 1, checkpoint.unit.newest_ns / 1e9)
                for checkpoint in complete_checkpoints[::-1]
            ]
            chosen_paths = {version.path for version in choose_versions(local_versions)}
            complete_checkpoints = [
                checkpoint for checkpoint in complete_checkpoints if checkpoint.path in chosen_paths
            ]
        for checkpoint in complete_checkpoints:
            checkpoints_by_family.setdefault(checkpoint.family, []).append(checkpoint)

        return [
            checkpoint
            for family_checkpoints in checkpoints_by_family.values()
            for checkpoint in family_checkpoints[-version_count:]
            if self._uploaded.get(checkpoint.path) != checkpoint.unit.files
        ]

    def _upload_pending(self, stop_event: threading.Event) -> None:
        generation = self.generation
        for checkpoint in self._find_pending_checkpoints():
            try:
                self._upload(checkpoint, generation, stop_event)
            except (ChangedFile, MissingChunks):
                # the program replaced or deleted the checkpoint; the next listing finds a newer
                # version
                continue
            except UploadStopped:
                return
            self._uploaded[checkpoint.path] = checkpoint.unit.files

        if generation.nodes > 1 and not stop_event.is_set():
            self._commit_shares()

    def _upload(
        self, checkpoint: LocalCheckpoint, generation: Generation, stop_event: threading.Event
    ) -> None:
        checkpoint_unit = checkpoint.unit
        file_records = self.store.upload_files(
            self.folder, checkpoint_unit, generation.node, stop_event
        )
        with self._lock:
            pointer_records = describe_pointers(self.folder, self._watch.pointers, checkpoint_unit)

        if generation.nodes == 1:
            self.store.commit(
                checkpoint_unit.path,
                checkpoint.format,
                checkpoint.step,
                1,
                file_records,
                pointer_records,
                self.to_store_time(checkpoint_unit.newest_ns) / 1e9,
            )
            return

        with self._lock:
            earlier_ns = self._watch.earlier_ns(checkpoint_unit.path)
        share_record = ShareRecord(
            path=checkpoint_unit.path,
            format=checkpoint.format,
            step=checkpoint.step,
            nodes=generation.nodes,
            files=file_records,
            pointers=pointer_records,
            node=generation.node,
            sequence=time.time_ns(),
            demands=dict(checkpoint.demands),
            proves_end=self._proves_end(checkpoint),
            newest_ns=self.to_store_time(checkpoint_unit.newest_ns),
            earlier_ns=self.to_store_time(earlier_ns) if earlier_ns else 0,
        )
        self.store.write_share(generation.key, share_record)
        self.store.verify_chunks_exist(file_records)

    def _proves_end(self, checkpoint: LocalCheckpoint) -> bool:
        """Return True if the files of the checkpoint show which files all nodes must have written,
        so that the end of the save can be recognized."""
        if checkpoint.format == DISTRIBUTED_CHECKPOINT:
            return True
        return checkpoint.format == HUGGING_FACE and self.generation.processes > 0

    def _commit_shares(self) -> None:
        """Commit the checkpoints for which the shares of all nodes are in the object store, and
        record which units this node lacks."""
        generation = self.generation
        own_units = self._list_own_units()
        absent_since = self._absent_since
        self._absent_since = {}
        for unit_name, share_keys in self.store.list_shares(generation.key).items():
            if generation.node not in share_keys and unit_name not in own_units:
                now_s = time.monotonic()
                first_absent_s = absent_since.get(unit_name, now_s)
                if now_s - first_absent_s >= self._watch.settings.quiet_s:
                    share_keys = {**share_keys, **self._write_absence(share_keys)}
                else:
                    self._absent_since[unit_name] = first_absent_s

            with suppress(MissingChunks):
                self.store.commit_shares(generation.key, unit_name, share_keys)

    def _write_absence(self, share_keys: dict[int, str]) -> dict[int, str]:
        """Record that this node lacks the unit of these shares; return {index of this node: key of
        the record}."""
        unit_path = self.store.find_unit_path(share_keys.values())
        if unit_path is None:
            return {}

        share_record = ShareRecord(
            path=unit_path,
            format="absent",
            step=None,
            nodes=self.generation.nodes,
            files=[],
            node=self.generation.node,
            sequence=time.time_ns(),
        )
        return {share_record.node: self.store.write_share(self.generation.key, share_record)}

    def _find_newer_checkpoint(self) -> LocalCheckpoint | None:
        """Return the newest complete checkpoint in the checkpoint folder if it is newer than its
        family's checkpoints in the object store, else None."""
        checkpoint = max(
            (
                checkpoint
                for checkpoint in self._watch.complete.values()
                if self._is_for_resume(checkpoint.path)
            ),
            key=attrgetter("age_key"),
            default=None,
        )
        if checkpoint is None:
            return None

        stored_record = self.store.find_newest_record(checkpoint.family)
        if stored_record is None:
            return checkpoint
        is_newer = self.to_store_time(checkpoint.unit.newest_ns) / 1e9 > stored_record.created
        if (
            checkpoint.step is not None
            and stored_record.step is not None
            and checkpoint.step != stored_record.step
        ):
            is_newer = checkpoint.step > stored_record.step
        return checkpoint if is_newer else None

    def _is_save_cut_off(self) -> bool:
        """Return True if the program was killed between two files of a save, so that it must
        continue from an earlier save."""
        stored_records = [stored_record for _, stored_record in self.store.read_records()]
        unstored_versions: list[LocalVersion] = []
        for checkpoint in sorted(
            self._watch.complete.values(), key=attrgetter("age_key"), reverse=True
        ):
            created_s = self.to_store_time(checkpoint.unit.newest_ns) / 1e9
            if not any(
                stored_record.path == checkpoint.path
                and abs(stored_record.created - created_s) < SAME_TIME_TOLERANCE_S
                for stored_record in stored_records
            ):
                unstored_versions.append(LocalVersion(checkpoint.path, 1, created_s))
        return is_save_cut_off([*unstored_versions, *stored_records])

    def _adopt(self, restored_records: list[CheckpointRecord]) -> None:
        """Record that restored checkpoints are complete and in the object store, and update the
        pointers to these checkpoints."""
        for record in restored_records:
            for pointer in record.pointers:
                with suppress(OSError):
                    write_pointer(self.folder, pointer, record.path)

            self._watch.adopt(record.path, record.format, record.step)
            if record.path in self._watch.complete:
                self._uploaded[record.path] = self._watch.complete[record.path].unit.files

    def _set_aside_incomplete(
        self, restored_records: list[CheckpointRecord], *, is_cut_off: bool = False
    ) -> None:
        """Move incomplete checkpoints out of the checkpoint folder, so that the program ignores
        these checkpoints. `is_cut_off` is True if the program was killed between two files of a
        save."""
        restored_paths = {record.path for record in restored_records}
        reasons_by_path = {
            path: reason
            for path, reason in self._watch.incomplete.items()
            if path not in restored_paths
        }
        if self.generation.nodes > 1 or is_cut_off:
            # a checkpoint that is newer than the restored checkpoints is incomplete, because other
            # nodes or other files of its save lack their parts, so the program would mix different
            # steps
            for path, checkpoint in self._watch.complete.items():
                if path not in restored_paths and is_newer_than_records(
                    checkpoint, restored_records
                ):
                    reasons_by_path[path] = (
                        "other files of its save are missing"
                        if is_cut_off
                        else "not all pods have their files of it"
                    )
        if not reasons_by_path:
            return

        for path, reason in reasons_by_path.items():
            write_stderr(
                f"the checkpoint {path} is not complete ({reason}): the program does not see it"
            )
        move_units_aside(self.folder, reasons_by_path)
        self._watch.forget(list(reasons_by_path))
