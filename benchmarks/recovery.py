"""Measure for how many seconds failures interrupt a training with 3 workers, steps of about 30 ms,
and 5 MB of weights.

    python -m benchmarks.recovery [--runs 10] [--peers 10] [--json] \\
      [--only killed,frozen,headless,all,gone]

Figures are medians of the seconds from a signal until the slowest survivor finishes its next step,
minus the duration of a step. For comparison, the benchmark also kills a node of a torchrun 2.13 job
with the same steps. The timeouts of torchrun are tuned (last call 1 s, keep-alive 3 × 1 s).
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks import torchrun
from benchmarks.bars import Bar, bar, parser, report
from benchmarks.workloads import stamped
from rekindle.local.services.services import Services
from rekindle.storage import Store
from tests.rekindle.training.crew import Crew

NAMES = ("w0", "w1", "w2")
VIRTUAL = 8
TIMEOUT_S = 300.0  # long, because the machine may be heavily loaded
# maximum number of micro-batches that a worker computes per step while all workers train
MAX_BATCHES = VIRTUAL // len(NAMES) + 1
FLAGS = {
    "workload": "benchmarks.workloads.stamped",
    "dataset": "stamped/dataset",
    "digest": stamped.digest(),
    "batch_size": 2,
    "virtual_workers": VIRTUAL,
    "workers": len(NAMES),
    "steps": 10**6,
    "schedule": "constant",
    "warmup": 0,
    "checkpoint_seconds": 600,
}
# scenario `gone`: seconds between two snapshots (HOT) and between two checkpoints (DURABLE)
HOT = 0.25
DURABLE = 3.0


class Run:
    """The processes of one training run, and the steps that they recorded."""

    def __init__(self, crew: Crew, folder: Path, name: str, **settings: float) -> None:
        self.crew, self.folder, self.first_workers_steps = crew, folder / name, list[stamped.Step]()
        self.folder.mkdir()
        values = FLAGS | {"out": f"{name}/model", "checkpoints": f"{name}/checkpoints"} | settings
        self.argv = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
        self.start()
        self.wait_for_all()

    def start(self) -> None:
        """Start all processes of the run."""
        self.coordinator = self.crew.coordinator(self.argv)
        self.launchers = {
            name: self.crew.launcher(name, self.argv, STAMPS=str(self.folder)) for name in NAMES
        }

    def kill(self) -> None:
        """Kill all processes, wait until they have ended, and keep the recorded steps of the first
        worker."""
        members = [self.coordinator, *self.launchers.values()]
        workers = [stamped.pid(self.folder, name) for name in NAMES]
        for member in members:
            member.send(signal.SIGKILL)
        for member in members:
            member.process.join()
        self.crew.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        self.first_workers_steps += stamped.steps(self.folder, NAMES[0])

    def signal(self, number: signal.Signals, *names: str) -> float:
        """Send a signal to the workers `names`, but not to their launchers.

        Returns the time immediately before the signals are sent.
        """
        pids = [stamped.pid(self.folder, name) for name in names]
        now = time.monotonic()
        for pid in pids:
            os.kill(pid, number)
        return now

    def steps(self, name: str, since: float) -> list[stamped.Step]:
        """Return the steps that a worker finished after the time `since`."""
        return [step for step in stamped.steps(self.folder, name) if step.finished > since]

    def wait_for_all(self, since: float = 0.0, steps: int = 12) -> float:
        """Wait until all workers train together. Returns the time at which the last worker finished
        its first step with all workers in the group."""
        since = since or time.monotonic()
        steps_by_name: dict[str, list[stamped.Step]] = {}

        def is_complete() -> bool:
            for name in NAMES:
                steps_by_name[name] = [
                    step for step in self.steps(name, since) if step.batches <= MAX_BATCHES
                ]
            return all(len(each) >= steps for each in steps_by_name.values())

        self.crew.until(is_complete, TIMEOUT_S)
        return max(each[0].finished for each in steps_by_name.values())

    def next_step(self, since: float, victims: set[str]) -> float:
        """Return the seconds from the time `since` until all survivors have finished a step, minus
        the duration of a step."""
        survivors = [name for name in NAMES if name not in victims]
        steps_by_name: dict[str, list[stamped.Step]] = {}

        def is_complete() -> bool:
            for name in survivors:
                steps_by_name[name] = [
                    step for step in self.steps(name, since) if step.batches > MAX_BATCHES
                ]
            return all(each for each in steps_by_name.values())

        earlier = [
            s for name in survivors for s in stamped.steps(self.folder, name) if s.finished < since
        ][-20:]
        usual = (
            (MAX_BATCHES + 1) / MAX_BATCHES * median(step.finished - step.began for step in earlier)
        )
        self.crew.until(is_complete, TIMEOUT_S)
        time.sleep(0.1)
        is_complete()
        later = [step for each in steps_by_name.values() for step in each[1:8]]
        duration = median([step.finished - step.began for step in later] or [usual])

        return max(each[0].finished for each in steps_by_name.values()) - since - duration

    def repeated(self) -> int:
        """Return the number of repeated steps. A process has repeated a step if it starts a second
        step from the same weights."""
        count = 0
        for path in self.folder.iterdir():
            name, _, pid = path.name.rpartition("-")
            weights = [step.weight for step in stamped.steps(self.folder, name, int(pid))]
            count += len(weights) - len(set(weights))
        return count


def killed(run: Run, runs: int, number: signal.Signals) -> dict[str, list[float]]:
    """Repeatedly kill a worker, which its launcher restarts; for SIGSTOP, stop a worker and then
    continue it.

    Returns two lists of seconds: until the survivors finish a step, and until all workers train
    together again.
    """
    next_step = []
    back = []

    for _ in range(runs):
        time.sleep(random.uniform(0.1, 0.3))
        victim = random.choice(NAMES)
        start = run.signal(number, victim)
        next_step.append(run.next_step(start, {victim}))

        if number == signal.SIGSTOP:
            start = run.signal(signal.SIGCONT, victim)

        back.append(run.wait_for_all(start) - start)

    return {"next step": next_step, "back": back}


def all_killed(run: Run, runs: int) -> dict[str, list[float]]:
    """Kill all workers. Returns the seconds until all of them, restored from shared memory, have
    finished a step."""
    next_step = []
    for _ in range(runs):
        time.sleep(random.uniform(0.5, 1.0))
        start = run.signal(signal.SIGKILL, *NAMES)
        next_step.append(run.wait_for_all(start, 1) - start)
        run.wait_for_all()
    return {"next step": next_step}


def all_processes_killed(run: Run, runs: int, *, hot: bool) -> dict[str, list[float]]:
    """Kill all processes. If `hot` is False, also delete the snapshots in memory, as if the nodes
    were lost.

    Returns three lists of durations in seconds: from the restart until all workers have finished a
    step, the duration of the repeated steps, and the duration of importing torch.
    """
    next_step = []
    lost = []
    imports = []

    for _ in range(runs):
        time.sleep(random.uniform(1.0, 1.5) * (1 if hot else DURABLE))
        run.kill()
        if not hot:
            for file in run.crew.logs.glob("rekindle-*"):
                file.unlink()

        imports.append(import_torch())
        start = time.monotonic()
        run.start()
        next_step.append(run.wait_for_all(start, 1) - start)
        first = stamped.steps(run.folder, NAMES[0])[0].weight
        steps = run.first_workers_steps
        # steps of the killed run from the same weights; empty if no step was lost
        again = [i for i, step in enumerate(steps) if step.weight == first]
        lost.append(
            sum(step.finished - step.began for step in steps[again[-1] :]) if again else 0.0
        )
        run.wait_for_all()

    return {"next step": next_step, "lost": lost, "import": imports}


def import_torch() -> float:
    """Return the seconds that `import torch` takes on this machine."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def headless(run: Run, runs: int) -> dict[str, list[float]]:
    """Kill and restart the coordinator.

    Returns the delay of the slowest step as a multiple of the usual duration of a step, and the
    seconds until all workers have registered again.
    """
    slowest = []
    back = []

    for _ in range(runs):
        time.sleep(2)
        start = time.monotonic()
        # the steps that ended in the last two seconds
        usual = [s.finished - s.began for name in NAMES for s in run.steps(name, start - 2)]
        run.coordinator.send(signal.SIGKILL)
        run.coordinator.process.join()
        time.sleep(0.5)
        began = time.monotonic()
        run.coordinator = run.crew.coordinator(run.argv)
        run.crew.until(lambda: "all 3 are connected again" in run.coordinator.said())
        back.append(time.monotonic() - began)
        time.sleep(max(0.0, start + 2 - time.monotonic()))
        after = max(s.finished - s.began for name in NAMES for s in run.steps(name, start))
        slowest.append((after - max(usual)) / median(usual))

    return {"slowest step": slowest, "back": back}


