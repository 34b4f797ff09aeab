"""Run the cases of one target; seed and number determine a case."""

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

CASE_TIMEOUT_S = 10.0
MAX_GROWTH_MB = 200.0  # maximum growth of a process


def run(name: str, seed: int, first: int = 0, count: int = 1 << 62, seconds: float = 1e9) -> tuple[int, float]:
    """Return the number of cases and the growth of the process in MB. A failure names the command to repeat it."""

    def fail_slow_case(*_: Any) -> None:
        raise AssertionError(f"the case takes longer than {CASE_TIMEOUT_S:g} s")

    folder = scratch()
    memory, number = 0.0, first
    signal.signal(signal.SIGALRM, fail_slow_case)
    deadline = time.monotonic() + seconds
    try:
        case = TARGETS[name](folder)
        while number < first + count and time.monotonic() < deadline:
            signal.setitimer(signal.ITIMER_REAL, CASE_TIMEOUT_S)
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
                memory = _memory_mb()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(folder, ignore_errors=True)
    grown = _memory_mb() - (memory or _memory_mb())
    assert grown < MAX_GROWTH_MB, f"{name} grew by {grown:.0f} MB in {number - first} cases"
    return number - first, grown


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
