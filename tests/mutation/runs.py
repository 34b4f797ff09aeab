"""Run the tests of mutants on copies of the tree, in forks of a process that has imported the slow
modules."""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).parents[2]
IMPORTED_MODULES = (
    "pytest",
    "hypothesis.stateful",
    "torch",
    "safetensors.torch",
    "pydantic",
    "boto3",
    "yaml",
    "psutil",
)
# limits in addition to 3 times the CPU and 10 times the wall time without mutation
EXTRA_CPU_S = 4.0
EXTRA_WALL_S = 30.0
# maximum memory of a mutant's tests in bytes
MAX_MEMORY = 4 << 30
SURVIVED = "survived"
KILLED = "killed"
TIMED_OUT = "timed out"
processes = multiprocessing.get_context("fork")


class UnmutatedTestsFail(Exception):
    """The tests fail without a mutation."""


@dataclass
class Run:
    """One forked process that tests a mutant in `tree`; `original` is the source with which the
    module is restored after the test."""

    mutant: Mutant
    tree: Path
    original: bytes
    log: Path
    process: Any
    deadline: float


class Laboratory:
    """Runs the tests of mutants in `jobs` copies of the tree in `folder`, with services that all
    tests share."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.number, self.running = 0, list[Run]()
        self.trees = [folder / f"tree{number}" for number in range(jobs)]
        self.runs = folder / "runs"
        self.runs.mkdir()
        list_command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(
            list_command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")

        for tree in self.trees:
            for name in filter(None, names):
                if (ROOT / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, tree / name)

        os.environ["PYTEST_STATE"] = str(folder / "state")
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["MKL_NUM_THREADS"] = "1"
        (folder / "state").mkdir()

        for module in IMPORTED_MODULES:
            importlib.import_module(module)

        gc.collect()
        gc.freeze()

    def measure(self, tests: tuple[str, ...]) -> tuple[float, float]:
        """Return the CPU seconds and the wall seconds of the tests without mutation. Raises
        UnmutatedTestsFail."""
        cpu = wall = 0.0

        # the first runs compile the modules and start the services
        for tree in [*self.trees, self.trees[0]]:
            began = time.monotonic()
            cpu_start = cpu_seconds()
            process, log = self._start(tree, tests, 0, measured=True)
            process.join()

            if process.exitcode:
                raise UnmutatedTestsFail(
                    f"the tests fail without a mutation:\n{log.read_text()[-3000:]}"
                )

            cpu = cpu_seconds() - cpu_start
            wall = time.monotonic() - began

        return cpu, wall

    def results(
        self, mutants: list[Mutant], tests: tuple[str, ...]
    ) -> Iterator[tuple[Mutant, str, str]]:
        """Yield each mutant with its outcome and the test that killed it."""
        cpu, wall = self.measure(tests)
        free = list(self.trees)
        running = self.running

        waiting = mutants[::-1]
        while waiting or running:
            while waiting and free:
                running.append(
                    self._start_mutant(
                        waiting.pop(),
                        free.pop(),
                        tests,
                        round(3 * cpu + EXTRA_CPU_S),
                        10 * wall + EXTRA_WALL_S,
                    )
                )

            wait(
                [run.process.sentinel for run in running],
                min(run.deadline for run in running) - time.monotonic(),
            )
            for run in [*running]:
                is_late = time.monotonic() > run.deadline
                if run.process.is_alive() and not is_late:
                    continue

                _kill_group(run.process.pid)
                run.process.join()
                running.remove(run)
                free.append(run.tree)
                (run.tree / run.mutant.path).write_bytes(run.original)
                yield (
                    run.mutant,
                    *_classify_outcome(
                        run.process.exitcode, is_late, run.log.read_text(errors="replace")
                    ),
                )

    def _start_mutant(
        self, mutant: Mutant, tree: Path, tests: tuple[str, ...], cpu: int, wall: float
    ) -> Run:
        file = tree / mutant.path
        original = file.read_bytes()
        file.write_text(mutant.text)
        # set another modification time; otherwise Python would use the old compiled module, since
        # it compares modification times in whole seconds
        os.utime(file, (self.number, self.number))
        process, log = self._start(tree, tests, cpu)
        return Run(mutant, tree, original, log, process, time.monotonic() + wall)

    def _start(
        self, tree: Path, tests: tuple[str, ...], cpu: int, measured: bool = False
    ) -> tuple[Any, Path]:
        self.number += 1
        log = self.runs / f"{self.number}.log"
        process = processes.Process(
            target=_run_tests, args=(tree, self.runs, self.number, tests, cpu, log, measured)
        )
        process.start()
        return process, log

    def close(self) -> None:
        """Stop the remaining runs and the services."""
        from rekindle.local.services.services import Services

        for run in self.running:
            _kill_group(run.process.pid)
        home = self.runs / "home"
        if home.exists():
            Services(home, {}).down()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _classify_outcome(code: int, is_late: bool, output: str) -> tuple[str, str]:
    if is_late or code in (-signal.SIGXCPU, -signal.SIGKILL):
        return TIMED_OUT, ""
    if code in (4, 5):
        raise RuntimeError(f"pytest ran no tests:\n{output[-3000:]}")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if code == 0:
        return (SURVIVED, "")
    return (KILLED, failed[0].split(" ")[1] if failed else f"exit code {code}")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        # the CPU time includes the processes that the tests have started
        os.killpg(pid, signal.SIGKILL)


def _run_tests(
    tree: Path,
    runs: Path,
    run_number: int,
    tests: tuple[str, ...],
    cpu: int,
    log: Path,
    measured: bool,
) -> None:
    """Run the tests of `tree` in the forked process, and exit with the exit code of pytest."""
    import hypothesis
    import pytest

    os.setpgid(0, 0)

    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)

    if cpu:
        used = round(cpu_seconds()) + cpu
        resource.setrlimit(resource.RLIMIT_CPU, (used, used + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))

    os.chdir(tree)
    # each run uses a bucket of its own, but all runs share the services
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["PYTEST_XDIST_WORKER"] = f"m{run_number}"

    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("tests", "argolocal", "rekindle")
    ]:
        del sys.modules[name]

    importlib.invalidate_caches()
    # hypothesis generates reproducible examples, and does not simplify them, because the first
    # failure is enough
    generated = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutation", phases=generated, database=None, derandomize=True, deadline=None
    )

    options = [
        "-x",
        "-q",
        "-rfE",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--rootdir={tree}",
    ]

    options.append("--hypothesis-profile=mutation")
    options += [f"--basetemp={runs / f'm{run_number}'}", *tests]
    code = pytest.main(options, plugins=[_Order(runs / f"{abs(hash(tests))}.json", measured)])
    sys.stdout.flush()
    os._exit(code)


class _Order:
    """Run the tests that are fastest without mutation first."""

    def __init__(self, file: Path, measured: bool) -> None:
        self.file, self.measured, self.seconds = file, measured, dict[str, float]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        seconds = {} if self.measured else json.loads(self.file.read_text())
        items.sort(key=lambda test_item: seconds.get(test_item.nodeid, 0.0))

    def pytest_sessionfinish(self) -> None:
        if self.measured:
            self.file.write_text(json.dumps(self.seconds))
