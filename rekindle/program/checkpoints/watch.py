"""Decides which checkpoints of a training program are complete, by listing the checkpoint folder
repeatedly.

    watch = FolderWatch(folder, WatchSettings(processes=2), is_alive)
    watch.begin()                      # before the processes of the program start
    watch.look()                       # every second, while they run
    watch.settle(has_succeeded=False)  # after all of them have ended
    watch.complete                     # the complete checkpoints
    watch.incomplete                   # the reasons why the other checkpoints are incomplete

A file that does not change may be complete, or the process that wrote it may have been killed. A
listing therefore counts as evidence that a file is complete only if all processes of the program
are alive after the listing. After the end of the processes, `settle` accepts only files whose
content is complete.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.program.checkpoints.dcp_metadata import METADATA_FILE
from rekindle.program.checkpoints.file_checks import FileCheck, FileStructure, check_file
from rekindle.program.checkpoints.folder import (
    CheckpointPointer,
    CheckpointUnit,
    FileState,
    FolderListing,
    list_folder,
    read_file_state,
)
from rekindle.program.checkpoints.formats import (
    ACCELERATE,
    EndEvidence,
    FormatContext,
    UnitContent,
    map_sizes_by_path,
    read_unit_content,
)
from rekindle.program.checkpoints.paths import replace_numbers

# number of seconds without a change after which a save counts as ended
QUIET_S = 2.0

Clock = Callable[[], float]


@dataclass(frozen=True)
class WatchSettings:
    """`processes`: number of processes of the program on all nodes, 0 if unknown; `nodes`: number
    of nodes; `marker`: name of a file that the program writes into each complete checkpoint, or
    ""; `quiet_s`: time without a change that counts as the end of a save."""

    processes: int = 0
    nodes: int = 1
    marker: str = ""
    quiet_s: float = QUIET_S


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint whose files on this node are complete. `demands`: files that the checkpoint must
    have on any node, with their minimum size in bytes; `step` is None if the step is unknown."""

    unit: CheckpointUnit
    format: str
    step: int | None
    demands: Mapping[str, int]

    @property
    def path(self) -> str:
        return self.unit.path

    @property
    def family(self) -> str:
        return self.unit.family

    @property
    def age_key(self) -> tuple[int, int]:
        """The sort key by which the checkpoints of one family are sorted from the oldest to the
        newest."""
        return -1 if self.step is None else self.step, self.unit.newest_ns


@dataclass
class _UnitHistory:
    """The state of one unit in the listings of its folder. `first_seen_s`: time when `files` was
    first seen; `started_with`: the files when the program started, None if the unit is newer;
    `earlier_files`: the files of the last version that was complete, or that existed when the
    program started; `quiet` is True if the files were still the same after `quiet_s` seconds;
    `renamed` is True if the unit had a temporary name in an earlier listing."""

    files: Mapping[str, FileState]
    first_seen_s: float
    started_with: Mapping[str, FileState] | None = None
    earlier_files: Mapping[str, FileState] | None = None
    earlier_complete: bool = False
    quiet: bool = False
    renamed: bool = False