@contextmanager
def crews() -> Iterator[tuple[Crew, Path]]:
    """Yield a Crew, which starts coordinators and launchers, and the folder for its files. The
    started processes use an object store with the dataset, and end with this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        services = Services(folder / "home", {})
        services.start("s3")
        environment = services.credentials() | {
            "S3_ENDPOINT_URL": services.url("s3"),
            "S3_BUCKET": "rekindle",
        }
        os.environ.update(environment)
        stamped.write(folder / "dataset")
        Store.from_env().upload(folder / "dataset", FLAGS["dataset"])
        (folder / "logs").mkdir()
        crew = Crew(environment, folder / "logs")

        try:
            yield crew, folder
        finally:
            crew.close()
            services.down()


def measure(runs: int, repetitions: int, only: set[str]) -> list[Bar]:
    """Run `scenarios` (empty: all scenarios), and return their figures."""
    bars: list[Bar] = []

    def is_selected(name: str) -> bool:
        return not only or name in only

    with crews() as (crew, folder):
        run = Run(crew, folder, "run")
        if is_selected("killed"):
            durations = killed(run, runs, signal.SIGKILL)
            bars += [
                bar(
                    "SIGKILL of one of three workers: next step", durations["next step"], "s", 0.10
                ),
                bar(
                    "SIGKILL of one of three workers: all workers train together",
                    durations["back"],
                    "s",
                    1.0,
                ),
            ]

        if is_selected("frozen"):
            durations = killed(run, max(3, runs // 2), signal.SIGSTOP)
            bars += [
                bar("SIGSTOP of one of three workers: next step", durations["next step"], "s", 1.5),
                bar("SIGCONT of this worker: all workers train together", durations["back"], "s"),
            ]

        if is_selected("headless"):
            durations = headless(run, max(3, runs // 2))
            bars += [
                bar(
                    "SIGKILL of the coordinator: delay of the slowest step",
                    durations["slowest step"],
                    "steps",
                    1.0,
                ),
                bar(
                    "start of a new coordinator: all workers have registered",
                    durations["back"],
                    "s",
                    1.0,
                ),
            ]

        lost = run.repeated()
        if is_selected("all"):
            durations = all_killed(run, max(3, runs // 2))
            bars.append(bar("SIGKILL of all workers: next step", durations["next step"], "s", 1.5))

        if is_selected("gone"):
            run.kill()
            run = Run(crew, folder, "gone", hot_seconds=HOT, checkpoint_seconds=DURABLE)
            times = max(3, runs // 2)
            node = all_processes_killed(run, times, hot=True)
            all_nodes = all_processes_killed(run, times, hot=False)

            bars += [
                bar("SIGKILL of all workers and launchers: next step", node["next step"], "s", 1.5),
                bar(
                    "time of `import torch` in one process, just before the restart",
                    node["import"],
                    "s",
                ),
                bar("time of repeated steps, with a snapshot every 0.25 s", node["lost"], "s", HOT),
                bar("loss of all nodes: next step", all_nodes["next step"], "s"),
                bar(
                    "time of repeated steps, with a checkpoint every 3 s",
                    all_nodes["lost"],
                    "s",
                    DURABLE,
                ),
            ]

        bars.append(bar("steps lost in failures that a worker survived", lost, "steps", 0))

    if repetitions and is_selected("killed"):
        peer = bar(
            "SIGKILL of one of three nodes under tuned torchrun: next step",
            torchrun.next_step(repetitions),
            "s",
        )
        times = peer["value"] / bars[0]["value"]
        bars += [peer, bar("time of torchrun, relative to Rekindle", times, "times", 50, "more")]

    return bars


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--runs", type=int, default=10, help="number of repetitions of each failure (default: 10)"
    )

    command.add_argument(
        "--peers",
        type=int,
        default=10,
        help="number of runs of torchrun, 20 s each (default: 10; 0: omit torchrun)",
    )

    command.add_argument(
        "--only",
        default="",
        help="comma-separated scenarios: killed,frozen,headless,all,gone (default: all five)",
    )

    options = command.parse_args()
    bars = measure(options.runs, options.peers, set(filter(None, options.only.split(","))))

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
