"""Identify processes that outlive their parent, and terminate them with their process group.

A process is identified by pid and start time, because the kernel reuses pids.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

RECORD_CHECK_INTERVAL_S = 3.0


def python_command(*arguments: str) -> list[str]:
    """Return a command that runs this Python interpreter. The command keeps the working directory,
    whose files are not trusted, out of sys.path."""
    return [sys.executable, "-P", *arguments]


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if the process has
    ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None

    # a zombie keeps its sockets open until its last thread has ended
    threads = int(fields[17])
    if fields[0] in "ZX" and threads <= 1:
        return None

    return int(fields[19])


def is_alive(pid: int, start_ticks: int) -> bool:
    """Return True if a process with this pid and start time is running."""
    return start_time(pid) == start_ticks


def mentions_home(pid: int, home: Path) -> bool:
    """Return True if the command line of the process contains `home` or a file in it."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any((item + b"/").startswith(os.fsencode(f"{home}/")) for item in arguments)


def confirm_recorded(child: subprocess.Popen[bytes]) -> None:
    """Let a child process return from `wait_until_recorded`. Call this function once the child is
    recorded on disk, so that other commands can stop the child."""
    assert child.stdin
    with suppress(BrokenPipeError), child.stdin:  # the child may have exited
        child.stdin.write(b"\n")


def wait_until_recorded() -> None:
    """Wait until the parent has recorded this process. If the parent dies first, exit, because no
    command could find and stop an unrecorded process."""
    if not os.read(0, 1):
        sys.exit("the parent died before it recorded this process")


def end_unless_recorded(record: Path) -> None:
    """Wait until the parent has written the file `record`. Then watch the file in a thread, and
    exit if it is deleted or contains another pid."""
    wait_until_recorded()

    def watch() -> None:
        while True:
            time.sleep(RECORD_CHECK_INTERVAL_S)
            try:
                if json.loads(record.read_text())["pid"] == os.getpid():
                    continue
            except (OSError, ValueError):
                pass
            os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def end_group(pid: int, start_ticks: int, grace: float) -> None:
    """Send SIGTERM to the process group of `pid`, send SIGKILL after `grace` seconds, and wait
    until `pid` has ended."""
    if not is_alive(pid, start_ticks):
        return
    signal_group(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while is_alive(pid, start_ticks) and time.monotonic() < deadline:
        time.sleep(0.02)
    signal_group(pid, signal.SIGKILL)
    while is_alive(pid, start_ticks):
        time.sleep(0.005)


def signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group. Returns False if the group does not exist."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
