"""Effect of releases on clients: 200 requests per second during a release, a failed release, a rollback and a canary.

    python -m benchmarks.release.traffic [--json]

The model is from configs/digits.yaml, with faults (benchmarks/workloads/faulty.py). 60 % of the requests have their
own connection (HTTP/1.1 and 1.0), 10 % are sent in pieces within a second, and 30 % come from clients that reuse their
connection and are idle for up to 8 s, longer than a server drains; like every pool, they first check if the connection
was closed. Answers must be 200 and from a verified version, except for the errors of the canary's faulty candidate.
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
REUSING, IDLE_S = 240, 8.0  # clients that reuse a connection, and their longest idle time: RATE * 0.3 requests/s
PIECES = 4  # per slow request
PORT = 18_495
SETTINGS = [
    "name=digits",
    "workload=benchmarks.workloads.faulty",
    f"serve.port={PORT}",
    "serve.max_waiting=2000",  # trainings use the same cores: answers may be late
    "gate={minimum: {accuracy: 0.9}, tolerance: 0.5, confidence: 0.999}",
]
CANARY = "serve.canary={steps: [50, 100], minutes: 0.2, wait_minutes: 5}"


@dataclass(frozen=True)
class Answer:
    """An answer: time, HTTP status (0: none), version of the model, and kind of connection."""

    time: float
    status: int
    version: str
    kind: str


class Traffic:
    """Clients that send requests at RATE, independently of the servers."""

    def __init__(self) -> None:
        self.texts = requests()
        self.answers: list[Answer] = []
        self.over = threading.Event()

    async def ask(self, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes) -> str:
        """Send a request; return the head of the answer in lower case. Raises OSError or EOFError without an answer."""
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
        """Send one request on its own connection."""
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
        """Send requests on one connection with idle time in between; reconnect when it is closed."""
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
    """Return True if the server has closed this connection."""
    if writer.is_closing():
        return True
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Send requests until the end of the block."""
    load = Traffic()
    thread = threading.Thread(target=lambda: asyncio.run(load.run()))
    thread.start()
    try:
        yield load
    finally:
        load.over.set()
        thread.join()


def train(home: Path, seed: int, *settings: str) -> str:
    """Run the pipeline. Returns its verdict."""
    sets = [*SETTINGS, f"train.seed={seed}", *settings]
    about = rekindle(home, "run", CONFIG, *(flag for setting in sets for flag in ("--set", setting)))
    print(f"{settings}: {about['verdict']}, {about.get('reason')}", file=sys.stderr)
    return about["verdict"]


def measure(home: Path) -> list[Bar]:
    """Return the figures of this benchmark."""
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
        bar("requests", len(load.answers), ""),
        bar("requests that failed, release, failed release and rollback", len(failed), "", 0),
        bar("requests that failed in the canary, except for the candidate's fault", len(failed_in_canary), "", 0),
        bar("answers of the version with random predictions", sum(a.version == "3" for a in load.answers), "", 0),
        bar("the command `rekindle rollback`", seconds, "s", 5),
        bar("last answer of the previous version to a new connection after its start", last_of_2, "s", 5),
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
