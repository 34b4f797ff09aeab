"""What a worker and its launcher let each other know: to leave, how long there is for it, and the newest step.

SIGTERM is heard from the first moment on, and even while the main thread waits inside a collective. The children of a
worker (a DataLoader's) do not hear it: it may be sent to the whole process group, and the worker still needs them.
"""

import array
import atexit
import ctypes
import math
import multiprocessing.util
import os
import signal
import threading
import time
from contextlib import suppress

from rekindle.errors import ConfigError, say

GRACE = "REKINDLE_GRACE"  # environment: seconds between a SIGTERM and the SIGKILL that follows it
LAUNCHER, WORKER = 0.95, 0.9  # shares of it after which they are gone
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
LIBC = ctypes.CDLL(None)

newest = memoryview(array.array("q", [-1]))  # [0]: the newest step this process has made; a launcher shares the memory
_until = math.inf


def grace() -> float:
    """Seconds between SIGTERM and SIGKILL. Raises ConfigError."""
    text = os.environ.get(GRACE) or "30"
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ConfigError(f"{GRACE} is {text!r}: it must be seconds, those of the pod's terminationGracePeriodSeconds.")


def left() -> float:
    """Seconds until this worker must be gone; infinite while nobody has told it to leave."""
    return _until - time.monotonic()


def heed_sigterm() -> threading.Event:
    """An event that a SIGTERM sets, even while the main thread waits for a collective.

    A Python handler would run only after it; the wakeup descriptor is written by the C handler at once.
    """
    leaving, seconds = threading.Event(), WORKER * grace()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        global _until
        while signal.SIGTERM not in os.read(reader, 16):
            pass
        _until = time.monotonic() + seconds
        leaving.set()
        time.sleep(seconds)
        say(f"still not done {seconds:g} s after SIGTERM: leaving now")
        os._exit(143)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # which the nursery has blocked
    _shield_children()
    return leaving


def die_with_parent(parent: int) -> None:
    """Be killed when `parent`, ours, dies; also if it is dead already."""
    LIBC.prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _shield_children() -> None:
    """From now on whatever this process forks does not take SIGTERM or SIGINT, and dies with it."""
    forking: list[tuple[int, bool]] = []

    def before() -> None:
        forking[:] = [(os.getpid(), threading.current_thread() is threading.main_thread())]

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        signal.set_wakeup_fd(-1)
        parent, lasting = forking[0]
        if lasting:  # the kernel would take the end of another thread for the parent's
            die_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=in_child)
    atexit.register(_end_children)  # after multiprocessing has registered its own, so it comes first


def _end_children() -> None:
    """What multiprocessing would do by SIGTERM at our end, and then wait for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call it an error
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
