"""Measure the cost of rendering and linting a large pipeline: the CPU seconds for 500 tasks, and
how the cost per task grows in larger pipelines.

    python -m benchmarks.lint [--json] [--runs 5] [--tasks 500]

One pipeline is a chain with a branch, written with Hera: each task reads an output of its
predecessor and an output of the first task, and every tenth task applies a PyTorchJob. A second
pipeline has the same number of blocks, every tenth block in a group. The CPU seconds include the
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
from benchmarks.bars import Bar, make_bar, make_parser, report
from rekindle import blocks
from rekindle.blocks.manifest.config import Config, load_config
from rekindle.blocks.manifest.render import (
    manifest_sha256,
    render_manifest,
    sort_keys_for_reading,
    to_yaml,
)

CONFIG_PATH = Path(__file__).parents[1] / "configs/demo.yaml"
# name of the module whose pipeline is rendered
PIPELINE_MODULE_NAME = "blocks_of_benchmark"

JOB_MANIFEST = """
{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob",
 "metadata": {"name": "{{workflow.name}}-{{inputs.parameters.x}}"},
 "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": {"spec": {"containers": [
   {"name": "pytorch", "image": "python:3.11"}]}}}}}}
"""


def make_task_pipeline(task_count: int) -> Workflow:
    """Return a workflow of `task_count` tasks, in which about ten tasks share each template."""
    with Workflow(generate_name="large-", entrypoint="main") as workflow:
        input_parameters = [
            Parameter(name=parameter_name, default="") for parameter_name in ("x", "y")
        ]
        output_parameters = [Parameter(name="y", value_from=m.ValueFrom(path="/tmp/y"))]
        container_command = ["python", "-c", "print('{{inputs.parameters.x}}')"]

        step_templates = [
            Container(
                name=f"step-{task_number}",
                image="python:3.11",
                command=container_command,
                inputs=input_parameters,
                outputs=output_parameters,
            )
            for task_number in range(task_count // 10)
        ]

        job_template = Resource(
            name="job",
            action="apply",
            manifest=JOB_MANIFEST,
            inputs=input_parameters,
            success_condition="status.x > 0",
        )

        with DAG(name="main"):
            for task_number in range(task_count):
                if task_number % 10 == 9:
                    Task(
                        name=f"job-{task_number}",
                        template=job_template,
                        arguments={"x": str(task_number)},
                        depends=f"task-{task_number - 1}",
                    )
                else:
                    previous_task_number = task_number - (2 if task_number % 10 == 0 else 1)
                    if task_number:
                        task_arguments = {
                            "x": _task_output_reference(previous_task_number),
                            "y": _task_output_reference(0),
                        }
                    else:
                        task_arguments = {"x": "{{workflow.name}}"}

                    if task_number:
                        depends_expression = (
                            f"task-{previous_task_number}.Succeeded && !task-0.Failed"
                        )
                    else:
                        depends_expression = None

                    Task(
                        name=f"task-{task_number}",
                        template=step_templates[task_number % len(step_templates)],
                        arguments=task_arguments,
                        depends=depends_expression,
                    )

    return workflow


def _task_output_reference(task_number: int) -> str:
    return f"{{{{tasks.task-{task_number}.outputs.parameters.y}}}}"


def measure_seconds(task_count: int) -> tuple[float, float]:
    """Return the CPU seconds of rendering and the CPU seconds of linting a chain of tasks.

    Raises SystemExit if a finding is fatal.
    """
    gc.collect()
    start_cpu_seconds = time.process_time()
    manifest: dict[str, Any] = sort_keys_for_reading(make_task_pipeline(task_count).to_dict())
    manifest_sha256(manifest)
    to_yaml(manifest)
    rendered_cpu_seconds = time.process_time()
    findings = lint(manifest)
    linted_cpu_seconds = time.process_time()

    fatal_findings = [str(finding) for finding in findings if finding.fatal]
    if fatal_findings:
        raise SystemExit("\n".join(fatal_findings[:5]))

    return rendered_cpu_seconds - start_cpu_seconds, linted_cpu_seconds - rendered_cpu_seconds


def make_block_pipeline(config: Config, task_count: int) -> Any:
    """Return the workflow of a pipeline of blocks, every tenth block in a group."""
    with blocks.pipeline(config) as workflow:
        prepare_task = blocks.prepare()
        for task_number in range(task_count - 1):
            dataset_outputs = prepare_task.outputs
            train_inputs = {
                "workload": config.workload,
                "dataset": dataset_outputs.dataset,
                "model": dataset_outputs.dataset,
                "run_id": dataset_outputs.run_id,
            }
            if task_number % 10:
                blocks.step("steps.evaluate", inputs=train_inputs)
                continue

            with blocks.group(f"group-{task_number}", when=dataset_outputs.digest != ""):
                blocks.step("steps.evaluate", inputs=train_inputs)

            prepare_task = blocks.prepare(experiment=dataset_outputs.digest)

    return workflow


def measure_block_seconds(config: Config, task_count: int) -> float:
    """Return the CPU seconds of building, rendering and linting a pipeline of blocks.

    Raises SystemExit if a finding is fatal.
    """
    pipeline_module = ModuleType(PIPELINE_MODULE_NAME)
    vars(pipeline_module).update(
        __file__=__file__, build=lambda config: make_block_pipeline(config, task_count)
    )
    sys.modules[PIPELINE_MODULE_NAME] = pipeline_module
    gc.collect()
    start_cpu_seconds = time.process_time()
    findings = lint(render_manifest(config.model_copy(update={"pipeline": PIPELINE_MODULE_NAME})))
    cpu_seconds = time.process_time() - start_cpu_seconds

    fatal_findings = [finding for finding in findings if finding.fatal]
    if fatal_findings:
        raise SystemExit(str(fatal_findings[0]))

    return cpu_seconds


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--runs",
        type=int,
        default=5,
        help="number of measurements per size of pipeline (default: 5)",
    )

    argument_parser.add_argument(
        "--tasks",
        type=int,
        default=500,
        help="number of tasks of the smallest pipeline (default: 500)",
    )

    options = argument_parser.parse_args()
    bars = measure_task_pipelines(options.tasks, options.runs)
    bars += measure_block_pipelines(options.tasks, options.runs)
    return report(bars, as_json=options.json)


def measure_task_pipelines(task_count: int, run_count: int) -> list[Bar]:
    """Measure pipelines of Hera tasks: of `task_count`, twice and four times as many tasks."""
    # warm up, because Hera and pydantic initialize themselves in the first call
    measure_seconds(task_count)
    cpu_seconds_by_size: dict[int, list[tuple[float, float]]] = {1: [], 2: [], 4: []}

    for _ in range(run_count):
        # measure the sizes alternately, so that other load on the machine affects all sizes equally
        for size_factor, cpu_second_pairs in cpu_seconds_by_size.items():
            cpu_second_pairs.append(measure_seconds(size_factor * task_count))

    bars = []
    for size_factor, cpu_second_pairs in cpu_seconds_by_size.items():
        limit_seconds = 1.5 if task_count * size_factor == 500 else None
        lint_cpu_seconds = min(linted_cpu_seconds for _, linted_cpu_seconds in cpu_second_pairs)
        bars.append(
            make_bar(
                f"render and lint, {task_count * size_factor} tasks",
                [sum(cpu_second_pair) for cpu_second_pair in cpu_second_pairs],
                "CPU s",
                limit_seconds,
                remark_text=f"{lint_cpu_seconds:.3f} CPU s for lint alone",
            )
        )

    for stage_index, stage_name in enumerate(("render", "lint")):
        small_seconds, large_seconds = (
            min(cpu_second_pair[stage_index] for cpu_second_pair in cpu_seconds_by_size[factor])
            for factor in (1, 4)
        )
        bars.append(
            make_bar(
                f"{stage_name}: cost per task of the largest pipeline, relative to the smallest",
                large_seconds / 4 / small_seconds,
                "x",
                1.5,
            )
        )

    return bars


def measure_block_pipelines(block_count: int, run_count: int) -> list[Bar]:
    """Measure pipelines of blocks: of `block_count`, and then pipelines of four times as many
    blocks."""
    config = load_config(CONFIG_PATH, environment={}).config
    # warm-up
    measure_block_seconds(config, 10)
    cpu_seconds_by_size = {
        size_factor: [
            measure_block_seconds(config, size_factor * block_count) for _ in range(run_count)
        ]
        for size_factor in (1, 4)
    }
    limit_seconds = 0.5 if block_count == 500 else None
    cost_ratio = min(cpu_seconds_by_size[4]) / 4 / min(cpu_seconds_by_size[1])

    return [
        make_bar(
            f"build, render and lint, {block_count} blocks",
            cpu_seconds_by_size[1],
            "CPU s",
            limit_seconds,
        ),
        make_bar(
            "cost per block of the largest pipeline, relative to the smallest", cost_ratio, "x", 1.5
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
