"""Hashes of files, and the record of files that this process has already verified."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 4

_verified_stamps: set[str] = set()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_paths(folder: Path) -> dict[str, Path]:
    """Return everything in a folder and its subfolders except folders, by relative path.

    A link to a folder is not followed, but returned, as are pipes and broken links.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def compute_sha256s(paths: Iterable[Path]) -> list[str]:
    """Return the sha256 of each file; read several files in parallel."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(file_sha256, paths))


def compute_stamp(paths: Iterable[Path]) -> str:
    """Return a hash of the names, sizes and times of files: it changes when a file is written."""
    lines = []
    for path in paths:
        status = path.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        lines.append(repr((str(path), status.st_dev, status.st_ino, status.st_size, *times)))

    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def is_verified(files_stamp: str) -> bool:
    """Return True if this process has verified the files with this stamp."""
    return files_stamp in _verified_stamps


def mark_verified(files_stamp: str) -> None:
    """Record that this process has verified the files with this stamp."""
    _verified_stamps.add(files_stamp)
