"""Atomic writes, private directories, files of other people, and the space that files need."""

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from argolocal.errors import ArgolocalError


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file atomically: readers see the old or the new text, even if several processes
    write the file."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_once(path: Path, text: str, mode: int = 0o666) -> str:
    """Write a file unless it exists, and return its content. If several processes write it, the
    first text is kept."""
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


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises OSError, without delay.

    Another kind of file could block the reader, such as a FIFO, or have no end, such as /dev/zero.
    """
    with _open_without_delay(path) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if facts.st_size > limit:
            text = f"it has {facts.st_size:,} bytes, and at most {limit:,} are read"
            raise OSError(errno.EFBIG, text, str(path))
        return file.read(limit)


def read_input(path: Path, limit: int) -> bytes:
    """Return at most `limit` bytes of a regular file or a pipe, such as of `<(command)`. Raises
    OSError.

    A FIFO that no process writes to is empty.
    """
    with _open_without_delay(path) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "it is neither a regular file nor a pipe", str(path))
        # from here on, reading waits for the processes that have opened the pipe for writing
        os.set_blocking(file.fileno(), True)
        return file.read(limit)


def _open_without_delay(path: Path) -> BinaryIO:
    """Open a file for reading, also a FIFO that no process writes to. Raises OSError, also for a
    directory."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def make_private(directory: Path) -> None:
    """Make a directory that only its owner can enter, or restrict the permissions of an existing
    directory."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        with suppress(PermissionError):  # the directory belongs to another user
            directory.chmod(0o700)


def make_own(directory: Path) -> None:
    """Make a directory that only its owner can enter in a place where all users can write, such as
    /tmp.

    Raises PermissionError if the directory belongs to another user, who could change its files.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)

    if not is_own(directory):
        reason = "the path belongs to another user, or is not a directory: remove it"
        raise PermissionError(errno.EPERM, reason, str(directory))

    if directory.stat().st_mode & 0o077:
        directory.chmod(0o700)


def is_own(directory: Path) -> bool:
    """Return True if the path is a directory that belongs to this user, and not a symbolic link."""
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def check_space(content: str, size: float, folder: Path, remedy: str) -> None:
    """Raise ArgolocalError if `size` bytes do not fit into `folder`; the message calls these bytes
    `content`."""
    message = missing_space(content, size, shutil.disk_usage(folder).free, str(folder), remedy)
    if message:
        raise ArgolocalError(message)


def missing_space(content: str, size: float, free_bytes: float, target: str, remedy: str) -> str:
    """Return "" if `size` bytes fit into the `free_bytes` of `target`, else a message with the
    `remedy`."""
    if size <= free_bytes:
        return ""
    return (
        f"{content} needs about {size / 1e9:.1f} GB and {target} has {free_bytes / 1e9:.1f} GB"
        f" left: {remedy}"
    )


def size_of(path: Path) -> int:
    """Return the size in bytes of a file or of all files in a folder; 0 for a missing path."""
    files: Iterable[Path] = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
