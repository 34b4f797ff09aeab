"""A limit on the total time of a request. The timeouts of HTTP clients do not limit the total time
of a request, because the timeouts restart with each byte of the answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_with_time_limit(limit_seconds: float, operation: Callable[[], T]) -> T:
    """Return the result of `operation()`. Raises TimeoutError after `limit_seconds`.

    A call that takes longer continues in its thread until it returns, or this process ends.
    """
    result_future: Future[T] = Future()

    def run_operation() -> None:
        try:
            result_future.set_result(operation())
        except BaseException as error:
            result_future.set_exception(error)

    threading.Thread(target=run_operation, daemon=True).start()
    try:
        return result_future.result(limit_seconds)
    except TimeoutError:
        if result_future.done():
            raise
        raise TimeoutError(f"it took more than {limit_seconds:g} s") from None
