"""Wait for a condition, with a deadline and a message. Tests wait only with the functions of this
module."""

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
    """Call `look` again and again, and return its first true result. The test fails after `seconds`
    seconds with a message that contains `what` it waited for and the evidence."""
    end = time.monotonic() + seconds
    while not (result := look()):
        assert time.monotonic() < end, f"waited {seconds:g} s for: {what}\n{evidence()}"
        time.sleep(pause)
    return result
