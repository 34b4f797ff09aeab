"""Check that files fit onto the disk, before they are written."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from argolocal.errors import ArgolocalError


def check_space(content: str, size: float, folder: Path, remedy: str) -> None:
    """Raise ArgolocalError if `size` bytes do not fit on the disk of `folder`. The message names
    the `content` and the `remedy`."""
    message = describe_missing_space(
        content, size, shutil.disk_usage(folder).free, str(folder), remedy
    )
    if message:
        raise ArgolocalError(message)


def describe_missing_space(
    content: str, size: float, free_bytes: float, target: str, remedy: str
) -> str:
    """Return "" if `size` bytes fit into the `free_bytes` of `target`, or else a message with the
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
