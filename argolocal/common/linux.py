"""Linux system calls and cgroup files that Python's standard library does not support."""

import ctypes
import os
import signal

# options of prctl(2)
SET_PDEATHSIG = 1
SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None)

# file names of a memory cgroup for each cgroup version
CGROUP_EVENTS = {1: "memory.oom_control", 2: "memory.events"}
CGROUP_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies. Exit if the process `parent` is
    already dead."""
    LIBC.prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def stop_ignoring_signals() -> None:
    """Restore the default action of ignored signals: a shell's background jobs ignore SIGINT, and
    `nohup` ignores SIGHUP."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def count_oom_kills(events: str) -> int:
    """Return the number of OOM-killed processes in the text of a cgroup's events file, or 0 if the
    counter is missing."""
    counters = dict(line.split(maxsplit=1) for line in events.splitlines() if " " in line)
    return int(counters.get("oom_kill", 0))
