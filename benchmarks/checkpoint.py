"""Measure what checkpoints cost a training loop: waiting time, slower steps, and time until the
state is durable.

    python -m benchmarks.checkpoint [--json] [--runs 10] [--megabytes 592] [--quick]

Uses the real classes with a state of 592 MB (49 M parameters and AdamW's two moments), one worker
and a local endpoint. The same run measures two references: a plain memcpy of the state into memory
that is already mapped, and bare parallel PUTs of the same bytes by the same client. For comparison,
on the same disk: torch.save, torch.save with fsync and rename, and
torch.distributed.checkpoint.async_save (thread). Figures are medians; --quick omits the comparison.
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

from benchmarks.bars import bar, parser, report
from rekindle.storage import Store
from rekindle.training.checkpoint.chunks import CHUNK_BYTES, run_parallel
from rekindle.training.checkpoint.durable import RankSize
from rekindle.training.checkpoint.manager import Checkpoints
from rekindle.training.local_dataset import LoaderState
from rekindle.training.spec import TrainConfig
from rekindle.training.training_state import State, tensor_bytes

STEP = 0.2  # duration in seconds of a step while a checkpoint is written in the background
SHORT = 0.00043  # duration in seconds of a short step, for measuring the overhead of snapshots
SMALL = 5  # size of a small state in megabytes, for measuring the overhead of snapshots


@contextlib.contextmanager
def endpoint(root: Path) -> Iterator[Store]:
    """Yield a store with its own local endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    command = [
        sys.executable,
        "-m",
        "rekindle.local.services.s3",
        "--root",
        str(root),
        "--port",
        str(port),
        "--bucket",
        "rekindle",
    ]
    with subprocess.Popen(
        command, env=os.environ | keys, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline()
        try:
            yield Store("rekindle", f"http://127.0.0.1:{port}", *keys.values())
        finally:
            process.kill()


def open_checkpoints(store: Store, megabytes: int, events: list[dict[str, Any]]) -> Checkpoints:
    """Return the Checkpoints object of a worker that has not made a step yet."""
    width = round((megabytes * 1e6 / 12) ** 0.5)
    model = torch.nn.Linear(width, width, bias=False)
    state = State(model, TrainConfig.model_validate({"keep_checkpoints": 2}), torch.device("cpu"))
    name = f"benchmark-{os.getpid()}-{megabytes}"

    def note(event: str, **fields: object) -> None:
        events.append({"event": event} | fields)

    loader = LoaderState(None)
    leaving = threading.Event()
    checkpoints = Checkpoints(
        store.short_retries(), name, "00" * 32, {}, state, loader, note, leaving
    )
    checkpoints.snapshots.ready.wait()
    checkpoints.restore(-1)

    return checkpoints


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Steps:
    """Runs steps with a fixed amount of work on one core, and measures how much another task slows
    them down."""

    def __init__(self) -> None:
        self.matrix = torch.randn(512, 512)
        once = min(seconds(self._work) for _ in range(20))
        self.count = max(1, round(STEP / once))
        self.alone = median(seconds(self.step) for _ in range(7))

    def _work(self) -> None:
        torch.mm(self.matrix, self.matrix)

    def step(self) -> None:
        for _ in range(self.count):
            self._work()

    def during(self, busy: Callable[[], bool]) -> tuple[float, float]:
        """Run training steps while `busy()` returns True.

        Returns the slow-down of these steps as a factor, and the total delay in seconds.
        """
        durations = [seconds(self.step)]
        while busy():
            durations.append(seconds(self.step))
        return median(durations) / self.alone, sum(durations) - len(durations) * self.alone


def measure(store: Store, megabytes: int, runs: int, steps: Steps) -> dict[str, float]:
    """Measure Rekindle's checkpoints and the references alternately; return their figures."""
    events: list[dict[str, Any]] = []
    checkpoints = open_checkpoints(store, megabytes, events)
    state = checkpoints.state
    figures = dict[str, list[float]]()
    target = torch.zeros_like(state.memory)
    view = tensor_bytes(state.memory)
    client = store.short_retries()

    def record(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    def wait_until_idle() -> None:
        while not checkpoints.snapshots.is_idle:
            time.sleep(0.01)

    def bare(number: int) -> None:
        client.put(f"bare/{number}", view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])

    for _ in range(runs):
        state.step += 1
        state.memory.uniform_()
        record("memcpy", seconds(lambda: target.copy_(state.memory)))
        wait_until_idle()
        checkpoints._snapshot_due = 0.0
        record("hot wait", seconds(lambda: checkpoints.save_if_due(RankSize(0, 1), durable=False)))
        wait_until_idle()
        record("bare", seconds(lambda: run_parallel(bare, range(-(-len(view) // CHUNK_BYTES)))))
        state.step += 1
        record(
            "durable wait", seconds(lambda: checkpoints.save_if_due(RankSize(0, 1), durable=True))
        )

        while checkpoints._is_uploading:
            time.sleep(0.01)

        record("durable", events[-1]["seconds"])
        assert events[-1]["uploaded"] == len(view)

    for _ in range(max(2, runs // 3)):
        state.step += 1
        state.memory.uniform_()
        wait_until_idle()
        checkpoints.save_if_due(RankSize(0, 1), durable=True)
        slower, lost = steps.during(lambda: checkpoints._is_uploading)
        record("slower", slower)
        record("lost", lost)

    checkpoints.close(remove_snapshots=True)
    return {name: median(values) for name, values in figures.items()}


def snapshot_overhead(store: Store, runs: int) -> float:
    """Return the CPU microseconds that snapshots of a state of SMALL megabytes add to a step of
    SHORT seconds."""
    checkpoints = open_checkpoints(store, SMALL, [])
    matrix = torch.randn(64, 64)
    once = min(seconds(lambda: torch.mm(matrix, matrix)) for _ in range(200))

    def step() -> None:
        for _ in range(round(SHORT / once)):
            torch.mm(matrix, matrix)

    def loop(keep: bool) -> float:
        began = time.process_time()
        count = min(4000, 400 * runs)
        for _ in range(count):
            step()
            checkpoints.state.step += 1
            if keep:
                checkpoints.save_if_due(RankSize(0, 1), durable=False)
        return 1e6 * (time.process_time() - began) / count

    pairs = [(loop(False), loop(True)) for _ in range(min(5, runs))]
    checkpoints.close(remove_snapshots=True)
    return median(with_snapshots - without for without, with_snapshots in pairs)


def others(folder: Path, megabytes: int, runs: int, steps: Steps) -> dict[str, dict[str, float]]:
    """Measure other ways to save the state, for comparison, and return their figures.

    The figures are the waiting time, the time until the state is durable, the slow-down of steps
    during the write, and the seconds lost.
    """
    from torch.distributed.checkpoint.state_dict_saver import async_save

    state = {f"part{number}": torch.rand(round(megabytes * 1e6 / 12)) for number in range(3)}
    temporary = folder / "state.tmp"
    path = folder / "state.pt"

    def save_durably() -> None:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    result = {}
    for name, call in (
        ("torch.save", lambda: torch.save(state, path)),
        ("torch.save + fsync + rename", save_durably),
    ):
        wait = median(seconds(call) for _ in range(runs))
        result[name] = {"wait": wait, "durable": wait, "slower": 1.0, "lost": wait}

    rows = []
    for number in range(max(2, runs // 2)):
        began = time.perf_counter()
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            future: Any = async_save(
                state, checkpoint_id=folder / f"dcp-{number % 2}", no_dist=True
            )

        wait = time.perf_counter() - began
        slower, lost = steps.during(lambda future=future: not future.done())
        rows.append((wait, time.perf_counter() - began, slower, wait + lost))

    names = ("wait", "durable", "slower", "lost")
    result["dcp.async_save"] = {
        name: median(row[index] for row in rows) for index, name in enumerate(names)
    }
    return result


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--runs", type=int, default=10, help="number of repetitions (default: 10)")
    command.add_argument(
        "--megabytes", type=int, default=592, help="size of the state in MB (default: 592)"
    )
    command.add_argument(
        "--quick", action="store_true", help="omit the comparison with other ways to save the state"
    )
    options = command.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="rekindle-checkpoint-"))

    try:
        with endpoint(folder / "s3") as store:
            steps = Steps()
            figures = measure(store, options.megabytes, options.runs, steps)
            small = snapshot_overhead(store, options.runs)

        if options.quick:
            peers = {}
        else:
            peers = others(folder, options.megabytes, options.runs, steps)
    finally:
        shutil.rmtree(folder)

    bars = [
        bar(
            "wait for a snapshot in shared memory",
            figures["hot wait"] / figures["memcpy"],
            "x memcpy",
            1.3,
        ),
        bar(
            "wait for a durable checkpoint",
            figures["durable wait"] / figures["memcpy"],
            "x memcpy",
            1.3,
        ),
        bar(
            "speed of a durable checkpoint, relative to bare parallel PUTs",
            figures["bare"] / figures["durable"],
            "times",
            0.7,
            "more",
        ),
        bar(
            f"snapshots of {SMALL} MB, added to a step of {1e3 * SHORT:g} ms",
            small,
            "µs CPU a step",
        ),
    ]

    figures.update(
        {"wait": figures["durable wait"], "lost": figures["durable wait"] + figures["lost"]}
    )
    rows = {"memcpy alone": {"wait": figures["memcpy"]}, "rekindle": figures, **peers}

    if not options.json:
        print(
            f"{options.megabytes} MB of state   {'wait s':>8} {'durable s':>10} {'step x':>7}"
            f" {'lost s':>7}"
        )
        for name, row in rows.items():
            figures = (row.get(key) for key in ("wait", "durable", "slower", "lost"))
            texts = ["" if figure is None else f"{figure:.3f}" for figure in figures]
            print(f"{name:28}", *(f"{text:>8}" for text in texts))

    return report(bars, as_json=options.json, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
