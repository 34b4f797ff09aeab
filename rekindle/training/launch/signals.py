"""SIGTERM and the time until SIGKILL in launchers and workers, and the newest step of a worker.

A worker handles SIGTERM even while its main thread blocks in a collective. Its child processes,
such as those of a DataLoader, ignore SIGTERM, which may be sent to the process group: the worker
needs them until it has left.
"""

import array
import atexit
import math
import multiprocessing.util
import os
import signal
import threading
import time

from argolocal.common import exit_codes
from argolocal.common.environment import read_seconds
from argolocal.common.linux import die_with_parent
from rekindle.errors import say
from rekindle.kubernetes_names import REKINDLE_GRACE

DEFAULT_GRACE_S = 30.0  # default of Kubernetes (terminationGracePeriodSeconds)
# shares of this time after which the launcher and its workers must have exited
LAUNCHER_SHARE = 0.95
WORKER_SHARE = 0.9

# element 0 is the newest step of this process; WorkerSlot replaces it by memory that the launcher
# can read
newest_step = memoryview(array.array("q", [-1]))
_deadline = math.inf


def read_grace_period() -> float:
    """Return the seconds between SIGTERM and SIGKILL. Raises ConfigError."""
    return read_seconds(
        REKINDLE_GRACE, DEFAULT_GRACE_S, "Set it to the pod's terminationGracePeriodSeconds."
    )


def seconds_left() -> float:
    """Return the seconds until this worker must have exited; infinite before SIGTERM."""
    return _deadline - time.monotonic()


def install_sigterm_handler() -> threading.Event:
    """Install a handler of SIGTERM that sets the returned event, even while the main thread blocks
    in a collective.

    A Python handler would run only after the collective. Instead, a thread waits for the byte that
    Python's C handler immediately writes to the wakeup descriptor.
    """
    leaving = threading.Event()
    seconds = WORKER_SHARE * read_grace_period()
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
        os._exit(exit_codes.TERMINATED)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    # the forkserver has blocked SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _shield_children()

    return leaving


def _shield_children() -> None:
    """Let future child processes ignore SIGTERM and SIGINT, and die with this process."""
    fork_origin: list[tuple[int, bool]] = []  # (pid, True if the main thread forks)

    def before_fork() -> None:
        fork_origin[:] = [(os.getpid(), threading.current_thread() is threading.main_thread())]

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        signal.set_wakeup_fd(-1)
        parent, from_main_thread = fork_origin[0]
        # the kernel would kill the child when the thread that forked it ends
        if from_main_thread:
            die_with_parent(parent)

    os.register_at_fork(before=before_fork, after_in_child=in_child)
    atexit.register(_end_children)  # registered after multiprocessing's handler, so it runs first


def _end_children() -> None:
    """Kill the daemonic child processes: they ignore SIGTERM, so multiprocessing would wait for
    them forever."""
    # torch's handler would report the end of these children as an error
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
