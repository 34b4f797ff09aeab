"""Keeps the files of a checkpoint readable during their upload, by hard links in a hidden folder.

If the program deletes or replaces a file, the hard link still leads to the old content. If the
program writes to the file in place, the content changes, so the upload compares the file's state
before and after reading.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rekindle.program.checkpoints.folder import CheckpointUnit, read_file_state
from rekindle.program.checkpoints.paths import resolve


class ChangedFile(Exception):
    """A file changed or disappeared while it was read."""


def choose_hidden_folder(root: Path) -> Path:
    """Return a folder for hard links and drafts on the file system of the checkpoint folder. The
    folder is next to the checkpoint folder, or inside the checkpoint folder if that is a mount
    point."""
    sibling_folder = root.parent / f".{root.name}.rekindle"
    if root.parent.stat().st_dev == root.stat().st_dev and os.access(root.parent, os.W_OK):
        return sibling_folder
    return root / ".rekindle"


def remove_leftover_links(root: Path) -> None:
    """Remove the hard links and drafts that killed processes have left in the hidden folder."""
    for folder_name in ("held", "drafts"):
        shutil.rmtree(choose_hidden_folder(root) / folder_name, ignore_errors=True)


@contextmanager
def hold_files(root: Path, checkpoint_unit: CheckpointUnit) -> Iterator[dict[str, Path]]:
    """Create hard links to the files of a unit for the duration of a `with` block. Yields, for each
    file, the path to read. Raises ChangedFile."""
    link_folder = choose_hidden_folder(root) / "held" / uuid.uuid4().hex
    # on a full disk, read the files themselves instead of links
    with suppress(OSError):
        link_folder.mkdir(parents=True)
    try:
        yield {
            relative_path: _hold_file(
                root, checkpoint_unit, relative_path, link_folder, file_number
            )
            for file_number, relative_path in enumerate(checkpoint_unit.files)
        }
    finally:
        shutil.rmtree(link_folder, ignore_errors=True)


def _hold_file(
    root: Path,
    checkpoint_unit: CheckpointUnit,
    relative_path: str,
    link_folder: Path,
    file_number: int,
) -> Path:
    source_path = checkpoint_unit.file_path(root, relative_path)
    link_path = link_folder / str(file_number)
    with suppress(OSError):
        os.link(resolve(source_path), link_path)

    held_path = link_path if link_path.exists() else source_path
    check_file_unchanged(held_path, checkpoint_unit, relative_path)
    return held_path


def check_file_unchanged(
    path: Path | int, checkpoint_unit: CheckpointUnit, relative_path: str
) -> None:
    """Raise ChangedFile unless a path or file descriptor is the given version of the unit's
    file."""
    try:
        is_unchanged = read_file_state(path) == checkpoint_unit.files[relative_path]
    except OSError:
        is_unchanged = False
    if not is_unchanged:
        raise ChangedFile(
            f"{checkpoint_unit.path}/{relative_path}" if relative_path else checkpoint_unit.path
        )
