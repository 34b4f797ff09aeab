"""Effect of releases on clients: 200 requests per second during a release, a failed release, a rollback and a canary.

    python -m benchmarks.release.traffic [--json]

The model is the model of configs/digits.yaml; some releases have a fault (benchmarks/workloads/faulty.py). 60 % of the
requests have their own connection (HTTP/1.1 or 1.0), 10 % are sent in pieces within a second, and 30 % come from
clients that reuse a connection after idle times of up to 8 s, longer than a server drains; like every connection pool,
these clients first check whether the connection was closed. Every answer must have status 200 and be from a verified
version, except for the errors of the canary's faulty candidate.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.release.canary import CONFIG, rekindle, requests

RATE = 200  # requests per second
REUSING, IDLE_S = 240, 8.0  # clients that reuse a connection, and their longest idle time: 30 % of RATE
PIECES = 4  # number of pieces of a slow request
PORT = 18_495
SETTINGS = [
    "name=digits",
    "workload=benchmarks.workloads.faulty",
    f"serve.port={PORT}",
    "serve.max_waiting=2000",  # large, because trainings use the same cores, so answers may be late
    "gate={minimum: {accuracy: 0.9}, tolerance: 0.5, confidence: 0.999}",
]
CANARY = "serve.canary={steps: [50, 100], minutes: 0.2, wait_minutes: 5}"


@dataclass(frozen=True)
class Answer:
    """The result of a request: its time, HTTP status (0: no answer), version of the model, and kind of connection."""

    time: float
    status: int
    version: str
    kind: str


class Traffic:
    """Clients that together send requests at RATE, however fast the servers answer."""

    def __init__(self) -> None:
        self.texts = requests()
        self.answers: list[Answer] = []
        self.over = threading.Event()

    async def ask(self, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes) -> str:
        """Send a request; return the head of its answer in lower case.

        Raises OSError or EOFError without an answer.
        """
        pieces = PIECES if kind == "slow" else 1
        for index in range(pieces):
            writer.write(text[len(text) * index // pieces : len(text) * (index + 1) // pieces])
            await asyncio.sleep(1 / pieces if pieces > 1 else 0)
        head = (await reader.readuntil(b"\r\n\r\n")).lower().decode()
        await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r")[0]))
        self.record(kind, int(head.split()[1]), head.partition("model-version: ")[2].partition("\r")[0])
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
                reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
                await self.ask(kind, reader, writer, text.replace(b"host: x", b"host: x\r\nconnection: close"))
                writer.close()
        except (OSError, EOFError, TimeoutError):
            self.record(kind, 0, "")

    async def reuse_connection(self) -> None:
        """Send requests on one connection, with idle times between requests; connect again when it is closed."""
        while not self.over.is_set():
            try:
                async with asyncio.timeout(60):
                    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
                head = ""
                while not (self.over.is_set() or "connection: close" in head or is_closed(writer)):
                    async with asyncio.timeout(60):
                        head = await self.ask("kept", reader, writer, random.choice(self.texts))
                    await asyncio.sleep(random.uniform(0, IDLE_S))
                writer.close()
            except (OSError, EOFError, TimeoutError):
                self.record("kept", 0, "")
                await asyncio.sleep(random.uniform(0, IDLE_S))

    async def run(self) -> None:
        """Send requests until `over` is set, then wait until all clients have an answer."""
        single, kinds = RATE - 2 * REUSING / IDLE_S, ["HTTP/1.1"] * 3 + ["HTTP/1.0"] * 3 + ["slow"]
        async with asyncio.TaskGroup() as group:
            for _ in range(REUSING):
                group.create_task(self.reuse_connection())
            start, number = time.perf_counter(), 0
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
def traffic() -> Iterator[Traffic]:
    """Send requests until the end of the block; yield the clients with their answers."""
    load = Traffic()
    thread = threading.Thread(target=lambda: asyncio.run(load.run()))
    thread.start()
    try:
        yield load
    finally:
        load.over.set()
        thread.join()


def train(home: Path, seed: int, *settings: str) -> str:
    """Run the pipeline of CONFIG with a seed. Returns the verdict about its model."""
    sets = [*SETTINGS, f"train.seed={seed}", *settings]
    about = rekindle(home, "run", CONFIG, *(flag for setting in sets for flag in ("--set", setting)))
    print(f"{settings}: {about['verdict']}, {about.get('reason')}", file=sys.stderr)
    return about["verdict"]


def measure(home: Path) -> list[Bar]:
    """Return the numbers of failed requests, and the duration of a rollback."""
    train(home, 1)
    with traffic() as load:
        verdicts = [train(home, 2)]
        try:
            verdicts.append(train(home, 3, "model.fault=unsteady"))
        except subprocess.CalledProcessError as error:
            verdicts.append(f"exit code {error.returncode}")
        start = time.time()
        rekindle(home, "rollback", "digits")
        seconds = time.time() - start
        time.sleep(3)
        of_2 = [answer for answer in load.answers if answer.version == "2"]
        last_of_2 = max(answer.time for answer in of_2 if answer.kind != "kept") - start
        before_canary = len(load.answers)
        try:
            verdicts.append(train(home, 4, "model.fault=errors", CANARY))
        except subprocess.CalledProcessError as error:
            verdicts.append(f"exit code {error.returncode}")
        time.sleep(3)
    print(verdicts, file=sys.stderr)
    versions = {answer.version for answer in load.answers} - {""}
    failed = [answer for answer in load.answers[:before_canary] if answer.status != 200]
    wrong = [answer for answer in load.answers[before_canary:] if answer.status != 200]
    failed_in_canary = [answer for answer in wrong if not (answer.status == 500 and answer.version)]
    kinds = Counter((answer.kind, answer.status) for answer in load.answers)
    print(f"versions {versions}; statuses by kind of connection {kinds}", file=sys.stderr)
    return [
        bar("all requests", len(load.answers), ""),
        bar("requests that failed during the releases and the rollback", len(failed), "", 0),
        bar("requests that failed during the canary, except for the candidate's fault", len(failed_in_canary), "", 0),
        bar("answers of the version that predicts at random", sum(a.version == "3" for a in load.answers), "", 0),
        bar("duration of the command `rekindle rollback`", seconds, "s", 5),
        bar("start of this command to the last answer of the previous version to a new connection", last_of_2, "s", 5),
    ]


def main() -> int:
    arguments = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            bars = measure(Path(folder))
        finally:
            rekindle(Path(folder), "down")
    return report(bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
