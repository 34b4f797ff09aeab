"""Calls that may never return, and how not to wait for them.

gloo waits until its time-out for what it has received in part when the sender dies, whatever is done to its sockets,
and for a member that dies while a group is built. So such a call is made in a thread of its own: who waits for it can
be told to stop, and the thread is left behind.
"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Broken(RuntimeError):
    """What was waited for will not come: the group is over."""


class Caller:
    """Makes one call at a time; `over` says whether it is still worth waiting for."""

    def __init__(self, over: Callable[[], bool]) -> None:
        self.over = over
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None
        self._pending: Future[Any] = Future()

    def run(self, call: Callable[[], T]) -> T:
        """What `call` gives or raises. Raises Broken as soon as `interrupt` is called, whatever becomes of the call."""
        self._pending = future = Future[T]()
        if self.over():
            raise Broken
        if not self._calls:
            self._calls = SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="calls", daemon=True).start()
        self._calls.put((future, call))
        try:
            return future.result()
        except Broken:
            self._calls.put(None)  # its thread ends when the call does
            self._calls = None
            raise

    def interrupt(self) -> None:
        """From another thread: what is being waited for is over."""
        _settle(self._pending, Broken("told that the group is broken"))


def _serve(calls: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    while item := calls.get():
        future, call = item
        try:
            _settle(future, call())
        except BaseException as error:
            _settle(future, error)
        del item, future, call  # they may hold a group, whose end closes its connections


def _settle(future: Future[Any], outcome: Any) -> None:
    """What became of it; whoever comes first decides."""
    with suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def bury(held: list[Any]) -> None:
    """Let go of the one object in `held` in a thread: the end of a group waits for its own threads, maybe for long."""

    def wait() -> None:
        while sys.getrefcount(held[0]) > 2:  # or whoever lets go last would do the waiting
            time.sleep(0.05)
        held.clear()

    threading.Thread(target=wait, name="burial", daemon=True).start()
