"""Accuracy of `rekindle plan`, and its CPU time for a large pipeline.

    python -m benchmarks.commands.plan [--json] [--runs 3] [--tasks 500]

To measure the accuracy, the demo runs `--runs` times with different seeds. The forecasts of three
changes are compared with runs of these changes: another seed, another gate (the data and the model
are cached), and other epochs. A forecast includes the tasks of a release only if the run did
release its model. The CPU time is measured for a pipeline of `--tasks` steps, without the import of
Hera: before the first run, after this run, and after a change of the first step's input.
"""

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.commands import REKINDLE_PROGRAM, make_environment, rekindle, stop_services
from benchmarks.runner import measure_child_cpu_seconds
from rekindle.cache import entries
from rekindle.local.cluster import LocalCluster
from rekindle.project.template import create

DEMO_CONFIG = Path(__file__).parents[2] / "configs/demo.yaml"
CONFIG_CHANGES = {
    "seed": ("train.seed=90", 0.25),
    "gate": ("gate.minimum.auc=0.7", 0.25),
    "epochs": ("train.epochs=8", 0.40),
}
STEP_SOURCE = """
from rekindle import Reuse, StepInputs, StepOutputs

REUSE = Reuse()

class Inputs(StepInputs):
    value: int
    number: int

class Outputs(StepOutputs):
    value: int

def run(inputs: Inputs) -> Outputs:
    return Outputs(value=inputs.value + inputs.number)
"""
PIPELINE_SOURCE = """
import rekindle
from rekindle import blocks

class Config(rekindle.Config):
    tasks: int = 500
    start: int = 0

def build(config):
    with blocks.pipeline(config) as workflow:
        first = blocks.step("steps.add", task="add-0", value=config.start, number=0)
        for number in range(1, config.tasks):
            blocks.step("steps.add", task=f"add-{number}", value=first.outputs.value, number=number)
    return workflow
"""


def find_home(working_folder: Path) -> Path:
    return working_folder / ".rekindle"


def measure_accuracy(working_folder: Path, run_count: int) -> list[Bar]:
    """Return by how much forecasts of the demo differ from its runs, in time and cost."""
    (working_folder / "configs/demo.yaml").write_text(DEMO_CONFIG.read_text())
    for seed in range(1, run_count + 1):
        rekindle(
            working_folder,
            find_home(working_folder),
            "run",
            "configs/demo.yaml",
            f"--set=train.seed={seed}",
        )

    bars = []
    for change_name, (config_change, error_limit) in CONFIG_CHANGES.items():
        plan_output = rekindle(
            working_folder,
            find_home(working_folder),
            "plan",
            "configs/demo.yaml",
            f"--set={config_change}",
            allowed_exit_codes=(10,),
        )
        run_output = rekindle(
            working_folder,
            find_home(working_folder),
            "run",
            "configs/demo.yaml",
            f"--set={config_change}",
        )

        is_released = run_output["verdict"] == "release"
        if is_released:
            forecast_seconds = plan_output["total"]["seconds"]
        else:
            forecast_seconds = plan_output["without_conditional_tasks"]["seconds"]

        if is_released:
            forecast_cost = plan_output["cost"]
        else:
            forecast_cost = plan_output["without_conditional_tasks"]["cost"]

        actual_seconds = _measure_run_seconds(run_output)
        actual_cost = run_output["cost"]["total"]
        for quantity, forecast_value, actual_value, unit_name in (
            ("time", forecast_seconds, actual_seconds, "s"),
            ("cost", forecast_cost, actual_cost, plan_output["currency"]),
        ):
            remark_text = (
                f"{forecast_value:.3g} {unit_name} for {actual_value:.3g} {unit_name};"
                f" {run_output['verdict']}"
            )
            relative_error = abs(forecast_value / actual_value - 1)

            bars.append(
                make_bar(
                    f"other {change_name}: {quantity}, relative error of the forecast",
                    relative_error,
                    "",
                    error_limit,
                    remark_text=remark_text,
                )
            )

    return bars


