"""Measure the speed of model servers on two cores: with predictions in batches, with predictions
one by one, and with `mlflow models serve`.

    python -m benchmarks.serving [--models digits fraud] [--seconds 10] [--json]

The models are steps.digits, steps.language, the workload `power` of docs/your-own-model.md, and
steps.fraud with the serving state of the handbook's data (5,000 cards, half a year), all with
random weights. The servers use the cores 0 and 1, and the clients use all other cores. There are 32
clients, which send one request after the other; each request contains one record. The clients use
three servers of the same release in turn: one with the default serve.max_batch, one with
serve.max_batch 1, and MLflow with two workers. The server of the last model then answers 8 clients,
first without other clients, then with 64 clients that send one byte per second.
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

from benchmarks.bars import Bar, make_bar, make_parser, report

# the setting `data.source` of each model, by name
SOURCE_BY_MODEL = {
    "digits": "sklearn://digits",
    "language": "python://topics",
    "power": "power.csv",
    "fraud": "simulate://7?cards=5000&terminals=10000&days=183",
}
# required answers per second of models that batching does not make faster
MIN_RATE_BY_MODEL = {"fraud": 1323}
MODEL_GUIDE_PATH = Path(__file__).parents[1] / "docs" / "your-own-model.md"
SERVER_CORES = {0, 1}
REQUEST_HEAD_TEMPLATE = (
    "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
)
RUN_COUNT = 3
# port of the first server; the next servers use the next ports
FIRST_PORT = 18_480


def load_workload(model_name: str, working_folder: Path) -> tuple[str, Any]:
    """Return the module name and the module of a model's workload. For the model `power`, first
    write the module and the data of this model into `working_folder`."""
    from rekindle.workload import load

    if model_name != "power":
        return f"steps.{model_name}", load(f"steps.{model_name}")

    source_match = re.search(
        r"```python\n(# power\.py\n.*?)```", MODEL_GUIDE_PATH.read_text(), re.DOTALL
    )
    assert source_match, f"{MODEL_GUIDE_PATH} does not contain power.py"
    (working_folder / "power.py").write_text(source_match[1])
    random_generator = random.Random(1)
    power_rows = [
        (
            hour % 24,
            round(random_generator.gauss(10, 8), 1),
            round(random_generator.uniform(1, 9), 2),
        )
        for hour in range(2000)
    ]
    (working_folder / "power.csv").write_text(
        "hour,temperature,kwh\n"
        + "".join(
            f"{hour_value},{temperature},{kwh}\n" for hour_value, temperature, kwh in power_rows
        )
    )

    return model_name, load(model_name)


def write_release(model_name: str, working_folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Write the files of a release with untrained weights; return the folder of the files, and
    instances to predict."""
    import torch
    from safetensors.torch import save_file

    from rekindle import families
    from rekindle.content.verified_release import RELEASE_RECORD
    from rekindle.release import pyfunc
    from rekindle.release.predictor import open_predictor
    from rekindle.storage import file_sha256
    from rekindle.workload import prepare, read_dataset_facts

    workload_module_name, workload_module = load_workload(model_name, working_folder)
    data_source = SOURCE_BY_MODEL[model_name]
    release_folder = working_folder / model_name
    data_source = data_source if "://" in data_source else str(working_folder / data_source)
    prepare(workload_module, workload_module.Data(source=data_source), release_folder)
    torch.manual_seed(0)
    model_section = workload_module.Model()
    model_family = list(families.get_families(workload_module))[-1]
    untrained_model = families.build(
        workload_module, model_family, model_section, read_dataset_facts(release_folder)
    )
    save_file(untrained_model.state_dict(), release_folder / "model.safetensors")
    weights_sha256 = file_sha256(release_folder / "model.safetensors")

    model_card = {
        "sha256": weights_sha256,
        "workload": workload_module_name,
        "family": model_family,
        "model": model_section.model_dump(mode="json"),
    }

    (release_folder / "model.json").write_text(json.dumps(model_card))

    if model_name == "fraud":
        instances = make_transactions(
            open_predictor(release_folder).example()["instances"][0]["time"]
        )
    else:
        instances = [
            example[0] for example in islice(workload_module.examples(release_folder), 2000)
        ]
        (release_folder / "example.json").write_text(json.dumps({"instances": instances[:1]}))

    pyfunc.write_mlmodel(release_folder)
    file_hashes = {
        str(path.relative_to(release_folder)): file_sha256(path)
        for path in release_folder.rglob("*")
        if path.is_file()
    }

    release_record = {
        "name": model_name,
        "version": "1",
        "workload": workload_module_name,
        "model_sha256": weights_sha256,
        "files": file_hashes,
    }

    # the record of the release, which MLflow needs to load the model from this folder
    (release_folder / RELEASE_RECORD).write_text(json.dumps(release_record))

    return release_folder, instances


