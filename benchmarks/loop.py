"""Measure the overhead of Rekindle's training loop compared with a bare loop, and of its exact
gradient summation compared with DDP.

    python -m benchmarks.loop [--json] [--quick]

The benchmark measures CPU time, which does not depend on other load. Each figure is a median over
blocks of steps; Rekindle's loop and the compared loops alternate in the same process
(benchmarks/workloads/mlp.py). Rekindle runs with all its features: it sends curves to a stub of
MLflow, prints progress lines, keeps hot snapshots in shared memory, and writes durable checkpoints
to a real S3 endpoint. The loops of accelerate and Ignite are included if these packages are
installed.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.workloads import stamped

# settings whose step takes 0.4 ms
SMALL_SETTINGS = {"model": {"width": 96, "layers": 3}, "batch_size": 32, "virtual_workers": 1}
LARGE_SETTINGS = {
    "model": {"width": 1010, "layers": 2},
    "batch_size": 16,
    "virtual_workers": 8,
}  # the model has 5.1 MB of parameters
MAX_RATIO_BY_WORKERS = {2: 1.15, 4: 1.4}


class MlflowStubHandler(BaseHTTPRequestHandler):
    """Stub of an MLflow server that accepts all requests."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Discard the log message."""


@contextmanager
def start_environment() -> Iterator[dict[str, str]]:
    """Start an S3 endpoint with the dataset, and a stub of MLflow; yield the environment variables
    that select them."""
    from rekindle.local.services.services import Services
    from rekindle.storage import Store

    with (
        tempfile.TemporaryDirectory() as temporary_folder,
        ThreadingHTTPServer(("127.0.0.1", 0), MlflowStubHandler) as mlflow_stub,
    ):
        threading.Thread(target=mlflow_stub.serve_forever, daemon=True).start()
        services = Services(Path(temporary_folder) / "home", {})

        try:
            credentials = services.credentials()
            s3_url = services.url("s3")
            store = Store("benchmark", s3_url, *credentials.values())
            store.client.create_bucket(Bucket=store.bucket)
            stamped.write_dataset(Path(temporary_folder) / "dataset")
            store.upload(Path(temporary_folder) / "dataset", "dataset")

            yield (
                os.environ
                | credentials
                | {
                    "S3_ENDPOINT_URL": s3_url,
                    "S3_BUCKET": store.bucket,
                    "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow_stub.server_port}",
                    "REKINDLE_CACHE": temporary_folder,
                    "OMP_NUM_THREADS": "1",
                }
            )
        finally:
            services.down()
            mlflow_stub.shutdown()


def measure_group(
    environment_variables: dict[str, str],
    process_count: int,
    training_settings: dict[str, Any],
    **turn_settings: object,
) -> list[dict[str, Any]]:
    """Train in a group of `process_count` processes. Return the figures of each process of the
    group (see `Turns.result`)."""
    run_name = f"run-{os.urandom(4).hex()}"

    step_flags = training_settings | {
        "out": f"{run_name}/model",
        "checkpoints": f"{run_name}/checkpoints",
        "workers": process_count,
    }

    free_ports = [free_port(), free_port()]
    group_variables = {
        "WORLD_SIZE": str(process_count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports[0]),
    }
    member_command = [sys.executable, "-m", "benchmarks.loop", "--member"]
    member_processes = []

    for rank in range(process_count):
        member_turns = turn_settings | {
            "rank": rank,
            "size": process_count,
            "meeting": f"127.0.0.1:{free_ports[1]}",
        }
        member_environment = environment_variables | (
            group_variables | {"RANK": str(rank), "TORCHELASTIC_RUN_ID": run_name}
            if process_count > 1
            else {}
        )
        arguments_json = json.dumps(
            {"parent": os.getpid(), "inputs": step_flags, "turns": member_turns}
        )
        pipe = subprocess.PIPE
        member_processes.append(
            subprocess.Popen(
                [*member_command, arguments_json], env=member_environment, stdout=pipe, stderr=pipe
            )
        )

    try:
        member_outputs = [member_process.communicate() for member_process in member_processes]
    finally:
        for member_process in member_processes:
            member_process.kill()

    for member_process, (_, error_output) in zip(member_processes, member_outputs, strict=True):
        if member_process.returncode:
            raise SystemExit(error_output.decode())

    return [json.loads(standard_output) for standard_output, _ in member_outputs]


