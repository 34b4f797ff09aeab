"""Handle the signals that stop a run: Ctrl-C, SIGTERM and SIGHUP.

# a command in the foreground: after Ctrl-C, `run` raises KeyboardInterrupt, and `caught` is 2
with StopSignals(stop_file, ask=True, exit_after=3.0) as signals:
    local_run.run(on_change, signals)

# in a library: the previous handlers are called
with Interrupts() as signals: ...
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

# A second signal is deferred only if it follows the first within this number of seconds, because
# `timeout` sends two signals within microseconds.
FORCE_AFTER_S = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Signal handlers that are active in a `with` block, in the main thread only. SIGHUP remains
    ignored if `nohup` has set this.

    A handler calls the previous handler of the signal, or else raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.previous_handlers: dict[int, Any] = {}
        self.pending_signals: list[tuple[int, FrameType | None]] = []
        self.pending_since = 0.0
        self.is_deferring = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.previous_handlers = {number: signal.getsignal(number) for number in SIGNALS}
            if self.previous_handlers[signal.SIGHUP] == signal.SIG_IGN:
                del self.previous_handlers[signal.SIGHUP]
            for number in self.previous_handlers:
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals until `allowed` is entered, because an exception before that could lose
        track of a process that has just started.

        A second signal is not deferred if it arrives more than FORCE_AFTER_S after the first.
        """
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False
            self.pending_signals.clear()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Deliver the deferred signals, and deliver new signals immediately. May raise
        KeyboardInterrupt."""
        was_deferring = self.is_deferring
        self.is_deferring = False
        try:
            self._deliver()
            yield
        finally:
            self.is_deferring = was_deferring

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Call the previous handler of a signal. Raise KeyboardInterrupt if the signal had none."""
        handler = self.previous_handlers[number]
        if callable(handler):
            handler(number, frame)
        elif handler != signal.SIG_IGN:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.pending_since = self.pending_since if self.pending_signals else time.monotonic()
        self.pending_signals.append((number, frame))
        if not self.is_deferring or time.monotonic() - self.pending_since > FORCE_AFTER_S:
            self._deliver()

    def _deliver(self) -> None:
        while self.pending_signals:
            self.receive(*self.pending_signals.pop(0))


class StopSignals(Interrupts):
    """The first signal raises KeyboardInterrupt and sets `caught` to its number; further signals
    are ignored.

    `ask`: ask before the first Ctrl-C on a terminal stops the run. `stop_file`: file that exists
    while `argolocal stop` stops the workflow; the signal of that command is not recorded in
    `caught`. `exit_after`: a further signal more than this many seconds after the first exits at
    once; then `argolocal resume` cleans up.
    """

    def __init__(
        self, stop_file: Path | None = None, ask: bool = False, exit_after: float = math.inf
    ) -> None:
        super().__init__()
        self.stop_file = stop_file
        self.exit_after = exit_after
        self.ask = ask and sys.stdin is not None and sys.stdin.isatty()
        self.say: Callable[[str], None] = lambda line: print(
            f"note: {line}", file=sys.stderr, flush=True
        )
        self.caught: int | None = None
        self.caught_at = 0.0

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            if time.monotonic() - self.caught_at > self.exit_after:
                os._exit(exit_codes.SIGNALLED + number)

            return

        if self.stop_file and self.stop_file.exists():
            raise KeyboardInterrupt

        if number == signal.SIGINT and self.ask:
            self.ask = False
            self.say(
                "Stop this run? y or another Ctrl-C stops the run, any other answer continues it."
            )
            threading.Thread(target=self._read_answer, daemon=True).start()

            return

        self.caught = number
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
            self.ask = True
            self.say("Continuing.")
