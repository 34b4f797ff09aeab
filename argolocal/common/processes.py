"""Processes that outlive their parent: identified by pid and start time, and terminated as a group.

A pid alone may have been reused.
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

WATCH = 3.0  # seconds between reads of the record


def python(*arguments: str) -> list[str]:
    """A command of this interpreter that imports nothing from the working directory, whose files may be anybody's."""
    return [sys.executable, "-P", *arguments]


def started(pid: int) -> int | None:
    """When a process was started (clock ticks since boot), None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    threads = int(fields[17])  # a zombie whose threads still end holds its sockets
    return None if fields[0] in "ZX" and threads <= 1 else int(fields[19])


def alive(pid: int, since: int) -> bool:
    """Whether the process that had this pid and this start time still runs."""
    return started(pid) == since


def serves(pid: int, home: Path) -> bool:
    """Whether the command line of the process names the directory `home` or a file in it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any((word + b"/").startswith(os.fsencode(f"{home}/")) for word in words)


def confirm_recorded(child: subprocess.Popen[bytes]) -> None:
    """Tell a child that waits on its stdin that it is recorded: from now on other commands can find and stop it."""
    assert child.stdin
    with suppress(BrokenPipeError), child.stdin:  # it may have exited
        child.stdin.write(b"\n")


def wait_until_recorded() -> None:
    """Exit if the parent died before it recorded this process: nothing would ever stop it."""
    if not os.read(0, 1):
        sys.exit("the parent died before it recorded this process")


def end_unless_recorded(record: Path) -> None:
    """Watch the record from a thread, and exit once it is deleted or has another pid: the home was removed."""
    wait_until_recorded()

    def watch() -> None:
        while True:
            time.sleep(WATCH)  # first: the record is written just after the start
            try:
                ours = json.loads(record.read_text())["pid"] == os.getpid()
            except (OSError, ValueError):
                ours = False
            if not ours:
                os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def end_group(pid: int, since: int, grace: float) -> None:
    """SIGTERM the process group of `pid`, SIGKILL it after `grace` seconds, and wait."""
    if not alive(pid, since):
        return
    signal_group(pid, signal.SIGTERM)
    until = time.monotonic() + grace
    while alive(pid, since) and time.monotonic() < until:
        time.sleep(0.02)
    signal_group(pid, signal.SIGKILL)
    while alive(pid, since):
        time.sleep(0.005)


def signal_group(pid: int, number: int) -> bool:
    """Signals a process group; False if there is none."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
