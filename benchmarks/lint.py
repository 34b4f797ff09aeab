"""Measure the cost of rendering and linting a large pipeline: the CPU seconds for 500 tasks, and
how the cost per task grows in larger pipelines.

    python -m benchmarks.lint [--json] [--runs 5] [--tasks 500]

One pipeline is a chain with a branch, written with Hera: each task reads an output of its
predecessor and an output of the first task, and every tenth task applies a PyTorchJob. A second
pipeline has the same number of blocks, every tenth of them in a group. The CPU seconds include the
creation of Hera's objects, of the manifest with its hash and YAML, and of all findings, but not
imports.
"""

import gc
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from hera.workflows import DAG, Container, Parameter, Resource, Task, Workflow
from hera.workflows import models as m

from argolocal.validate import lint
from benchmarks.bars import bar, parser, report
from rekindle import blocks
from rekindle.blocks.manifest.config import Config, load_config
from rekindle.blocks.manifest.render import manifest_sha256, order_keys, render_manifest, to_yaml

CONFIG = Path(__file__).parents[1] / "configs/demo.yaml"
PIPELINE = "blocks_of_benchmark"  # name of the module whose pipeline is rendered

JOB = """
{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob",
 "metadata": {"name": "{{workflow.name}}-{{inputs.parameters.x}}"},
 "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": {"spec": {"containers": [
   {"name": "pytorch", "image": "python:3.11"}]}}}}}}
"""


def pipeline(tasks: int) -> Workflow:
    """Return a workflow of `tasks` tasks, in which about ten tasks share each template."""
    with Workflow(generate_name="large-", entrypoint="main") as workflow:
        inputs = [Parameter(name=name, default="") for name in ("x", "y")]
        outputs = [Parameter(name="y", value_from=m.ValueFrom(path="/tmp/y"))]
        command = ["python", "-c", "print('{{inputs.parameters.x}}')"]

        steps = [
            Container(
                name=f"step-{n}",
                image="python:3.11",
                command=command,
                inputs=inputs,
                outputs=outputs,
            )
            for n in range(tasks // 10)
        ]

        job = Resource(
            name="job",
            action="apply",
            manifest=JOB,
            inputs=inputs,
            success_condition="status.x > 0",
        )

        with DAG(name="main"):
            for n in range(tasks):
                if n % 10 == 9:
                    Task(
                        name=f"job-{n}",
                        template=job,
                        arguments={"x": str(n)},
                        depends=f"task-{n - 1}",
                    )
                else:
                    previous = n - (2 if n % 10 == 0 else 1)
                    if n:
                        read = {"x": _output(previous), "y": _output(0)}
                    else:
                        read = {"x": "{{workflow.name}}"}

                    if n:
                        depends = f"task-{previous}.Succeeded && !task-0.Failed"
                    else:
                        depends = None

                    Task(
                        name=f"task-{n}",
                        template=steps[n % len(steps)],
                        arguments=read,
                        depends=depends,
                    )

    return workflow


def _output(task: int) -> str:
    return f"{{{{tasks.task-{task}.outputs.parameters.y}}}}"


def seconds(tasks: int) -> tuple[float, float]:
    """Return the CPU seconds of rendering and the CPU seconds of linting a chain of tasks.

    Raises SystemExit if a finding is fatal.
    """
    gc.collect()
    start = time.process_time()
    manifest: dict[str, Any] = order_keys(pipeline(tasks).to_dict())
    manifest_sha256(manifest)
    to_yaml(manifest)
    rendered = time.process_time()
    findings = lint(manifest)
    linted = time.process_time()

    fatal = [str(finding) for finding in findings if finding.fatal]
    if fatal:
        raise SystemExit("\n".join(fatal[:5]))

    return rendered - start, linted - rendered


def block_pipeline(config: Config, tasks: int) -> Any:
    """Return the workflow of a pipeline of blocks, every tenth of them in a group."""
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        for number in range(tasks - 1):
            outputs = data.outputs
            inputs = {
                "workload": config.workload,
                "dataset": outputs.dataset,
                "model": outputs.dataset,
                "run_id": outputs.run_id,
            }
            if number % 10:
                blocks.step("steps.evaluate", inputs=inputs)
                continue

            with blocks.group(f"group-{number}", when=outputs.digest != ""):
                blocks.step("steps.evaluate", inputs=inputs)

            data = blocks.prepare(experiment=outputs.digest)

    return workflow


def block_seconds(config: Config, tasks: int) -> float:
    """Return the CPU seconds of building, rendering and linting a pipeline of blocks.

    Raises SystemExit if a finding is fatal.
    """
    module = ModuleType(PIPELINE)
    vars(module).update(__file__=__file__, build=lambda config: block_pipeline(config, tasks))
    sys.modules[PIPELINE] = module
    gc.collect()
    start = time.process_time()
    findings = lint(render_manifest(config.model_copy(update={"pipeline": PIPELINE})))
    duration = time.process_time() - start

    fatal = [finding for finding in findings if finding.fatal]
    if fatal:
        raise SystemExit(str(fatal[0]))

    return duration


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--runs",
        type=int,
        default=5,
        help="number of measurements per size of pipeline (default: 5)",
    )

    command.add_argument(
        "--tasks",
        type=int,
        default=500,
        help="number of tasks of the smallest pipeline (default: 500)",
    )

    options = command.parse_args()
    # warm-up, because Hera and pydantic initialize themselves in the first call
    seconds(options.tasks)
    figures: dict[int, list[tuple[float, float]]] = {1: [], 2: [], 4: []}

    for _ in range(options.runs):
        # measure the sizes alternately, so that other load on the machine affects all of them
        # equally
        for times, runs in figures.items():
            runs.append(seconds(times * options.tasks))

    bars = []
    for times, runs in figures.items():
        limit = 1.5 if options.tasks * times == 500 else None
        name = f"render and lint, {options.tasks * times} tasks"
        lints = min(linted for _, linted in runs)

        bars.append(
            bar(
                name,
                [sum(run) for run in runs],
                "CPU s",
                limit,
                text=f"{lints:.3f} CPU s for lint alone",
            )
        )

    for index, stage in enumerate(("render", "lint")):
        small, large = (min(run[index] for run in figures[n]) for n in (1, 4))
        bars.append(
            bar(
                f"{stage}: cost per task of the largest pipeline, relative to the smallest",
                large / 4 / small,
                "x",
                1.5,
            )
        )

    config = load_config(CONFIG, environment={}).config
    block_seconds(config, 10)
    built = {
        times: [block_seconds(config, times * options.tasks) for _ in range(options.runs)]
        for times in (1, 4)
    }
    limit = 0.5 if options.tasks == 500 else None
    bars.append(bar(f"build, render and lint, {options.tasks} blocks", built[1], "CPU s", limit))
    share = min(built[4]) / 4 / min(built[1])
    bars.append(
        bar("cost per block of the largest pipeline, relative to the smallest", share, "x", 1.5)
    )

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
