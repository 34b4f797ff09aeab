"""Lists the possible checkpoints of a training program in its checkpoint folder.

A unit is a directory or a file that the program writes as one checkpoint, at any depth: a directory
such as `checkpoint-500`, a file such as `version_0/checkpoints/epoch=1-step=50.ckpt`, or a file
that is overwritten, such as `latest.pt`. A pointer is a small text file or a symbolic link that
names a unit.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rekindle.program.checkpoints.paths import (
    has_step_number,
    is_temporary_name,
    make_family_path,
    parse_step,
    resolve,
)

MAX_DEPTH = 8
MAX_POINTER_BYTES = 1024
WEIGHTS_SUFFIXES = {
    ".bin",
    ".cbm",
    ".ckpt",
    ".dill",
    ".h5",
    ".hdf5",
    ".joblib",
    ".keras",
    ".msgpack",
    ".npy",
    ".npz",
    ".pickle",
    ".pkl",
    ".pt",
    ".pth",
    ".safetensors",
    ".skops",
    ".tar",
    ".ubj",
}
TEXT_SUFFIXES = {".csv", ".err", ".html", ".json", ".jsonl", ".log", ".md", ".out", ".txt", ".yaml"}
# a text file with such a name counts as a checkpoint only if the folder has no other checkpoints
TEXT_CHECKPOINT = re.compile(
    r"(?:checkpoint|ckpt|counter|epoch|iter|iteration|last|latest|progress|resume|save|snapshot"
    r"|state|step|training_state|weights)(?:[-_=.]?\d+)?(?:\.(?:json|txt|yaml|yml))?",
    re.IGNORECASE,
)
# a directory that contains one of these files is a checkpoint, independent of its name
SIGNATURE_FILES = re.compile(
    r"trainer_state\.json|checkpoint-is-incomplete\.txt|(__\d+)?\.metadata|__\d+_\d+\.distcp"
    r"|random_states_\d+\.pkl|rng_state(_\d+)?\.pth"
)
# a directory with one of these files contains a model for use, not a checkpoint to resume from
MODEL_FILES = {"adapter_config.json", "config.json", "training_args.bin"}


class FileState(NamedTuple):
    """The properties of a file that show whether the file was changed."""

    inode: int
    size: int
    mtime_ns: int
    mode: int


@dataclass(frozen=True)
class CheckpointUnit:
    """A possible checkpoint. `files`: files of the unit by path relative to the unit; a unit that
    is a single file has the path "". `inode`: inode of the directory or file; `was_renamed` is True
    if the unit was renamed after its last write, or a hard link to it was made or removed."""

    path: str
    files: Mapping[str, FileState]
    inode: int
    was_renamed: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_file(self) -> bool:
        return "" in self.files

    @property
    def family(self) -> str:
        """The path of the unit, with the numbers that count saves replaced by N. Units with the
        same family are versions of the same checkpoint."""
        return make_family_path(self.path)

    @property
    def step(self) -> int | None:
        """The step that the name of the unit contains, or None."""
        return parse_step(self.name)

    @cached_property
    def newest_ns(self) -> int:
        """The time of the unit's last change, in nanoseconds."""
        return max((file_state.mtime_ns for file_state in self.files.values()), default=0)

    @cached_property
    def oldest_ns(self) -> int:
        return min((file_state.mtime_ns for file_state in self.files.values()), default=0)

    def file_path(self, root: Path, relative_path: str) -> Path:
        """Return the path of a file of this unit below the checkpoint folder `root`."""
        return root / self.path / relative_path if relative_path else root / self.path


@dataclass(frozen=True)
class CheckpointPointer:
    """A text file or symbolic link that names a unit. `text`: content of the file, or target of the
    link."""

    path: str
    text: str
    is_link: bool


@dataclass
class FolderListing:
    """The content of the checkpoint folder at one time. `text_units`: text files that may be
    checkpoints; `temporary_inodes`: inodes of the files and directories with a temporary name."""

    units: dict[str, CheckpointUnit] = field(default_factory=dict)
    text_units: dict[str, CheckpointUnit] = field(default_factory=dict)
    pointers: list[CheckpointPointer] = field(default_factory=list)
    temporary_inodes: set[int] = field(default_factory=set)


def list_folder(root: Path, marker_name: str = "") -> FolderListing:
    """List the units and pointers below `root`. Files that disappear during the listing are left
    out. `marker_name`: the name of a file that the program writes into a complete checkpoint."""
    listing = FolderListing()
    _list_directory(root, "", marker_name, listing, MAX_DEPTH)
    if not listing.units:
        listing.units = listing.text_units
        pointers = [pointer for pointer in listing.pointers if pointer.path not in listing.units]
        listing.pointers = pointers
    return listing


def find_any_file(folder: Path) -> str:
    """Return the relative path of the first file below a folder, without temporary files; "" if
    the folder has no file."""
    return min((path for path, _ in _walk_files(resolve(folder), folder, "")), default="")


