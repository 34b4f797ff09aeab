"""Signals that stop a run (Ctrl-C, SIGTERM and SIGHUP), handled in one object that is passed to the
code that waits.

with StopSignals(stop_file, ask=True, exit_after=3.0) as signals:     # a command in the foreground
    local.run(on_change, signals)                                     # raises KeyboardInterrupt;
    signals.caught: 2

with Interrupts() as signals: ...                                     # in a library: calls the
previous handlers
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

# a signal that follows another one after this time is not deferred; `timeout` sends two signals
# within microseconds
FORCE_AFTER_S = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Installs signal handlers in its `with` block, in the main thread only. With `nohup`, SIGHUP
    stays ignored.

    Each signal goes to the previous handler; if a handler is missing, the signal raises
    KeyboardInterrupt.
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
        """Defer signals until `allowed` is entered: any other code could lose a process that has
        just started.

        If the code does not reach `allowed` within FORCE_AFTER_S, a second signal is not deferred.
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
        """Call the previous handler of a signal, or raise KeyboardInterrupt if a handler is
        missing."""
        handler: Callable[[int, FrameType | None], Any] | int | None = self.previous_handlers[
            number
        ]
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

    `ask`: ask before the first Ctrl-C on a terminal stops the run. `stop_file`: exists while
    `argolocal stop` stops the workflow; a signal then comes from that command, and is not recorded
    in `caught`. `exit_after`: number of seconds after the first signal; from then on, a further
    signal exits at once, and `argolocal resume` cleans up.
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

        self.caught, self.caught_at = number, time.monotonic()
        raise KeyboardInterrupt

    def _read_answer(self) -> None:
        # not sys.stdin.readline(), which holds a lock while it waits: the interpreter would crash
        # at exit
        try:
            answer = os.read(sys.stdin.fileno(), 100)
        except OSError:  # the terminal is closed
            return
        if answer.strip().lower().startswith(b"y"):
            os.kill(os.getpid(), signal.SIGINT)
        else:
            self.ask = True
            self.say("Continuing.")
