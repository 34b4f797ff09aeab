"""Detects with inotify (man 7 inotify) whether another process opens a file."""

import ctypes
import os
import struct
from pathlib import Path

IN_OPEN = 0x20
IN_ISDIR = 0x40000000
EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
READ_BYTES = 1 << 16
LIBC = ctypes.CDLL(None, use_errno=True)


class OpenedFiles:
    """Records whether a file, or any file in a folder, was opened since the creation of this
    object."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._descriptor = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify is not available")

        folders = [path, *(item for item in path.rglob("*") if item.is_dir())]
        for folder in folders:
            LIBC.inotify_add_watch(self._descriptor, os.fsencode(folder), IN_OPEN)
        self._has_opened = False

    @property
    def any(self) -> bool:
        """True if a file was opened."""
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return self._has_opened

        start = 0
        while start < len(data):
            _, mask, _, length = EVENT.unpack_from(data, start)
            self._has_opened |= bool(mask & IN_OPEN) and not mask & IN_ISDIR
            start += EVENT.size + length
        return self._has_opened

    def close(self) -> None:
        os.close(self._descriptor)
