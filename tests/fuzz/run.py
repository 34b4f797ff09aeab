"""Runs the cases of one target: the same seed and number are the same case."""

import contextlib
import io
import random
import resource
import shutil
import signal
import time
import traceback
from typing import Any

from tests.fuzz.targets import TARGETS, scratch

HANGS = 10.0  # seconds
GROWTH = 200.0  # MB that a process may grow by


def run(name: str, seed: int, first: int = 0, count: int = 1 << 62, seconds: float = 1e9) -> tuple[int, float]:
    """The number of cases, and by how many MB the process grew. Raises AssertionError with the command of a fault."""

    def hangs(*_: Any) -> None:
        raise AssertionError(f"it takes longer than {HANGS:g} s")

    folder = scratch()
    before, number = 0.0, first
    signal.signal(signal.SIGALRM, hangs)
    until = time.monotonic() + seconds
    try:
        case = TARGETS[name](folder)
        while number < first + count and time.monotonic() < until:
            signal.setitimer(signal.ITIMER_REAL, HANGS)
            log = io.StringIO()
            try:
                with contextlib.redirect_stderr(log):
                    case(random.Random(f"{seed}/{number}"))
            except BaseException:
                again = f"python -m tests.fuzz --only '{name}' --seed {seed} --case {number}"
                raise AssertionError(f"{traceback.format_exc()}{log.getvalue()}again: {again}") from None
            assert "Traceback" not in log.getvalue(), log.getvalue()
            number += 1
            if number - first == 500:
                before = _memory()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(folder, ignore_errors=True)
    grown = _memory() - (before or _memory())
    assert grown < GROWTH, f"{name} grew by {grown:.0f} MB in {number - first} cases"
    return number - first, grown


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
