"""Measure what checkpoints cost a training loop: waiting time, slower steps, and time until the
state is durable.

    python -m benchmarks.checkpoint [--json] [--runs 10] [--megabytes 592] [--quick]

The benchmark uses the real classes with a state of 592 MB (49 M parameters and AdamW's two
moments), one worker and a local endpoint. The same run measures two references: a plain memcpy of
the state into memory that is already mapped, and bare parallel PUTs of the same bytes by the same
client. For comparison, the benchmark measures on the same disk: torch.save, torch.save with fsync
and rename, and torch.distributed.checkpoint.async_save (thread). The figures are medians; --quick
omits the comparison with other ways to save the state.
"""

import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.bars import Bar, make_bar, make_parser, report
from rekindle.storage import Store
from rekindle.training.checkpoint.chunks import CHUNK_BYTES, run_for_chunks
from rekindle.training.checkpoint.durable import RankAndGroupSize
from rekindle.training.checkpoint.manager import WorkerCheckpoints
from rekindle.training.local_dataset import LoaderState
from rekindle.training.spec import TrainConfig
from rekindle.training.training_state import TrainingState, view_tensor_bytes

# duration of a step while a checkpoint is written in the background
STEP_SECONDS = 0.2
# duration of a step, and size of the state in MB, for measuring the overhead of snapshots
SHORT_STEP_SECONDS = 0.00043
SMALL_STATE_MB = 5
# columns of the table that compares ways to save the state
FIGURE_NAMES = ("wait", "durable", "slower", "lost")


