"""Handle the signals that stop a run, which are SIGINT (Ctrl-C), SIGTERM and SIGHUP.

# in a command: after Ctrl-C, `run` raises KeyboardInterrupt, and `signals.caught` is 2 (SIGINT)
with StopSignals(stop_file, asks_before_stop=True, exit_after_seconds=3.0) as signals:
    local_run.run(on_change, signals)

# in a library: a signal also calls the handlers of the program that uses the library
with InterruptHandlers() as signals: ...
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from argolocal.common import exit_codes

# A second signal is deferred only if it follows the first within this number of seconds: the
# command `timeout` sends two signals within microseconds, and a user who presses Ctrl-C again
# later wants to stop at once.
FORCE_STOP_AFTER_S = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptHandlers:
    """Signal handlers that are active in a `with` block, in the main thread only. Under `nohup`,
    SIGHUP remains ignored in the `with` block.

    Each of these handlers calls the handler that the signal had before the `with` block. If a
    signal had the default action before the `with` block, its handler raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.previous_handlers: dict[int, Any] = {}
        self.pending_signals: list[tuple[int, FrameType | None]] = []
        self.pending_since = 0.0
        self.is_deferring = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.previous_handlers = {
                signal_number: signal.getsignal(signal_number) for signal_number in STOP_SIGNALS
            }
            if self.previous_handlers[signal.SIGHUP] == signal.SIG_IGN:
                del self.previous_handlers[signal.SIGHUP]
            for signal_number in self.previous_handlers:
                signal.signal(signal_number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signal_number, handler in self.previous_handlers.items():
            signal.signal(signal_number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals until `allowed` is entered: an exception before that could lose track of a
        process that has just started.

        A second signal is not deferred if it arrives more than FORCE_STOP_AFTER_S after the first
        signal.
        """
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False
            self.pending_signals.clear()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Deliver the deferred signals, and deliver new signals immediately. The delivery of a
        deferred signal may raise KeyboardInterrupt."""
        was_deferring = self.is_deferring
        self.is_deferring = False
        try:
            self._deliver()
            yield
        finally:
            self.is_deferring = was_deferring

    def receive(self, signal_number: int, frame: FrameType | None) -> None:
        """Call the previous handler of a signal. Raise KeyboardInterrupt if the signal had the
        default action."""
        handler = self.previous_handlers[signal_number]
        if callable(handler):
            handler(signal_number, frame)
        elif handler != signal.SIG_IGN:
            raise KeyboardInterrupt

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self.pending_since = self.pending_since if self.pending_signals else time.monotonic()
        self.pending_signals.append((signal_number, frame))
        if not self.is_deferring or time.monotonic() - self.pending_since > FORCE_STOP_AFTER_S:
            self._deliver()

    def _deliver(self) -> None:
        while self.pending_signals:
            self.receive(*self.pending_signals.pop(0))


class StopSignals(InterruptHandlers):
    """The first signal raises KeyboardInterrupt and sets `caught` to its number; further signals
    are ignored.

    `stop_file`: file that exists while `argolocal stop` stops the workflow; the signal of that
    command is not recorded in `caught`. `asks_before_stop`: ask before the first Ctrl-C on a
    terminal stops the run. `exit_after_seconds`: a signal that arrives more than this many seconds
    after the first signal ends the program at once; then `argolocal resume` cleans up.
    """

    def __init__(
        self,
        stop_file: Path | None = None,
        asks_before_stop: bool = False,
        exit_after_seconds: float = math.inf,
    ) -> None:
        super().__init__()
        self.stop_file = stop_file
        self.exit_after_seconds = exit_after_seconds
        self.asks_before_stop = asks_before_stop and sys.stdin is not None and sys.stdin.isatty()
        self.say: Callable[[str], None] = lambda line: print(
            f"note: {line}", file=sys.stderr, flush=True
        )
        self.caught: int | None = None
        self.caught_at = 0.0

    def receive(self, signal_number: int, frame: FrameType | None) -> None:
        if self.caught:
            if time.monotonic() - self.caught_at > self.exit_after_seconds:
                os._exit(exit_codes.SIGNAL_OFFSET + signal_number)

            return

        if self.stop_file and self.stop_file.exists():
            raise KeyboardInterrupt

        if signal_number == signal.SIGINT and self.asks_before_stop:
            self.asks_before_stop = False
            self.say(
                "Stop this run? y or another Ctrl-C stops the run, any other answer continues it."
            )
            threading.Thread(target=self._read_answer, daemon=True).start()

            return

        self.caught = signal_number
        self.caught_at = time.monotonic()
        raise KeyboardInterrupt

    def _read_answer(self) -> None:
        # read the descriptor, because sys.stdin.readline() would hold a lock while it waits, which
        # crashes Python at exit
        try:
            answer = os.read(sys.stdin.fileno(), 100)
        except OSError:  # the terminal is closed
            return
        if answer.strip().lower().startswith(b"y"):
            os.kill(os.getpid(), signal.SIGINT)
        else:
            self.asks_before_stop = True
            self.say("Continuing.")
