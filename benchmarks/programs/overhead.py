"""Measure how much slower a program runs, as a share of its steps, while an agent (the process of
Rekindle that starts the program) uploads the program's checkpoints.

    python -m benchmarks.programs.overhead [--runs 5] [--seconds 60] [--json]

The same program (benchmarks/programs/saving.py: two processes, a checkpoint of 50 MB every 10 s) is
started with an agent and without an agent, in turns. The object store runs on the same machine, so
the CPU load of the store also slows the program.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.programs.services import start_object_store
from rekindle.program.processes.environment import (
    ProcessLayout,
    find_free_port,
    make_node_variables,
    make_rank_variables,
)
from tests.rekindle.program.pods import Pods

REPOSITORY_ROOT = str(Path(__file__).parents[2])
PROCESS_COUNT = 2
STEPS_PATTERN = re.compile(r"(\d+) steps in ([\d.]+) seconds")


def measure_agent(
    store_environment: dict[str, str], pods_folder: Path, program_flags: list[str]
) -> float:
    """Return the steps per second of the program under an agent."""
    program_command = ["-m", "benchmarks.programs.saving", "{checkpoints}", *program_flags]
    pod_environment = {**store_environment, "REKINDLE_PATH": REPOSITORY_ROOT}
    pods = Pods(pod_environment, pods_folder, program_command, program={"processes": PROCESS_COUNT})
    try:
        [agent_process] = pods.start(1)
        agent_process.process.join()
        return _parse_steps_per_second(pods.logs())
    finally:
        pods.close()


def measure_alone(checkpoint_folder: Path, program_flags: list[str]) -> float:
    """Return the steps per second of the program without an agent."""
    process_layout = ProcessLayout(0, (PROCESS_COUNT,), "127.0.0.1", find_free_port("127.0.0.1"), 0)
    command = [
        sys.executable,
        "-m",
        "benchmarks.programs.saving",
        str(checkpoint_folder),
        *program_flags,
    ]
    node_environment = {
        **os.environ,
        **make_node_variables(process_layout, "alone"),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            command,
            env={**node_environment, **make_rank_variables(process_layout, rank)},
            cwd=REPOSITORY_ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESS_COUNT)
    ]
    process_outputs = [process.communicate()[0] for process in processes]
    return _parse_steps_per_second(process_outputs[0])


def _parse_steps_per_second(program_output: str) -> float:
    steps_match = STEPS_PATTERN.search(program_output)
    if steps_match is None:
        raise RuntimeError(f"the program printed no steps:\n{program_output[-3000:]}")
    return int(steps_match[1]) / float(steps_match[2])


def measure_overhead(run_count: int, program_flags: list[str]) -> list[Bar]:
    """Return the figures of `run_count` pairs of runs, with and without the agent."""
    step_losses = []
    with (
        start_object_store() as store_environment,
        tempfile.TemporaryDirectory() as temporary_folder,
    ):
        for run_number in range(run_count):
            alone_folder = Path(temporary_folder) / f"alone{run_number}"
            alone_folder.mkdir()
            # alternate the order, so that a machine that becomes slower does not favour the runs
            # with or without an agent
            agent_folder = Path(temporary_folder) / f"agent{run_number}"
            if run_number % 2:
                alone_speed = measure_alone(alone_folder, program_flags)
                agent_speed = measure_agent(store_environment, agent_folder, program_flags)
            else:
                agent_speed = measure_agent(store_environment, agent_folder, program_flags)
                alone_speed = measure_alone(alone_folder, program_flags)
            step_losses.append(100 * (1 - agent_speed / alone_speed))
    return [make_bar("steps lost by watching and uploading", step_losses, "%", 3)]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument("--runs", type=int, default=5, help="number of pairs (default: 5)")
    argument_parser.add_argument(
        "--seconds", type=float, default=60, help="of each run (default: 60)"
    )
    argument_parser.add_argument(
        "--save-seconds", type=float, default=10, help="between checkpoints (default: 10)"
    )
    argument_parser.add_argument(
        "--megabytes", type=int, default=50, help="of a checkpoint (default: 50)"
    )
    options = argument_parser.parse_args()
    program_flags = [str(options.seconds), str(options.save_seconds), str(options.megabytes)]
    return report(measure_overhead(options.runs, program_flags), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