@dataclass
class FolderWatch:
    """Observes one checkpoint folder. `is_alive`: returns True while all processes of the program
    on this node run. Not thread-safe."""

    root: Path
    settings: WatchSettings
    is_alive: Callable[[], bool]
    clock: Clock = time.monotonic
    # the complete checkpoints, by path
    complete: dict[str, LocalCheckpoint] = field(default_factory=dict)
    # path of an incomplete unit → the reason why the unit is incomplete
    incomplete: dict[str, str] = field(default_factory=dict)
    pointers: list[CheckpointPointer] = field(default_factory=list)
    # names of the files of a finished checkpoint, without numbers, by family
    _shapes: dict[str, frozenset[str]] = field(default_factory=dict)
    _histories: dict[str, _UnitHistory] = field(default_factory=dict)
    _temporary_inodes: set[int] = field(default_factory=set)
    _checks: dict[tuple[int, int, int, str], FileCheck] = field(default_factory=dict)
    _has_begun: bool = False
    _ended: bool = True
    _succeeded: bool = False

    def learn_shape(self, family: str, file_paths: list[str]) -> None:
        """Record which files a finished checkpoint has. The next checkpoint of its family is
        complete only when it has the same files."""
        self._shapes[family] = frozenset(map(replace_numbers, file_paths))

    @property
    def has_ended(self) -> bool:
        """True while the program does not run."""
        return self._ended

    @property
    def files(self) -> dict[str, Mapping[str, FileState]]:
        """The files of all units when the checkpoint folder was last listed, by path of the
        unit."""
        return {path: unit_history.files for path, unit_history in self._histories.items()}

    @property
    def started_with(self) -> dict[str, Mapping[str, FileState] | None]:
        """The files that existed when the program started, by the path of the unit."""
        return {path: unit_history.started_with for path, unit_history in self._histories.items()}

    def adopt(self, unit_path: str, format_name: str, step: int | None) -> None:
        """Record that the unit `unit_path` is complete, because its files were restored."""
        checkpoint_unit = list_folder(self.root, self.settings.marker).units.get(unit_path)
        if checkpoint_unit is None:
            return
        self.complete[unit_path] = LocalCheckpoint(checkpoint_unit, format_name, step, {})
        self.incomplete.pop(unit_path, None)
        if not checkpoint_unit.is_file:
            self.learn_shape(checkpoint_unit.family, list(checkpoint_unit.files))

    def forget(self, unit_paths: list[str]) -> None:
        """Forget units that were moved out of the checkpoint folder."""
        for unit_path in unit_paths:
            self.complete.pop(unit_path, None)
            self.incomplete.pop(unit_path, None)
            self._histories.pop(unit_path, None)

    def earlier_ns(self, unit_path: str) -> int:
        """Return the time of the last change of the previous version of a unit; 0 if the unit has
        no previous version."""
        unit_history = self._histories.get(unit_path)
        earlier_files = unit_history.earlier_files if unit_history else None
        if unit_history is None or not earlier_files or earlier_files == unit_history.files:
            return 0
        return max(file_state.mtime_ns for file_state in earlier_files.values())

    def begin(self, watch_settings: WatchSettings | None = None) -> None:
        """Record the files that exist before the program starts. A file that the program does not
        write again is not part of a new checkpoint. `watch_settings`: new settings, if they have
        changed.
        """
        self.settings = watch_settings or self.settings
        self._has_begun = True
        self._ended = False
        self._succeeded = False
        self._temporary_inodes.clear()
        folder_listing = list_folder(self.root, self.settings.marker)
        now_s = self.clock()

        histories_by_path: dict[str, _UnitHistory] = {}
        for unit_path, checkpoint_unit in folder_listing.units.items():
            is_complete = (
                unit_path in self.complete
                and self.complete[unit_path].unit.files == checkpoint_unit.files
            )
            histories_by_path[unit_path] = _UnitHistory(
                checkpoint_unit.files,
                now_s,
                started_with=checkpoint_unit.files,
                earlier_files=checkpoint_unit.files,
                earlier_complete=is_complete,
            )
        self._histories = histories_by_path

    def look(self) -> None:
        """List the checkpoint folder while the program runs, and update `complete` and
        `incomplete`."""
        folder_listing = list_folder(self.root, self.settings.marker)
        now_s = self.clock()
        # check this after the listing, because a program that died before may have left an
        # incomplete file
        counts_as_evidence = self.is_alive() and not self._ended

        self._update_histories(folder_listing, now_s, counts_as_evidence)
        self._judge_units(folder_listing)

    def settle(self, *, has_succeeded: bool) -> None:
        """List the checkpoint folder after all processes of the program have ended, and update
        `complete` and `incomplete`. `has_succeeded` is True if all exit codes are 0, so that no
        save was interrupted."""
        self._ended = True
        self._succeeded = has_succeeded
        folder_listing = list_folder(self.root, self.settings.marker)
        self._update_histories(folder_listing, self.clock(), counts_as_evidence=False)
        self._judge_units(folder_listing)

    def _update_histories(
        self, folder_listing: FolderListing, now_s: float, counts_as_evidence: bool
    ) -> None:
        histories_by_path: dict[str, _UnitHistory] = {}
        for unit_path, checkpoint_unit in folder_listing.units.items():
            unit_history = self._histories.get(unit_path)
            if unit_history is None:
                unit_history = _UnitHistory(checkpoint_unit.files, now_s)
            elif unit_history.files != checkpoint_unit.files:
                if unit_path in self.complete:
                    unit_history.earlier_files = unit_history.files
                    unit_history.earlier_complete = True
                unit_history.files = checkpoint_unit.files
                unit_history.first_seen_s = now_s
                unit_history.quiet = False
                unit_history.renamed = False
            elif counts_as_evidence and now_s - unit_history.first_seen_s >= self.settings.quiet_s:
                unit_history.quiet = True

            if checkpoint_unit.inode in self._temporary_inodes:
                unit_history.renamed = True
            histories_by_path[unit_path] = unit_history

        self._histories = histories_by_path
        self._temporary_inodes |= folder_listing.temporary_inodes

    def _judge_units(self, folder_listing: FolderListing) -> None:
        previous_checkpoints = self.complete
        self.complete = {}
        self.incomplete = {}
        self.pointers = folder_listing.pointers

        for unit_path, checkpoint_unit in folder_listing.units.items():
            previous_checkpoint = previous_checkpoints.get(unit_path)
            if previous_checkpoint and previous_checkpoint.unit.files == checkpoint_unit.files:
                self.complete[unit_path] = previous_checkpoint
                continue

            try:
                self._judge_unit(checkpoint_unit, folder_listing)
            # catch every error: a malformed file must not affect the other checkpoints
            except Exception as error:
                self.incomplete[unit_path] = f"it cannot be read ({type(error).__name__}: {error})"

        current_check_keys = {
            _make_check_key(checkpoint_unit, relative_path)
            for checkpoint_unit in folder_listing.units.values()
            for relative_path in checkpoint_unit.files
        }
        self._checks = {
            check_key: file_check
            for check_key, file_check in self._checks.items()
            if check_key in current_check_keys
        }

    def _judge_unit(self, checkpoint_unit: CheckpointUnit, folder_listing: FolderListing) -> None:
        format_context = FormatContext(self.root, self.settings.processes, self.settings.marker)
        unit_content = read_unit_content(checkpoint_unit, format_context)
        problem = self._find_problem(checkpoint_unit, unit_content, folder_listing)
        if problem:
            self.incomplete[checkpoint_unit.path] = problem
            return

        self.complete[checkpoint_unit.path] = LocalCheckpoint(
            checkpoint_unit, unit_content.format, unit_content.step, unit_content.demands
        )

    def _find_problem(
        self,
        checkpoint_unit: CheckpointUnit,
        unit_content: UnitContent,
        folder_listing: FolderListing,
    ) -> str:
        """Return the reason why a unit is not complete, or ""."""
        if unit_content.problem:
            return unit_content.problem
        if not checkpoint_unit.files:
            return "it is empty"
        if self.settings.nodes == 1 and (
            missing_reason := unit_content.find_missing_file(
                map_sizes_by_path(checkpoint_unit.files)
            )
        ):
            return missing_reason

        unit_history = self._histories[checkpoint_unit.path]
        if problem := self._find_files_of_earlier_save(checkpoint_unit, unit_content, unit_history):
            return problem

        for relative_path in checkpoint_unit.files:
            if problem := self._check(checkpoint_unit, relative_path).problem:
                return f"{relative_path or checkpoint_unit.name}: {problem}"

        problem = self._find_missing_end(
            checkpoint_unit, unit_content, unit_history, folder_listing
        )
        if not problem and self._has_changed(checkpoint_unit):
            return "it changed while it was checked"
        return problem

    def _find_files_of_earlier_save(
        self, checkpoint_unit: CheckpointUnit, unit_content: UnitContent, unit_history: _UnitHistory
    ) -> str:
        """Return "" if the current save has written all its files, else the name of a file that is
        still from an earlier save."""
        earlier_files = unit_history.earlier_files
        if (
            checkpoint_unit.is_file
            or earlier_files is None
            or earlier_files == checkpoint_unit.files
        ):
            return ""

        unchanged_paths = [
            path
            for path, file_state in earlier_files.items()
            if checkpoint_unit.files.get(path) == file_state
        ]
        if len(unchanged_paths) == len(earlier_files) and unit_history.earlier_complete:
            # the program only added files to a complete checkpoint, for example the results of an
            # evaluation
            return ""

        for path in unchanged_paths:
            if unit_content.is_written_by_every_save(path):
                return f"{path} is of an earlier save"
        return ""

    def _find_missing_end(
        self,
        checkpoint_unit: CheckpointUnit,
        unit_content: UnitContent,
        unit_history: _UnitHistory,
        folder_listing: FolderListing,
    ) -> str:
        """Return "" if the program has finished the save of a unit, else the reason why it is
        unknown whether the save is finished."""
        is_new = unit_history.started_with != checkpoint_unit.files
        is_finished = (
            unit_content.end is EndEvidence.VISIBLE
            or unit_history.renamed
            or self._was_renamed(checkpoint_unit, unit_history)
            or (self._succeeded and is_new)
            or (is_new and self._has_later_unit(checkpoint_unit, folder_listing))
        )
        if is_finished:
            if not checkpoint_unit.is_file:
                self.learn_shape(checkpoint_unit.family, list(checkpoint_unit.files))
            return ""

        # the unit must be new, because an unfinished file of an earlier process does not change
        # either
        is_quiet = unit_history.quiet and is_new
        if checkpoint_unit.is_file:
            return self._find_missing_end_of_file(checkpoint_unit, is_quiet)

        expected_names = self._shapes.get(checkpoint_unit.family, frozenset())
        present_names = {replace_numbers(path) for path in checkpoint_unit.files}
        if missing_names := sorted(expected_names - present_names):
            return f"{missing_names[0]} is missing, but the earlier checkpoint has it"
        if unit_content.end is not EndEvidence.QUIET and not expected_names:
            return "nothing shows yet that the program has finished this save"

        if is_quiet:
            return ""
        if not self._ended:
            return "it may still be written"
        if unit_content.format == ACCELERATE and not expected_names:
            return "nothing shows that the program had finished this save"

        for relative_path in checkpoint_unit.files:
            is_proven = relative_path in unit_content.demands or relative_path.endswith(
                (".distcp", METADATA_FILE)
            )
            if (
                not is_proven
                and self._check(checkpoint_unit, relative_path).structure is FileStructure.NONE
            ):
                return f"nothing shows that {relative_path} was written to its end"
        return ""

    def _was_renamed(self, checkpoint_unit: CheckpointUnit, unit_history: _UnitHistory) -> bool:
        """Return True if the program renamed the unit after writing it."""
        if not (checkpoint_unit.was_renamed and checkpoint_unit.is_file):
            return checkpoint_unit.was_renamed

        # the hard links for uploads look like a rename, so the evidence of a rename counts only for
        # a new file, and not for an earlier file that the program overwrites in place
        if not self._has_begun or unit_history.started_with == checkpoint_unit.files:
            return False
        earlier_state = (unit_history.earlier_files or {}).get("")
        return earlier_state is None or earlier_state.inode != checkpoint_unit.inode

    def _find_missing_end_of_file(self, checkpoint_unit: CheckpointUnit, is_quiet: bool) -> str:
        file_structure = self._check(checkpoint_unit, "").structure
        if file_structure is FileStructure.ZIP or is_quiet:
            return ""
        if file_structure is not FileStructure.NONE and self._ended:
            return ""
        if self._ended:
            return "nothing shows that it was written to its end"
        return "it may still be written"

    def _has_later_unit(
        self, checkpoint_unit: CheckpointUnit, folder_listing: FolderListing
    ) -> bool:
        """Return True if the program has since started another unit of the same family."""
        return any(
            other_unit.family == checkpoint_unit.family
            and other_unit.path != checkpoint_unit.path
            and other_unit.files
            and other_unit.oldest_ns > checkpoint_unit.newest_ns
            and self._histories[other_unit.path].started_with != other_unit.files
            for other_unit in folder_listing.units.values()
        )

    def _check(self, checkpoint_unit: CheckpointUnit, relative_path: str) -> FileCheck:
        """Return the result of checking a file's content. Each version of a file is checked only
        once."""
        check_key = _make_check_key(checkpoint_unit, relative_path)
        if check_key not in self._checks:
            try:
                self._checks[check_key] = check_file(
                    checkpoint_unit.file_path(self.root, relative_path)
                )
            except OSError as error:
                return FileCheck(FileStructure.NONE, f"it cannot be read ({error.strerror})")
        return self._checks[check_key]

    def _has_changed(self, checkpoint_unit: CheckpointUnit) -> bool:
        """Return True if a file has changed since the listing, so that the checks may have read
        another version."""
        try:
            return any(
                read_file_state(checkpoint_unit.file_path(self.root, relative_path)) != file_state
                for relative_path, file_state in checkpoint_unit.files.items()
            )
        except OSError:
            return True


def _make_check_key(
    checkpoint_unit: CheckpointUnit, relative_path: str
) -> tuple[int, int, int, str]:
    file_state = checkpoint_unit.files[relative_path]
    return (
        file_state.inode,
        file_state.size,
        file_state.mtime_ns,
        f"{checkpoint_unit.path}/{relative_path}",
    )
