"""Decides which checkpoints of a training program are complete, by listing its folder repeatedly.

    watch = Watch(folder, WatchSettings(processes=2), is_alive)
    watch.begin()                 # before the processes of the program start
    watch.look()                  # every second, while they run
    watch.settle(succeeded=False) # after all of them have ended
    watch.complete                # the complete checkpoints, with the reason for the others

A file that does not change may be complete, or its writer may have been killed. So the listing
counts as evidence only if all processes of the program are alive afterwards, and `settle` accepts
only files whose content is complete.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.program.checkpoints.dcp_metadata import METADATA
from rekindle.program.checkpoints.file_checks import FileCheck, Structure, check_file
from rekindle.program.checkpoints.folder import (
    FileState,
    Listing,
    Pointer,
    Unit,
    list_folder,
    read_file_state,
)
from rekindle.program.checkpoints.formats import (
    ACCELERATE,
    Content,
    Context,
    End,
    read_content,
    sizes_of,
)
from rekindle.program.checkpoints.paths import without_numbers

QUIET_S = 2.0  # seconds without a change after which a save counts as ended

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
    have on any node, with their minimum size in bytes; `step`: None if it is unknown."""

    unit: Unit
    format: str
    step: int | None
    demands: Mapping[str, int]

    @property
    def path(self) -> str:
        return self.unit.path

    @property
    def family(self) -> str:
        return self.unit.family


@dataclass
class _History:
    """The state of one unit in the listings of its folder. `earlier_files`: the files of the
    last version that was complete, or that existed when the program started; `first_look_s`: time
    when `files` was first seen; `quiet`: True if the files were still the same after `quiet_s`
    seconds."""

    files: Mapping[str, FileState]
    first_look_s: float
    started_with: Mapping[str, FileState] | None = None
    earlier_files: Mapping[str, FileState] | None = None
    earlier_complete: bool = False
    quiet: bool = False
    renamed: bool = False


