"""Detects with inotify (man 7 inotify) whether another process opens a file."""

import ctypes
import os
import struct
from pathlib import Path

IN_OPEN = 0x20
IN_ISDIR = 0x40000000
# fields of an inotify event: watch, mask, cookie, length of the name
EVENT_STRUCT = struct.Struct("iIII")
READ_BYTES = 1 << 16
LIBC = ctypes.CDLL(None, use_errno=True)


class FileOpenWatcher:
    """Records whether a file, or any file in a folder, was opened since the creation of this
    object."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._descriptor = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify is not available")

        watched_folders = [
            path,
            *(descendant for descendant in path.rglob("*") if descendant.is_dir()),
        ]
        for watched_folder in watched_folders:
            LIBC.inotify_add_watch(self._descriptor, os.fsencode(watched_folder), IN_OPEN)
        self._was_opened = False

    def was_file_opened(self) -> bool:
        """Return True if another process has opened a watched file."""
        try:
            event_bytes = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return self._was_opened

        event_start = 0
        while event_start < len(event_bytes):
            _, event_mask, _, name_bytes = EVENT_STRUCT.unpack_from(event_bytes, event_start)
            if event_mask & IN_OPEN and not event_mask & IN_ISDIR:
                self._was_opened = True
            event_start += EVENT_STRUCT.size + name_bytes
        return self._was_opened

    def close(self) -> None:
        os.close(self._descriptor)
