"""SIGTERM, heard from the first moment on and even while the main thread waits inside a collective."""

import os
import signal
import sys
import threading

GRACE = 25.0  # seconds after a SIGTERM in which a step and a checkpoint must fit


def heed_sigterm() -> threading.Event:
    """An event that a SIGTERM sets, even while the main thread waits for a collective.

    A Python handler would run only after it; the wakeup descriptor is written by the C handler at once.
    """
    leaving = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        while signal.SIGTERM not in os.read(reader, 16):
            pass
        leaving.set()
        threading.Event().wait(GRACE)
        sys.stderr.write(f"still not done {GRACE:.0f} s after SIGTERM: leaving now\n")
        os._exit(143)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    return leaving
