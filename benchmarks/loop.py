"""Measure the overhead of Rekindle's training loop compared with a bare loop, and of its exact
gradient summation compared with DDP.

    python -m benchmarks.loop [--json] [--quick]

Measures CPU time, which does not depend on other load. Each figure is a median over blocks of
steps; Rekindle's loop and the compared loops alternate in the same process
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

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.workloads import stamped

# settings whose step takes 0.4 ms
SMALL = {"model": {"width": 96, "layers": 3}, "batch_size": 32, "virtual_workers": 1}
LARGE = {
    "model": {"width": 1010, "layers": 2},
    "batch_size": 16,
    "virtual_workers": 8,
}  # the model has 5.1 MB of parameters
BARS = {2: 1.15, 4: 1.4}


class Tracker(BaseHTTPRequestHandler):
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
def environment() -> Iterator[dict[str, str]]:
    """Start an S3 endpoint with the dataset, and a stub of MLflow; yield the environment variables
    that select them."""
    from rekindle.local.services.services import Services
    from rekindle.storage import Store

    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadingHTTPServer(("127.0.0.1", 0), Tracker) as tracker,
    ):
        threading.Thread(target=tracker.serve_forever, daemon=True).start()
        services = Services(Path(folder) / "home", {})

        try:
            keys = services.credentials()
            url = services.url("s3")
            store = Store("benchmark", url, *keys.values())
            store.client.create_bucket(Bucket=store.bucket)
            stamped.write(Path(folder) / "dataset")
            store.upload(Path(folder) / "dataset", "dataset")

            yield (
                os.environ
                | keys
                | {
                    "S3_ENDPOINT_URL": url,
                    "S3_BUCKET": store.bucket,
                    "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{tracker.server_port}",
                    "REKINDLE_CACHE": folder,
                    "OMP_NUM_THREADS": "1",
                }
            )
        finally:
            services.down()
            tracker.shutdown()


def measure(
    env: dict[str, str], size: int, settings: dict[str, Any], **turns: object
) -> list[dict[str, Any]]:
    """Train in a group of `size` processes. Returns the figures of each process (see
    `Turns.result`)."""
    name = f"run-{os.urandom(4).hex()}"

    flags = settings | {
        "out": f"{name}/model",
        "checkpoints": f"{name}/checkpoints",
        "workers": size,
    }

    ports = [free_port(), free_port()]
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    command = [sys.executable, "-m", "benchmarks.loop", "--member"]
    members = []

    for rank in range(size):
        member_turns = turns | {"rank": rank, "size": size, "meeting": f"127.0.0.1:{ports[1]}"}
        variables = env | (
            world | {"RANK": str(rank), "TORCHELASTIC_RUN_ID": name} if size > 1 else {}
        )
        text = json.dumps({"parent": os.getpid(), "inputs": flags, "turns": member_turns})
        pipe = subprocess.PIPE
        members.append(subprocess.Popen([*command, text], env=variables, stdout=pipe, stderr=pipe))

    try:
        outputs = [member.communicate() for member in members]
    finally:
        for member in members:
            member.kill()

    for member, (_, error) in zip(members, outputs, strict=True):
        if member.returncode:
            raise SystemExit(error.decode())

    return [json.loads(out) for out, _ in outputs]


def train_as_worker(text: str) -> None:
    """Train in this process as one worker, and print its figures."""
    from argolocal.common.linux import die_with_parent
    from benchmarks.workloads import mlp
    from rekindle.training.spec import TrainingSpec
    from rekindle.training.worker import run_worker

    settings = json.loads(text)
    die_with_parent(settings["parent"])

    inputs = TrainingSpec(
        workload="benchmarks.workloads.mlp",
        dataset="dataset",
        digest=stamped.digest(),
        **settings["inputs"],
    )

    mlp.turns = mlp.Turns(inputs, **settings["turns"])
    run_worker(inputs)
    print(json.dumps(mlp.turns.result()))


def alone(env: dict[str, str], blocks: int) -> list[Bar]:
    """Measure the CPU time that each loop adds to a bare step of 0.4 ms, in one process."""
    # the warm-up is long enough to include sending the first curves, after 5 s
    block = 500
    warm = 14000
    settings = SMALL | {"run_id": "1", "checkpoint_seconds": 5, "steps": warm + block * blocks + 1}
    result = measure(env, 1, settings, block=block, warm=warm)[0]
    steps = result["steps"]
    bare = result["steps"]["bare"]
    # the background threads also work during the turns of other loops
    threads = result["threads"] * median(steps["Rekindle"])
    bars = [bar("a bare step", median(bare) * 1e6, "µs")]

    for name, each in steps.items():
        if name != "bare":
            over = median(other - base for base, other in zip(bare, each, strict=True))
            over += threads if name == "Rekindle" else 0

            bars.append(
                bar(
                    f"{name}: added to the bare step",
                    over * 1e6,
                    "µs",
                    60 if name == "Rekindle" else None,
                )
            )

    return [
        *bars,
        bar("share of Rekindle's background threads in this overhead", threads * 1e6, "µs"),
    ]


def together(env: dict[str, str], size: int, blocks: int) -> list[Bar]:
    """Return the step times in a group of processes: of Rekindle's loop, with 8 virtual workers and
    an exact sum of 5 MB of gradients, and of a DDP loop."""
    block = 10
    warm = 10
    settings = LARGE | {"checkpoint_seconds": 3600, "steps": warm + block * blocks + 1}
    results = measure(env, size, settings, block=block, warm=warm)
    each = {
        name: [mean(f["steps"][name][i] for f in results) for i in range(blocks)]
        for name in results[0]["steps"]
    }
    bars = [
        bar(f"{size} workers: {name}", median(times) * 1e3, "ms") for name, times in each.items()
    ]
    ratio = median(exact / ddp for exact, ddp in zip(each["Rekindle"], each["DDP"], strict=True))

    return [
        *bars,
        bar(f"{size} workers: Rekindle, relative to DDP", ratio, "times", BARS.get(size)),
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--quick", action="store_true", help="measure fewer blocks of steps")

    command.add_argument(
        "--sizes",
        type=int,
        nargs="*",
        default=[1, 2, 4],
        help="numbers of processes (default: 1 2 4)",
    )

    command.add_argument("--member", help=argparse.SUPPRESS)

    options = command.parse_args()
    if options.member:
        train_as_worker(options.member)
        return 0

    bars: list[Bar] = []
    with environment() as env:
        for size in options.sizes:
            bars += (
                alone(env, 20 if options.quick else 60)
                if size == 1
                else together(env, size, 10 if options.quick else 30)
            )

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
