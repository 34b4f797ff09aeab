"""Run the fuzz cases of one target, which is a parser of untrusted input. The seed and the number
of a case determine the input of the case."""

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

from tests.fuzz.targets import TARGETS, create_scratch_folder

CASE_TIMEOUT_S = 10.0
# maximum growth of the memory of a process
MAX_GROWTH_MB = 200.0


@dataclass(frozen=True)
class Result:
    """The result of a target without failed cases; `growth_mb`: growth of the process in MB."""

    name: str
    cases: int = 0
    seconds: float = 0.0
    growth_mb: float = 0.0

    def __add__(self, other: "Result") -> "Result":
        seconds = self.seconds + other.seconds
        growth_mb = max(self.growth_mb, other.growth_mb)
        return Result(self.name, self.cases + other.cases, seconds, growth_mb)


def run(
    name: str,
    seed: int,
    first_case: int = 0,
    count: int = 1 << 62,
    seconds: float = 1e9,
    deadline: float = 1e18,
) -> Result:
    """Run cases of a target for `seconds` seconds, but at most until `deadline`, and at least one
    case. The text of a failure contains the command that repeats it."""

    def fail_slow_case(*_: Any) -> None:
        raise AssertionError(f"the case takes longer than {CASE_TIMEOUT_S:g} s")

    folder = create_scratch_folder()
    early_memory_mb = 0.0
    case_number = first_case
    start_seconds = time.monotonic()
    signal.signal(signal.SIGALRM, fail_slow_case)
    deadline = min(start_seconds + seconds, deadline)

    try:
        case = TARGETS[name](folder)
        while case_number < first_case + count and (
            case_number == first_case or time.monotonic() < deadline
        ):
            signal.setitimer(signal.ITIMER_REAL, CASE_TIMEOUT_S)
            log = io.StringIO()

            try:
                with contextlib.redirect_stderr(log):
                    case(random.Random(f"{seed}/{case_number}"))
            except BaseException:
                repeat_command = (
                    f"python -m tests.fuzz --only '{name}' --seed {seed} --case {case_number}"
                )
                raise AssertionError(
                    f"{traceback.format_exc()}{log.getvalue()}again: {repeat_command}"
                ) from None

            assert "Traceback" not in log.getvalue(), log.getvalue()
            case_number += 1
            if case_number - first_case == 500:
                early_memory_mb = _memory_mb()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(folder, ignore_errors=True)

    growth_mb = _memory_mb() - (early_memory_mb or _memory_mb())
    assert growth_mb < MAX_GROWTH_MB, (
        f"{name} grew by {growth_mb:.0f} MB in {case_number - first_case} cases"
    )
    return Result(name, case_number - first_case, time.monotonic() - start_seconds, growth_mb)


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
