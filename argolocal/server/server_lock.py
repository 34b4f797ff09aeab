"""The lock of a home (a directory of runs), which only one server can hold at a time.

    with ServerLock(home, port):    # raises Busy with the pid and the port of the other server
        ...
    find_server(home)               # RunningServer(pid=4711, port=7070), or None

The kernel releases the lock when the server dies for any reason.
"""

import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from argolocal.common import homes, program
from argolocal.common.json_text import to_json
from argolocal.state.journal import Busy

LOCK_FILE = "server.lock"
MAX_RECORD_BYTES = 200
# maximum number of seconds for which `find_server` in another process holds the lock
PROBE_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class RunningServer:
    """The running server of a home, and the port of its page and its API."""

    pid: int
    port: int


class ServerLock:
    """The lock that the server holds while it runs."""

    def __init__(self, home: Path, port: int) -> None:
        self.home = home
        self.port = port
        self.descriptor = -1

    def __enter__(self) -> Self:
        homes.create_home(self.home)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.descriptor = os.open(self.home / LOCK_FILE, flags, 0o600)
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        while not _try_lock(self.descriptor, fcntl.LOCK_EX):
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue

            server = _read_record(self.descriptor)
            os.close(self.descriptor)
            details = f" (pid {server.pid}, http://127.0.0.1:{server.port})" if server else ""
            raise Busy(
                f"a server runs in {self.home} already{details}: use it, end it, or set"
                f" {program.environment_variable('HOME')} to another directory."
            )

        os.ftruncate(self.descriptor, 0)
        record = to_json(asdict(RunningServer(os.getpid(), self.port)))
        os.pwrite(self.descriptor, record.encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def find_server(home: Path) -> RunningServer | None:
    """Return the server that runs in a home (directory of all runs), or None."""
    try:
        descriptor = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # use a shared lock, so that simultaneous probes do not detect each other
        if _try_lock(descriptor, fcntl.LOCK_SH):
            return None
        return _read_record(descriptor)
    finally:
        os.close(descriptor)


def _read_record(descriptor: int) -> RunningServer | None:
    """Return the record in the lock file, or None while the server is writing it."""
    with suppress(ValueError, TypeError):
        return RunningServer(**json.loads(os.pread(descriptor, MAX_RECORD_BYTES, 0)))
    return None


def _try_lock(descriptor: int, operation: int) -> bool:
    """Lock a file with flock. Return False if another process holds the lock of the file."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
