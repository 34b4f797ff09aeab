"""Measure the effect of releases on clients, which send 200 requests per second while the servers
of a model change.

    python -m benchmarks.release.traffic [--json]

The changes are a release, a failed release, a rollback, canaries of a faulty candidate (with the
traffic split by pods, and by an HTTPRoute) and the canary of a good candidate. The model is the
model of configs/digits.yaml; some releases have a fault (benchmarks/workloads/faulty.py). The
clients are:

- 57 % of the requests: a connection for each request (HTTP/1.1 or 1.0), with one in seven requests
  sent in pieces
  within a second
- 30 %: clients that reuse a connection after up to 6 s and, like every connection pool, first check
whether the connection was closed; one in four of these clients sends its requests in pieces
- 13 %: clients that reuse a connection without a check after up to 12 s, which is longer than a
server takes to shut down

Every answer must have status 200 and come from a verified version; only faulty candidates may
return errors.
"""

import asyncio
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.release.canary import CONFIG, rekindle, requests

RATE = 200  # requests per second
# clients that reuse connections, by kind: (number of clients at RATE, longest idle time in seconds)
REUSE = {"checked": (135, 6.0), "checked, slow": (45, 6.0), "unchecked": (156, 12.0)}
PIECES = 4  # number of pieces of a slow request
PORT = 18_495
SETTINGS = [
    "name=digits",
    "workload=benchmarks.workloads.faulty",
    f"serve.port={PORT}",
    # large, because answers may be late while trainings use the same cores
    "serve.max_waiting=2000",
    "serve.grace_seconds=5",
    "gate={minimum: {accuracy: 0.9}, tolerance: 0.5, confidence: 0.999}",
]
ROUTE = ", gateway: default/web"
CANARY = "steps: [50, 100], minutes: 0.2, wait_minutes: 5"
SETTLE_S = 9.0  # time to wait after a change, so that the previous servers have ended


@dataclass(frozen=True)
class Answer:
    """The result of a request: its time, HTTP status (0: no answer), version of the model, and kind
    of connection."""

    time: float
    status: int
    version: str
    kind: str


