"""Measure how fast clients get answers while 4,000 slow or silent connections flood a model server,
which may open only 256 file descriptors.

    python -m benchmarks.flood [--seconds 10] [--json]

The server serves the workload `power` of docs/your-own-model.md. Each connection of the flood sends
one of the following: nothing, part of a request's head, a complete request and part of a second
head, or a complete head and part of the body. A connection of the flood that the server closes is
opened again after 20 s on average, so about 200 connections arrive per second. A third of the
clients sends requests on one connection without a pause, a third opens a connection for each
request, and a third reuses a connection after pauses and, like every connection pool, first checks
whether the connection was closed. Probes are sent each on its own connection, as a kubelet does.
"""

import asyncio
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import quantiles

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.release.traffic import is_connection_closed
from benchmarks.serving import FIRST_PORT, make_requests, start_server, upload, write_release

MAX_FILE_DESCRIPTORS = 256
FLOOD_CONNECTIONS = 4000
# number of clients of each kind
CLIENTS_PER_KIND = 4
RUN_COUNT = 3
# mean pause before the flood reopens a connection that the server has closed
CLIENT_PAUSE_S = 20.0
PROBE_REQUEST = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
CLIENT_KINDS = ("steady", "single", "pausing", "probe")


class MeasuredClients:
    """Clients of a server, and their measurements."""

    def __init__(self, request_texts: list[bytes]) -> None:
        self.texts = request_texts
        # latencies of all requests except the probes
        self.seconds: list[float] = []
        self.probes = 0
        # number of failed requests by client kind and reason
        self.failures: Counter[str] = Counter()

    async def client(self, client_kind: str, end_seconds: float) -> None:
        """Send requests as a client of the kind `client_kind` until the time `end_seconds`."""
        connection_writer = connection_reader = None

        while (start_seconds := time.perf_counter()) < end_seconds:
            request_text = PROBE_REQUEST if client_kind == "probe" else random.choice(self.texts)
            try:
                async with asyncio.timeout(30):
                    if (
                        not (connection_writer and connection_reader)
                        or client_kind in ("single", "probe")
                        or is_connection_closed(connection_writer)
                    ):
                        if connection_writer:
                            connection_writer.close()

                        connection_reader, connection_writer = await asyncio.open_connection(
                            "127.0.0.1", FIRST_PORT
                        )

                    connection_writer.write(request_text)
                    response_head = (await connection_reader.readuntil(b"\r\n\r\n")).lower()
                    await connection_reader.readexactly(
                        int(response_head.partition(b"content-length: ")[2].partition(b"\r")[0])
                    )

                if not response_head.startswith(b"http/1.1 200"):
                    self.failures[f"{client_kind}: {response_head[:12].decode()}"] += 1
            except (OSError, EOFError, TimeoutError) as error:
                self.failures[f"{client_kind}: {error!r}"] += 1
                connection_writer = None

            if client_kind == "probe":
                self.probes += 1
            else:
                self.seconds.append(time.perf_counter() - start_seconds)

            await asyncio.sleep({"probe": 0.2, "pausing": random.uniform(0, 1)}.get(client_kind, 0))

    async def run(self, duration_seconds: float) -> None:
        end_seconds = time.perf_counter() + duration_seconds
        await asyncio.gather(
            *(
                self.client(client_kind, end_seconds)
                for client_kind in CLIENT_KINDS
                for _ in range(CLIENTS_PER_KIND)
            )
        )


async def flood_server(request_text: bytes) -> None:
    """Keep connections to the server open forever; and reopen each connection that the server
    closes."""
    request_head = request_text.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    request_beginnings = [
        b"",
        request_text[:20],
        request_text + request_text[:20],
        request_head + b"{",
    ]

    async def hold(request_beginning: bytes) -> None:
        while True:
            await asyncio.sleep(random.uniform(0, 2 * CLIENT_PAUSE_S))
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", FIRST_PORT)
                writer.write(request_beginning)
                while await reader.read(1000):
                    pass
                writer.close()

    await asyncio.gather(
        *(
            hold(request_beginnings[connection_number % len(request_beginnings)])
            for connection_number in range(FLOOD_CONNECTIONS)
        )
    )


