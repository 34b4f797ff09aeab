"""Measure the overhead of the local runner, `rekindle run --manifest`, for 4 and for 100 trivial
Python steps, and for 1,000 containers that do nothing.

    python -m benchmarks.runner [--json]

Figures are medians of the CPU seconds of the command and all its children, because CPU time does
not depend on other load. For comparison, the benchmark also measures the same Python processes
without a runner. The benchmark also measures the memory of the runner's state machine without
processes, and its best rate of five runs.
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

from benchmarks.bars import Bar, make_bar, make_parser, report

SAMPLE_OUTPUTS = {"parameters": [{"name": "out", "value": "1"}]}
STEP_SOURCE = (
    'open("{{outputs.parameters.out.path}}", "w").write(str(int("{{inputs.parameters.x}}") + 1))'
)


def chain(step_count: int) -> dict[str, Any]:
    """Return a workflow of `step_count` steps, each of which increments a number."""
    task_documents = []
    for step_index in range(step_count):
        input_value = (
            f"{{{{tasks.t{step_index - 1}.outputs.parameters.out}}}}" if step_index else "0"
        )
        task_arguments = {"parameters": [{"name": "x", "value": input_value}]}
        task_documents.append(
            {"name": f"t{step_index}", "template": "add", "arguments": task_arguments}
            | ({"depends": f"t{step_index - 1}"} if step_index else {})
        )

    output_parameters = {"parameters": [{"name": "out", "valueFrom": {"path": "/tmp/out"}}]}
    script_template = {"image": "python:3.11", "command": ["python", "-I"], "source": STEP_SOURCE}

    template_documents = [
        {"name": "main", "dag": {"tasks": task_documents}},
        {
            "name": "add",
            "inputs": {"parameters": [{"name": "x"}]},
            "outputs": output_parameters,
            "script": script_template,
        },
    ]

    workflow_spec = {"entrypoint": "main", "templates": template_documents}

    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "w-"},
        "spec": workflow_spec,
    }


def measure_child_cpu_seconds(measured_call: Callable[[], Any]) -> float:
    """Return the CPU seconds of the children that `measured_call` starts and waits for."""
    start_times = os.times()
    measured_call()
    end_times = os.times()
    return (
        end_times.children_user
        + end_times.children_system
        - start_times.children_user
        - start_times.children_system
    )


def loop(container_count: int) -> dict[str, Any]:
    """Return a workflow of `container_count` containers that do nothing, two at a time."""
    task_documents = [
        {"name": "t", "template": "nothing", "withSequence": {"count": str(container_count)}}
    ]
    empty_template = {"name": "nothing", "container": {"image": "busybox", "command": ["true"]}}
    loop_workflow = chain(1)
    loop_workflow["spec"] = {
        "entrypoint": "main",
        "parallelism": 2,
        "templates": [{"name": "main", "dag": {"tasks": task_documents}}, empty_template],
    }
    return loop_workflow


def run(working_folder: Path, workflow_document: dict[str, Any]) -> None:
    """Run a workflow with the command `rekindle run --manifest`."""
    manifest_path = working_folder / "manifest.json"
    manifest_path.write_text(json.dumps(workflow_document))

    run_command = [
        str(Path(sys.executable).with_name("rekindle")),
        "run",
        "--manifest",
        str(manifest_path),
        "-o",
        "json",
    ]

    environment = {**os.environ, "REKINDLE_HOME": str(working_folder / "home")}
    completed_process = subprocess.run(
        run_command, capture_output=True, text=True, env=environment, check=True
    )
    assert json.loads(completed_process.stdout)["phase"] == "Succeeded"


def run_bare_programs(working_folder: Path, step_count: int) -> None:
    """Run the programs of `step_count` steps in sequence, without a runner."""
    for step_index in range(step_count):
        program_text = f'open("{working_folder}/out", "w").write(str(int("{step_index}") + 1))'
        subprocess.run([sys.executable, "-I", "-c", program_text], check=True)


def measure_process_cpu(process_count: int) -> float:
    """Return the CPU seconds of `process_count` processes that do nothing."""
    return measure_child_cpu_seconds(
        lambda: [subprocess.run(["true"], check=True) for _ in range(process_count)]
    )


def transitions(workflow_spec: dict[str, Any], pod_count: int) -> float:
    """Return how many changes of pod phases the runner's state machine processes per second, for
    `pod_count` pods, two at a time."""
    from argolocal.engine.nodes import PodEnded, PodStarted, StartPod
    from argolocal.engine.scheduler import Scheduler
    from argolocal.manifest.read import build_workflow

    manifest = {
        "kind": "Workflow",
        "metadata": {"name": "w"},
        "spec": {**workflow_spec, "parallelism": 2},
    }
    scheduler = Scheduler(build_workflow(manifest))
    pending_events = []
    start_cpu_seconds = time.process_time()

    while not scheduler.done:
        start_actions = [
            action
            for action in scheduler.advance(time.time(), pending_events)
            if isinstance(action, StartPod)
        ]
        pending_events = [
            pod_event
            for start_action in start_actions
            for pod_event in (
                PodStarted(start_action.id),
                PodEnded(start_action.id, "Succeeded", "", SAMPLE_OUTPUTS),
            )
        ]

    assert scheduler.status["phase"] == "Succeeded"
    # each pod has three phases: pending, running, completed
    return 3 * pod_count / (time.process_time() - start_cpu_seconds)


def measure_peak_memory_mb(node_count: int) -> float:
    """Return the peak memory in MB of a process that schedules a workflow of `node_count` nodes."""
    program_text = (
        "import resource; from benchmarks.runner import loop,"
        f" transitions\ntransitions(loop({node_count})['spec'], {node_count});"
        " print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    return float(
        subprocess.run(
            [sys.executable, "-c", program_text], capture_output=True, text=True, check=True
        ).stdout
    )


def find_best_rate(workflow_document: dict[str, Any]) -> float:
    """Return the best rate (see `transitions`) of five runs of the state machine, for a workflow of
    1,000 pods."""
    return max(transitions(workflow_document["spec"], 1000) for _ in range(5))


def measure_runner() -> list[Bar]:
    """Return the CPU seconds of the runner per step, and the rate and memory of its state
    machine."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        working_folder = Path(temporary_folder)
        four_step_cpu_seconds = median(
            measure_child_cpu_seconds(lambda: run(working_folder, chain(4))) for _ in range(5)
        )
        hundred_step_cpu_seconds = median(
            measure_child_cpu_seconds(lambda: run(working_folder, chain(100))) for _ in range(3)
        )
        container_cpu_seconds = (
            measure_child_cpu_seconds(lambda: run(working_folder, loop(1000)))
            - measure_process_cpu(1000)
        ) / 1000
        journal_bytes = (
            max(
                journal_path.stat().st_size
                for journal_path in working_folder.glob("home/runs/*/journal.jsonl")
            )
            / 1000
        )
        bare_step_cpu_seconds = (
            median(
                measure_child_cpu_seconds(lambda: run_bare_programs(working_folder, 100))
                for _ in range(3)
            )
            / 100
        )

    step_cpu_seconds = (hundred_step_cpu_seconds - four_step_cpu_seconds) / 96

    return [
        make_bar("workflow of 4 steps", four_step_cpu_seconds, "CPU s", 1.0),
        make_bar("one additional step", step_cpu_seconds, "CPU s", 0.1),
        make_bar(
            "one additional step, minus the same process without a runner",
            step_cpu_seconds - bare_step_cpu_seconds,
            "CPU s",
            0.015,
        ),
        make_bar(
            "one additional step, relative to the same process without a runner",
            step_cpu_seconds / bare_step_cpu_seconds,
            "times",
        ),
        make_bar(
            "one of 1,000 containers that do nothing, minus its process",
            container_cpu_seconds,
            "CPU s",
            0.015,
        ),
        make_bar("journal per container", journal_bytes, "bytes"),
        make_bar(
            "state machine alone, for a loop of 1,000 containers",
            find_best_rate(loop(1000)),
            "transitions/s",
            20_000,
            "more",
        ),
        make_bar(
            "state machine alone, for a chain of 1,000 steps",
            find_best_rate(chain(1000)),
            "transitions/s",
        ),
        make_bar(
            "memory of the state machine with 10,000 nodes",
            measure_peak_memory_mb(10_000),
            "MB",
            200,
        ),
    ]


def main() -> int:
    return report(measure_runner(), as_json=make_parser(__doc__).parse_args().json)


if __name__ == "__main__":
    sys.exit(main())
