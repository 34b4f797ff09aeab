"""Measure for how many seconds failures interrupt a training with 3 workers, steps of about 30 ms,
and 5 MB of weights.

    python -m benchmarks.recovery [--runs 10] [--peers 10] [--json] \\
      [--only killed,frozen,headless,all,gone]

Figures are medians of the seconds from a signal to a process until the slowest surviving worker
finishes its next step, minus the duration of a step. For comparison, the benchmark also kills a
node of a torchrun 2.13 job with the same steps. The timeouts of torchrun are tuned (last call 1 s,
keep-alive 3 × 1 s).
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
from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.workloads import stamped
from rekindle.local.services.services import Services
from rekindle.storage import Store
from tests.rekindle.training.crew import Crew

WORKER_NAMES = ("w0", "w1", "w2")
VIRTUAL_WORKERS = 8
# the timeout is long, because the machine may be heavily loaded
RECOVERY_TIMEOUT_S = 300.0
# maximum number of micro-batches that a worker computes per step while all workers train
MAX_BATCHES_PER_WORKER = VIRTUAL_WORKERS // len(WORKER_NAMES) + 1
TRAINING_FLAGS = {
    "workload": "benchmarks.workloads.stamped",
    "dataset": "stamped/dataset",
    "digest": stamped.compute_digest(),
    "batch_size": 2,
    "virtual_workers": VIRTUAL_WORKERS,
    "workers": len(WORKER_NAMES),
    "steps": 10**6,
    "schedule": "constant",
    "warmup": 0,
    "checkpoint_seconds": 600,
}
# scenario `gone`: HOT_INTERVAL_S is the time between two snapshots in memory, DURABLE_INTERVAL_S
# between two checkpoints
HOT_INTERVAL_S = 0.25
DURABLE_INTERVAL_S = 3.0


class MeasuredRun:
    """The processes of one training run, and the steps that they recorded."""

    def __init__(
        self, crew: Crew, stamps_folder: Path, run_name: str, **training_settings: float
    ) -> None:
        self.crew = crew
        self.folder = stamps_folder / run_name
        self.first_workers_steps: list[stamped.StampedStep] = []
        self.folder.mkdir()
        flag_values = (
            TRAINING_FLAGS
            | {"out": f"{run_name}/model", "checkpoints": f"{run_name}/checkpoints"}
            | training_settings
        )
        self.argv = [
            f"--{flag_name.replace('_', '-')}={flag_value}"
            for flag_name, flag_value in flag_values.items()
        ]
        self.start()
        self.wait_for_all()

    def start(self) -> None:
        """Start all processes of the run."""
        self.coordinator = self.crew.start_coordinator(self.argv)
        self.launchers = {
            worker_name: self.crew.start_launcher(worker_name, self.argv, STAMPS=str(self.folder))
            for worker_name in WORKER_NAMES
        }

    def kill(self) -> None:
        """Kill all processes of the run, wait until they have ended, and keep the recorded steps of
        the first worker."""
        member_processes = [self.coordinator, *self.launchers.values()]
        worker_pids = [
            stamped.find_newest_pid(self.folder, worker_name) for worker_name in WORKER_NAMES
        ]
        for member_process in member_processes:
            member_process.send(signal.SIGKILL)
        for member_process in member_processes:
            member_process.process.join()
        self.crew.until(
            lambda: not any(Path(f"/proc/{worker_pid}").exists() for worker_pid in worker_pids)
        )
        self.first_workers_steps += stamped.read_steps(self.folder, WORKER_NAMES[0])

    def signal(self, signal_number: signal.Signals, *worker_names: str) -> float:
        """Send a signal to the workers `worker_names`, but not to their launchers.

        Return the time (of time.monotonic) immediately before the first signal is sent.
        """
        worker_pids = [
            stamped.find_newest_pid(self.folder, worker_name) for worker_name in worker_names
        ]
        now_seconds = time.monotonic()
        for worker_pid in worker_pids:
            os.kill(worker_pid, signal_number)
        return now_seconds

    def steps(self, worker_name: str, since_seconds: float) -> list[stamped.StampedStep]:
        """Return the steps that a worker finished after the time `since_seconds`."""
        return [
            step
            for step in stamped.read_steps(self.folder, worker_name)
            if step.finished > since_seconds
        ]

    def wait_for_all(self, since_seconds: float = 0.0, min_step_count: int = 12) -> float:
        """Wait until all workers train together. Return the time at which the last worker finished
        its first step with all workers in the group."""
        since_seconds = since_seconds or time.monotonic()
        steps_by_name: dict[str, list[stamped.StampedStep]] = {}

        def is_complete() -> bool:
            for worker_name in WORKER_NAMES:
                steps_by_name[worker_name] = [
                    step
                    for step in self.steps(worker_name, since_seconds)
                    if step.batches <= MAX_BATCHES_PER_WORKER
                ]
            return all(
                len(worker_steps) >= min_step_count for worker_steps in steps_by_name.values()
            )

        self.crew.until(is_complete, RECOVERY_TIMEOUT_S)
        return max(worker_steps[0].finished for worker_steps in steps_by_name.values())

    def measure_next_step(self, since_seconds: float, victim_names: set[str]) -> float:
        """Return the seconds from the time `since_seconds` until all survivors have finished a
        step, minus the duration of a step."""
        survivor_names = [
            worker_name for worker_name in WORKER_NAMES if worker_name not in victim_names
        ]
        steps_by_name: dict[str, list[stamped.StampedStep]] = {}

        def is_complete() -> bool:
            for worker_name in survivor_names:
                steps_by_name[worker_name] = [
                    step
                    for step in self.steps(worker_name, since_seconds)
                    if step.batches > MAX_BATCHES_PER_WORKER
                ]
            return all(worker_steps for worker_steps in steps_by_name.values())

        earlier_steps = [
            earlier_step
            for worker_name in survivor_names
            for earlier_step in stamped.read_steps(self.folder, worker_name)
            if earlier_step.finished < since_seconds
        ][-20:]
        usual_step_seconds = (
            (MAX_BATCHES_PER_WORKER + 1)
            / MAX_BATCHES_PER_WORKER
            * median(step.finished - step.began for step in earlier_steps)
        )
        self.crew.until(is_complete, RECOVERY_TIMEOUT_S)
        time.sleep(0.1)
        is_complete()
        later_steps = [
            step for worker_steps in steps_by_name.values() for step in worker_steps[1:8]
        ]
        step_seconds = median(
            [step.finished - step.began for step in later_steps] or [usual_step_seconds]
        )

        return (
            max(worker_steps[0].finished for worker_steps in steps_by_name.values())
            - since_seconds
            - step_seconds
        )

    def repeated(self) -> int:
        """Return the number of repeated steps. A process has repeated a step if it starts a second
        step from the same weights."""
        lost_step_count = 0
        for stamp_path in self.folder.iterdir():
            worker_name, _, worker_pid = stamp_path.name.rpartition("-")
            step_weights = [
                step.weight
                for step in stamped.read_steps(self.folder, worker_name, int(worker_pid))
            ]
            lost_step_count += len(step_weights) - len(set(step_weights))
        return lost_step_count


def measure_killed_worker(
    measured_run: MeasuredRun, repetition_count: int, signal_number: signal.Signals
) -> dict[str, list[float]]:
    """Repeatedly kill a worker, which its launcher restarts; for SIGSTOP, stop a worker and then
    continue it.

    Return two lists of seconds: the times until the other workers finish a step, and the times
    until all workers train together again.
    """
    next_step_seconds = []
    rejoin_seconds = []

    for _ in range(repetition_count):
        time.sleep(random.uniform(0.1, 0.3))
        victim_name = random.choice(WORKER_NAMES)
        kill_seconds = measured_run.signal(signal_number, victim_name)
        next_step_seconds.append(measured_run.measure_next_step(kill_seconds, {victim_name}))

        if signal_number == signal.SIGSTOP:
            kill_seconds = measured_run.signal(signal.SIGCONT, victim_name)

        rejoin_seconds.append(measured_run.wait_for_all(kill_seconds) - kill_seconds)

    return {"next step": next_step_seconds, "back": rejoin_seconds}


def measure_all_killed(measured_run: MeasuredRun, repetition_count: int) -> list[float]:
    """Repeatedly kill all workers. Return the seconds until all workers, restored from shared
    memory, have finished a step."""
    next_step_seconds = []
    for _ in range(repetition_count):
        time.sleep(random.uniform(0.5, 1.0))
        kill_seconds = measured_run.signal(signal.SIGKILL, *WORKER_NAMES)
        next_step_seconds.append(measured_run.wait_for_all(kill_seconds, 1) - kill_seconds)
        measured_run.wait_for_all()
    return next_step_seconds


def measure_processes_killed(
    measured_run: MeasuredRun, repetition_count: int, *, has_snapshots: bool
) -> dict[str, list[float]]:
    """Repeatedly kill all processes of a training. If `has_snapshots` is False, also delete the
    snapshots in memory, as if the nodes were lost.

    Return three lists of durations in seconds: from the restart until all workers have finished a
    step, the duration of the repeated steps, and the duration of importing torch.
    """
    next_step_seconds = []
    repeated_step_seconds = []
    import_seconds = []

    for _ in range(repetition_count):
        time.sleep(random.uniform(1.0, 1.5) * (1 if has_snapshots else DURABLE_INTERVAL_S))
        measured_run.kill()
        if not has_snapshots:
            for snapshot_file in measured_run.crew.logs.glob("rekindle-*"):
                snapshot_file.unlink()

        import_seconds.append(measure_torch_import())
        restart_seconds = time.monotonic()
        measured_run.start()
        next_step_seconds.append(measured_run.wait_for_all(restart_seconds, 1) - restart_seconds)
        first_weight = stamped.read_steps(measured_run.folder, WORKER_NAMES[0])[0].weight
        recorded_steps = measured_run.first_workers_steps
        # indexes of the recorded steps with the same weights as the restored state; empty if no
        # step was lost
        restart_indexes = [
            step_index
            for step_index, step in enumerate(recorded_steps)
            if step.weight == first_weight
        ]
        repeated_steps = recorded_steps[restart_indexes[-1] :] if restart_indexes else []
        repeated_step_seconds.append(
            sum((step.finished - step.began for step in repeated_steps), start=0.0)
        )
        measured_run.wait_for_all()

    return {"next step": next_step_seconds, "lost": repeated_step_seconds, "import": import_seconds}


def measure_torch_import() -> float:
    """Return the seconds that `import torch` takes on this machine."""
    start_seconds = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - start_seconds


def measure_coordinator_kill(
    measured_run: MeasuredRun, repetition_count: int
) -> dict[str, list[float]]:
    """Kill and restart the coordinator.

    Return the delay of the slowest step as a multiple of the usual duration of a step, and the
    seconds until all workers have registered with the new coordinator.
    """
    slowest_step_seconds = []
    rejoin_seconds = []

    for _ in range(repetition_count):
        time.sleep(2)
        kill_seconds = time.monotonic()
        # the steps that ended in the last two seconds
        usual_step_seconds = [
            worker_step.finished - worker_step.began
            for worker_name in WORKER_NAMES
            for worker_step in measured_run.steps(worker_name, kill_seconds - 2)
        ]
        measured_run.coordinator.send(signal.SIGKILL)
        measured_run.coordinator.process.join()
        time.sleep(0.5)
        restart_seconds = time.monotonic()
        measured_run.coordinator = measured_run.crew.start_coordinator(measured_run.argv)
        measured_run.crew.until(
            lambda: "all 3 are connected again" in measured_run.coordinator.read_log()
        )
        rejoin_seconds.append(time.monotonic() - restart_seconds)
        time.sleep(max(0.0, kill_seconds + 2 - time.monotonic()))
        slowest_later_seconds = max(
            worker_step.finished - worker_step.began
            for worker_name in WORKER_NAMES
            for worker_step in measured_run.steps(worker_name, kill_seconds)
        )
        slowest_step_seconds.append(
            (slowest_later_seconds - max(usual_step_seconds)) / median(usual_step_seconds)
        )

    return {"slowest step": slowest_step_seconds, "back": rejoin_seconds}


@contextmanager
def start_crew() -> Iterator[tuple[Crew, Path]]:
    """Yield a Crew, which starts coordinators and launchers, and the folder for the files of the
    Crew. The processes of a Crew use an object store with the dataset, and end with this
    process."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        working_folder = Path(temporary_folder)
        services = Services(working_folder / "home", {})
        services.start("s3")
        environment = services.credentials() | {
            "S3_ENDPOINT_URL": services.url("s3"),
            "S3_BUCKET": "rekindle",
        }
        os.environ.update(environment)
        stamped.write_dataset(working_folder / "dataset")
        Store.from_env().upload(working_folder / "dataset", TRAINING_FLAGS["dataset"])
        (working_folder / "logs").mkdir()
        crew = Crew(environment, working_folder / "logs")

        try:
            yield crew, working_folder
        finally:
            crew.close()
            services.down()