def train_as_worker(arguments_json: str) -> None:
    """Train in this process as one worker, and print its figures."""
    from argolocal.common.linux import die_with_parent
    from benchmarks.workloads import mlp
    from rekindle.training.spec import TrainingSpec
    from rekindle.training.worker import run_worker

    worker_settings = json.loads(arguments_json)
    die_with_parent(worker_settings["parent"])

    training_spec = TrainingSpec(
        workload="benchmarks.workloads.mlp",
        dataset="dataset",
        digest=stamped.compute_digest(),
        **worker_settings["inputs"],
    )

    mlp.turns = mlp.LoopTurns(training_spec, **worker_settings["turns"])
    run_worker(training_spec)
    print(json.dumps(mlp.turns.result()))


def measure_alone(environment_variables: dict[str, str], block_count: int) -> list[Bar]:
    """Measure the CPU time that each loop adds to a bare step of 0.4 ms, in one process."""
    # the warm-up is long enough to include sending the first curves, after 5 s
    steps_per_block = 500
    warm_up_steps = 14000
    training_settings = SMALL_SETTINGS | {
        "run_id": "1",
        "checkpoint_seconds": 5,
        "steps": warm_up_steps + steps_per_block * block_count + 1,
    }
    measured_figures = measure_group(
        environment_variables,
        1,
        training_settings,
        block=steps_per_block,
        warm=warm_up_steps,
    )[0]
    step_seconds_by_loop = measured_figures["steps"]
    bare_step_seconds = measured_figures["steps"]["bare"]
    # the background threads also work during the turns of other loops
    thread_seconds = measured_figures["threads"] * median(step_seconds_by_loop["Rekindle"])
    bars = [make_bar("a bare step", median(bare_step_seconds) * 1e6, "µs")]

    for loop_name, loop_step_seconds in step_seconds_by_loop.items():
        if loop_name != "bare":
            overhead_seconds = median(
                loop_seconds - bare_seconds
                for bare_seconds, loop_seconds in zip(
                    bare_step_seconds, loop_step_seconds, strict=True
                )
            )
            overhead_seconds += thread_seconds if loop_name == "Rekindle" else 0

            bars.append(
                make_bar(
                    f"{loop_name}: added to the bare step",
                    overhead_seconds * 1e6,
                    "µs",
                    60 if loop_name == "Rekindle" else None,
                )
            )

    return [
        *bars,
        make_bar(
            "share of Rekindle's background threads in this overhead", thread_seconds * 1e6, "µs"
        ),
    ]


def measure_together(
    environment_variables: dict[str, str], worker_count: int, block_count: int
) -> list[Bar]:
    """Return the step times in a group of processes: of Rekindle's loop, with 8 virtual workers and
    an exact sum of 5 MB of gradients, and of a DDP loop."""
    steps_per_block = 10
    warm_up_steps = 10
    training_settings = LARGE_SETTINGS | {
        "checkpoint_seconds": 3600,
        "steps": warm_up_steps + steps_per_block * block_count + 1,
    }
    figures_by_process = measure_group(
        environment_variables,
        worker_count,
        training_settings,
        block=steps_per_block,
        warm=warm_up_steps,
    )
    mean_seconds_by_loop = {
        loop_name: [
            mean(
                process_figures["steps"][loop_name][block_index]
                for process_figures in figures_by_process
            )
            for block_index in range(block_count)
        ]
        for loop_name in figures_by_process[0]["steps"]
    }
    bars = [
        make_bar(f"{worker_count} workers: {loop_name}", median(block_seconds) * 1e3, "ms")
        for loop_name, block_seconds in mean_seconds_by_loop.items()
    ]
    median_ratio = median(
        exact_seconds / ddp_seconds
        for exact_seconds, ddp_seconds in zip(
            mean_seconds_by_loop["Rekindle"], mean_seconds_by_loop["DDP"], strict=True
        )
    )

    return [
        *bars,
        make_bar(
            f"{worker_count} workers: Rekindle, relative to DDP",
            median_ratio,
            "times",
            MAX_RATIO_BY_WORKERS.get(worker_count),
        ),
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe_socket:
        return probe_socket.getsockname()[1]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--quick", action="store_true", help="measure fewer blocks of steps"
    )

    argument_parser.add_argument(
        "--sizes",
        type=int,
        nargs="*",
        default=[1, 2, 4],
        help="numbers of processes (default: 1 2 4)",
    )

    argument_parser.add_argument("--member", help=argparse.SUPPRESS)

    options = argument_parser.parse_args()
    if options.member:
        train_as_worker(options.member)
        return 0

    bars: list[Bar] = []
    with start_environment() as environment_variables:
        for worker_count in options.sizes:
            bars += (
                measure_alone(environment_variables, 20 if options.quick else 60)
                if worker_count == 1
                else measure_together(
                    environment_variables, worker_count, 10 if options.quick else 30
                )
            )

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
