"""Speed of serving a fraud model: requests of one transaction, on two cores, compared with `mlflow models serve`.

    python -m benchmarks.serving [--seconds 10] [--json]

The model has the shape and the serving state of the handbook's (5,000 cards, half a year) and random weights. Servers
use cores 0 and 1, clients the others. 32 clients send one request after the other; then 8 clients without others, and
together with 64 that send one byte per second. MLflow serves the same release with two workers.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import psutil

from benchmarks.bars import Bar, bar, parser, report

WORLD = "simulate://7?cards=5000&terminals=10000&days=183"
CORES = {0, 1}
NAME, PREFIX = "fraud", "releases/fraud/benchmark/"
HEAD = "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
RUNS = 3


def write_release(folder: Path) -> Path:
    """Write the files of a release with untrained weights."""
    import torch
    from safetensors.torch import save_file

    from rekindle.storage import file_sha256
    from rekindle.workload import dataset_facts, prepare
    from steps import fraud

    prepare(fraud, fraud.Data(source=WORLD), folder)
    torch.manual_seed(0)
    section = fraud.Model()
    save_file(fraud.model(section, dataset_facts(folder)).state_dict(), folder / "model.safetensors")
    sha256 = file_sha256(folder / "model.safetensors")
    card = {"sha256": sha256, "workload": "steps.fraud", "model": section.model_dump(mode="json")}
    (folder / "model.json").write_text(json.dumps(card))
    return folder


def upload(release: Path, home: Path) -> dict[str, str]:
    """Upload the release to its own object store. Returns the environment with the address of the store."""
    from rekindle.local.services.services import Services
    from rekindle.release.files import commit
    from rekindle.storage import Store, file_sha256

    services = Services(home, {})
    keys, url = services.credentials(), services.url("s3")
    store = Store("benchmark", url, *keys.values())
    store.client.create_bucket(Bucket=store.bucket)
    paths = [release / name for name in ("model.safetensors", "model.json", "dataset.json")]
    hashes = {}
    for path in [*paths, *(release / "state").iterdir()]:
        key = str(path.relative_to(release))
        store.upload(path, PREFIX + key)
        hashes[key] = file_sha256(path)
    about = {"name": NAME, "version": "1", "workload": "steps.fraud", "model_sha256": hashes["model.safetensors"]}
    commit(store, PREFIX, about | {"files": hashes})
    return {**os.environ, **keys, "S3_ENDPOINT_URL": url, "S3_BUCKET": store.bucket}


@contextmanager
def running(command: list[str], env: dict[str, str], ready: str) -> Iterator[psutil.Process]:
    """Run a server on its cores; yields when the URL `ready` answers 200."""
    affinity = os.sched_getaffinity(0)
    with tempfile.TemporaryFile("w+") as log:
        os.sched_setaffinity(0, CORES)
        server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=log, process_group=0)
        os.sched_setaffinity(0, affinity)
        try:
            deadline = time.monotonic() + 120
            while True:
                with suppress(OSError), urllib.request.urlopen(ready, timeout=5):
                    break
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} does not serve: {log.read()[-2000:]}")
                time.sleep(0.2)
            yield psutil.Process(server.pid)
        finally:
            os.killpg(server.pid, 15)
            server.wait()


def requests(path: str, key: str, time: str, count: int = 2000) -> list[bytes]:
    """Return HTTP requests of one transaction each."""
    draw, texts = random.Random(1), []
    for number in range(count):
        card, terminal, amount = draw.randrange(5000), draw.randrange(10_000), round(draw.uniform(1, 200), 2)
        row = {"transaction_id": number, "time": time, "card": card, "terminal": terminal, "amount": amount}
        body = json.dumps({key: [row]})
        texts.append((HEAD.format(path, len(body)) + body).encode())
    return texts


class Load:
    """Clients of one server, and their measurements."""

    def __init__(self, port: int, texts: list[bytes]) -> None:
        self.port, self.texts = port, texts
        self.seconds: list[float] = []
        self.failures = 0

    async def client(self, number: int, until: float) -> None:
        """Send one request after the other."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while (start := time.perf_counter()) < until:
            number = (number + 7) % len(self.texts)
            writer.write(self.texts[number])
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
            self.failures += not head.startswith(b"http/1.1 200")
            self.seconds.append(time.perf_counter() - start)
        writer.close()

    async def slow_client(self, until: float) -> None:
        """Send one byte of a request's body per second; reconnect when the server closes the connection."""
        while time.perf_counter() < until:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            head, _, body = self.texts[0].partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            for byte in body:
                writer.write(bytes([byte]))
                await asyncio.sleep(1)
                if reader.at_eof() or time.perf_counter() > until:
                    break
            writer.close()

    async def run(self, clients: int, slow: int, seconds: float) -> None:
        until = time.perf_counter() + seconds
        slow_ones = [self.slow_client(until) for _ in range(slow)]
        await asyncio.gather(*(self.client(number * 61, until) for number in range(clients)), *slow_ones)


