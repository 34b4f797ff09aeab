"""The list of all benchmarks, with flags for the shortest possible run of each, which shows only
that the benchmark works."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# exit code of a benchmark whose figures miss a limit
MISSED_LIMIT_EXIT_CODE = 1
CLUSTER_NEED = "a cluster"
PUBLISHED_DATA_NEED = "the published data of the Fraud Detection Handbook"


@dataclass(frozen=True)
class BenchmarkProgram:
    """A benchmark.

    `smallest`: flags of the benchmark's shortest run. `slow` is True if the shortest run takes more
    than 3 seconds. `needs`: what the full benchmark requires besides this machine, or "".
    """

    name: str
    smallest: tuple[str, ...] = ()
    slow: bool = False
    needs: str = ""


SIMULATED_WORLD_URI = "simulate://7?cards=100&terminals=200&days=183&start=2018-04-01"

PROGRAMS = (
    BenchmarkProgram("benchmarks.startup", ("--runs=1",)),
    BenchmarkProgram("benchmarks.runner", slow=True),
    BenchmarkProgram("benchmarks.lint", ("--runs=1", "--tasks=20")),
    BenchmarkProgram("benchmarks.prepare", ("--cards=100", "--repeats=1"), slow=True),
    BenchmarkProgram("benchmarks.recovery", ("--runs=1", "--peers=0", "--only=killed"), slow=True),
    BenchmarkProgram("benchmarks.programs.recovery", ("--runs=1",), slow=True),
    BenchmarkProgram(
        "benchmarks.programs.overhead",
        ("--runs=1", "--seconds=3", "--save-seconds=1", "--megabytes=1"),
        slow=True,
    ),
    BenchmarkProgram("benchmarks.checkpoint", ("--runs=1", "--megabytes=8", "--quick"), slow=True),
    BenchmarkProgram("benchmarks.loop", ("--quick", "--sizes", "1", "2"), slow=True),
    BenchmarkProgram(
        "benchmarks.loading",
        ("--source=simulate://7?cards=400&terminals=200&days=183", "--rounds=2"),
        slow=True,
    ),
    BenchmarkProgram("benchmarks.scale", ("--members=8", "--runs=2"), slow=True),
    BenchmarkProgram("benchmarks.serving", ("--models", "digits", "--seconds=0.5"), slow=True),
    BenchmarkProgram("benchmarks.flood", ("--seconds=0.5",), slow=True),
    BenchmarkProgram("benchmarks.commands.plan", ("--runs=1", "--tasks=10"), slow=True),
    BenchmarkProgram(
        "benchmarks.commands.reproduce",
        # after one epoch, the model misses the minimum accuracy that the config requires for a
        # release
        ("configs/digits.yaml", "--set=train.epochs=1", "--set=gate.minimum.accuracy=0"),
        slow=True,
    ),
    BenchmarkProgram("benchmarks.release.traffic", slow=True),
    BenchmarkProgram("benchmarks.release.canary", ("--runs=1", "--kinds", "good"), slow=True),
    BenchmarkProgram("benchmarks.release.retention", ("--runs=13",), slow=True),
    BenchmarkProgram(
        "benchmarks.release.pairs", ("--pairs=1", "--minutes=2", "--rollbacks=1"), slow=True
    ),
    BenchmarkProgram(
        "benchmarks.workloads.worlds", ("--world=testers", "--set=train.epochs=1"), slow=True
    ),
    BenchmarkProgram(
        "benchmarks.workloads.handbook",
        (f"--source={SIMULATED_WORLD_URI}", "--set=train.epochs=1"),
        slow=True,
        needs=PUBLISHED_DATA_NEED,
    ),
    BenchmarkProgram(
        "benchmarks.sweep.halving",
        (f"--source={SIMULATED_WORLD_URI}", "--trials=3", "--set=train.epochs=3"),
        slow=True,
        needs=PUBLISHED_DATA_NEED,
    ),
    BenchmarkProgram(
        "benchmarks.commands.page",
        (
            "--nodes=20",
            "--log-megabytes=1",
            "--viewers=2",
            "--events=2",
            "--seconds=1",
            "--runs=1",
        ),
        slow=True,
    ),
    BenchmarkProgram(
        "benchmarks.commands.server",
        ("--queued=6", "--places=3", "--finished=12", "--requests=2"),
    ),
    BenchmarkProgram("benchmarks.clusters.overhead", needs=CLUSTER_NEED),
    BenchmarkProgram("benchmarks.clusters.harvest", needs=CLUSTER_NEED),
)


def run_benchmark(
    benchmark_program: BenchmarkProgram, command_flags: Sequence[str]
) -> list[dict[str, Any]]:
    """Run a benchmark and return its figures. Raises RuntimeError if the run fails."""
    command = [sys.executable, "-m", benchmark_program.name, "--json", *command_flags]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode not in (0, MISSED_LIMIT_EXIT_CODE) or not process.stdout:
        raise RuntimeError(
            f"{' '.join(command)} ended with exit code"
            f" {process.returncode}:\n{process.stderr[-3000:]}"
        )

    return json.loads(process.stdout)["bars"]