def _measure_run_seconds(run_output: dict[str, Any]) -> float:
    """Return the time from the start of the first step to the end of the last step."""
    from argolocal.view.summary import parse_timestamp

    finished_steps = [step for step in run_output["steps"] if step["started"] and step["finished"]]
    return max(parse_timestamp(step["finished"]) for step in finished_steps) - min(
        parse_timestamp(step["started"]) for step in finished_steps
    )


def measure_plan_cpu(working_folder: Path, task_count: int, run_count: int) -> list[Bar]:
    """Return the CPU seconds that planning a large pipeline takes, without the import of Hera."""
    (working_folder / "steps/add.py").write_text(STEP_SOURCE)
    (working_folder / "pipelines/large.py").write_text(PIPELINE_SOURCE)
    config_sections = (
        f"workload: steps.{working_folder.name}\ndata: {{source: data/power.csv}}\ntasks:"
        f" {task_count}\n"
    )
    config_text = f"name: large\npipeline: pipelines.large\n{config_sections}"
    (working_folder / "configs/large.yaml").write_text(config_text)
    hera_cpu_seconds = measure_child_cpu_seconds(
        partial(subprocess.run, [sys.executable, "-c", "import hera.workflows"], check=True)
    )

    def measure(case_name: str, expected_exit_code: int, *set_options: str) -> Bar:
        command = [REKINDLE_PROGRAM, "plan", "configs/large.yaml", "-o", "json", *set_options]

        def plan() -> None:
            completed_process = subprocess.run(
                command,
                cwd=working_folder,
                env=make_environment(find_home(working_folder)),
                stdout=subprocess.DEVNULL,
            )
            if completed_process.returncode != expected_exit_code:
                raise SystemExit(
                    f"{' '.join(command)} ended with exit code {completed_process.returncode}"
                )

        return make_bar(
            f"plan of {task_count} tasks, {case_name}",
            [measure_child_cpu_seconds(plan) - hera_cpu_seconds for _ in range(run_count)],
            "CPU s",
            limit_seconds,
        )

    limit_seconds = 1.0 if task_count == 500 else None
    bars = [measure("before the first run", 10)]
    rekindle(working_folder, find_home(working_folder), "run", "configs/large.yaml")
    bars += [measure("all cached", 0), measure("with another input", 10, "--set=start=1000000")]

    for case_name, deletes_index in ((" without an index", True), (", with the index", False)):
        look_up_seconds = [
            _measure_look_up(working_folder, task_count, deletes_index) for _ in range(run_count)
        ]
        bars.append(
            make_bar(
                f"look-up of {task_count} cached results{case_name}",
                look_up_seconds,
                "s",
                limit_seconds,
            )
        )

    return bars


def _measure_look_up(working_folder: Path, task_count: int, deletes_index: bool) -> float:
    """Return the seconds that a new client needs to find the cached results of all tasks, and to
    reserve these results for a run."""
    store = LocalCluster(find_home(working_folder)).store()
    entry_keys = [cache_entry.key for cache_entry in entries.read_entries(store)]

    if deletes_index:
        store.delete([entries.INDEX_KEY])

    start_seconds = time.perf_counter()
    entry_lookup = entries.Lookup(LocalCluster(find_home(working_folder)).store(), task_count)
    found_count = sum(entry_lookup.find(key) is not None for key in entry_keys)
    entry_lookup.close()
    elapsed_seconds = time.perf_counter() - start_seconds

    if found_count < task_count:
        raise SystemExit(f"{found_count} of {task_count} results were found")

    return elapsed_seconds


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--runs",
        type=int,
        default=3,
        help="number of runs before the forecasts, and of measurements",
    )

    argument_parser.add_argument(
        "--tasks", type=int, default=500, help="number of steps of the large pipeline"
    )
    options = argument_parser.parse_args()

    with tempfile.TemporaryDirectory(dir=Path.home()) as temporary_folder:
        plan_folder = Path(temporary_folder) / "plans"
        create(plan_folder)
        try:
            bars = measure_plan_cpu(plan_folder, options.tasks, options.runs) + measure_accuracy(
                plan_folder, options.runs
            )
        finally:
            stop_services(find_home(plan_folder))

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
