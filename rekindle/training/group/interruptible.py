"""Interruptible waits for calls that may never return.

When a peer dies, a call of gloo blocks until its timeout if it has received part of a message (even
if its sockets are shut down), or if it is building a group with that peer. Calls that may block
therefore run in a separate thread. If the wait for a call is interrupted, the thread is abandoned.
"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class GroupBrokenError(RuntimeError):
    """Raised if the result of a call will never arrive, because the group is broken."""


class InterruptibleCaller:
    """Runs calls in a separate thread, one at a time. `is_aborted()` returns True if the results of
    further calls will never arrive."""

    def __init__(self, is_aborted: Callable[[], bool]) -> None:
        self.aborted = is_aborted
        self._call_queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None
        self._pending_result: Future[Any] = Future()

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Return the result of `function`, or raise its exception. Raises GroupBrokenError after
        `interrupt`, while the call may continue in its thread."""
        result_future = Future[ResultT]()
        self._pending_result = result_future
        if self.aborted():
            raise GroupBrokenError

        if not self._call_queue:
            self._call_queue = SimpleQueue()
            threading.Thread(
                target=_run_calls, args=(self._call_queue,), name="calls", daemon=True
            ).start()

        self._call_queue.put((result_future, function))
        try:
            return result_future.result()
        except GroupBrokenError:
            # the thread that serves this queue ends after the abandoned call
            self._call_queue.put(None)
            self._call_queue = None
            raise

    def interrupt(self) -> None:
        """End the current wait for a call, from another thread."""
        _resolve_future(self._pending_result, GroupBrokenError("the group is broken"))


def _run_calls(queued_calls: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    while queued_call := queued_calls.get():
        resolve_with_function(*queued_call)
        # drop the reference now, because the call may refer to a process group, whose destructor
        # closes the group's connections
        del queued_call


def resolve_with_function(result_future: Future[ResultT], function: Callable[[], ResultT]) -> None:
    """Resolve `result_future` with the result or the exception of `function`."""
    try:
        _resolve_future(result_future, function())
    except BaseException as error:
        _resolve_future(result_future, error)
    finally:
        # the traceback of an error keeps this frame alive; without `del`, this frame would keep the
        # objects alive that `function` uses
        del result_future, function


def _resolve_future(result_future: Future[ResultT], outcome: ResultT | BaseException) -> None:
    """Set the result or the exception of a future, unless the future is already resolved."""
    with suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            result_future.set_exception(outcome)
        else:
            result_future.set_result(outcome)


def release_in_background(group_references: list[object]) -> None:
    """Clear `group_references`, which holds one process group, in a daemon thread, because the
    destructor of the process group may block."""

    def release() -> None:
        # wait until no other reference is left, because the thread that drops the last reference
        # would block
        while sys.getrefcount(group_references[0]) > 2:
            time.sleep(0.05)
        group_references.clear()

    threading.Thread(target=release, name="release", daemon=True).start()