@dataclass(frozen=True)
class Run:
    """Measurements of the clients of one run, and CPU time of the server."""

    rate: float  # answers per second
    p99: float  # ms
    failures: int
    cpu: float  # ms per answer


def run(server: psutil.Process, port: int, texts: list[bytes], clients: int, seconds: float, slow: int = 0) -> Run:
    """Measure after a warm-up of one second."""
    asyncio.run(Load(port, texts).run(clients, 0, 1.0))
    load, start, used = Load(port, texts), time.perf_counter(), cpu(server)
    asyncio.run(load.run(clients, slow, seconds))
    answers, used = len(load.seconds), cpu(server) - used
    rate = answers / (time.perf_counter() - start)
    return Run(rate, 1000 * quantiles(load.seconds, n=100)[98], load.failures, 1000 * used / answers)


def cpu(server: psutil.Process) -> float:
    """Return the CPU seconds of a server and its processes."""
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(folder: Path, seconds: float, processes: int) -> list[Bar]:
    """Return the figures of this benchmark."""
    release = write_release(folder / "release")
    env = upload(release, folder / "home")
    from rekindle.release import pyfunc
    from rekindle.release.predictor import open_predictor

    pyfunc.describe(release, "")
    example = open_predictor(release).example()["instances"][0]["time"]
    port, other = 18_480, 18_481
    serve = [sys.executable, "-m", "rekindle", "step", "steps.serve", f"--model={PREFIX}", f"--port={port}"]
    rekindle_requests = requests(f"/v1/models/{NAME}:predict", "instances", example)
    mlflow_requests = requests("/invocations", "dataframe_records", example)
    flags = ["--env-manager=local", "--workers=2", f"--port={other}", f"--model-uri={release}"]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}
    with running([*serve, f"--processes={processes}"], env, f"http://127.0.0.1:{port}/health/ready") as server:
        many = [run(server, port, rekindle_requests, 32, seconds) for _ in range(RUNS)]
        alone = [run(server, port, rekindle_requests, 8, seconds) for _ in range(RUNS)]
        with_slow = [run(server, port, rekindle_requests, 8, seconds, slow=64) for _ in range(RUNS)]
    serve = [sys.executable, "-m", "mlflow", "models", "serve", *flags]
    with running(serve, env | threads | paths, f"http://127.0.0.1:{other}/ping") as server:
        mlflow = [run(server, other, mlflow_requests, 32, seconds) for _ in range(RUNS)]
    return [
        bar("requests of one record, 32 clients", [each.rate for each in many], "/s", 1323, "more"),
        bar("their p99", [each.p99 for each in many], "ms", 40),
        bar("CPU of one", [each.cpu for each in many], "ms"),
        bar("p99 of 8 clients", [each.p99 for each in alone], "ms"),
        bar("p99 of 8 clients with 64 slow ones", [each.p99 for each in with_slow], "ms"),
        bar("the second over the first", _ratios(with_slow, alone, "p99"), "times", 2),
        bar("requests that failed", sum(each.failures for each in many + alone + with_slow), "", 0),
        bar("mlflow models serve, 32 clients", [each.rate for each in mlflow], "/s"),
        bar("its p99", [each.p99 for each in mlflow], "ms"),
        bar("CPU of one of its requests", [each.cpu for each in mlflow], "ms"),
        bar("its requests that failed", sum(each.failures for each in mlflow), ""),
        bar("our rate over MLflow's", _ratios(many, mlflow, "rate"), "times", 5, "more"),
    ]


def _ratios(runs: list[Run], references: list[Run], figure: str) -> list[float]:
    return [getattr(a, figure) / getattr(b, figure) for a, b in zip(runs, references, strict=True)]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--seconds", type=float, default=10, help="duration of each run")
    command.add_argument("--processes", type=int, default=1, help="serve.processes")
    arguments = command.parse_args()
    if client_cores := os.sched_getaffinity(0) - CORES:
        os.sched_setaffinity(0, client_cores)
    with tempfile.TemporaryDirectory() as folder:
        try:
            bars = measure(Path(folder), arguments.seconds, arguments.processes)
        finally:
            from rekindle.local.services.services import Services

            Services(Path(folder) / "home", {}).down()
    return report(bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
