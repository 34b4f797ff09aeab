"""The checkpoints of a training program in its checkpoint folder, as a listing shows them.

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

from rekindle.program.paths import has_step, is_temporary, parse_step, without_numbers

MAX_DEPTH = 8
MAX_POINTER_BYTES = 1024
WEIGHTS_SUFFIXES = {
    ".bin",
    ".ckpt",
    ".h5",
    ".keras",
    ".msgpack",
    ".npy",
    ".npz",
    ".pickle",
    ".pkl",
    ".pt",
    ".pth",
    ".safetensors",
    ".tar",
    ".ubj",
}
TEXT_SUFFIXES = {".csv", ".err", ".html", ".json", ".jsonl", ".log", ".md", ".out", ".txt", ".yaml"}
# a directory with one of these files is a checkpoint under any name
SIGNATURES = re.compile(
    r"trainer_state\.json|checkpoint-is-incomplete\.txt|(__\d+)?\.metadata|__\d+_\d+\.distcp"
    r"|random_states_\d+\.pkl|rng_state(_\d+)?\.pth"
)
# a directory with one of these files contains a model for use, not a checkpoint to resume from
MODEL_FILES = {"adapter_config.json", "config.json", "training_args.bin"}


class FileState(NamedTuple):
    """The facts about a file that change when the file is written."""

    inode: int
    size: int
    mtime_ns: int
    mode: int


@dataclass(frozen=True)
class Unit:
    """A possible checkpoint. `files`: its files by path relative to the unit; a unit that is a file
    has one, with the path "". `inode`: of the directory or file itself; `was_renamed`: True if the
    directory got its name after its last file."""

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
        """The path without numbers: units of one family are checkpoints of one kind."""
        return without_numbers(self.path)

    @property
    def step(self) -> int | None:
        """The step in the name, or None."""
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
    """A text file or symbolic link that names a unit. `text`: its content or target."""

    path: str
    text: str
    is_link: bool


@dataclass
class Listing:
    """One look at the checkpoint folder. `temporary_inodes`: the files and directories with a
    temporary name."""

    units: dict[str, Unit] = field(default_factory=dict)
    pointers: list[Pointer] = field(default_factory=list)
    temporary_inodes: set[int] = field(default_factory=set)


def list_folder(root: Path, marker: str = "") -> Listing:
    """List the units and pointers below `root`. Files that disappear during the listing are left
    out. `marker`: the name of a file that the program writes into a complete checkpoint."""
    listing = Listing()
    _list_directory(root, "", marker, listing, MAX_DEPTH)
    return listing


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
                files = dict(_walk_files(root.resolve(), root / path, ""))
                # a rename changes the ctime of a directory, and not its mtime
                was_renamed = status.st_ctime_ns > status.st_mtime_ns
                listing.units[path] = Unit(path, files, status.st_ino, was_renamed)
            elif depth > 0:
                _list_directory(root, path, marker, listing, depth - 1)
        elif stat.S_ISREG(status.st_mode):
            if not has_model and _is_unit_file(entry.name):
                listing.units[path] = Unit(path, {"": _file_state(status)}, status.st_ino)
            elif status.st_size <= MAX_POINTER_BYTES and Path(path).suffix in ("", ".txt"):
                _add_text_pointer(root, path, listing)


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

    # `epoch_3` with nothing but `step_100` and `step_200` is a folder of checkpoints
    return not entries or not all(
        entry.is_dir(follow_symlinks=False) and has_step(entry.name) for entry in entries
    )


def _is_unit_file(name: str) -> bool:
    suffix = Path(name).suffix.lower()
    if name.startswith(".") or suffix in TEXT_SUFFIXES:
        return False
    return suffix in WEIGHTS_SUFFIXES or (has_step(name) and not name.isdigit())


def _walk_files(root: Path, directory: Path, parent: str) -> Iterator[tuple[str, FileState]]:
    """Yield the regular files below a directory, without temporary ones. A symbolic link to a file
    below `root` counts as that file; other links are left out."""
    for entry in _scan(directory):
        path = f"{parent}{entry.name}"
        if is_temporary(entry.name) or not _is_valid_name(entry.name):
            continue

        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk_files(root, directory / entry.name, f"{path}/")
                continue
            if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
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
