"""Run the cases of one target; seed and number determine a case."""

import contextlib
import io
import random
import resource
import shutil
import signal
import time
import traceback
from dataclasses import dataclass
from typing import Any

from tests.fuzz.targets import TARGETS, scratch

CASE_TIMEOUT_S = 10.0
MAX_GROWTH_MB = 200.0  # maximum growth of a process


@dataclass(frozen=True)
class Result:
    """Result of a target without failures; `grown`: growth of the process in MB."""

    name: str
    cases: int = 0
    seconds: float = 0.0
    grown: float = 0.0

    def __add__(self, other: "Result") -> "Result":
        seconds = self.seconds + other.seconds
        grown = max(self.grown, other.grown)
        return Result(self.name, self.cases + other.cases, seconds, grown)


def run(
    name: str,
    seed: int,
    first: int = 0,
    count: int = 1 << 62,
    seconds: float = 1e9,
    deadline: float = 1e18,
) -> Result:
    """Run cases for `seconds`, at most until `deadline`, and at least one. A failure names the
    command to repeat it."""

    def fail_slow_case(*_: Any) -> None:
        raise AssertionError(f"the case takes longer than {CASE_TIMEOUT_S:g} s")

    folder = scratch()
    memory = 0.0
    number = first
    began = time.monotonic()
    signal.signal(signal.SIGALRM, fail_slow_case)
    deadline = min(began + seconds, deadline)

    try:
        case = TARGETS[name](folder)
        while number < first + count and (number == first or time.monotonic() < deadline):
            signal.setitimer(signal.ITIMER_REAL, CASE_TIMEOUT_S)
            log = io.StringIO()

            try:
                with contextlib.redirect_stderr(log):
                    case(random.Random(f"{seed}/{number}"))
            except BaseException:
                again = f"python -m tests.fuzz --only '{name}' --seed {seed} --case {number}"
                raise AssertionError(
                    f"{traceback.format_exc()}{log.getvalue()}again: {again}"
                ) from None

            assert "Traceback" not in log.getvalue(), log.getvalue()
            number += 1
            if number - first == 500:
                memory = _memory_mb()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(folder, ignore_errors=True)

    grown = _memory_mb() - (memory or _memory_mb())
    assert grown < MAX_GROWTH_MB, f"{name} grew by {grown:.0f} MB in {number - first} cases"
    return Result(name, number - first, time.monotonic() - began, grown)


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