@dataclass
class Watch:
    """Observes one checkpoint folder. `is_alive`: returns True while all processes of the program
    on this node run. Not thread-safe."""

    root: Path
    settings: WatchSettings
    is_alive: Callable[[], bool]
    clock: Clock = time.monotonic
    # the complete checkpoints, by path
    complete: dict[str, LocalCheckpoint] = field(default_factory=dict)
    # the reasons why the other units are incomplete, by path
    incomplete: dict[str, str] = field(default_factory=dict)
    pointers: list[Pointer] = field(default_factory=list)
    # names of the files of a finished checkpoint, without numbers, by family
    _shapes: dict[str, frozenset[str]] = field(default_factory=dict)
    _histories: dict[str, _History] = field(default_factory=dict)
    _temporary_inodes: set[int] = field(default_factory=set)
    _checks: dict[tuple[int, int, int, str], FileCheck] = field(default_factory=dict)
    _has_begun: bool = False
    _ended: bool = True
    _succeeded: bool = False

    def learn_shape(self, family: str, paths: list[str]) -> None:
        """Record which files a finished checkpoint has. The next checkpoint of its family is
        complete only when it has the same files."""
        self._shapes[family] = frozenset(map(without_numbers, paths))

    @property
    def has_ended(self) -> bool:
        """True while the program does not run."""
        return self._ended

    @property
    def files(self) -> dict[str, Mapping[str, FileState]]:
        """The files of all units when the folder was last listed, by path of the unit."""
        return {path: history.files for path, history in self._histories.items()}

    @property
    def started_with(self) -> dict[str, Mapping[str, FileState] | None]:
        """The files that existed when the program started, by the path of the unit."""
        return {path: history.started_with for path, history in self._histories.items()}

    def adopt(self, path: str, kind: str, step: int | None) -> None:
        """Record that the unit `path` is complete, because its files were restored."""
        unit = list_folder(self.root, self.settings.marker).units.get(path)
        if unit is None:
            return
        self.complete[path] = LocalCheckpoint(unit, kind, step, {})
        self.incomplete.pop(path, None)
        if not unit.is_file:
            self.learn_shape(unit.family, list(unit.files))

    def forget(self, paths: list[str]) -> None:
        """Forget units that were moved out of the folder."""
        for path in paths:
            self.complete.pop(path, None)
            self.incomplete.pop(path, None)
            self._histories.pop(path, None)

    def earlier_ns(self, path: str) -> int:
        """Return the time of the last change of the previous version of a unit; 0 if this is the
        first one."""
        history = self._histories.get(path)
        earlier = history.earlier_files if history else None
        if history is None or not earlier or earlier == history.files:
            return 0
        return max(state.mtime_ns for state in earlier.values())

    def begin(self, settings: WatchSettings | None = None) -> None:
        """Record the files that exist before the program starts. A file that the program does not
        write again is not part of a new checkpoint. `settings`: new settings, if they have changed.
        """
        self.settings = settings or self.settings
        self._has_begun = True
        self._ended = False
        self._succeeded = False
        self._temporary_inodes.clear()
        listing = list_folder(self.root, self.settings.marker)
        now = self.clock()

        histories: dict[str, _History] = {}
        for path, unit in listing.units.items():
            is_complete = path in self.complete and self.complete[path].unit.files == unit.files
            histories[path] = _History(
                unit.files,
                now,
                started_with=unit.files,
                earlier_files=unit.files,
                earlier_complete=is_complete,
            )
        self._histories = histories

    def look(self) -> None:
        """List the folder while the program runs, and update `complete` and `incomplete`."""
        listing = list_folder(self.root, self.settings.marker)
        now = self.clock()
        # if the program died before the end of the listing, it may have left an incomplete file
        counts = self.is_alive() and not self._ended

        self._update_histories(listing, now, counts)
        self._judge(listing)

    def settle(self, *, succeeded: bool) -> None:
        """List the folder after all processes of the program have ended, and update `complete` and
        `incomplete`. `succeeded`: True if all exit codes are 0, so that no save was interrupted."""
        self._ended = True
        self._succeeded = succeeded
        listing = list_folder(self.root, self.settings.marker)
        self._update_histories(listing, self.clock(), counts=False)
        self._judge(listing)

    def _update_histories(self, listing: Listing, now: float, counts: bool) -> None:
        histories: dict[str, _History] = {}
        for path, unit in listing.units.items():
            history = self._histories.get(path)
            if history is None:
                history = _History(unit.files, now)
            elif history.files != unit.files:
                if path in self.complete:
                    history.earlier_files = history.files
                    history.earlier_complete = True
                history.files = unit.files
                history.first_look_s = now
                history.quiet = False
                history.renamed = False
            elif counts and now - history.first_look_s >= self.settings.quiet_s:
                history.quiet = True

            if unit.inode in self._temporary_inodes:
                history.renamed = True
            histories[path] = history

        self._histories = histories
        self._temporary_inodes |= listing.temporary_inodes

    def _judge(self, listing: Listing) -> None:
        previous = self.complete
        self.complete = {}
        self.incomplete = {}
        self.pointers = listing.pointers

        for path, unit in listing.units.items():
            checkpoint = previous.get(path)
            if checkpoint and checkpoint.unit.files == unit.files:
                self.complete[path] = checkpoint
                continue

            try:
                self._judge_unit(unit, listing)
            # catch every error: a malformed file must not affect the other checkpoints
            except Exception as error:
                self.incomplete[path] = f"it cannot be read ({type(error).__name__}: {error})"

        kept = {_check_key(unit, file) for unit in listing.units.values() for file in unit.files}
        self._checks = {key: check for key, check in self._checks.items() if key in kept}

    def _judge_unit(self, unit: Unit, listing: Listing) -> None:
        context = Context(self.root, self.settings.processes, self.settings.marker)
        content = read_content(unit, context)
        problem = self._find_problem(unit, content, listing)
        if problem:
            self.incomplete[unit.path] = problem
            return

        self.complete[unit.path] = LocalCheckpoint(
            unit, content.format, content.step, content.demands
        )

    def _find_problem(self, unit: Unit, content: Content, listing: Listing) -> str:
        """Return the reason why a unit is not complete, or ""."""
        if content.problem:
            return content.problem
        if not unit.files:
            return "it is empty"
        if self.settings.nodes == 1 and (missing := content.find_missing(sizes_of(unit.files))):
            return missing

        history = self._histories[unit.path]
        if problem := self._find_files_of_earlier_save(unit, content, history):
            return problem

        for file in unit.files:
            if problem := self._check(unit, file).problem:
                return f"{file or unit.name}: {problem}"

        problem = self._find_missing_end(unit, content, history, listing)
        if not problem and self._has_changed(unit):
            return "it changed during the look"
        return problem

    def _find_files_of_earlier_save(self, unit: Unit, content: Content, history: _History) -> str:
        earlier = history.earlier_files
        if unit.is_file or earlier is None or earlier == unit.files:
            return ""

        same = [path for path, state in earlier.items() if unit.files.get(path) == state]
        if len(same) == len(earlier) and history.earlier_complete:
            # the program only added files to a complete checkpoint, for example the results of an
            # evaluation
            return ""

        for path in same:
            if content.is_written_by_every_save(path):
                return f"{path} is of an earlier save"
        return ""

    def _find_missing_end(
        self, unit: Unit, content: Content, history: _History, listing: Listing
    ) -> str:
        """Return "" if the program has finished this save, else the reason why this is unknown."""
        is_new = history.started_with != unit.files
        is_finished = (
            content.end is End.VISIBLE
            or history.renamed
            or self._was_renamed(unit, history)
            or (self._succeeded and is_new)
            or (is_new and self._has_later_unit(unit, listing))
        )
        if is_finished:
            if not unit.is_file:
                self.learn_shape(unit.family, list(unit.files))
            return ""

        # an unfinished file of an earlier process does not change either, so it must be new
        is_quiet = history.quiet and is_new
        if unit.is_file:
            return self._find_missing_end_of_file(unit, is_quiet)

        shape = self._shapes.get(unit.family, frozenset())
        names = {without_numbers(path) for path in unit.files}
        if missing := sorted(shape - names):
            return f"{missing[0]} is missing, which the earlier checkpoint has"
        if content.end is not End.QUIET and not shape:
            return "nothing shows yet that the program has finished this save"

        if is_quiet:
            return ""
        if not self._ended:
            return "it may still be written"
        if content.format == ACCELERATE and not shape:
            return "nothing shows that the program had finished this save"

        for file in unit.files:
            is_proven = file in content.demands or file.endswith((".distcp", METADATA))
            if not is_proven and self._check(unit, file).structure is Structure.NONE:
                return f"nothing shows that {file} was written to its end"
        return ""

    def _was_renamed(self, unit: Unit, history: _History) -> bool:
        """Return True if the program renamed the unit after writing it."""
        if not (unit.was_renamed and unit.is_file):
            return unit.was_renamed

        # the hard links for uploads look like a rename, so the file must be new and not an earlier
        # file that the program overwrites in place
        if not self._has_begun or history.started_with == unit.files:
            return False
        earlier = (history.earlier_files or {}).get("")
        return earlier is None or earlier.inode != unit.inode

    def _find_missing_end_of_file(self, unit: Unit, is_quiet: bool) -> str:
        structure = self._check(unit, "").structure
        if structure is Structure.ZIP or is_quiet:
            return ""
        if structure is not Structure.NONE and self._ended:
            return ""
        if self._ended:
            return "nothing shows that it was written to its end"
        return "it may still be written"

    def _has_later_unit(self, unit: Unit, listing: Listing) -> bool:
        """Return True if the program has since started another unit of the same family."""
        return any(
            other.family == unit.family
            and other.path != unit.path
            and other.files
            and other.oldest_ns > unit.newest_ns
            and self._histories[other.path].started_with != other.files
            for other in listing.units.values()
        )

    def _check(self, unit: Unit, file: str) -> FileCheck:
        """Return the check of a file. Each version of a file is checked only once."""
        key = _check_key(unit, file)
        if key not in self._checks:
            try:
                self._checks[key] = check_file(unit.file_path(self.root, file))
            except OSError as error:
                return FileCheck(Structure.NONE, f"it cannot be read ({error.strerror})")
        return self._checks[key]

    def _has_changed(self, unit: Unit) -> bool:
        """Return True if a file has changed since the listing, so that the checks may have read
        another version."""
        try:
            return any(
                read_file_state(unit.file_path(self.root, file)) != state
                for file, state in unit.files.items()
            )
        except OSError:
            return True


def _check_key(unit: Unit, file: str) -> tuple[int, int, int, str]:
    state = unit.files[file]
    return state.inode, state.size, state.mtime_ns, f"{unit.path}/{file}"