def measure_scenarios(
    repetition_count: int, peer_repetition_count: int, scenario_names: set[str]
) -> list[Bar]:
    """Run the scenarios `scenario_names` (empty: all scenarios), and return their figures.

    `peer_repetition_count`: number of runs of torchrun for comparison; 0: no comparison with
    torchrun.
    """
    bars: list[Bar] = []
    fewer_repetitions = max(3, repetition_count // 2)

    def is_selected(scenario_name: str) -> bool:
        return not scenario_names or scenario_name in scenario_names

    with start_crew() as (crew, folder):
        measured_run = MeasuredRun(crew, folder, "run")
        if is_selected("killed"):
            bars += make_kill_bars(measured_run, repetition_count)
        if is_selected("frozen"):
            bars += make_freeze_bars(measured_run, fewer_repetitions)
        if is_selected("headless"):
            bars += make_coordinator_bars(measured_run, fewer_repetitions)

        lost_step_count = measured_run.repeated()
        if is_selected("all"):
            next_step_seconds = measure_all_killed(measured_run, fewer_repetitions)
            bars.append(make_bar("SIGKILL of all workers: next step", next_step_seconds, "s", 1.5))

        if is_selected("gone"):
            measured_run.kill()
            measured_run = MeasuredRun(
                crew,
                folder,
                "gone",
                hot_seconds=HOT_INTERVAL_S,
                checkpoint_seconds=DURABLE_INTERVAL_S,
            )
            bars += make_process_loss_bars(measured_run, fewer_repetitions)

        bars.append(
            make_bar("steps lost in failures that a worker survived", lost_step_count, "steps", 0)
        )

    if peer_repetition_count and is_selected("killed"):
        bars += compare_with_torchrun(peer_repetition_count, recovery_seconds=bars[0]["value"])

    return bars


def make_kill_bars(measured_run: MeasuredRun, repetition_count: int) -> list[Bar]:
    """Return the figures of the scenario `killed`: a worker gets SIGKILL."""
    seconds_by_figure = measure_killed_worker(measured_run, repetition_count, signal.SIGKILL)
    return [
        make_bar(
            "SIGKILL of one of three workers: next step",
            seconds_by_figure["next step"],
            "s",
            0.10,
        ),
        make_bar(
            "SIGKILL of one of three workers: all workers train together",
            seconds_by_figure["back"],
            "s",
            1.0,
        ),
    ]


def make_freeze_bars(measured_run: MeasuredRun, repetition_count: int) -> list[Bar]:
    """Return the figures of the scenario `frozen`: a worker is stopped, and later continued."""
    seconds_by_figure = measure_killed_worker(measured_run, repetition_count, signal.SIGSTOP)
    return [
        make_bar(
            "SIGSTOP of one of three workers: next step", seconds_by_figure["next step"], "s", 1.5
        ),
        make_bar(
            "SIGCONT of this worker: all workers train together", seconds_by_figure["back"], "s"
        ),
    ]


def make_coordinator_bars(measured_run: MeasuredRun, repetition_count: int) -> list[Bar]:
    """Return the figures of the scenario `headless`: the coordinator is killed and replaced."""
    values_by_figure = measure_coordinator_kill(measured_run, repetition_count)
    return [
        make_bar(
            "SIGKILL of the coordinator: delay of the slowest step",
            values_by_figure["slowest step"],
            "steps",
            1.0,
        ),
        make_bar(
            "start of a new coordinator: all workers have registered",
            values_by_figure["back"],
            "s",
            1.0,
        ),
    ]


def make_process_loss_bars(measured_run: MeasuredRun, repetition_count: int) -> list[Bar]:
    """Return the figures of the scenario `gone`: all processes are killed, first with the snapshots
    in memory kept, then with these snapshots deleted."""
    process_loss_seconds = measure_processes_killed(
        measured_run, repetition_count, has_snapshots=True
    )
    node_loss_seconds = measure_processes_killed(
        measured_run, repetition_count, has_snapshots=False
    )
    return [
        make_bar(
            "SIGKILL of all workers and launchers: next step",
            process_loss_seconds["next step"],
            "s",
            1.5,
        ),
        make_bar(
            "time of `import torch` in one process, just before the restart",
            process_loss_seconds["import"],
            "s",
        ),
        make_bar(
            "time of repeated steps, with a snapshot every 0.25 s",
            process_loss_seconds["lost"],
            "s",
            HOT_INTERVAL_S,
        ),
        make_bar("loss of all nodes: next step", node_loss_seconds["next step"], "s"),
        make_bar(
            "time of repeated steps, with a checkpoint every 3 s",
            node_loss_seconds["lost"],
            "s",
            DURABLE_INTERVAL_S,
        ),
    ]


def compare_with_torchrun(run_count: int, recovery_seconds: float) -> list[Bar]:
    """Return the seconds until torchrun makes the next step, and their ratio to `recovery_seconds`,
    the corresponding figure of Rekindle."""
    torchrun_bar = make_bar(
        "SIGKILL of one of three nodes under tuned torchrun: next step",
        torchrun.measure_next_step(run_count),
        "s",
    )
    time_ratio = torchrun_bar["value"] / recovery_seconds
    return [
        torchrun_bar,
        make_bar("time of torchrun, relative to Rekindle", time_ratio, "times", 50, "more"),
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--runs", type=int, default=10, help="number of repetitions of each failure (default: 10)"
    )

    argument_parser.add_argument(
        "--peers",
        type=int,
        default=10,
        help="number of runs of torchrun, 20 s each (default: 10; 0: omit torchrun)",
    )

    argument_parser.add_argument(
        "--only",
        default="",
        help="comma-separated scenarios: killed,frozen,headless,all,gone (default: all five)",
    )

    options = argument_parser.parse_args()
    bars = measure_scenarios(
        options.runs, options.peers, set(filter(None, options.only.split(",")))
    )

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
