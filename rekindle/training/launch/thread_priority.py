"""Lowers the priority of a background thread, so that the training has priority."""

import ctypes
import os
import platform
import threading
from contextlib import suppress

BACKGROUND_NICENESS = 10
IDLE_IO_CLASS = 3
# bit position of the priority class in the argument of ioprio_set
IO_CLASS_SHIFT = 13
# the constant IOPRIO_WHO_PROCESS, which selects the priority of one thread
THREAD_TARGET = 1
# type of CPU → number of the system call ioprio_set, which the C library does not wrap
IO_PRIORITY_CALLS = {"x86_64": 251, "aarch64": 30}


def lower_thread_priority() -> None:
    """Lower the CPU and disk priority of this thread and of the threads that it starts."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)

    syscall_number = IO_PRIORITY_CALLS.get(platform.machine())
    if syscall_number and platform.system() == "Linux":
        idle_priority = IDLE_IO_CLASS << IO_CLASS_SHIFT
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(syscall_number, THREAD_TARGET, 0, idle_priority)
