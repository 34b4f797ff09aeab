"""Interruptible waits for calls that may never return.

When a peer dies, a call of gloo blocks until its timeout if it has received part of a message (even
if its sockets are shut down), or if it is building a group with that peer. So calls that may block
run in a separate thread. If the wait is interrupted, the thread is abandoned.
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
    """The result of a call will never arrive, because the group is broken."""


class InterruptibleCaller:
    """Runs calls in a separate thread, one at a time. `aborted()` returns True if the call's result
    will never arrive."""

    def __init__(self, aborted: Callable[[], bool]) -> None:
        self.aborted = aborted
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None
        self._pending_result: Future[Any] = Future()

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, or raise its exception. Raises GroupBroken after
        `interrupt`, while the call may continue in its thread."""
        self._pending_result = future = Future[T]()
        if self.aborted():
            raise GroupBroken

        if not self._calls:
            self._calls = SimpleQueue()
            threading.Thread(
                target=_run_calls, args=(self._calls,), name="calls", daemon=True
            ).start()

        self._calls.put((future, call))
        try:
            return future.result()
        except GroupBroken:
            self._calls.put(None)  # the thread that serves this queue ends after the abandoned call
            self._calls = None
            raise

    def interrupt(self) -> None:
        """End the current wait, from another thread."""
        _resolve_future(self._pending_result, GroupBroken("the group is broken"))


def _run_calls(calls: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    while item := calls.get():
        resolve_with_call(*item)
        del item  # the item may reference a group, whose destructor closes the group's connections


def resolve_with_call(future: Future[T], call: Callable[[], T]) -> None:
    """Resolve `future` with the result or the exception of `call`."""
    try:
        _resolve_future(future, call())
    except BaseException as error:
        _resolve_future(future, error)
    finally:
        # the traceback of an error keeps this frame alive; without `del`, this frame would keep the
        # objects alive that `call` uses
        del future, call


def _resolve_future(future: Future[T], outcome: T | BaseException) -> None:
    """Set the result or the exception of a future, unless it already has one."""
    with suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def release_in_background(references: list[object]) -> None:
    """Clear `references`, which holds one process group, in a daemon thread: the group's destructor
    may block."""

    def release() -> None:
        # wait until no other reference is left: the thread that drops the last one would block
        while sys.getrefcount(references[0]) > 2:
            time.sleep(0.05)
        references.clear()

    threading.Thread(target=release, name="release", daemon=True).start()
