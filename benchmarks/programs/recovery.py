"""Measure for how many seconds the loss of one of three nodes interrupts a training program,
compared with torchrun and the same program.

    python -m benchmarks.programs.recovery [--runs 10] [--json]

Rekindle and torchrun both run the program of benchmarks/torchrun.py (DDP, steps of a few
milliseconds, without checkpoints), and each loses the node with the last rank by SIGKILL. The
timeouts of torchrun are tuned as in benchmarks.recovery. Figures are medians of the seconds from
the SIGKILL to the next step that the surviving nodes finish, minus the duration of a step.
"""

import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import torchrun
from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.programs.services import start_object_store
from tests.rekindle.program.pods import Pods

NODE_COUNT = torchrun.NODE_COUNT


def measure_next_step(store_environment: dict[str, str], run_count: int) -> list[float]:
    """Return the seconds from the SIGKILL of one of three pods to the next step of the other two,
    minus the duration of a step."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        return [
            _measure_once(store_environment, Path(temporary_folder) / str(run_number))
            for run_number in range(run_count)
        ]


def _measure_once(store_environment: dict[str, str], pods_folder: Path) -> float:
    stamps_folder = pods_folder / "stamps"
    stamps_folder.mkdir(parents=True)
    program_command = ["-m", "benchmarks.torchrun", str(stamps_folder)]
    repository_root = str(Path(__file__).parents[2])
    pods = Pods(
        {**store_environment, "REKINDLE_PATH": repository_root},
        pods_folder,
        program_command,
        workers=NODE_COUNT,
        min_workers=1,
    )
    try:
        agent_processes = pods.start(NODE_COUNT)
        torchrun.wait_until(lambda: len(torchrun.read_stamps(stamps_folder, NODE_COUNT)) >= 10)
        earlier_stamps = torchrun.read_stamps(stamps_folder, NODE_COUNT)
        kill_seconds = time.monotonic()
        agent_processes[-1].send(signal.SIGKILL)
        torchrun.wait_until(lambda: bool(torchrun.read_stamps(stamps_folder, NODE_COUNT - 1)))

        usual_step_seconds = (earlier_stamps[-1] - earlier_stamps[0]) / (len(earlier_stamps) - 1)
        return (
            torchrun.read_stamps(stamps_folder, NODE_COUNT - 1)[0]
            - kill_seconds
            - usual_step_seconds
        )
    finally:
        pods.close()


def measure_recovery(run_count: int) -> list[Bar]:
    """Measure Rekindle, then torchrun, and return the figures of Rekindle and of torchrun."""
    with start_object_store() as store_environment:
        rekindle_bar = make_bar(
            "SIGKILL of one of three pods: next step",
            measure_next_step(store_environment, run_count),
            "s",
        )

    torchrun_bar = make_bar(
        "the same under tuned torchrun", torchrun.measure_next_step(run_count), "s"
    )
    speed_ratio = torchrun_bar["value"] / rekindle_bar["value"]
    return [
        rekindle_bar,
        torchrun_bar,
        make_bar("time of torchrun, relative to Rekindle", speed_ratio, "times", 3, "more"),
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--runs", type=int, default=10, help="number of losses (default: 10)"
    )
    options = argument_parser.parse_args()
    return report(measure_recovery(options.runs), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
