"""Processes that outlive their parent: identified by pid and start time, and terminated as a group.

A pid alone does not identify a process, because the kernel reuses pids.
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


def python(*arguments: str) -> list[str]:
    """Return a command that runs this Python without imports from the working directory, which is
    not trusted."""
    return [sys.executable, "-P", *arguments]


def start_time(pid: int) -> int | None:
    """Return the start time of a process (clock ticks since boot), or None if it has ended or is a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    threads = int(fields[17])  # a zombie with threads that are still ending keeps its sockets open
    if fields[0] in "ZX" and threads <= 1:
        return None
    return int(fields[19])


def is_alive(pid: int, start_ticks: int) -> bool:
    """Return True if the process with this pid and this start time still runs."""
    return start_time(pid) == start_ticks


def mentions_home(pid: int, home: Path) -> bool:
    """Return True if the command line of the process contains `home` or a file in it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any((word + b"/").startswith(os.fsencode(f"{home}/")) for word in words)


def confirm_recorded(child: subprocess.Popen[bytes]) -> None:
    """Let a child return from `wait_until_recorded`: other commands can now find and stop the
    child."""
    assert child.stdin
    with suppress(BrokenPipeError), child.stdin:  # the child may have exited
        child.stdin.write(b"\n")


def wait_until_recorded() -> None:
    """Wait until the parent has recorded this process; exit if the parent died, because no command
    could stop it."""
    if not os.read(0, 1):
        sys.exit("the parent died before it recorded this process")


def end_unless_recorded(record: Path) -> None:
    """Wait until `record` exists, then watch this file from a thread; exit if it is deleted or has
    another pid."""
    wait_until_recorded()

    def watch() -> None:
        while True:
            # wait first: the record is written just after the start
            time.sleep(RECORD_CHECK_INTERVAL_S)
            try:
                if json.loads(record.read_text())["pid"] == os.getpid():
                    continue
            except (OSError, ValueError):
                pass
            os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def end_group(pid: int, start_ticks: int, grace: float) -> None:
    """Send SIGTERM to the process group of `pid`, after `grace` seconds SIGKILL, and wait until
    `pid` has ended."""
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