def _list_directory(
    root: Path, parent_path: str, marker_name: str, listing: FolderListing, depth: int
) -> None:
    directory_entries = _scan_directory(root / parent_path)
    has_model = not MODEL_FILES.isdisjoint(
        directory_entry.name for directory_entry in directory_entries
    )

    for directory_entry in directory_entries:
        path = f"{parent_path}/{directory_entry.name}" if parent_path else directory_entry.name
        file_status = _read_file_status(directory_entry)
        if file_status is None or not _is_valid_name(directory_entry.name):
            continue

        if is_temporary_name(directory_entry.name):
            listing.temporary_inodes.add(file_status.st_ino)
        elif stat.S_ISLNK(file_status.st_mode):
            with suppress(OSError):
                listing.pointers.append(CheckpointPointer(path, os.readlink(root / path), True))
        elif stat.S_ISDIR(file_status.st_mode):
            if directory_entry.name.startswith("."):
                continue
            if _is_unit_directory(root / path, directory_entry.name, marker_name):
                states_by_path = dict(_walk_files(resolve(root), root / path, ""))
                listing.units[path] = CheckpointUnit(
                    path, states_by_path, file_status.st_ino, _was_renamed(file_status)
                )
            elif depth > 0:
                _list_directory(root, path, marker_name, listing, depth - 1)
        elif stat.S_ISREG(file_status.st_mode):
            if not has_model and is_unit_file(directory_entry.name):
                states_by_path = {"": _make_file_state(file_status)}
                listing.units[path] = CheckpointUnit(
                    path, states_by_path, file_status.st_ino, _was_renamed(file_status)
                )
                continue
            if TEXT_CHECKPOINT.fullmatch(directory_entry.name):
                states_by_path = {"": _make_file_state(file_status)}
                listing.text_units[path] = CheckpointUnit(
                    path, states_by_path, file_status.st_ino, _was_renamed(file_status)
                )
            if file_status.st_size <= MAX_POINTER_BYTES and Path(path).suffix in ("", ".txt"):
                _add_text_pointer(root, path, listing)


def _was_renamed(file_status: os.stat_result) -> bool:
    # a write changes the mtime and the ctime, a rename changes only the ctime
    return file_status.st_ctime_ns > file_status.st_mtime_ns


def _scan_directory(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as directory_entries:
            return sorted(directory_entries, key=lambda directory_entry: directory_entry.name)
    except OSError:
        return []


def _read_file_status(directory_entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return os.lstat(directory_entry.path)
    except OSError:
        return None


def _is_valid_name(file_name: str) -> bool:
    try:
        file_name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_unit_directory(directory: Path, directory_name: str, marker_name: str) -> bool:
    directory_entries = _scan_directory(directory)
    entry_names = [directory_entry.name for directory_entry in directory_entries]
    if any(
        SIGNATURE_FILES.fullmatch(entry_name) or entry_name == marker_name
        for entry_name in entry_names
    ):
        return True
    if not has_step_number(directory_name):
        return False

    # a folder `epoch_3` that contains only `step_100` and `step_200` is not a checkpoint itself
    return not directory_entries or not all(
        directory_entry.is_dir(follow_symlinks=False) and has_step_number(directory_entry.name)
        for directory_entry in directory_entries
    )


def is_unit_file(file_name: str) -> bool:
    suffix = Path(file_name).suffix.lower()
    if file_name.startswith(".") or suffix in TEXT_SUFFIXES:
        return False
    return suffix in WEIGHTS_SUFFIXES or (has_step_number(file_name) and not file_name.isdigit())


def _walk_files(root: Path, directory: Path, start_prefix: str) -> Iterator[tuple[str, FileState]]:
    """Yield the regular files below a directory, except temporary files. A symbolic link to a file
    below `root` counts as the linked file; other links are left out."""
    # use a loop instead of recursion, since directories can be nested deeper than Python's call
    # stack
    pending_folders = [(directory, start_prefix)]
    while pending_folders:
        folder, path_prefix = pending_folders.pop()
        for directory_entry in _scan_directory(folder):
            path = f"{path_prefix}{directory_entry.name}"
            if is_temporary_name(directory_entry.name) or not _is_valid_name(directory_entry.name):
                continue

            try:
                if directory_entry.is_dir(follow_symlinks=False):
                    pending_folders.append((folder / directory_entry.name, f"{path}/"))
                    continue
                if directory_entry.is_symlink() and not resolve(
                    Path(directory_entry.path)
                ).is_relative_to(root):
                    continue

                file_status = os.stat(directory_entry.path)
                if stat.S_ISREG(file_status.st_mode):
                    yield path, _make_file_state(file_status)
            except OSError:
                continue


def _make_file_state(file_status: os.stat_result) -> FileState:
    return FileState(
        file_status.st_ino,
        file_status.st_size,
        file_status.st_mtime_ns,
        stat.S_IMODE(file_status.st_mode),
    )


def read_file_state(path: Path | int) -> FileState:
    """Return the FileState of a file or file descriptor. Raises OSError."""
    return _make_file_state(os.stat(path))


def _add_text_pointer(root: Path, path: str, listing: FolderListing) -> None:
    try:
        pointer_text = (root / path).read_text()
    except (OSError, ValueError):
        return
    if pointer_text.strip() and "\n" not in pointer_text.strip():
        listing.pointers.append(CheckpointPointer(path, pointer_text, False))
