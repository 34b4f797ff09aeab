"""A limit on the total time of a request, which HTTP clients lack: their timeouts restart with each
byte of the answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return `call()`. Raises TimeoutError after `seconds`.

    A call that takes longer continues in its thread until the call or this process ends.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:
        if result.done():
            raise
        raise TimeoutError(f"it took more than {seconds:g} s") from None
