"""Measure the speed of model servers on two cores: with predictions in batches, with predictions
one by one, and with `mlflow models serve`.

    python -m benchmarks.serving [--models digits fraud] [--seconds 10] [--json]

The models are steps.digits, steps.language, the workload `power` of docs/your-own-model.md, and
steps.fraud with the serving state of the handbook's data (5,000 cards, half a year), all with
random weights. Servers use cores 0 and 1, clients all other cores. 32 clients send one request
after the other; each request contains one record. The clients use three servers of the same release
in turn: one with the default serve.max_batch, one with serve.max_batch 1, and MLflow with two
workers. The server of the last model then answers 8 clients, first without other clients, then with
64 clients that send one byte per second.
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from benchmarks.bars import Bar, bar, parser, report

# the setting `data.source` of each model, by name
SOURCES = {
    "digits": "sklearn://digits",
    "language": "python://topics",
    "power": "power.csv",
    "fraud": "simulate://7?cards=5000&terminals=10000&days=183",
}
RATES = {"fraud": 1323}  # required answers per second of a model that batching does not make faster
PAGE = Path(__file__).parents[1] / "docs" / "your-own-model.md"
CORES = {0, 1}
HEAD = "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
RUNS = 3
PORT = 18_480  # port of the first server; the next servers use the next ports


def load_workload(name: str, folder: Path) -> tuple[str, Any]:
    """Return the module name and the module of a model's workload. For the model `power`, first
    write the module and its data into `folder`."""
    from rekindle.workload import load

    if name != "power":
        return f"steps.{name}", load(f"steps.{name}")

    match = re.search(r"```python\n(# power\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert match, f"{PAGE} does not contain power.py"
    (folder / "power.py").write_text(match[1])
    draw = random.Random(1)
    rows = [
        (hour % 24, round(draw.gauss(10, 8), 1), round(draw.uniform(1, 9), 2))
        for hour in range(2000)
    ]
    (folder / "power.csv").write_text(
        "hour,temperature,kwh\n" + "".join(f"{h},{t},{kwh}\n" for h, t, kwh in rows)
    )

    return name, load(name)


def write_release(name: str, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Write the files of a release with untrained weights; return the folder of the files, and
    instances to predict."""
    import torch
    from safetensors.torch import save_file

    from rekindle import families
    from rekindle.content.verified_release import RELEASE_RECORD
    from rekindle.release import pyfunc
    from rekindle.release.predictor import open_predictor
    from rekindle.storage import file_sha256
    from rekindle.workload import dataset_facts, prepare

    module, workload = load_workload(name, folder)
    source = SOURCES[name]
    release = folder / name
    source = source if "://" in source else str(folder / source)
    prepare(workload, workload.Data(source=source), release)
    torch.manual_seed(0)
    section = workload.Model()
    family = list(families.get_families(workload))[-1]
    model = families.build(workload, family, section, dataset_facts(release))
    save_file(model.state_dict(), release / "model.safetensors")
    sha256 = file_sha256(release / "model.safetensors")

    card = {
        "sha256": sha256,
        "workload": module,
        "family": family,
        "model": section.model_dump(mode="json"),
    }

    (release / "model.json").write_text(json.dumps(card))

    if name == "fraud":
        instances = transactions(open_predictor(release).example()["instances"][0]["time"])
    else:
        instances = [example[0] for example in islice(workload.examples(release), 2000)]
        (release / "example.json").write_text(json.dumps({"instances": instances[:1]}))

    pyfunc.write_mlmodel(release)
    hashes = {
        str(path.relative_to(release)): file_sha256(path)
        for path in release.rglob("*")
        if path.is_file()
    }

    record = {
        "name": name,
        "version": "1",
        "workload": module,
        "model_sha256": sha256,
        "files": hashes,
    }

    # file for MLflow, which loads the model from this folder
    (release / RELEASE_RECORD).write_text(json.dumps(record))

    return release, instances


def transactions(time: str, count: int = 2000) -> list[dict[str, Any]]:
    """Return random transactions between cards and terminals of the fraud model's serving state."""
    draw = random.Random(1)
    return [
        {"transaction_id": number, "time": time}
        | {
            "card": draw.randrange(5000),
            "terminal": draw.randrange(10_000),
            "amount": round(draw.uniform(1, 200), 2),
        }
        for number in range(count)
    ]


