"""Accuracy of `rekindle plan`, and its CPU time for a large pipeline.

    python -m benchmarks.commands.plan [--json] [--runs 3] [--tasks 500]

To measure the accuracy, the demo runs `--runs` times with different seeds. Then the forecasts of
three changes are compared with runs of these changes: another seed, another gate (the data and the
model are cached), and other epochs. A forecast includes the tasks of a release only if the run did
release its model. The CPU time is measured for a pipeline of `--tasks` steps, without the import of
Hera: before the first run, after the run, and after a change of the first step's input.
"""

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.commands import REKINDLE, down, environment, rekindle
from benchmarks.runner import cpu
from rekindle.cache import entries
from rekindle.local.cluster import LocalCluster
from rekindle.project.template import create

DEMO = Path(__file__).parents[2] / "configs/demo.yaml"
CHANGES = {
    "seed": ("train.seed=90", 0.25),
    "gate": ("gate.minimum.auc=0.7", 0.25),
    "epochs": ("train.epochs=8", 0.40),
}
STEP = """
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
PIPELINE = """
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


def home_of(folder: Path) -> Path:
    return folder / ".rekindle"


def accuracy(folder: Path, runs: int) -> list[Bar]:
    """Return by how much forecasts of the demo differ from its runs, in time and cost."""
    (folder / "configs/demo.yaml").write_text(DEMO.read_text())
    for seed in range(1, runs + 1):
        rekindle(folder, home_of(folder), "run", "configs/demo.yaml", f"--set=train.seed={seed}")

    bars = []
    for name, (change, limit) in CHANGES.items():
        plan = rekindle(
            folder, home_of(folder), "plan", "configs/demo.yaml", f"--set={change}", codes=(10,)
        )
        run = rekindle(folder, home_of(folder), "run", "configs/demo.yaml", f"--set={change}")

        released = run["verdict"] == "release"
        if released:
            total = plan["total"]["seconds"]
        else:
            total = plan["without_conditional_tasks"]["seconds"]

        if released:
            cost = plan["cost"]
        else:
            cost = plan["without_conditional_tasks"]["cost"]

        seconds = _seconds(run)
        spent = run["cost"]["total"]
        for kind, forecast, actual, unit in (
            ("time", total, seconds, "s"),
            ("cost", cost, spent, plan["currency"]),
        ):
            text = f"{forecast:.3g} {unit} for {actual:.3g} {unit}; {run['verdict']}"
            error = abs(forecast / actual - 1)

            bars.append(
                bar(
                    f"other {name}: {kind}, relative error of the forecast",
                    error,
                    "",
                    limit,
                    text=text,
                )
            )

    return bars


def _seconds(run: dict[str, Any]) -> float:
    """Return the time from the start of the first step to the end of the last step."""
    from argolocal.view.summary import timestamp

    steps = [step for step in run["steps"] if step["started"] and step["finished"]]
    return max(timestamp(step["finished"]) for step in steps) - min(
        timestamp(step["started"]) for step in steps
    )


def plan_cpu(folder: Path, tasks: int, runs: int) -> list[Bar]:
    """Return the CPU seconds that planning a large pipeline takes, without the import of Hera."""
    (folder / "steps/add.py").write_text(STEP)
    (folder / "pipelines/large.py").write_text(PIPELINE)
    sections = f"workload: steps.{folder.name}\ndata: {{source: data/power.csv}}\ntasks: {tasks}\n"
    config = f"name: large\npipeline: pipelines.large\n{sections}"
    (folder / "configs/large.yaml").write_text(config)
    hera = cpu(partial(subprocess.run, [sys.executable, "-c", "import hera.workflows"], check=True))

    def measure(name: str, code: int, *sets: str) -> Bar:
        command = [REKINDLE, "plan", "configs/large.yaml", "-o", "json", *sets]

        def plan() -> None:
            done = subprocess.run(
                command, cwd=folder, env=environment(home_of(folder)), stdout=subprocess.DEVNULL
            )
            if done.returncode != code:
                raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}")

        return bar(
            f"plan of {tasks} tasks, {name}",
            [cpu(plan) - hera for _ in range(runs)],
            "CPU s",
            limit,
        )

    limit = 1.0 if tasks == 500 else None
    bars = [measure("before the first run", 10)]
    rekindle(folder, home_of(folder), "run", "configs/large.yaml")
    bars += [measure("all cached", 0), measure("with another input", 10, "--set=start=1000000")]

    for name, delete in ((" without an index", True), (", with the index", False)):
        seconds = [_look_up_seconds(folder, tasks, delete) for _ in range(runs)]
        bars.append(bar(f"look-up of {tasks} cached results{name}", seconds, "s", limit))

    return bars


def _look_up_seconds(folder: Path, tasks: int, delete: bool) -> float:
    """Return the seconds that a new client needs to find the cached results of all tasks, and to
    reserve them for a run."""
    store = LocalCluster(home_of(folder)).store()
    keys = [entry.key for entry in entries.read_entries(store)]

    if delete:
        store.delete([entries.INDEX_KEY])

    start = time.perf_counter()
    lookup = entries.Lookup(LocalCluster(home_of(folder)).store(), tasks)
    found = sum(lookup.find(key) is not None for key in keys)
    lookup.close()
    seconds = time.perf_counter() - start

    if found < tasks:
        raise SystemExit(f"{found} of {tasks} results were found")

    return seconds


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--runs",
        type=int,
        default=3,
        help="number of runs before the forecasts, and of measurements",
    )

    command.add_argument(
        "--tasks", type=int, default=500, help="number of steps of the large pipeline"
    )
    options = command.parse_args()

    with tempfile.TemporaryDirectory(dir=Path.home()) as base:
        folder = Path(base) / "plans"
        create(folder)
        try:
            bars = plan_cpu(folder, options.tasks, options.runs) + accuracy(folder, options.runs)
        finally:
            down(home_of(folder))

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
