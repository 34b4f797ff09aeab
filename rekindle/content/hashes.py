"""Hashes of files; remembers which files this process has already verified."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from rekindle.errors import ConfigError

THREADS = 4
# maximum number of different paths, through links, to one folder
MAX_VISITS = 1000

_verified_stamps: set[str] = set()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_paths(folder: Path) -> dict[str, Path]:
    """Return all paths below a folder by their relative path; leave out folders that have content.

    The path of a link to a folder is returned, and the link is not followed. The paths of pipes,
    broken links and empty folders are returned, too.
    """
    sorted_paths = sorted(path for path in folder.rglob("*") if not _has_content(path))
    return {path.relative_to(folder).as_posix(): path for path in sorted_paths}


def _has_content(path: Path) -> bool:
    """Return True for a folder that contains files or folders and that this process may list."""
    if path.is_symlink() or not path.is_dir():
        return False

    with suppress(PermissionError):
        return any(path.iterdir())
    return False


def linked_files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of the folders linked into it, except folders that this
    process may not list.

    A link to one of its own parent folders is not followed, because the path would be endless.
    Raises ConfigError if more than MAX_VISITS paths lead to one folder: in a chain of 30 folders
    with two links each to the next folder, a billion paths lead to the last folder.
    """
    yield from _follow_links(folder, frozenset(), Counter())


def _follow_links(
    folder: Path,
    parent_identities: frozenset[tuple[int, int]],
    visit_counts: Counter[tuple[int, int]],
) -> Iterator[Path]:
    folder_status = folder.stat()
    folder_identity = (folder_status.st_dev, folder_status.st_ino)
    if folder_identity in parent_identities:
        return

    visit_counts[folder_identity] += 1
    if visit_counts[folder_identity] > MAX_VISITS:
        raise ConfigError(
            f"{folder.resolve()} is reached over more than {MAX_VISITS:,} links, and each path"
            " would be hashed: remove links to folders that contain further links."
        )

    try:
        sorted_paths = sorted(folder.iterdir())
    except PermissionError:
        return

    for path in sorted_paths:
        if path.is_dir():
            yield from _follow_links(path, parent_identities | {folder_identity}, visit_counts)
        elif path.is_file():
            yield path


def compute_sha256s(paths: Iterable[Path]) -> list[str]:
    """Return the sha256 of each file; read several files in parallel."""
    with ThreadPoolExecutor(THREADS) as thread_pool:
        return list(thread_pool.map(file_sha256, paths))


def compute_stamp(paths: Iterable[Path]) -> str:
    """Return a hash of the names, inodes, sizes and times of files. The hash changes when one of
    the files is written."""
    stamp_lines = []
    for path in paths:
        file_status = path.stat()
        change_times = file_status.st_mtime_ns, file_status.st_ctime_ns
        stamp_lines.append(
            repr(
                (
                    str(path),
                    file_status.st_dev,
                    file_status.st_ino,
                    file_status.st_size,
                    *change_times,
                )
            )
        )

    return hashlib.sha256("\n".join(stamp_lines).encode(errors="surrogateescape")).hexdigest()


def is_verified(files_stamp: str) -> bool:
    """Return True if this process has verified the files with the stamp `files_stamp`."""
    return files_stamp in _verified_stamps


def mark_verified(files_stamp: str) -> None:
    """Record that this process has verified the files with the stamp `files_stamp`."""
    _verified_stamps.add(files_stamp)
