"""Measure the overhead of the local runner, `rekindle run --manifest`, for 4 and for 100 trivial
Python steps, and for 1,000 containers that do nothing.

    python -m benchmarks.runner [--json]

Figures are medians of the CPU seconds of the command and all its children, which do not depend on
other load. For comparison, the benchmark also measures the same Python processes without a runner.
For the state machine of the runner without processes, it measures the memory and the best rate of
five runs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bars import Bar, bar, parser, report

OUT = {"parameters": [{"name": "out", "value": "1"}]}
STEP = 'open("{{outputs.parameters.out.path}}", "w").write(str(int("{{inputs.parameters.x}}") + 1))'


def chain(count: int) -> dict[str, Any]:
    """Return a workflow of `count` steps, each of which increments a number."""
    tasks = []
    for i in range(count):
        value = f"{{{{tasks.t{i - 1}.outputs.parameters.out}}}}" if i else "0"
        arguments = {"parameters": [{"name": "x", "value": value}]}
        tasks.append(
            {"name": f"t{i}", "template": "add", "arguments": arguments}
            | ({"depends": f"t{i - 1}"} if i else {})
        )

    out = {"parameters": [{"name": "out", "valueFrom": {"path": "/tmp/out"}}]}
    script = {"image": "python:3.11", "command": ["python", "-I"], "source": STEP}

    templates = [
        {"name": "main", "dag": {"tasks": tasks}},
        {
            "name": "add",
            "inputs": {"parameters": [{"name": "x"}]},
            "outputs": out,
            "script": script,
        },
    ]

    spec = {"entrypoint": "main", "templates": templates}

    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "w-"},
        "spec": spec,
    }


def cpu(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of the children that `call` starts and waits for."""
    start = os.times()
    call()
    end = os.times()
    return end.children_user + end.children_system - start.children_user - start.children_system


def loop(count: int) -> dict[str, Any]:
    """Return a workflow of `count` containers that do nothing, two at a time."""
    tasks = [{"name": "t", "template": "nothing", "withSequence": {"count": str(count)}}]
    nothing = {"name": "nothing", "container": {"image": "busybox", "command": ["true"]}}
    workflow = chain(1)
    workflow["spec"] = {
        "entrypoint": "main",
        "parallelism": 2,
        "templates": [{"name": "main", "dag": {"tasks": tasks}}, nothing],
    }
    return workflow


def run(folder: Path, workflow: dict[str, Any]) -> None:
    """Run a workflow by `rekindle run --manifest`."""
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(workflow))

    command = [
        str(Path(sys.executable).with_name("rekindle")),
        "run",
        "--manifest",
        str(manifest),
        "-o",
        "json",
    ]

    environment = {**os.environ, "REKINDLE_HOME": str(folder / "home")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(result.stdout)["phase"] == "Succeeded"


def bare(folder: Path, count: int) -> None:
    """Run the programs of `count` steps in sequence, without a runner."""
    for i in range(count):
        source = f'open("{folder}/out", "w").write(str(int("{i}") + 1))'
        subprocess.run([sys.executable, "-I", "-c", source], check=True)


def processes(count: int) -> float:
    """Return the CPU seconds of `count` processes that do nothing."""
    return cpu(lambda: [subprocess.run(["true"], check=True) for _ in range(count)])


def transitions(spec: dict[str, Any], count: int) -> float:
    """Return how many pod phase changes per second the state machine processes, for `count` pods,
    two at a time."""
    from argolocal.engine.nodes import PodEnded, PodStarted, Start
    from argolocal.engine.scheduler import Scheduler
    from argolocal.manifest.read import workflow

    manifest = {"kind": "Workflow", "metadata": {"name": "w"}, "spec": {**spec, "parallelism": 2}}
    scheduler = Scheduler(workflow(manifest))
    events = []
    began = time.process_time()

    while not scheduler.done:
        starts = [
            action for action in scheduler.advance(time.time(), events) if isinstance(action, Start)
        ]
        events = [
            event
            for start in starts
            for event in (PodStarted(start.id), PodEnded(start.id, "Succeeded", "", OUT))
        ]

    assert scheduler.status["phase"] == "Succeeded"
    # each pod has three phases: pending, running, completed
    return 3 * count / (time.process_time() - began)


def memory(count: int) -> float:
    """Return the peak memory in MB of a process that schedules a workflow of `count` nodes."""
    code = (
        "import resource; from benchmarks.runner import loop,"
        f" transitions\ntransitions(loop({count})['spec'], {count});"
        " print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    return float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )


def best(workflow: dict[str, Any]) -> float:
    """Return the best rate (see `transitions`) of five runs of the state machine, for a workflow of
    1,000 pods."""
    return max(transitions(workflow["spec"], 1000) for _ in range(5))


def measure() -> list[Bar]:
    """Return the CPU seconds of the runner per step, and the rate and memory of its state
    machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        four = median(cpu(lambda: run(folder, chain(4))) for _ in range(5))
        hundred = median(cpu(lambda: run(folder, chain(100))) for _ in range(3))
        trivial = (cpu(lambda: run(folder, loop(1000))) - processes(1000)) / 1000
        journal = (
            max(path.stat().st_size for path in folder.glob("home/runs/*/journal.jsonl")) / 1000
        )
        floor = median(cpu(lambda: bare(folder, 100)) for _ in range(3)) / 100

    step = (hundred - four) / 96

    return [
        bar("workflow of 4 steps", four, "CPU s", 1.0),
        bar("one additional step", step, "CPU s", 0.1),
        bar(
            "one additional step, minus the same process without a runner",
            step - floor,
            "CPU s",
            0.015,
        ),
        bar(
            "one additional step, relative to the same process without a runner",
            step / floor,
            "times",
        ),
        bar("one of 1,000 containers that do nothing, minus its process", trivial, "CPU s", 0.015),
        bar("journal per container", journal, "bytes"),
        bar(
            "state machine alone, for a loop of 1,000 containers",
            best(loop(1000)),
            "transitions/s",
            20_000,
            "more",
        ),
        bar("state machine alone, for a chain of 1,000 steps", best(chain(1000)), "transitions/s"),
        bar("memory of the state machine with 10,000 nodes", memory(10_000), "MB", 200),
    ]


def main() -> int:
    return report(measure(), as_json=parser(__doc__).parse_args().json)


if __name__ == "__main__":
    sys.exit(main())
