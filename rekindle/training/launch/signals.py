"""The handling of SIGTERM in launchers and workers, the time left until SIGKILL, and the newest
step of a worker.

A worker handles SIGTERM even while its main thread blocks in a collective. The child processes of a
worker, such as the processes of a DataLoader, ignore a SIGTERM to the process group, since the
worker needs them until it has left.
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
from rekindle.errors import write_stderr
from rekindle.kubernetes_names import REKINDLE_GRACE

# default value of Kubernetes for terminationGracePeriodSeconds
DEFAULT_GRACE_S = 30.0
# fractions of the grace period after which the launcher and its workers must have exited
LAUNCHER_GRACE_SHARE = 0.95
WORKER_GRACE_SHARE = 0.9

# element 0 is the newest step of this process; `WorkerSlot.attach` replaces the memoryview by a
# view of memory that the launcher can read
newest_step = memoryview(array.array("q", [-1]))
_deadline = math.inf


def read_grace_seconds() -> float:
    """Return the seconds between SIGTERM and SIGKILL. Raises ConfigError."""
    return read_seconds(
        REKINDLE_GRACE, DEFAULT_GRACE_S, "Set it to the pod's terminationGracePeriodSeconds."
    )


def compute_seconds_left() -> float:
    """Return the seconds until this worker must have exited; infinite before SIGTERM."""
    return _deadline - time.monotonic()


def install_sigterm_handler() -> threading.Event:
    """Install a handler of SIGTERM that sets the returned event, even while the main thread blocks
    in a collective.

    A Python handler would run only after the collective operation. To notice SIGTERM earlier, a
    thread waits for the byte that Python's C handler immediately writes to the wakeup descriptor.
    """
    leaving_event = threading.Event()
    grace_seconds = WORKER_GRACE_SHARE * read_grace_seconds()
    read_descriptor, write_descriptor = os.pipe()
    os.set_blocking(write_descriptor, False)

    def wait() -> None:
        global _deadline
        while signal.SIGTERM not in os.read(read_descriptor, 16):
            pass
        _deadline = time.monotonic() + grace_seconds
        leaving_event.set()
        time.sleep(grace_seconds)
        write_stderr(f"the worker has not finished {grace_seconds:g} s after SIGTERM: exiting now")
        os._exit(exit_codes.TERMINATED)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write_descriptor)
    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    # unblock SIGTERM, which the forkserver has blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _shield_children()

    return leaving_event


def _shield_children() -> None:
    """Let future child processes ignore SIGTERM and SIGINT, and die with this process."""
    # pid of the forking process, and True if its main thread forks
    fork_origin: list[tuple[int, bool]] = []

    def before_fork() -> None:
        fork_origin[:] = [(os.getpid(), threading.current_thread() is threading.main_thread())]

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        signal.set_wakeup_fd(-1)
        parent_pid, is_from_main_thread = fork_origin[0]
        # set the signal only for a fork by the main thread, because the kernel would kill the child
        # when another forking thread ends
        if is_from_main_thread:
            die_with_parent(parent_pid)

    os.register_at_fork(before=before_fork, after_in_child=in_child)
    # `_end_children` is registered after multiprocessing's exit handler, so it runs first
    atexit.register(_end_children)


def _end_children() -> None:
    """Kill the daemonic child processes, which ignore SIGTERM, so that multiprocessing would wait
    for them forever."""
    # reset the handler of SIGCHLD, because torch's handler would report the end of the killed child
    # processes as an error
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child_process in multiprocessing.active_children():
        if child_process.daemon:
            child_process.kill()
