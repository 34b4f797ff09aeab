"""What clients see of releases: 200 requests a second through a release, one that fails, a rollback and a canary.

    python -m benchmarks.release.traffic [--json]

The model is configs/digits.yaml, with faults (benchmarks/workloads/faulty.py). Each request has its own connection.
An answer must be 200 and come from a verified version, but for the errors of the faulty candidate of the canary.
"""

import asyncio
import random
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

RATE = 200  # requests a second
PORT = 18_495
SETTINGS = [
    "name=digits",
    "workload=benchmarks.workloads.faulty",
    f"serve.port={PORT}",
    "serve.max_waiting=2000",  # trainings take the same cores: answers may be late
    "gate={minimum: {accuracy: 0.9}, tolerance: 0.5, confidence: 0.999}",
]
CANARY = "serve.canary={steps: [50, 100], minutes: 0.2, wait_minutes: 5}"


@dataclass(frozen=True)
class Answer:
    """What a client got: when, the HTTP status (0: no answer), and the version that answered."""

    time: float
    status: int
    version: str


class Traffic:
    """Clients that come at RATE, whatever the servers do."""

    def __init__(self) -> None:
        self.texts = [text.replace(b"host: x", b"host: x\r\nconnection: close") for text in requests()]
        self.answers: list[Answer] = []
        self.over = threading.Event()

    async def client(self, text: bytes) -> None:
        """One request on a connection of its own."""
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
                writer.write(text)
                head = (await reader.read()).partition(b"\r\n\r\n")[0].lower().decode()
                writer.close()
            status = int(head.split()[1])
        except (OSError, TimeoutError, IndexError):
            status, head = 0, ""
        version = head.partition("model-version: ")[2].partition("\r")[0]
        self.answers.append(Answer(time.time(), status, version))

    async def run(self) -> None:
        """Until it is over and everybody has an answer."""
        async with asyncio.TaskGroup() as group:
            start, number = time.perf_counter(), 0
            while not self.over.is_set():
                group.create_task(self.client(random.choice(self.texts)))
                number += 1
                await asyncio.sleep(max(0, start + number / RATE - time.perf_counter()))


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Requests until the end of the block."""
    load = Traffic()
    thread = threading.Thread(target=lambda: asyncio.run(load.run()))
    thread.start()
    try:
        yield load
    finally:
        load.over.set()
        thread.join()


def train(home: Path, seed: int, *settings: str) -> str:
    """Run the pipeline; its verdict."""
    sets = [*SETTINGS, f"train.seed={seed}", *settings]
    about = rekindle(home, "run", CONFIG, *(flag for setting in sets for flag in ("--set", setting)))
    print(f"{settings}: {about['verdict']}, {about.get('reason')}", file=sys.stderr)
    return about["verdict"]


def measure(home: Path) -> list[Bar]:
    """The bars of this benchmark."""
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
        last_of_2 = max(answer.time for answer in load.answers if answer.version == "2") - start
        before_canary = len(load.answers)
        try:
            verdicts.append(train(home, 4, "model.fault=errors", CANARY))
        except subprocess.CalledProcessError as error:
            verdicts.append(f"exit code {error.returncode}")
        time.sleep(3)
    print(verdicts, file=sys.stderr)
    versions = {answer.version for answer in load.answers} - {""}
    quiet = [answer for answer in load.answers[:before_canary] if answer.status != 200]
    later = [a for a in load.answers[before_canary:] if a.status != 200 and not (a.status == 500 and a.version)]
    print(f"versions {versions}; statuses {Counter(answer.status for answer in load.answers)}", file=sys.stderr)
    return [
        bar("requests", len(load.answers), ""),
        bar("requests that failed, release, failed release and rollback", len(quiet), "", 0),
        bar("requests that failed in the canary, but for the candidate's own fault", len(later), "", 0),
        bar("answers of the unsteady version", sum(a.version == "3" for a in load.answers), "", 0),
        bar("the command `rekindle rollback`", seconds, "s", 5),
        bar("last answer of the former version after it began", last_of_2, "s", 5),
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
