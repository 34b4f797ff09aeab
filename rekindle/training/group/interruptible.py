"""Interruptible waits for calls that may never return.

When a peer dies, gloo blocks until its timeout if it has received part of a message (shutting down
its sockets does not help), or if the peer was a member of a group that is being built. So such a
call runs in a separate thread. The wait for this thread can be interrupted; then the thread is
abandoned.
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


class GroupBroken(RuntimeError):
    """The result will never arrive: the group is broken."""


class InterruptibleCaller:
    """Runs one call at a time; `aborted` returns True if the call's result will never arrive."""

    def __init__(self, aborted: Callable[[], bool]) -> None:
        self.aborted = aborted
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None
        self._pending_result: Future[Any] = Future()

    def run(self, call: Callable[[], T]) -> T:
        """Return or raise the result of `call`. Raises GroupBroken after `interrupt`; the call may
        continue."""
        self._pending_result = future = Future[T]()
        if self.aborted():
            raise GroupBroken

        if not self._calls:
            self._calls = SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="calls", daemon=True).start()

        self._calls.put((future, call))
        try:
            return future.result()
        except GroupBroken:
            self._calls.put(None)  # the thread that serves this queue ends after the abandoned call
            self._calls = None
            raise

    def interrupt(self) -> None:
        """End the current wait, from another thread."""
        _resolve(self._pending_result, GroupBroken("the group is broken"))


def _serve(calls: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    while item := calls.get():
        fulfil(*item)
        del item  # the item may reference a group, whose destructor closes the group's connections


def fulfil(future: Future[T], call: Callable[[], T]) -> None:
    """Resolve `future` with the result or the exception of `call`."""
    try:
        _resolve(future, call())
    except BaseException as error:
        _resolve(future, error)
    finally:
        # the traceback of an error keeps this frame alive, and so would keep the references of
        # `call`
        del future, call


def _resolve(future: Future[Any], outcome: Any) -> None:
    """Set the result or exception; the first outcome wins."""
    with suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def release_in_background(references: list[Any]) -> None:
    """Drop the only item of `references` on a daemon thread: a process group's destructor may block
    on its threads."""

    def release() -> None:
        # wait for other references: the thread that drops the last one would block
        while sys.getrefcount(references[0]) > 2:
            time.sleep(0.05)
        references.clear()

    threading.Thread(target=release, name="release", daemon=True).start()