def make_transactions(start_time: str, transaction_count: int = 2000) -> list[dict[str, Any]]:
    """Return random transactions between cards and terminals of the fraud model's serving state."""
    random_generator = random.Random(1)
    return [
        {"transaction_id": transaction_number, "time": start_time}
        | {
            "card": random_generator.randrange(5000),
            "terminal": random_generator.randrange(10_000),
            "amount": round(random_generator.uniform(1, 200), 2),
        }
        for transaction_number in range(transaction_count)
    ]


def upload(model_name: str, release_folder: Path, home_folder: Path) -> tuple[str, dict[str, str]]:
    """Upload a release to an object store. Return the key prefix of the release, and the
    environment variables for its servers."""
    from rekindle.content.verified_release import compute_content_hash
    from rekindle.local.services.services import Services
    from rekindle.release.release_files import commit_release
    from rekindle.storage import Store, file_sha256

    services = Services(home_folder, {})
    credentials = services.credentials()
    s3_url = services.url("s3")

    object_store = Store("benchmark", s3_url, *credentials.values())
    with suppress(object_store.client.exceptions.BucketAlreadyOwnedByYou):
        object_store.client.create_bucket(Bucket=object_store.bucket)

    file_names = ("model.safetensors", "model.json", "dataset.json", "example.json")
    file_paths = [
        release_folder / file_name
        for file_name in file_names
        if (release_folder / file_name).exists()
    ]
    file_paths.extend((release_folder / "state").glob("*"))
    files_by_key = {str(path.relative_to(release_folder)): path for path in file_paths}
    file_hashes = {key: file_sha256(path) for key, path in files_by_key.items()}

    release_prefix = f"releases/{model_name}/{compute_content_hash(file_hashes)}/"
    for key, path in files_by_key.items():
        object_store.upload(path, release_prefix + key)

    workload_name = json.loads((release_folder / "model.json").read_text())["workload"]
    release_record = {
        "name": model_name,
        "version": "1",
        "workload": workload_name,
        "model_sha256": file_hashes["model.safetensors"],
    }

    commit_release(
        object_store, release_prefix, release_folder, release_record | {"files": file_hashes}
    )
    path_variables = {
        "PYTHONPATH": f"{os.getcwd()}:{release_folder.parent}",
        "REKINDLE_PATH": str(release_folder.parent),
    }

    return release_prefix, {
        **os.environ,
        **credentials,
        **path_variables,
        "S3_ENDPOINT_URL": s3_url,
        "S3_BUCKET": object_store.bucket,
    }


@contextmanager
def start_server(
    server_command: list[str], server_environment: dict[str, str], ready_url: str
) -> Iterator[psutil.Process]:
    """Run a server on the cores CORES until the end of the `with` block. The `with` block begins
    when the URL `ready_url` returns status 200."""
    cpu_affinity = os.sched_getaffinity(0)

    with tempfile.TemporaryFile("w+") as log_file:
        os.sched_setaffinity(0, SERVER_CORES)
        server_process = subprocess.Popen(
            server_command,
            env=server_environment,
            stdout=subprocess.DEVNULL,
            stderr=log_file,
            process_group=0,
        )
        os.sched_setaffinity(0, cpu_affinity)

        try:
            deadline_seconds = time.monotonic() + 120
            while True:
                with suppress(OSError), urllib.request.urlopen(ready_url, timeout=5):
                    break

                if server_process.poll() is not None or time.monotonic() > deadline_seconds:
                    log_file.seek(0)
                    raise SystemExit(
                        f"{' '.join(server_command)} does not serve: {log_file.read()[-2000:]}"
                    )

                time.sleep(0.2)

            yield psutil.Process(server_process.pid)
        finally:
            os.killpg(server_process.pid, 15)
            server_process.wait()


