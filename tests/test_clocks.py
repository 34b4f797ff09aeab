"""Tests neither sleep nor assert on clocks, because both are unreliable on a busy machine.
`tests.waiting.until` waits for a condition, `tests.effort.calls` counts the cost of code, and
`benchmarks/` measures seconds.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CLOCKS = {
    "sleep",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "thread_time",
    "Timer",
}
FIGURES = "a command that prints durations"
ROLLBACKS = "a test that prints the time of a rollback"
FAULTS = "faults start at seeded times and have a duration"
STAMPS = "events are recorded with their time"
# file → (calls, reason)
EXCEPTIONS = {
    "waiting.py": ({"monotonic", "sleep"}, "this is the wait"),
    "chaos/__main__.py": ({"monotonic"}, FIGURES),
    "chaos/execution.py": ({"monotonic", "sleep", "time.time"}, FAULTS),
    "chaos/faults.py": ({"monotonic", "sleep"}, FAULTS),
    "chaos/stage.py": ({"monotonic"}, FIGURES),
    "chaos/watch.py": ({"time.time"}, STAMPS),
    "cluster/faults.py": ({"time.time"}, STAMPS),
    "cluster/kube.py": ({"time.time"}, STAMPS),
    "cluster/outage.py": ({"sleep", "time.time"}, FAULTS),
    "cluster/test_demo.py": ({"monotonic"}, ROLLBACKS),
    "cluster/test_pairs.py": ({"sleep"}, FAULTS),
    "cluster/test_traffic.py": ({"time.time"}, ROLLBACKS),
    "conformance/argo.py": ({"monotonic"}, "a workflow that Argo does not end has a deadline"),
    "conformance/differ.py": (
        {"monotonic", "sleep"},
        f"{FIGURES}, and looks at the cluster once a second",
    ),
    "conformance/examples.py": ({"monotonic"}, FIGURES),
    "fuzz/__main__.py": ({"monotonic"}, FIGURES),
    "fuzz/run.py": ({"monotonic"}, "a command that fuzzes for a given time"),
    "mutation/runs.py": ({"monotonic"}, "a mutant that never ends has a deadline"),
    "rekindle/cache/test_entries.py": ({"time.time"}, "entries of known ages"),
    "rekindle/training/checkpoint/test_manager.py": (
        {"monotonic", "sleep"},
        "a simulated clock; the manager cannot measure more time than has passed",
    ),
    "argolocal/controllers/test_kept_connections.py": (
        {"sleep"},
        "clients that are silent for a while",
    ),
    "argolocal/runner/kills.py": (
        {"monotonic", "sleep"},
        f"{FAULTS}, as shares of an undisturbed run; its server is slow",
    ),
    "rekindle/cluster/test_backfill.py": ({"sleep"}, FAULTS),
    "rekindle/serving/echo.py": ({"sleep"}, "a model with the latency that a request sets"),
    "rekindle/serving/interrupted/disturbance.py": ({"Timer"}, FAULTS),
    "rekindle/training/toy.py": (
        {"sleep", "time.time"},
        f"a training with a configurable speed; {STAMPS}",
    ),
    "rekindle/operations/test_backfill.py": (
        {"monotonic", "sleep"},
        f"{FAULTS}, as shares of an undisturbed run",
    ),
}


def calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each call of a clock or a sleep, and its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in CLOCKS:
                yield name, node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr="time")):
                yield "time.time", node.lineno


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("time.sleep(1)", "sleep"),
        ("await asyncio.sleep(0.1)", "sleep"),
        ("assert perf_counter() - began < 2", "perf_counter"),
        ("while time.monotonic() < end: pass", "monotonic"),
        ("until = time.time() + 5", "time.time"),
        ("threading.Timer(0.1, kill).start()", "Timer"),
    ],
)
def test_a_sleep_or_the_use_of_a_clock_in_a_test_is_found(source: str, name: str) -> None:
    assert [call for call, _ in calls(ast.parse(source))] == [name]


def test_no_test_sleeps_or_reads_a_clock() -> None:
    lines = []
    for path in FOLDER.rglob("*.py"):
        file = str(path.relative_to(FOLDER))
        allowed, _ = EXCEPTIONS.get(file, (set[str](), ""))
        lines += [
            f"{file}:{line}: {name}"
            for name, line in calls(ast.parse(path.read_text()))
            if name not in allowed
        ]
    assert not lines, "\n".join(
        [*lines, "wait with tests.waiting.until, count with tests.effort.calls, or see benchmarks/"]
    )


def test_every_allowed_clock_is_used() -> None:
    used = {
        file: {name for name, _ in calls(ast.parse((FOLDER / file).read_text()))}
        for file in EXCEPTIONS
    }
    assert used == {file: names for file, (names, _) in EXCEPTIONS.items()}