@contextlib.contextmanager
def start_store_endpoint(root_folder: Path) -> Iterator[Store]:
    """Yield a store with its own local endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as probe_socket:
        port = probe_socket.getsockname()[1]

    credentials = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    server_command = [
        sys.executable,
        "-m",
        "rekindle.local.services.s3",
        "--root",
        str(root_folder),
        "--port",
        str(port),
        "--bucket",
        "rekindle",
    ]
    with subprocess.Popen(
        server_command, env=os.environ | credentials, stdout=subprocess.PIPE, text=True
    ) as server_process:
        assert server_process.stdout
        assert server_process.stdout.readline()
        try:
            yield Store("rekindle", f"http://127.0.0.1:{port}", *credentials.values())
        finally:
            server_process.kill()


def open_checkpoints(
    store: Store, state_megabytes: int, recorded_events: list[dict[str, Any]]
) -> WorkerCheckpoints:
    """Return the checkpoints of a worker that has not made a step yet; events are appended to
    `recorded_events`."""
    matrix_width = round((state_megabytes * 1e6 / 12) ** 0.5)
    linear_model = torch.nn.Linear(matrix_width, matrix_width, bias=False)
    training_state = TrainingState(
        linear_model, TrainConfig.model_validate({"keep_checkpoints": 2}), torch.device("cpu")
    )
    checkpoint_name = f"benchmark-{os.getpid()}-{state_megabytes}"

    def note(event_name: str, **event_fields: object) -> None:
        recorded_events.append({"event": event_name} | event_fields)

    loader_state = LoaderState(None)
    leaving_event = threading.Event()
    checkpoints = WorkerCheckpoints(
        store.short_retries(),
        checkpoint_name,
        "00" * 32,
        {},
        training_state,
        loader_state,
        note,
        leaving_event,
    )
    checkpoints.snapshots.ready.wait()
    checkpoints.restore(-1)

    return checkpoints


def measure_seconds(timed_call: Callable[[], Any]) -> float:
    start_seconds = time.perf_counter()
    timed_call()
    return time.perf_counter() - start_seconds


class CalibratedSteps:
    """Runs steps with a fixed amount of work on one core, and measures how much another task slows
    them down."""

    def __init__(self) -> None:
        self.matrix = torch.randn(512, 512)
        work_seconds = min(measure_seconds(self._compute_step) for _ in range(20))
        self.repetitions = max(1, round(STEP_SECONDS / work_seconds))
        self.undisturbed_seconds = median(measure_seconds(self.step) for _ in range(7))

    def _compute_step(self) -> None:
        torch.mm(self.matrix, self.matrix)

    def step(self) -> None:
        for _ in range(self.repetitions):
            self._compute_step()

    def during(self, is_busy: Callable[[], bool]) -> tuple[float, float]:
        """Run training steps while `is_busy()` returns True.

        Return the slow-down of the training steps as a factor, and their total delay in seconds.
        """
        step_seconds = [measure_seconds(self.step)]
        while is_busy():
            step_seconds.append(measure_seconds(self.step))
        delay_seconds = sum(step_seconds) - len(step_seconds) * self.undisturbed_seconds
        return median(step_seconds) / self.undisturbed_seconds, delay_seconds


def measure_checkpoints(
    store: Store, state_megabytes: int, run_count: int, calibrated_steps: CalibratedSteps
) -> dict[str, float]:
    """Measure Rekindle's checkpoints and the references alternately; return their figures."""
    recorded_events: list[dict[str, Any]] = []
    checkpoints = open_checkpoints(store, state_megabytes, recorded_events)
    training_state = checkpoints.state
    figures_by_name = dict[str, list[float]]()
    memcpy_target = torch.zeros_like(training_state.memory)
    memory_view = view_tensor_bytes(training_state.memory)
    store_client = store.short_retries()

    def record(figure_name: str, figure_value: float) -> None:
        figures_by_name.setdefault(figure_name, []).append(figure_value)

    def wait_until_idle() -> None:
        while not checkpoints.snapshots.is_idle:
            time.sleep(0.01)

    def put_chunk(chunk_number: int) -> None:
        store_client.put(
            f"bare/{chunk_number}",
            memory_view[chunk_number * CHUNK_BYTES : (chunk_number + 1) * CHUNK_BYTES],
        )

    for _ in range(run_count):
        training_state.step += 1
        training_state.memory.uniform_()
        record("memcpy", measure_seconds(lambda: memcpy_target.copy_(training_state.memory)))
        wait_until_idle()
        checkpoints._next_snapshot_time = 0.0
        record(
            "hot wait",
            measure_seconds(
                lambda: checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=False)
            ),
        )
        wait_until_idle()
        record(
            "bare",
            measure_seconds(
                lambda: run_for_chunks(put_chunk, range(-(-len(memory_view) // CHUNK_BYTES)))
            ),
        )
        training_state.step += 1
        record(
            "durable wait",
            measure_seconds(
                lambda: checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=True)
            ),
        )

        while checkpoints._is_uploading:
            time.sleep(0.01)

        record("durable", recorded_events[-1]["seconds"])
        assert recorded_events[-1]["uploaded"] == len(memory_view)

    for _ in range(max(2, run_count // 3)):
        training_state.step += 1
        training_state.memory.uniform_()
        wait_until_idle()
        checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=True)
        slowdown_share, lost_seconds = calibrated_steps.during(lambda: checkpoints._is_uploading)
        record("slower", slowdown_share)
        record("lost", lost_seconds)

    checkpoints.close(remove_snapshots=True)
    return {
        figure_name: median(figure_values) for figure_name, figure_values in figures_by_name.items()
    }


def measure_snapshot_overhead(store: Store, run_count: int) -> float:
    """Return the CPU microseconds that snapshots of a state of SMALL megabytes add to a step of
    SHORT seconds."""
    checkpoints = open_checkpoints(store, SMALL_STATE_MB, [])
    matrix = torch.randn(64, 64)
    matmul_seconds = min(measure_seconds(lambda: torch.mm(matrix, matrix)) for _ in range(200))

    def step() -> None:
        for _ in range(round(SHORT_STEP_SECONDS / matmul_seconds)):
            torch.mm(matrix, matrix)

    def loop(is_snapshotting: bool) -> float:
        start_cpu_seconds = time.process_time()
        step_count = min(4000, 400 * run_count)
        for _ in range(step_count):
            step()
            checkpoints.state.step += 1
            if is_snapshotting:
                checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=False)
        return 1e6 * (time.process_time() - start_cpu_seconds) / step_count

    cpu_time_pairs = [(loop(False), loop(True)) for _ in range(min(5, run_count))]
    checkpoints.close(remove_snapshots=True)
    return median(
        with_snapshots - without_snapshots for without_snapshots, with_snapshots in cpu_time_pairs
    )


def measure_other_savers(
    folder: Path, state_megabytes: int, run_count: int, calibrated_steps: CalibratedSteps
) -> dict[str, dict[str, float]]:
    """Measure other ways to save the state, for comparison, and return their figures.

    The figures FIGURE_NAMES of a method are the seconds that the training waits, the seconds until
    the state is durable, the factor by which steps are slower during the write, and the seconds
    that the training loses in total.
    """
    from torch.distributed.checkpoint.state_dict_saver import async_save

    saved_state = {
        f"part{tensor_number}": torch.rand(round(state_megabytes * 1e6 / 12))
        for tensor_number in range(3)
    }
    temporary_path = folder / "state.tmp"
    state_path = folder / "state.pt"

    def save_durably() -> None:
        with open(temporary_path, "wb") as file:
            torch.save(saved_state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary_path.rename(state_path)

    figures_by_method = {}
    for method_name, save_call in (
        ("torch.save", lambda: torch.save(saved_state, state_path)),
        ("torch.save + fsync + rename", save_durably),
    ):
        wait_seconds = median(measure_seconds(save_call) for _ in range(run_count))
        figures_by_method[method_name] = {
            "wait": wait_seconds,
            "durable": wait_seconds,
            "slower": 1.0,
            "lost": wait_seconds,
        }

    figure_rows = []
    for run_number in range(max(2, run_count // 2)):
        start_seconds = time.perf_counter()
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            future: Any = async_save(
                saved_state, checkpoint_id=folder / f"dcp-{run_number % 2}", no_dist=True
            )

        wait_seconds = time.perf_counter() - start_seconds
        slowdown_share, lost_seconds = calibrated_steps.during(
            lambda future=future: not future.done()
        )
        figure_rows.append(
            (
                wait_seconds,
                time.perf_counter() - start_seconds,
                slowdown_share,
                wait_seconds + lost_seconds,
            )
        )

    figures_by_method["dcp.async_save"] = {
        figure_name: median(figure_row[figure_index] for figure_row in figure_rows)
        for figure_index, figure_name in enumerate(FIGURE_NAMES)
    }
    return figures_by_method


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--runs", type=int, default=10, help="number of repetitions (default: 10)"
    )
    argument_parser.add_argument(
        "--megabytes", type=int, default=592, help="size of the state in MB (default: 592)"
    )
    argument_parser.add_argument(
        "--quick", action="store_true", help="omit the comparison with other ways to save the state"
    )
    options = argument_parser.parse_args()
    torch.set_num_threads(1)
    temporary_folder = Path(tempfile.mkdtemp(prefix="rekindle-checkpoint-"))

    try:
        with start_store_endpoint(temporary_folder / "s3") as store:
            calibrated_steps = CalibratedSteps()
            figures_by_name = measure_checkpoints(
                store, options.megabytes, options.runs, calibrated_steps
            )
            snapshot_overhead_us = measure_snapshot_overhead(store, options.runs)

        if options.quick:
            peer_figures = {}
        else:
            peer_figures = measure_other_savers(
                temporary_folder, options.megabytes, options.runs, calibrated_steps
            )
    finally:
        shutil.rmtree(temporary_folder)

    table_rows = {
        "memcpy alone": {"wait": figures_by_name["memcpy"]},
        "rekindle": figures_by_name
        | {
            "wait": figures_by_name["durable wait"],
            "lost": figures_by_name["durable wait"] + figures_by_name["lost"],
        },
        **peer_figures,
    }
    if not options.json:
        print_table(options.megabytes, table_rows)

    bars = make_bars(figures_by_name, snapshot_overhead_us)
    return report(bars, as_json=options.json, rows=table_rows)


def make_bars(figures_by_name: dict[str, float], snapshot_overhead_us: float) -> list[Bar]:
    """Return the figures of Rekindle's checkpoints, relative to the measured references."""
    return [
        make_bar(
            "wait for a snapshot in shared memory",
            figures_by_name["hot wait"] / figures_by_name["memcpy"],
            "x memcpy",
            1.3,
        ),
        make_bar(
            "wait for a durable checkpoint",
            figures_by_name["durable wait"] / figures_by_name["memcpy"],
            "x memcpy",
            1.3,
        ),
        make_bar(
            "speed of a durable checkpoint, relative to bare parallel PUTs",
            figures_by_name["bare"] / figures_by_name["durable"],
            "times",
            0.7,
            "more",
        ),
        make_bar(
            f"snapshots of {SMALL_STATE_MB} MB, added to a step of {1e3 * SHORT_STEP_SECONDS:g} ms",
            snapshot_overhead_us,
            "µs CPU a step",
        ),
    ]


def print_table(state_megabytes: int, table_rows: dict[str, dict[str, float]]) -> None:
    """Print a row with the figures of each way to save the state."""
    print(
        f"{state_megabytes} MB of state   {'wait s':>8} {'durable s':>10} {'step x':>7}"
        f" {'lost s':>7}"
    )
    for row_name, table_row in table_rows.items():
        cell_values = [table_row.get(figure_name) for figure_name in FIGURE_NAMES]
        cell_texts = ["" if value is None else f"{value:.3f}" for value in cell_values]
        print(f"{row_name:28}", *(f"{cell_text:>8}" for cell_text in cell_texts))


if __name__ == "__main__":
    sys.exit(main())
