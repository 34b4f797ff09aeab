"""Files that a reader never sees half-written."""

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace the file's content in one step: readers see the old or the new text, also with concurrent writers."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_once(path: Path, text: str, mode: int = 0o666) -> str:
    """Write a file unless it exists; returns its content. Of several writers the first wins."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return path.read_text()
    finally:
        draft.unlink()
    return text


def make_private(directory: Path) -> None:
    """Make a directory that only its owner can enter. One that exists becomes so: its files can be read by others."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        with suppress(PermissionError):  # another user's
            directory.chmod(0o700)


def make_own(directory: Path) -> None:
    """Make a directory that only its owner can enter where everybody may make some, such as /tmp.

    Raises PermissionError for one of another user, who can change what is in it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if not is_own(directory):
        raise PermissionError(errno.EPERM, "it belongs to another user, or is no directory: remove it", str(directory))
    if directory.stat().st_mode & 0o077:
        directory.chmod(0o700)


def is_own(directory: Path) -> bool:
    """True if this is a directory of ours, and no link."""
    about = directory.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
