"""Keeps the files of a checkpoint readable during their upload, by hard links in a hidden folder.

If the program deletes or replaces a file, the link still leads to the old content. If the program
writes in place, the content changes, so the reader compares the file's state before and after.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rekindle.program.checkpoints.folder import Unit, read_file_state
from rekindle.program.checkpoints.paths import resolve


class ChangedFile(Exception):
    """A file changed or disappeared while it was read."""


def hidden_folder(root: Path) -> Path:
    """Return a folder for links and drafts on the file system of the checkpoint folder: next to it,
    or inside if the checkpoint folder is a mount point."""
    sibling = root.parent / f".{root.name}.rekindle"
    if root.parent.stat().st_dev == root.stat().st_dev and os.access(root.parent, os.W_OK):
        return sibling
    return root / ".rekindle"


def remove_leftovers(root: Path) -> None:
    """Remove the links and drafts of processes that were killed."""
    for name in ("held", "drafts"):
        shutil.rmtree(hidden_folder(root) / name, ignore_errors=True)


@contextmanager
def hold(root: Path, unit: Unit) -> Iterator[dict[str, Path]]:
    """Link the files of a unit inside a `with` block. Yields, for each file, the path to read.
    Raises ChangedFile."""
    folder = hidden_folder(root) / "held" / uuid.uuid4().hex
    with suppress(OSError):  # on a full disk, read without links
        folder.mkdir(parents=True)
    try:
        yield {file: _hold_file(root, unit, file, folder, n) for n, file in enumerate(unit.files)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _hold_file(root: Path, unit: Unit, file: str, folder: Path, number: int) -> Path:
    source = unit.file_path(root, file)
    link = folder / str(number)
    with suppress(OSError):
        os.link(resolve(source), link)

    path = link if link.exists() else source
    check_unchanged(path, unit, file)
    return path


def check_unchanged(path: Path | int, unit: Unit, file: str) -> None:
    """Raise ChangedFile unless a path or file descriptor is this version of the unit's file."""
    try:
        is_same = read_file_state(path) == unit.files[file]
    except OSError:
        is_same = False
    if not is_same:
        raise ChangedFile(f"{unit.path}/{file}" if file else unit.path)
