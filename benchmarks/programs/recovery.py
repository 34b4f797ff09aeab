"""Measure for how many seconds the loss of one of three nodes interrupts a training program,
compared with torchrun and the same program.

    python -m benchmarks.programs.recovery [--runs 10] [--json]

Both run the program of benchmarks/torchrun.py (DDP, steps of a few milliseconds, without
checkpoints), and lose the node with the last rank by SIGKILL. torchrun is tuned as in
benchmarks.recovery. Figures are medians of the seconds from the signal to the next step that the
survivors finish, minus the duration of a step.
"""

import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import torchrun
from benchmarks.bars import Bar, bar, parser, report
from benchmarks.programs.services import object_store
from tests.rekindle.program.pods import Pods

NODES = torchrun.NODES


def next_step(environment: dict[str, str], runs: int) -> list[float]:
    """Return the seconds from the SIGKILL of one of three pods to the next step of the other two,
    minus the duration of a step."""
    with tempfile.TemporaryDirectory() as name:
        return [_once(environment, Path(name) / str(number)) for number in range(runs)]


def _once(environment: dict[str, str], folder: Path) -> float:
    stamps = folder / "stamps"
    stamps.mkdir(parents=True)
    command = ["-m", "benchmarks.torchrun", str(stamps)]
    root = str(Path(__file__).parents[2])
    pods = Pods(
        {**environment, "REKINDLE_PATH": root}, folder, command, workers=NODES, min_workers=1
    )
    try:
        agents = pods.start(NODES)
        torchrun.until(lambda: len(torchrun.read_stamps(stamps, NODES)) >= 10)
        earlier = torchrun.read_stamps(stamps, NODES)
        start = time.monotonic()
        agents[-1].send(signal.SIGKILL)
        torchrun.until(lambda: bool(torchrun.read_stamps(stamps, NODES - 1)))

        step = (earlier[-1] - earlier[0]) / (len(earlier) - 1)
        return torchrun.read_stamps(stamps, NODES - 1)[0] - start - step
    finally:
        pods.close()


def measure(runs: int) -> list[Bar]:
    """Measure Rekindle, then torchrun, and return the figures of both."""
    with object_store() as environment:
        own = bar("SIGKILL of one of three pods: next step", next_step(environment, runs), "s")

    peer = bar("the same under tuned torchrun", torchrun.next_step(runs), "s")
    times = peer["value"] / own["value"]
    return [own, peer, bar("time of torchrun, relative to Rekindle", times, "times", 3, "more")]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--runs", type=int, default=10, help="number of losses (default: 10)")
    options = command.parse_args()
    return report(measure(options.runs), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
