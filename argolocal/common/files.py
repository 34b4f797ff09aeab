"""Write files atomically, make private directories, read untrusted files, and check the free disk
space."""

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


def write_atomically(path: Path, text: str, permissions: int = 0o666) -> None:
    """Replace a file atomically: readers see the old or the new text, even if several processes
    write the file."""
    draft_path = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(
            os.open(draft_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions), "w"
        ) as file:
            file.write(text)
        draft_path.replace(path)
    except BaseException:
        draft_path.unlink(missing_ok=True)
        raise


def write_if_missing(path: Path, text: str, permissions: int = 0o666) -> str:
    """Write a file unless it exists, and return its content. If several processes write the file,
    the content of the first process is kept."""
    draft_path = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(os.open(draft_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions), "w") as file:
        file.write(text)
    try:
        os.link(draft_path, path)
    except FileExistsError:
        return path.read_text()
    finally:
        draft_path.unlink()
    return text


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most `max_bytes` bytes. Raises OSError for any
    other file: a FIFO could block the reader, and /dev/zero has no end."""
    with open_regular_file(path, max_bytes) as file:
        return file.read(max_bytes)


def open_regular_file(path: Path, max_bytes: int) -> BinaryIO:
    """Open a regular file of at most `max_bytes` bytes for reading. Raises OSError for a file that
    is too large or not regular."""
    file = _open_without_blocking(path)
    try:
        file_status = os.fstat(file.fileno())
        if not stat.S_ISREG(file_status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if file_status.st_size > max_bytes:
            reason = f"it has {file_status.st_size:,} bytes, and at most {max_bytes:,} are read"
            raise OSError(errno.EFBIG, reason, str(path))
        return file
    except BaseException:
        file.close()
        raise


def read_file_or_pipe(path: Path, max_bytes: int) -> bytes:
    """Return at most `max_bytes` bytes of a regular file or a pipe, such as `<(command)`. Raises
    OSError.

    A FIFO without a writing process counts as empty.
    """
    with _open_without_blocking(path) as file:
        file_mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(file_mode) or stat.S_ISFIFO(file_mode)):
            raise OSError(errno.EINVAL, "it is neither a regular file nor a pipe", str(path))
        # make `read` wait for the processes that have opened the pipe for writing
        os.set_blocking(file.fileno(), True)
        return file.read(max_bytes)


def _open_without_blocking(path: Path) -> BinaryIO:
    """Open a file for reading without waiting, even a FIFO without a writing process. Raises
    OSError, for example for a directory."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def make_private_directory(directory: Path) -> None:
    """Create a directory that only its owner can enter. If the directory exists, remove the
    permissions of other users."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        # chmod fails if the directory belongs to another user
        with suppress(PermissionError):
            directory.chmod(0o700)


def make_owned_directory(directory: Path) -> None:
    """Create a directory that only this user can enter, inside a directory that all users can write
    to, such as /tmp.

    Raises PermissionError if the directory belongs to another user, who could change its files.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)

    if not is_owned_directory(directory):
        reason = "the path belongs to another user, or is not a directory: remove it"
        raise PermissionError(errno.EPERM, reason, str(directory))

    if directory.stat().st_mode & 0o077:
        directory.chmod(0o700)


def is_owned_directory(directory: Path) -> bool:
    """Return True if the path is a directory that belongs to this user, and not a symbolic link."""
    file_status = directory.lstat()
    return stat.S_ISDIR(file_status.st_mode) and file_status.st_uid == os.geteuid()


def require_disk_space(content_name: str, size_bytes: float, folder: Path, remedy: str) -> None:
    """Raise ArgolocalError if `size_bytes` bytes do not fit on the disk of `folder`. The message
    names the `content_name` and the `remedy`."""
    message = describe_missing_space(
        content_name, size_bytes, shutil.disk_usage(folder).free, str(folder), remedy
    )
    if message:
        raise ArgolocalError(message)


def describe_missing_space(
    content_name: str, size_bytes: float, free_bytes: float, target_name: str, remedy: str
) -> str:
    """Return a message with the `remedy` if `target_name` has less than `size_bytes` bytes free,
    else ""."""
    if size_bytes <= free_bytes:
        return ""
    return (
        f"{content_name} needs about {size_bytes / 1e9:.1f} GB and {target_name} has"
        f" {free_bytes / 1e9:.1f} GB left: {remedy}"
    )


def count_bytes(path: Path) -> int:
    """Return the size in bytes of a file or of all files in a folder; 0 for a missing path."""
    files: Iterable[Path] = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk (fsync). Raises OSError."""
    folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_descriptor)
    finally:
        os.close(folder_descriptor)
