"""Measure how clients fare while 4,000 slow or silent connections flood a model server, which may
open only 256 file descriptors.

    python -m benchmarks.flood [--seconds 10] [--json]

The server serves the workload `power` of docs/your-own-model.md. Each connection of the flood sends
one of the following: nothing, part of a request's head, a complete request and part of a second
head, or a complete head and part of the body. A connection that the server closes is opened again
after 20 s on average, so about 200 connections arrive per second. A third of the clients sends
requests on one connection without a pause, a third opens a connection for each request, and a third
reuses a connection after pauses and, like every connection pool, first checks whether the
connection was closed. Probes are sent each on its own connection, as a kubelet does.
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

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.release.traffic import is_closed
from benchmarks.serving import PORT, requests, running, upload, write_release

DESCRIPTORS = 256
CONNECTIONS = 4000
CLIENTS = 4  # number of clients of each kind
RUNS = 3
PAUSE_S = 20.0  # mean pause before the flood reopens a connection that the server has closed
PROBE = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
KINDS = ("steady", "single", "pausing", "probe")


class Clients:
    """Clients of a server, and their measurements."""

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts
        self.seconds: list[float] = []
        self.probes = 0
        # number of failed requests by client kind and reason
        self.failures: Counter[str] = Counter()

    async def client(self, kind: str, until: float) -> None:
        """Send requests until the time `until`."""
        writer = reader = None

        while (start := time.perf_counter()) < until:
            text = PROBE if kind == "probe" else random.choice(self.texts)
            try:
                async with asyncio.timeout(30):
                    if not (writer and reader) or kind in ("single", "probe") or is_closed(writer):
                        if writer:
                            writer.close()

                        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)

                    writer.write(text)
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    await reader.readexactly(
                        int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
                    )

                if not head.startswith(b"http/1.1 200"):
                    self.failures[f"{kind}: {head[:12].decode()}"] += 1
            except (OSError, EOFError, TimeoutError) as error:
                self.failures[f"{kind}: {error!r}"] += 1
                writer = None

            if kind == "probe":
                self.probes += 1
            else:
                self.seconds.append(time.perf_counter() - start)

            await asyncio.sleep({"probe": 0.2, "pausing": random.uniform(0, 1)}.get(kind, 0))

    async def run(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(self.client(kind, until) for kind in KINDS for _ in range(CLIENTS)))


async def flood(text: bytes) -> None:
    """Keep connections to the server open forever; reopen a connection that the server closes."""
    head = text.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    starts = [b"", text[:20], text + text[:20], head + b"{"]

    async def hold(start: bytes) -> None:
        while True:
            await asyncio.sleep(random.uniform(0, 2 * PAUSE_S))
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
                writer.write(start)
                while await reader.read(1000):
                    pass
                writer.close()

    await asyncio.gather(*(hold(starts[number % len(starts)]) for number in range(CONNECTIONS)))


@contextmanager
def flooding() -> Iterator[None]:
    """Flood the server until the end of the block, from another process."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.flood", "--attack"])
    try:
        time.sleep(PAUSE_S / 2)  # wait until the server has used all its file descriptors
        yield
    finally:
        process.kill()
        process.wait()


def measure(folder: Path, seconds: float) -> list[Bar]:
    """Measure the clients without and with the flood, and return the figures."""
    release, instances = write_release("power", folder)
    messages = requests("/v1/models/power:predict", "instances", instances)
    prefix, env = upload("power", release, folder / "home")

    serve = [
        sys.executable,
        "-m",
        "rekindle",
        "step",
        "steps.serve",
        f"--model={prefix}",
        f"--port={PORT}",
    ]

    command = ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh", *serve]

    def run() -> Clients:
        clients = Clients(messages)
        asyncio.run(clients.run(seconds))
        return clients

    alone = []
    flooded = []
    with running(command, env, f"http://127.0.0.1:{PORT}/health/ready"):
        run()  # warm-up, because the first requests are slower
        for _ in range(RUNS):
            alone.append(run())
            with flooding():
                flooded.append(run())

    failures = sum((clients.failures for clients in alone + flooded), Counter[str]())
    busy = sum(failures[f"{kind}: http/1.1 503"] for kind in KINDS if kind != "probe")
    print(dict(failures), file=sys.stderr)
    p99 = [
        [1000 * quantiles(clients.seconds, n=100)[98] for clients in runs]
        for runs in (alone, flooded)
    ]
    ratios = [during / without for without, during in zip(*p99, strict=True)]

    return [
        bar(
            "requests of clients during the flood",
            sum(len(clients.seconds) for clients in flooded),
            "",
        ),
        bar("probes during the flood", sum(clients.probes for clients in flooded), ""),
        bar("requests with the answer 503 and Retry-After", busy, ""),
        bar(
            "requests and probes that were reset or got another answer",
            failures.total() - busy,
            "",
            0,
        ),
        bar("p99 of the clients without the flood", p99[0], "ms"),
        bar("p99 of the clients during the flood", p99[1], "ms"),
        bar("p99 during the flood, relative to p99 without the flood", ratios, "times", 2),
    ]


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--seconds", type=float, default=10, help="seconds of each run (default: 10)"
    )
    command.add_argument(
        "--attack", action="store_true", help="only flood the server at the port of this benchmark"
    )
    arguments = command.parse_args()
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    if arguments.attack:
        (text,) = requests(
            "/v1/models/power:predict", "instances", [{"hour": 1, "temperature": 9.0}]
        )
        asyncio.run(flood(text))

    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)  # the folder that contains power.py
        try:
            bars = measure(Path(folder), arguments.seconds)
        finally:
            from rekindle.local.services.services import Services

            Services(Path(folder) / "home", {}).down()

    return report(bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
