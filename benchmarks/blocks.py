"""A large pipeline written with blocks: CPU seconds to build, render and lint it, and whether more cost more each.

    python -m benchmarks.blocks [--json] [--runs 5] [--tasks 500]

A chain of steps with files and parameters, every tenth in a group with a condition. Measured in this process, without
imports.
"""

import gc
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from benchmarks.bars import bar, parser, report
from rekindle import blocks, project
from rekindle.argo.validate import lint
from rekindle.config import Config, load_config
from rekindle.render import render_manifest

CONFIG = Path(__file__).parents[1] / "configs/demo.yaml"


def seconds(config: Config, tasks: int) -> float:
    """CPU seconds from `build` to the findings. Raises SystemExit if one of them is fatal."""

    def build(config: Config) -> Any:
        with blocks.pipeline(config) as workflow:
            data = blocks.prepare()
            for number in range(tasks - 1):
                outputs = data.outputs
                given = {"dataset": outputs.dataset, "model": outputs.dataset, "run_id": outputs.run_id}
                if number % 10:
                    blocks.step("steps.evaluate", inputs=given)
                else:
                    with blocks.group(f"group-{number}", when=outputs.digest != ""):
                        blocks.step("steps.evaluate", inputs=given)
                    data = blocks.prepare(experiment=outputs.digest)
        return workflow

    def load(name: str, *rest: Any) -> Any:
        return SimpleNamespace(build=build) if name == "x" else known(name, *rest)

    known = project.load
    gc.collect()
    with patch.object(project, "load", load):
        start = time.process_time()
        findings = lint(render_manifest(config.model_copy(update={"pipeline": "x"})))
        took = time.process_time() - start
    if fatal := [finding for finding in findings if finding.fatal]:
        raise SystemExit(str(fatal[0]))
    return took


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--tasks", type=int, default=500)
    arguments = command.parse_args()
    config = load_config(CONFIG, environment={}).config
    seconds(config, 10)  # imports
    small, large = (
        [seconds(config, tasks) for _ in range(arguments.runs)] for tasks in (arguments.tasks, 4 * arguments.tasks)
    )
    bars = [
        bar(f"build, render and lint {arguments.tasks} tasks", small, "s", 0.5),
        bar("CPU of a task among four times as many, to one", min(large) / 4 / min(small), "x", 1.5),
    ]
    return report(bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
