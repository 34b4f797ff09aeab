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
    family_of,
    has_step,
    is_temporary,
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
# a directory that contains one of these files is a checkpoint, whatever its name
SIGNATURES = re.compile(
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
class Unit:
    """A possible checkpoint. `files`: its files by path relative to the unit; a unit that is a
    single file contains this file with the path "". `inode`: inode of the directory or file;
    `was_renamed`: True if the unit was renamed after its last write, or a hard link to it was made
    or removed."""

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
        """The path with the numbers that count saves replaced. Units with the same family are
        versions of the same checkpoint."""
        return family_of(self.path)

    @property
    def step(self) -> int | None:
        """The step that the name contains, or None."""
        return parse_step(self.name)

    @cached_property
    def newest_ns(self) -> int:
        """The time of the last change, in nanoseconds."""
        return max((state.mtime_ns for state in self.files.values()), default=0)

    @cached_property
    def oldest_ns(self) -> int:
        return min((state.mtime_ns for state in self.files.values()), default=0)

    def file_path(self, root: Path, file: str) -> Path:
        """Return the path of a file of this unit below the checkpoint folder `root`."""
        return root / self.path / file if file else root / self.path


@dataclass(frozen=True)
class Pointer:
    """A text file or symbolic link that names a unit. `text`: content of the file, or target of the
    link."""

    path: str
    text: str
    is_link: bool


@dataclass
class Listing:
    """The content of the checkpoint folder at one time. `text_units`: text files that may be
    checkpoints; `temporary_inodes`: inodes of the files and directories with a temporary name."""

    units: dict[str, Unit] = field(default_factory=dict)
    text_units: dict[str, Unit] = field(default_factory=dict)
    pointers: list[Pointer] = field(default_factory=list)
    temporary_inodes: set[int] = field(default_factory=set)


def list_folder(root: Path, marker: str = "") -> Listing:
    """List the units and pointers below `root`. Files that disappear during the listing are left
    out. `marker`: the name of a file that the program writes into a complete checkpoint."""
    listing = Listing()
    _list_directory(root, "", marker, listing, MAX_DEPTH)
    if not listing.units:
        listing.units = listing.text_units
        pointers = [item for item in listing.pointers if item.path not in listing.units]
        listing.pointers = pointers
    return listing


def find_file(folder: Path) -> str:
    """Return the relative path of any file below a folder that is not temporary; "" if none
    exists."""
    return min((path for path, _ in _walk_files(resolve(folder), folder, "")), default="")


def _list_directory(root: Path, parent: str, marker: str, listing: Listing, depth: int) -> None:
    entries = _scan(root / parent)
    has_model = not MODEL_FILES.isdisjoint(entry.name for entry in entries)

    for entry in entries:
        path = f"{parent}/{entry.name}" if parent else entry.name
        status = _read_status(entry)
        if status is None or not _is_valid_name(entry.name):
            continue

        if is_temporary(entry.name):
            listing.temporary_inodes.add(status.st_ino)
        elif stat.S_ISLNK(status.st_mode):
            with suppress(OSError):
                listing.pointers.append(Pointer(path, os.readlink(root / path), True))
        elif stat.S_ISDIR(status.st_mode):
            if entry.name.startswith("."):
                continue
            if _is_unit_directory(root / path, entry.name, marker):
                files = dict(_walk_files(resolve(root), root / path, ""))
                listing.units[path] = Unit(path, files, status.st_ino, _was_renamed(status))
            elif depth > 0:
                _list_directory(root, path, marker, listing, depth - 1)
        elif stat.S_ISREG(status.st_mode):
            if not has_model and is_unit_file(entry.name):
                files = {"": _file_state(status)}
                listing.units[path] = Unit(path, files, status.st_ino, _was_renamed(status))
                continue
            if TEXT_CHECKPOINT.fullmatch(entry.name):
                files = {"": _file_state(status)}
                listing.text_units[path] = Unit(path, files, status.st_ino, _was_renamed(status))
            if status.st_size <= MAX_POINTER_BYTES and Path(path).suffix in ("", ".txt"):
                _add_text_pointer(root, path, listing)


def _was_renamed(status: os.stat_result) -> bool:
    # a rename changes only the ctime, but a write also changes the mtime
    return status.st_ctime_ns > status.st_mtime_ns


def _scan(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _read_status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return os.lstat(entry.path)
    except OSError:
        return None


def _is_valid_name(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_unit_directory(directory: Path, name: str, marker: str) -> bool:
    entries = _scan(directory)
    names = [entry.name for entry in entries]
    if any(SIGNATURES.fullmatch(entry) or entry == marker for entry in names):
        return True
    if not has_step(name):
        return False

    # a folder `epoch_3` that contains only `step_100` and `step_200` is not a checkpoint itself
    return not entries or not all(
        entry.is_dir(follow_symlinks=False) and has_step(entry.name) for entry in entries
    )


def is_unit_file(name: str) -> bool:
    suffix = Path(name).suffix.lower()
    if name.startswith(".") or suffix in TEXT_SUFFIXES:
        return False
    return suffix in WEIGHTS_SUFFIXES or (has_step(name) and not name.isdigit())


def _walk_files(root: Path, directory: Path, parent: str) -> Iterator[tuple[str, FileState]]:
    """Yield the regular files below a directory, except temporary files. A symbolic link to a file
    below `root` counts as that file; other links are left out."""
    # a loop instead of recursion, since directories can be nested deeper than Python's call stack
    folders = [(directory, parent)]
    while folders:
        folder, prefix = folders.pop()
        for entry in _scan(folder):
            path = f"{prefix}{entry.name}"
            if is_temporary(entry.name) or not _is_valid_name(entry.name):
                continue

            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append((folder / entry.name, f"{path}/"))
                    continue
                if entry.is_symlink() and not resolve(Path(entry.path)).is_relative_to(root):
                    continue

                status = os.stat(entry.path)
                if stat.S_ISREG(status.st_mode):
                    yield path, _file_state(status)
            except OSError:
                continue


def _file_state(status: os.stat_result) -> FileState:
    return FileState(
        status.st_ino, status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode)
    )


def read_file_state(path: Path | int) -> FileState:
    """Return the state of a file or file descriptor. Raises OSError."""
    return _file_state(os.stat(path))


def _add_text_pointer(root: Path, path: str, listing: Listing) -> None:
    try:
        text = (root / path).read_text()
    except (OSError, ValueError):
        return
    if text.strip() and "\n" not in text.strip():
        listing.pointers.append(Pointer(path, text, False))
