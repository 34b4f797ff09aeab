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


def make_python_command(*arguments: str) -> list[str]:
    """Return a command that runs this Python interpreter. The command keeps the working directory,
    whose files are not trusted, out of sys.path."""
    return [sys.executable, "-P", *arguments]


def read_start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if the process has
    ended or is a zombie."""
    try:
        stat_fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None

    # a zombie keeps its sockets open until its last thread has ended
    thread_count = int(stat_fields[17])
    if stat_fields[0] in "ZX" and thread_count <= 1:
        return None

    return int(stat_fields[19])


def is_alive(pid: int, start_ticks: int) -> bool:
    """Return True if a process with this pid and start time is running."""
    return read_start_ticks(pid) == start_ticks


def mentions_home(pid: int, home: Path) -> bool:
    """Return True if the command line of the process contains `home` or a file in it."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any((argument + b"/").startswith(os.fsencode(f"{home}/")) for argument in arguments)


def confirm_recorded(child_process: subprocess.Popen[bytes]) -> None:
    """Let a child process return from `wait_until_recorded`. Call this function once the child is
    recorded on disk, so that other commands can stop the child."""
    assert child_process.stdin
    # the child may have exited
    with suppress(BrokenPipeError), child_process.stdin:
        child_process.stdin.write(b"\n")


def wait_until_recorded() -> None:
    """Wait until the parent has recorded this process. If the parent dies first, exit, because no
    command could find and stop an unrecorded process."""
    if not os.read(0, 1):
        sys.exit("the parent died before it recorded this process")


def end_unless_recorded(record_file: Path) -> None:
    """Wait until the parent has written the file `record_file`. After this, watch `record_file` in
    a thread, and exit if the file is deleted or contains another pid."""
    wait_until_recorded()

    def watch() -> None:
        while True:
            time.sleep(RECORD_CHECK_INTERVAL_S)
            try:
                if json.loads(record_file.read_text())["pid"] == os.getpid():
                    continue
            except (OSError, ValueError):
                pass
            os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def terminate_group(pid: int, start_ticks: int, grace_seconds: float) -> None:
    """Send SIGTERM to the process group of `pid`, send SIGKILL after `grace_seconds` seconds,
    and wait until `pid` has ended."""
    if not is_alive(pid, start_ticks):
        return
    signal_group(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while is_alive(pid, start_ticks) and time.monotonic() < deadline:
        time.sleep(0.02)
    signal_group(pid, signal.SIGKILL)
    while is_alive(pid, start_ticks):
        time.sleep(0.005)


def signal_group(pid: int, signal_number: int) -> bool:
    """Send a signal to a process group. Returns False if the group does not exist."""
    try:
        os.killpg(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