@contextmanager
def flood_from_process() -> Iterator[None]:
    """Flood the server until the end of the `with` block, from another process."""
    flood_process = subprocess.Popen([sys.executable, "-m", "benchmarks.flood", "--attack"])
    try:
        # wait until the server has used all its file descriptors
        time.sleep(CLIENT_PAUSE_S / 2)
        yield
    finally:
        flood_process.kill()
        flood_process.wait()


def measure_flood(temporary_folder: Path, duration_seconds: float) -> list[Bar]:
    """Measure the clients without and with the flood, and return the figures."""
    written_release, instances = write_release("power", temporary_folder)
    request_messages = make_requests("/v1/models/power:predict", "instances", instances)
    release_prefix, server_environment = upload("power", written_release, temporary_folder / "home")

    serve_command = [
        sys.executable,
        "-m",
        "rekindle",
        "step",
        "steps.serve",
        f"--model={release_prefix}",
        f"--port={FIRST_PORT}",
    ]

    limited_serve_command = [
        "sh",
        "-c",
        f'ulimit -n {MAX_FILE_DESCRIPTORS}; exec "$@"',
        "sh",
        *serve_command,
    ]

    def run_clients() -> MeasuredClients:
        clients = MeasuredClients(request_messages)
        asyncio.run(clients.run(duration_seconds))
        return clients

    unflooded_clients = []
    flooded_clients = []
    with start_server(
        limited_serve_command, server_environment, f"http://127.0.0.1:{FIRST_PORT}/health/ready"
    ):
        # warm up the server and the clients, because the first requests are slower
        run_clients()
        for _ in range(RUN_COUNT):
            unflooded_clients.append(run_clients())
            with flood_from_process():
                flooded_clients.append(run_clients())

    return make_bars(unflooded_clients, flooded_clients)


def make_bars(
    unflooded_clients: list[MeasuredClients], flooded_clients: list[MeasuredClients]
) -> list[Bar]:
    """Return the figures of the runs without and with the flood; the runs with the same index in
    both lists were made at nearly the same time."""
    failure_counts = sum(
        (clients.failures for clients in unflooded_clients + flooded_clients), Counter[str]()
    )
    busy_count = sum(
        failure_counts[f"{client_kind}: http/1.1 503"]
        for client_kind in CLIENT_KINDS
        if client_kind != "probe"
    )
    print(dict(failure_counts), file=sys.stderr)
    p99_latencies_ms = [
        [1000 * quantiles(clients.seconds, n=100)[98] for clients in client_runs]
        for client_runs in (unflooded_clients, flooded_clients)
    ]
    latency_ratios = [
        latency_during_flood / latency_without_flood
        for latency_without_flood, latency_during_flood in zip(*p99_latencies_ms, strict=True)
    ]

    return [
        make_bar(
            "requests of clients during the flood",
            sum(len(clients.seconds) for clients in flooded_clients),
            "",
        ),
        make_bar("probes during the flood", sum(clients.probes for clients in flooded_clients), ""),
        make_bar("requests with the answer 503 and Retry-After", busy_count, ""),
        make_bar(
            "requests and probes that were reset or got another answer",
            failure_counts.total() - busy_count,
            "",
            0,
        ),
        make_bar("p99 of the clients without the flood", p99_latencies_ms[0], "ms"),
        make_bar("p99 of the clients during the flood", p99_latencies_ms[1], "ms"),
        make_bar(
            "p99 during the flood, relative to p99 without the flood", latency_ratios, "times", 2
        ),
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--seconds", type=float, default=10, help="seconds of each run (default: 10)"
    )
    argument_parser.add_argument(
        "--attack", action="store_true", help="only flood the server at the port of this benchmark"
    )
    options = argument_parser.parse_args()
    _, descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit, descriptor_limit))

    if options.attack:
        (request_text,) = make_requests(
            "/v1/models/power:predict", "instances", [{"hour": 1, "temperature": 9.0}]
        )
        asyncio.run(flood_server(request_text))

    with tempfile.TemporaryDirectory() as folder:
        # the folder that contains the module power.py
        sys.path.insert(0, folder)
        try:
            bars = measure_flood(Path(folder), options.seconds)
        finally:
            from rekindle.local.services.services import Services

            Services(Path(folder) / "home", {}).down()

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
