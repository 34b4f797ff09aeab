"""Wait for a condition, with a deadline and a message. Tests do not wait in other ways."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    what: str,
    look: Callable[[], T | None],
    seconds: float = 60,
    pause: float = 0.02,
    evidence: Callable[[], object] = lambda: "",
) -> T:
    """Return the first true result of `look`. Fails after `seconds`, with `what` it waited for and
    the evidence."""
    end = time.monotonic() + seconds
    while not (result := look()):
        assert time.monotonic() < end, f"waited {seconds:g} s for: {what}\n{evidence()}"
        time.sleep(pause)
    return result