def upload(name: str, release: Path, home: Path) -> tuple[str, dict[str, str]]:
    """Upload a release to an object store. Return the key prefix of the release, and the
    environment variables for its servers."""
    from rekindle.content.verified_release import content_hash
    from rekindle.local.services.services import Services
    from rekindle.release.release_files import commit
    from rekindle.storage import Store, file_sha256

    services = Services(home, {})
    keys = services.credentials()
    url = services.url("s3")

    store = Store("benchmark", url, *keys.values())
    with suppress(store.client.exceptions.BucketAlreadyOwnedByYou):
        store.client.create_bucket(Bucket=store.bucket)

    names = ("model.safetensors", "model.json", "dataset.json", "example.json")
    paths = [release / file for file in names if (release / file).exists()]
    paths.extend((release / "state").glob("*"))
    files = {str(path.relative_to(release)): path for path in paths}
    hashes = {key: file_sha256(path) for key, path in files.items()}

    prefix = f"releases/{name}/{content_hash(hashes)}/"
    for key, path in files.items():
        store.upload(path, prefix + key)

    workload = json.loads((release / "model.json").read_text())["workload"]
    about = {
        "name": name,
        "version": "1",
        "workload": workload,
        "model_sha256": hashes["model.safetensors"],
    }

    commit(store, prefix, release, about | {"files": hashes})
    folders = {
        "PYTHONPATH": f"{os.getcwd()}:{release.parent}",
        "REKINDLE_PATH": str(release.parent),
    }

    return prefix, {
        **os.environ,
        **keys,
        **folders,
        "S3_ENDPOINT_URL": url,
        "S3_BUCKET": store.bucket,
    }


@contextmanager
def running(command: list[str], env: dict[str, str], ready: str) -> Iterator[psutil.Process]:
    """Run a server on CORES until the end of the block. The block begins when the URL `ready`
    returns status 200."""
    affinity = os.sched_getaffinity(0)

    with tempfile.TemporaryFile("w+") as log:
        os.sched_setaffinity(0, CORES)
        server = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=log, process_group=0
        )
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


def requests(path: str, key: str, instances: list[dict[str, Any]]) -> list[bytes]:
    """Return one HTTP request for each instance."""
    bodies = (json.dumps({key: [instance]}) for instance in instances)
    return [(HEAD.format(path, len(body.encode())) + body).encode() for body in bodies]