def make_requests(
    request_path: str, instances_key: str, instances: list[dict[str, Any]]
) -> list[bytes]:
    """Return one HTTP request for each instance."""
    request_bodies = (json.dumps({instances_key: [instance]}) for instance in instances)
    return [
        (
            REQUEST_HEAD_TEMPLATE.format(request_path, len(request_body.encode())) + request_body
        ).encode()
        for request_body in request_bodies
    ]


class ClientLoad:
    """Clients of one server, and their measurements."""

    def __init__(self, server_port: int, request_texts: list[bytes]) -> None:
        self.port = server_port
        self.texts = request_texts
        self.seconds: list[float] = []
        self.failures = 0

    async def client(self, request_index: int, end_seconds: float) -> None:
        """Send one request after the other until the time `end_seconds`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while (start_seconds := time.perf_counter()) < end_seconds:
            request_index = (request_index + 7) % len(self.texts)
            writer.write(self.texts[request_index])
            response_head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(
                int(response_head.partition(b"content-length: ")[2].partition(b"\r")[0])
            )
            self.failures += not response_head.startswith(b"http/1.1 200")
            self.seconds.append(time.perf_counter() - start_seconds)
        writer.close()

    async def send_slowly_until(self, end_seconds: float) -> None:
        """Open a connection, and send one byte of a request's body per second; reconnect when the
        server closes the connection."""
        while time.perf_counter() < end_seconds:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            request_head, _, request_body = self.texts[0].partition(b"\r\n\r\n")
            writer.write(request_head + b"\r\n\r\n")
            for byte in request_body:
                writer.write(bytes([byte]))
                await asyncio.sleep(1)
                if reader.at_eof() or time.perf_counter() > end_seconds:
                    break
            writer.close()

    async def run(self, client_count: int, slow: int, duration_seconds: float) -> None:
        end_seconds = time.perf_counter() + duration_seconds
        slow_clients = [self.send_slowly_until(end_seconds) for _ in range(slow)]
        await asyncio.gather(
            *(
                self.client(client_number * 61, end_seconds)
                for client_number in range(client_count)
            ),
            *slow_clients,
        )


@dataclass(frozen=True)
class RunMeasurements:
    """The measurements of one run: rate and latency, as the clients see them, and the CPU time of
    the server."""

    # answers per second
    rate: float
    # 99th percentile of the latency in ms
    p99: float
    failures: int
    # CPU time of the server in ms per answer
    cpu: float


@dataclass(frozen=True)
class MeasuredServer:
    """A running server, and the requests that clients send to it."""

    process: psutil.Process
    port: int
    texts: list[bytes]

    def run(self, client_count: int, duration_seconds: float, slow: int = 0) -> RunMeasurements:
        """Let the clients send requests for `duration_seconds`, after a warm-up of one second, and
        return the measurements."""
        asyncio.run(ClientLoad(self.port, self.texts).run(client_count, 0, 1.0))
        client_load = ClientLoad(self.port, self.texts)
        start_seconds = time.perf_counter()
        start_cpu_seconds = self.cpu()
        asyncio.run(client_load.run(client_count, slow, duration_seconds))
        answer_count = len(client_load.seconds)
        spent_cpu_seconds = self.cpu() - start_cpu_seconds
        answers_per_second = answer_count / (time.perf_counter() - start_seconds)
        return RunMeasurements(
            answers_per_second,
            1000 * quantiles(client_load.seconds, n=100)[98],
            client_load.failures,
            1000 * spent_cpu_seconds / answer_count,
        )

    def cpu(self) -> float:
        """Return the CPU seconds of the server and its child processes."""
        process_cpu_times = [
            process.cpu_times()
            for process in (self.process, *self.process.children(recursive=True))
        ]
        return sum(cpu_times.user + cpu_times.system for cpu_times in process_cpu_times)


def start_servers(
    model_name: str, working_folder: Path, process_count: int, exit_stack: ExitStack
) -> list[MeasuredServer]:
    """Start three servers of a model: a server that predicts in batches, a server that predicts one
    by one, and a server of MLflow."""
    release_folder, instances = write_release(model_name, working_folder)
    release_prefix, server_environment = upload(model_name, release_folder, working_folder / "home")
    measured_servers = []
    request_texts = make_requests(f"/v1/models/{model_name}:predict", "instances", instances)

    for extra_flags in ([], ["--max-batch=1"]):
        server_port = FIRST_PORT + len(measured_servers)
        serve_command = [
            sys.executable,
            "-m",
            "rekindle",
            "step",
            "steps.serve",
            f"--model={release_prefix}",
            f"--port={server_port}",
        ]

        server_command = [*serve_command, f"--processes={process_count}", *extra_flags]
        ready_url = f"http://127.0.0.1:{server_port}/health/ready"
        measured_servers.append(
            MeasuredServer(
                exit_stack.enter_context(
                    start_server(server_command, server_environment, ready_url)
                ),
                server_port,
                request_texts,
            )
        )

    server_port = FIRST_PORT + len(measured_servers)
    extra_flags = [
        "--env-manager=local",
        "--workers=2",
        f"--port={server_port}",
        f"--model-uri={release_folder}",
    ]
    thread_variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    path_variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    server_command = [sys.executable, "-m", "mlflow", "models", "serve", *extra_flags]
    server_process = exit_stack.enter_context(
        start_server(
            server_command,
            server_environment | thread_variables | path_variables,
            f"http://127.0.0.1:{server_port}/ping",
        )
    )

    return [
        *measured_servers,
        MeasuredServer(
            server_process,
            server_port,
            make_requests("/invocations", "dataframe_records", instances),
        ),
    ]


def measure_model(
    model_name: str,
    working_folder: Path,
    duration_seconds: float,
    process_count: int,
    measures_slow_clients: bool,
) -> list[Bar]:
    """Measure the servers of a model; if `measures_slow_clients` is True, also measure with slow
    clients. Return the figures of the model's servers."""
    with ExitStack() as exit_stack:
        measured_servers = start_servers(model_name, working_folder, process_count, exit_stack)
        runs_by_turn = [
            [server.run(32, duration_seconds) for server in measured_servers]
            for _ in range(RUN_COUNT)
        ]
        batched_runs, single_runs, mlflow_runs = (
            [turn_runs[server_index] for turn_runs in runs_by_turn]
            for server_index in range(len(measured_servers))
        )
        bars = make_load_bars(model_name, batched_runs, single_runs, mlflow_runs)
        failure_count = sum(_list_figures(batched_runs + single_runs, "failures"))

        if measures_slow_clients:
            slow_client_bars, slow_client_failures = measure_slow_clients(
                measured_servers[0], duration_seconds
            )
            bars += slow_client_bars
            failure_count += slow_client_failures

    return [*bars, make_bar("  requests that failed with Rekindle", failure_count, "", 0)]