class Traffic:
    """Clients that together send `rate` requests per second, regardless of how fast the servers
    answer."""

    def __init__(self, host: str = "127.0.0.1", port: int = PORT, rate: float = RATE) -> None:
        self.address = (host, port)
        self.rate = rate
        self.texts = requests()
        self.answers: list[Answer] = []
        self.over = threading.Event()

    async def ask(
        self, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes
    ) -> str:
        """Send a request; return the status line and headers of the response in lower case.

        Raises OSError or EOFError if no response arrives.
        """
        pieces = PIECES if "slow" in kind else 1
        for index in range(pieces):
            writer.write(text[len(text) * index // pieces : len(text) * (index + 1) // pieces])
            await asyncio.sleep(1 / pieces if pieces > 1 else 0)

        head = (await reader.readuntil(b"\r\n\r\n")).lower().decode()
        await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r")[0]))
        self.record(
            kind, int(head.split()[1]), head.partition("model-version: ")[2].partition("\r")[0]
        )

        return head

    def record(self, kind: str, status: int, version: str) -> None:
        self.answers.append(Answer(time.time(), status, version, kind))

    async def client(self, kind: str) -> None:
        """Send one request on a new connection."""
        text = random.choice(self.texts)
        if kind == "HTTP/1.0":
            text = text.replace(b"HTTP/1.1", b"HTTP/1.0")

        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection(*self.address)
                await self.ask(
                    kind, reader, writer, text.replace(b"host: x", b"host: x\r\nconnection: close")
                )
                writer.close()
        except (OSError, EOFError, TimeoutError):
            self.record(kind, 0, "")

    async def reuse_connection(self, kind: str, idle_s: float) -> None:
        """Send requests on one connection, with idle times in between; reconnect when the
        connection is closed."""
        while not self.over.is_set():
            try:
                async with asyncio.timeout(60):
                    reader, writer = await asyncio.open_connection(*self.address)

                head = ""
                while not (self.over.is_set() or "connection: close" in head):
                    if kind != "unchecked" and is_closed(writer):
                        break

                    async with asyncio.timeout(60):
                        head = await self.ask(kind, reader, writer, random.choice(self.texts))

                    await asyncio.sleep(random.uniform(0, idle_s))

                writer.close()
            except (OSError, EOFError, TimeoutError):
                self.record(kind, 0, "")
                await asyncio.sleep(random.uniform(0, idle_s))

    async def run(self) -> None:
        """Send requests until the event `over` is set, then wait until all clients have their
        answers."""
        reuse = [
            (kind, round(count * self.rate / RATE), idle_s)
            for kind, (count, idle_s) in REUSE.items()
        ]
        single = self.rate - sum(2 * count / idle_s for _, count, idle_s in reuse)
        kinds = ["HTTP/1.1"] * 3 + ["HTTP/1.0"] * 3 + ["slow"]

        async with asyncio.TaskGroup() as group:
            for kind, count, idle_s in reuse:
                for _ in range(count):
                    group.create_task(self.reuse_connection(kind, idle_s))

            start = time.perf_counter()
            number = 0
            while not self.over.is_set():
                group.create_task(self.client(kinds[number % len(kinds)]))
                number += 1
                await asyncio.sleep(max(0, start + number / single - time.perf_counter()))


def is_closed(writer: asyncio.StreamWriter) -> bool:
    """Return True if the server has closed the connection of `writer`."""
    if writer.is_closing():
        return True
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


@contextmanager
def traffic(load: Traffic) -> Iterator[Traffic]:
    """Send the requests of `load` until the end of the block; yield `load`, which collects the
    answers."""
    thread = threading.Thread(target=lambda: asyncio.run(load.run()))
    thread.start()
    try:
        yield load
    finally:
        load.over.set()
        thread.join()


def train(home: Path, seed: int, *settings: str) -> str:
    """Run the pipeline of CONFIG with a seed. Returns the verdict about the model, or `exit code N`
    if the run fails."""
    sets = [*SETTINGS, f"train.seed={seed}", *settings]
    try:
        result = rekindle(
            home, "run", CONFIG, *(flag for setting in sets for flag in ("--set", setting))
        )
    except subprocess.CalledProcessError as error:
        return f"exit code {error.returncode}"
    return result["verdict"]


def canary(home: Path, seed: int, fault: str, more: str = "") -> str:
    return train(home, seed, f"model.fault={fault}", f"serve.canary={{{CANARY}{more}}}")


# changes by name: (function that makes the change, its expected result, versions that may answer
# during the change, the faulty one of these versions or "")
CHANGES: dict[str, tuple[Callable[[Path], str], str, set[str], str]] = {
    "release": (lambda home: train(home, 2), "release", {"1", "2"}, ""),
    "failed-release": (
        lambda home: train(home, 3, "model.fault=unsteady"),
        "exit code 1",
        {"2"},
        "",
    ),
    "rollback": (lambda home: rekindle(home, "rollback", "digits")["version"], "1", {"1", "2"}, ""),
    "canary": (lambda home: canary(home, 4, "errors"), "exit code 3", {"1", "4"}, "4"),
    "canary-route": (lambda home: canary(home, 5, "errors", ROUTE), "exit code 3", {"1", "5"}, "5"),
    "canary-passes": (lambda home: canary(home, 6, "", ROUTE), "release", {"1", "6"}, ""),
}


def count(name: str, answers: list[Answer], versions: set[str], faulty: str) -> list[Bar]:
    """Count the requests that failed, and those that an unexpected version answered, during the
    change `name`.

    `versions`: versions that may answer; `faulty`: the version that may return errors, or "".
    """
    failed = [
        a for a in answers if a.status != 200 and not (a.status == 500 and a.version == faulty)
    ]
    strangers = [a for a in answers if a.status == 200 and a.version not in versions]
    by_version = Counter(a.version for a in answers)
    kinds = Counter((a.kind, a.status) for a in failed)
    print(f"{name}: answers by version {by_version}; failed {kinds}", file=sys.stderr)

    return [
        bar(f"{name}: requests", len(answers), ""),
        bar("  requests that failed, except for the candidate's fault", len(failed), "", 0),
        bar(
            "  answers of another version than the champion and the verified candidate",
            len(strangers),
            "",
            0,
        ),
    ]


def rollback_times(answers: list[Answer], previous: str, start: float, seconds: float) -> list[Bar]:
    """Return the figures of a rollback: the duration `seconds` of its command, and the time from
    `start` until the last answer of the version `previous`."""
    last = max(a.time for a in answers if a.version == previous and a.kind not in REUSE) - start
    return [
        bar("  duration of the command", seconds, "s", 5),
        bar(
            "  time until the last answer of the previous version to a new connection", last, "s", 5
        ),
    ]


def measure_change(home: Path, load: Traffic, name: str) -> list[Bar]:
    """Make the change `name`; return how many requests failed meanwhile, and how many an unexpected
    version answered."""
    change, expected, versions, faulty = CHANGES[name]
    first = len(load.answers)
    start = time.time()
    result = change(home)
    seconds = time.time() - start

    if result != expected:
        raise SystemExit(f"{name} ended with {result}, not with {expected}")

    time.sleep(SETTLE_S)
    answers = load.answers[first:]
    bars = count(name, answers, versions, faulty)

    if name == "rollback":
        bars += rollback_times(answers, "2", start, seconds)

    return bars


def main() -> int:
    arguments = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        try:
            train(home, 1)
            with traffic(Traffic()) as load:
                bars = [line for name in CHANGES for line in measure_change(home, load, name)]
        finally:
            rekindle(home, "down")
    return report(bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
