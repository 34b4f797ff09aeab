"""Log files of pods. A log is read in parts, because it can be larger than the memory."""

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from argolocal.view.summary import ERROR_LINE

# number of bytes at the end of a log that are searched for an error
SEARCHED_END_BYTES = 65_536


class LogFile(Protocol):
    """The log of one pod. All methods may be called from several threads. If the log file was
    removed"""

    @property
    def name(self) -> str:
        """The name of the pod."""
        ...

    @property
    def is_local(self) -> bool:
        """True if reading hundreds of megabytes takes only a second."""
        ...

    def size(self) -> int:
        """Return the current number of bytes."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, or fewer bytes at the end of the log."""
        ...


@dataclass(frozen=True)
class LocalLog:
    """A log in the home of this machine, the directory of runs. A path that is not a regular file
    counts as an empty log."""

    name: str
    path: Path
    is_local: bool = True

    def size(self) -> int:
        try:
            status = self.path.stat()
        except OSError:
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def read(self, offset: int, size: int) -> bytes:
        try:
            # without O_NONBLOCK, opening a FIFO waits for its writer
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return b""
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)


def local_logs(folder: Path) -> Mapping[str, LogFile]:
    """Return the logs in a folder, by the name of the pod."""
    return {path.stem: LocalLog(path.stem, path) for path in sorted(folder.glob("*.log"))}


def read_end(log: LogFile, size: int) -> str:
    """Return the last `size` bytes of a log as text."""
    return log.read(max(0, log.size() - size), size).decode(errors="replace")


def find_log_with_error(logs: Iterable[LogFile]) -> LogFile | None:
    """Return the log with an error whose last line is the oldest. If no log contains an error,
    return the log whose last line is the oldest, or None if there are no logs."""
    by_age = sorted(logs, key=_last_change)
    for log in by_age:
        if ERROR_LINE.search(read_end(log, SEARCHED_END_BYTES)):
            return log
    return next(iter(by_age), None)


def _last_change(log: LogFile) -> float:
    """Return the unix time at which the last line of a log was written, or 0 if the time is
    unknown."""
    if not isinstance(log, LocalLog):
        return 0.0
    try:
        return log.path.stat().st_mtime
    except OSError:
        return 0.0