def make_load_bars(
    model_name: str,
    batched_runs: list[RunMeasurements],
    single_runs: list[RunMeasurements],
    mlflow_runs: list[RunMeasurements],
) -> list[Bar]:
    """Return the figures of the three servers of a model: the server that predicts in batches, the
    server that predicts one by one, and MLflow's server."""
    return [
        make_bar(
            f"{model_name}: requests of one record, 32 clients",
            _list_figures(batched_runs, "rate"),
            "/s",
            MIN_RATE_BY_MODEL.get(model_name),
            "more",
        ),
        make_bar("  p99 of these requests", _list_figures(batched_runs, "p99"), "ms", 40),
        make_bar("  CPU time per request", _list_figures(batched_runs, "cpu"), "ms"),
        make_bar("  rate with serve.max_batch 1", _list_figures(single_runs, "rate"), "/s"),
        make_bar(
            "  CPU time per request with serve.max_batch 1",
            _list_figures(single_runs, "cpu"),
            "ms",
        ),
        make_bar(
            "  rate in batches, relative to serve.max_batch 1",
            _compute_ratios(batched_runs, single_runs, "rate"),
            "times",
            None if model_name in MIN_RATE_BY_MODEL else 3,
            "more",
        ),
        make_bar("  rate of mlflow models serve", _list_figures(mlflow_runs, "rate"), "/s"),
        make_bar("  p99 of mlflow models serve", _list_figures(mlflow_runs, "p99"), "ms"),
        make_bar(
            "  CPU time per request of mlflow models serve",
            _list_figures(mlflow_runs, "cpu"),
            "ms",
        ),
        make_bar(
            "  requests that failed with mlflow models serve",
            sum(_list_figures(mlflow_runs, "failures")),
            "",
        ),
        make_bar(
            "  rate in batches, relative to mlflow models serve",
            _compute_ratios(batched_runs, mlflow_runs, "rate"),
            "times",
            5,
            "more",
        ),
    ]


