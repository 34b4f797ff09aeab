"""State shared by a worker and its launcher: a request to leave, the time left, and the newest
step.

A worker receives SIGTERM from its start, even while the main thread blocks in a collective. The
children of a worker (such as a DataLoader's) ignore SIGTERM, which may be sent to the whole process
group: the worker still needs them.
"""

import array
import atexit
import math
import multiprocessing.util
import os
import signal
import threading
import time

from argolocal.common.environment import read_seconds
from argolocal.common.linux import die_with_parent
from rekindle.errors import say

GRACE = "REKINDLE_GRACE"  # environment variable: seconds between SIGTERM and SIGKILL
DEFAULT_GRACE = 30.0  # of Kubernetes
# shares of these seconds that the launcher and its workers may use
LAUNCHER_SHARE = 0.95
WORKER_SHARE = 0.9

# element 0 is the newest step of this process; a launcher shares this memory with the process
newest_step = memoryview(array.array("q", [-1]))
_deadline = math.inf


def grace() -> float:
    """Return the seconds between SIGTERM and SIGKILL. Raises ConfigError."""
    return read_seconds(GRACE, DEFAULT_GRACE, "Set it to the pod's terminationGracePeriodSeconds.")


def seconds_left() -> float:
    """Return the seconds until this worker must have exited; infinite before a SIGTERM."""
    return _deadline - time.monotonic()


def on_sigterm() -> threading.Event:
    """Return an event that SIGTERM sets, even while the main thread blocks in a collective.

    A Python handler would run only after the collective; the C handler immediately writes to the
    wakeup descriptor.
    """
    leaving = threading.Event()
    seconds = WORKER_SHARE * grace()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        global _deadline
        while signal.SIGTERM not in os.read(reader, 16):
            pass
        _deadline = time.monotonic() + seconds
        leaving.set()
        time.sleep(seconds)
        say(f"the worker has not finished {seconds:g} s after SIGTERM: exiting now")
        os._exit(143)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    # the forkserver has blocked SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _shield_children()

    return leaving


def _shield_children() -> None:
    """Make future children of this process ignore SIGTERM and SIGINT, and die with it."""
    fork_origin: list[tuple[int, bool]] = []  # (pid, True if the main thread forks)

    def before_fork() -> None:
        fork_origin[:] = [(os.getpid(), threading.current_thread() is threading.main_thread())]

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        signal.set_wakeup_fd(-1)
        parent, from_main_thread = fork_origin[0]
        if from_main_thread:  # the kernel considers the thread that forked as the parent
            die_with_parent(parent)

    os.register_at_fork(before=before_fork, after_in_child=in_child)
    atexit.register(_end_children)  # registered after multiprocessing's handler, so it runs first


def _end_children() -> None:
    """Kill the daemon children: they ignore SIGTERM, so multiprocessing would wait for them
    forever."""
    # torch's handler would report the end of these children as an error
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