class Load:
    """Clients of one server, and their measurements."""

    def __init__(self, port: int, texts: list[bytes]) -> None:
        self.port = port
        self.texts = texts
        self.seconds: list[float] = []
        self.failures = 0

    async def client(self, number: int, until: float) -> None:
        """Send one request after the other until the time `until`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while (start := time.perf_counter()) < until:
            number = (number + 7) % len(self.texts)
            writer.write(self.texts[number])
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(
                int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
            )
            self.failures += not head.startswith(b"http/1.1 200")
            self.seconds.append(time.perf_counter() - start)
        writer.close()

    async def slow_client(self, until: float) -> None:
        """Send one byte of a request's body per second; reconnect when the server closes the
        connection."""
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
        await asyncio.gather(
            *(self.client(number * 61, until) for number in range(clients)), *slow_ones
        )


@dataclass(frozen=True)
class Run:
    """The measurements of one run: rate and latency, as the clients see them, and the CPU time of
    the server."""

    rate: float  # answers per second
    p99: float  # 99th percentile of the latency in ms
    failures: int
    cpu: float  # CPU time of the server in ms per answer


@dataclass(frozen=True)
class Server:
    """A running server, and the requests that clients send to it."""

    process: psutil.Process
    port: int
    texts: list[bytes]

    def run(self, clients: int, seconds: float, slow: int = 0) -> Run:
        """Let the clients run for `seconds`, after a warm-up of one second, and return the
        measurements."""
        asyncio.run(Load(self.port, self.texts).run(clients, 0, 1.0))
        load = Load(self.port, self.texts)
        start = time.perf_counter()
        used = self.cpu()
        asyncio.run(load.run(clients, slow, seconds))
        answers = len(load.seconds)
        used = self.cpu() - used
        rate = answers / (time.perf_counter() - start)
        return Run(
            rate, 1000 * quantiles(load.seconds, n=100)[98], load.failures, 1000 * used / answers
        )

    def cpu(self) -> float:
        """Return the CPU seconds of the server and its child processes."""
        times = [
            process.cpu_times()
            for process in (self.process, *self.process.children(recursive=True))
        ]
        return sum(each.user + each.system for each in times)


def start_servers(name: str, folder: Path, processes: int, stack: ExitStack) -> list[Server]:
    """Start three servers of a model: one that predicts in batches, one that predicts one by one,
    and one of MLflow."""
    release, instances = write_release(name, folder)
    prefix, env = upload(name, release, folder / "home")
    servers = []
    texts = requests(f"/v1/models/{name}:predict", "instances", instances)

    for flags in ([], ["--max-batch=1"]):
        port = PORT + len(servers)
        serve = [
            sys.executable,
            "-m",
            "rekindle",
            "step",
            "steps.serve",
            f"--model={prefix}",
            f"--port={port}",
        ]

        command = [*serve, f"--processes={processes}", *flags]
        ready = f"http://127.0.0.1:{port}/health/ready"
        servers.append(Server(stack.enter_context(running(command, env, ready)), port, texts))

    port = PORT + len(servers)
    flags = ["--env-manager=local", "--workers=2", f"--port={port}", f"--model-uri={release}"]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "mlflow", "models", "serve", *flags]
    process = stack.enter_context(
        running(command, env | threads | paths, f"http://127.0.0.1:{port}/ping")
    )

    return [
        *servers,
        Server(process, port, requests("/invocations", "dataframe_records", instances)),
    ]


def measure(name: str, folder: Path, seconds: float, processes: int, slow: bool) -> list[Bar]:
    """Measure the servers of a model; if `slow` is True, also measure with slow clients. Return the
    figures."""
    with ExitStack() as stack:
        servers = start_servers(name, folder, processes, stack)
        turns = [[server.run(32, seconds) for server in servers] for _ in range(RUNS)]
        batched, single, mlflow = (
            [turn[number] for turn in turns] for number in range(len(servers))
        )

        bars = [
            bar(
                f"{name}: requests of one record, 32 clients",
                _all(batched, "rate"),
                "/s",
                RATES.get(name),
                "more",
            ),
            bar("  p99 of these requests", _all(batched, "p99"), "ms", 40),
            bar("  CPU time per request", _all(batched, "cpu"), "ms"),
            bar("  rate with serve.max_batch 1", _all(single, "rate"), "/s"),
            bar("  CPU time per request with serve.max_batch 1", _all(single, "cpu"), "ms"),
            bar(
                "  rate in batches, relative to serve.max_batch 1",
                _ratios(batched, single, "rate"),
                "times",
                None if name in RATES else 3,
                "more",
            ),
            bar("  rate of mlflow models serve", _all(mlflow, "rate"), "/s"),
            bar("  p99 of mlflow models serve", _all(mlflow, "p99"), "ms"),
            bar("  CPU time per request of mlflow models serve", _all(mlflow, "cpu"), "ms"),
            bar(
                "  requests that failed with mlflow models serve", sum(_all(mlflow, "failures")), ""
            ),
            bar(
                "  rate in batches, relative to mlflow models serve",
                _ratios(batched, mlflow, "rate"),
                "times",
                5,
                "more",
            ),
        ]

        failures = sum(_all(batched + single, "failures"))

        if slow:
            alone = [servers[0].run(8, seconds) for _ in range(RUNS)]
            with_slow = [servers[0].run(8, seconds, slow=64) for _ in range(RUNS)]
            failures += sum(_all(alone + with_slow, "failures"))

            bars += [
                bar("  p99 of 8 clients alone", _all(alone, "p99"), "ms"),
                bar("  p99 of 8 clients with 64 slow clients", _all(with_slow, "p99"), "ms"),
                bar(
                    "  p99 with slow clients, relative to p99 without slow clients",
                    _ratios(with_slow, alone, "p99"),
                    "times",
                    2,
                ),
            ]

    return [*bars, bar("  requests that failed with Rekindle", failures, "", 0)]


def _all(runs: list[Run], figure: str) -> list[float]:
    return [getattr(each, figure) for each in runs]


def _ratios(runs: list[Run], references: list[Run], figure: str) -> list[float]:
    return [a / b for a, b in zip(_all(runs, figure), _all(references, figure), strict=True)]


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--models",
        nargs="+",
        choices=list(SOURCES),
        default=list(SOURCES),
        help="models to serve (default: all)",
    )

    command.add_argument(
        "--seconds", type=float, default=10, help="seconds of each run (default: 10)"
    )

    command.add_argument(
        "--processes",
        type=int,
        default=1,
        help="setting serve.processes of the servers (default: 1)",
    )

    arguments = command.parse_args()

    client_cores = os.sched_getaffinity(0) - CORES
    if client_cores:
        os.sched_setaffinity(0, client_cores)

    bars = []
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)  # the folder that contains power.py
        try:
            for name in arguments.models:
                slow = name == arguments.models[-1]
                bars += measure(name, Path(folder), arguments.seconds, arguments.processes, slow)
        finally:
            from rekindle.local.services.services import Services

            Services(Path(folder) / "home", {}).down()

    return report(bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