def measure_slow_clients(
    measured_server: MeasuredServer, duration_seconds: float
) -> tuple[list[Bar], float]:
    """Measure 8 clients, first alone and then next to 64 slow clients. Return the figures of the 8
    clients, and the number of failed requests."""
    undisturbed_runs = [measured_server.run(8, duration_seconds) for _ in range(RUN_COUNT)]
    disturbed_runs = [measured_server.run(8, duration_seconds, slow=64) for _ in range(RUN_COUNT)]
    bars = [
        make_bar("  p99 of 8 clients alone", _list_figures(undisturbed_runs, "p99"), "ms"),
        make_bar(
            "  p99 of 8 clients with 64 slow clients", _list_figures(disturbed_runs, "p99"), "ms"
        ),
        make_bar(
            "  p99 with slow clients, relative to p99 without slow clients",
            _compute_ratios(disturbed_runs, undisturbed_runs, "p99"),
            "times",
            2,
        ),
    ]
    return bars, sum(_list_figures(undisturbed_runs + disturbed_runs, "failures"))


def _list_figures(measured_runs: list[RunMeasurements], figure_name: str) -> list[float]:
    """Return one figure, a field of RunMeasurements, of each measured run."""
    return [getattr(measured_run, figure_name) for measured_run in measured_runs]


def _compute_ratios(
    measured_runs: list[RunMeasurements], reference_runs: list[RunMeasurements], figure_name: str
) -> list[float]:
    return [
        figure_value / reference_value
        for figure_value, reference_value in zip(
            _list_figures(measured_runs, figure_name),
            _list_figures(reference_runs, figure_name),
            strict=True,
        )
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--models",
        nargs="+",
        choices=list(SOURCE_BY_MODEL),
        default=list(SOURCE_BY_MODEL),
        help="models to serve (default: all)",
    )

    argument_parser.add_argument(
        "--seconds", type=float, default=10, help="seconds of each run (default: 10)"
    )

    argument_parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="setting serve.processes of the servers (default: 1)",
    )

    options = argument_parser.parse_args()

    client_cores = os.sched_getaffinity(0) - SERVER_CORES
    if client_cores:
        os.sched_setaffinity(0, client_cores)

    bars = []
    with tempfile.TemporaryDirectory() as temporary_folder:
        # the folder that contains the module power.py
        sys.path.insert(0, temporary_folder)
        try:
            for model_name in options.models:
                is_last_model = model_name == options.models[-1]
                bars += measure_model(
                    model_name,
                    Path(temporary_folder),
                    options.seconds,
                    options.processes,
                    is_last_model,
                )
        finally:
            from rekindle.local.services.services import Services

            Services(Path(temporary_folder) / "home", {}).down()

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
