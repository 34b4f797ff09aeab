"""Measure how much slower a program runs, as a share of its steps, while an agent watches and
uploads its checkpoints.

    python -m benchmarks.programs.overhead [--runs 5] [--seconds 60] [--json]

The same program (benchmarks/programs/saving.py: two processes, a checkpoint of 50 MB every 10 s) is
started by an agent, and without one, in turns. The object store runs on the same machine, so its
CPU load also slows the program.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.programs.services import object_store
from rekindle.program.processes.environment import (
    Layout,
    find_free_port,
    node_variables,
    rank_variables,
)
from tests.rekindle.program.pods import Pods

ROOT = str(Path(__file__).parents[2])
PROCESSES = 2
STEPS = re.compile(r"(\d+) steps in ([\d.]+) seconds")


def measure_agent(environment: dict[str, str], folder: Path, flags: list[str]) -> float:
    """Return the steps per second of the program under an agent."""
    command = ["-m", "benchmarks.programs.saving", "{checkpoints}", *flags]
    variables = {**environment, "REKINDLE_PATH": ROOT}
    pods = Pods(variables, folder, command, program={"processes": PROCESSES})
    try:
        [agent] = pods.start(1)
        agent.process.join()
        return _steps_per_second(pods.logs())
    finally:
        pods.close()


def measure_alone(folder: Path, flags: list[str]) -> float:
    """Return the steps per second of the program without an agent."""
    layout = Layout(0, (PROCESSES,), "127.0.0.1", find_free_port("127.0.0.1"), 0)
    command = [sys.executable, "-m", "benchmarks.programs.saving", str(folder), *flags]
    variables = {**os.environ, **node_variables(layout, "alone"), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command,
            env={**variables, **rank_variables(layout, rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    outputs = [process.communicate()[0] for process in processes]
    return _steps_per_second(outputs[0])


def _steps_per_second(output: str) -> float:
    match = STEPS.search(output)
    if match is None:
        raise RuntimeError(f"the program printed no steps:\n{output[-3000:]}")
    return int(match[1]) / float(match[2])


def measure(runs: int, flags: list[str]) -> list[Bar]:
    """Return the figures of `runs` pairs of runs, with and without the agent."""
    losses = []
    with object_store() as environment, tempfile.TemporaryDirectory() as name:
        for number in range(runs):
            alone_folder = Path(name) / f"alone{number}"
            alone_folder.mkdir()
            # alternate the order, so that a machine that becomes slower does not favour either side
            agent_folder = Path(name) / f"agent{number}"
            if number % 2:
                alone = measure_alone(alone_folder, flags)
                with_agent = measure_agent(environment, agent_folder, flags)
            else:
                with_agent = measure_agent(environment, agent_folder, flags)
                alone = measure_alone(alone_folder, flags)
            losses.append(100 * (1 - with_agent / alone))
    return [bar("steps lost by watching and uploading", losses, "%", 3)]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--runs", type=int, default=5, help="number of pairs (default: 5)")
    command.add_argument("--seconds", type=float, default=60, help="of each run (default: 60)")
    command.add_argument(
        "--save-seconds", type=float, default=10, help="between checkpoints (default: 10)"
    )
    command.add_argument("--megabytes", type=int, default=50, help="of a checkpoint (default: 50)")
    options = command.parse_args()
    flags = [str(options.seconds), str(options.save_seconds), str(options.megabytes)]
    return report(measure(options.runs, flags), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
