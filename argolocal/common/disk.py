"""Estimates of disk space, before files are written."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from argolocal.errors import ArgolocalError


def check_space(content: str, size: float, folder: Path, remedy: str) -> None:
    """Raise ArgolocalError if `content`, about `size` bytes, does not fit into `folder`."""
    if message := missing_space(content, size, shutil.disk_usage(folder).free, str(folder), remedy):
        raise ArgolocalError(message)


def missing_space(content: str, size: float, free: float, target: str, remedy: str) -> str:
    """Return "" if `size` bytes fit into the `free` bytes of `target`, else a message with the `remedy`."""
    if size <= free:
        return ""
    return f"{content} needs about {size / 1e9:.1f} GB and {target} has {free / 1e9:.1f} GB left: {remedy}"


def size_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder; 0 for a missing path."""
    files: Iterable[Path] = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
