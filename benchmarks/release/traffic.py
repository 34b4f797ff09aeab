"""Measure the effect of releases on clients, which send 200 requests per second while the servers
of a model change.

    python -m benchmarks.release.traffic [--json]

The changes are a release, a failed release, a rollback, canaries of a faulty candidate (which gets
its share of the traffic once by the number of pods, and once by an HTTPRoute) and the canary of a
good candidate. The model is the model of configs/digits.yaml; some releases have a fault
(benchmarks/workloads/faulty.py). The clients are:

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

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.release.canary import CONFIG_PATH, make_requests, rekindle

# requests per second
REQUESTS_PER_SECOND = 200
# clients that reuse connections, by kind: (number of clients at RATE, longest idle time in seconds)
REUSED_CONNECTIONS = {"checked": (135, 6.0), "checked, slow": (45, 6.0), "unchecked": (156, 12.0)}
# number of pieces of a slow request
SLOW_REQUEST_PIECES = 4
SERVER_PORT = 18_495
TRAIN_SETTINGS = [
    "name=digits",
    "workload=benchmarks.workloads.faulty",
    f"serve.port={SERVER_PORT}",
    # a large limit, because answers may be late while trainings use the same cores
    "serve.max_waiting=2000",
    "serve.grace_seconds=5",
    "gate={minimum: {accuracy: 0.9}, tolerance: 0.5, confidence: 0.999}",
]
ROUTE_SETTING = ", gateway: default/web"
CANARY_SETTING = "steps: [50, 100], minutes: 0.2, wait_minutes: 5"
# time to wait after a change, so that the previous servers have ended
SETTLE_SECONDS = 9.0


@dataclass(frozen=True)
class RequestAnswer:
    """The result of a request: its time, HTTP status (0: no answer), version of the model, and kind
    of connection."""

    time: float
    status: int
    version: str
    kind: str


class TrafficClients:
    """A group of clients that sends `rate` requests per second in total, regardless of how fast the
    servers answer."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        server_port: int = SERVER_PORT,
        requests_per_second: float = REQUESTS_PER_SECOND,
    ) -> None:
        self.address = (host, server_port)
        self.rate = requests_per_second
        self.texts = make_requests()
        self.answers: list[RequestAnswer] = []
        self.over = threading.Event()

    async def ask(
        self,
        connection_kind: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request_text: bytes,
    ) -> str:
        """Send a request; return the status line and headers of the response in lower case.

        Raises OSError or EOFError if no response arrives.
        """
        piece_count = SLOW_REQUEST_PIECES if "slow" in connection_kind else 1
        for piece_index in range(piece_count):
            writer.write(
                request_text[
                    len(request_text) * piece_index // piece_count : len(request_text)
                    * (piece_index + 1)
                    // piece_count
                ]
            )
            await asyncio.sleep(1 / piece_count if piece_count > 1 else 0)

        response_head = (await reader.readuntil(b"\r\n\r\n")).lower().decode()
        await reader.readexactly(
            int(response_head.partition("content-length: ")[2].partition("\r")[0])
        )
        self.record(
            connection_kind,
            int(response_head.split()[1]),
            response_head.partition("model-version: ")[2].partition("\r")[0],
        )

        return response_head

    def record(self, connection_kind: str, http_status: int, model_version: str) -> None:
        self.answers.append(RequestAnswer(time.time(), http_status, model_version, connection_kind))

    async def client(self, connection_kind: str) -> None:
        """Send one request on a new connection, and record its answer."""
        request_text = random.choice(self.texts)
        if connection_kind == "HTTP/1.0":
            request_text = request_text.replace(b"HTTP/1.1", b"HTTP/1.0")

        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection(*self.address)
                await self.ask(
                    connection_kind,
                    reader,
                    writer,
                    request_text.replace(b"host: x", b"host: x\r\nconnection: close"),
                )
                writer.close()
        except (OSError, EOFError, TimeoutError):
            self.record(connection_kind, 0, "")

    async def reuse_connection(self, connection_kind: str, idle_seconds: float) -> None:
        """Send requests on one connection, with idle times in between; reconnect when the
        connection is closed."""
        while not self.over.is_set():
            try:
                async with asyncio.timeout(60):
                    reader, writer = await asyncio.open_connection(*self.address)

                response_head = ""
                while not (self.over.is_set() or "connection: close" in response_head):
                    if connection_kind != "unchecked" and is_connection_closed(writer):
                        break

                    async with asyncio.timeout(60):
                        response_head = await self.ask(
                            connection_kind, reader, writer, random.choice(self.texts)
                        )

                    await asyncio.sleep(random.uniform(0, idle_seconds))

                writer.close()
            except (OSError, EOFError, TimeoutError):
                self.record(connection_kind, 0, "")
                await asyncio.sleep(random.uniform(0, idle_seconds))

    async def run(self) -> None:
        """Send requests until the event `over` is set, then wait until all clients have their
        answers."""
        reused_connections = [
            (
                connection_kind,
                round(connection_count * self.rate / REQUESTS_PER_SECOND),
                idle_seconds,
            )
            for connection_kind, (connection_count, idle_seconds) in REUSED_CONNECTIONS.items()
        ]
        single_request_rate = self.rate - sum(
            2 * connection_count / idle_seconds
            for _, connection_count, idle_seconds in reused_connections
        )
        connection_kinds = ["HTTP/1.1"] * 3 + ["HTTP/1.0"] * 3 + ["slow"]

        async with asyncio.TaskGroup() as task_group:
            for connection_kind, connection_count, idle_seconds in reused_connections:
                for _ in range(connection_count):
                    task_group.create_task(self.reuse_connection(connection_kind, idle_seconds))

            start_seconds = time.perf_counter()
            request_number = 0
            while not self.over.is_set():
                task_group.create_task(
                    self.client(connection_kinds[request_number % len(connection_kinds)])
                )
                request_number += 1
                await asyncio.sleep(
                    max(
                        0,
                        start_seconds + request_number / single_request_rate - time.perf_counter(),
                    )
                )


def is_connection_closed(writer: asyncio.StreamWriter) -> bool:
    """Return True if the server has closed the connection of `writer`."""
    if writer.is_closing():
        return True
    poller = select.poll()
    poller.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poller.poll(0))


@contextmanager
def send_traffic(traffic_clients: TrafficClients) -> Iterator[TrafficClients]:
    """Send the requests of `traffic_clients` until the end of the `with` block; yield
    `traffic_clients`, which collects the answers."""
    traffic_thread = threading.Thread(target=lambda: asyncio.run(traffic_clients.run()))
    traffic_thread.start()
    try:
        yield traffic_clients
    finally:
        traffic_clients.over.set()
        traffic_thread.join()


def train(home_folder: Path, train_seed: int, *extra_settings: str) -> str:
    """Run the pipeline of CONFIG with a seed. Return the verdict about the model, or the text `exit
    code N` if the run fails."""
    set_options = [*TRAIN_SETTINGS, f"train.seed={train_seed}", *extra_settings]
    try:
        run_output = rekindle(
            home_folder,
            "run",
            CONFIG_PATH,
            *(command_flag for set_option in set_options for command_flag in ("--set", set_option)),
        )
    except subprocess.CalledProcessError as error:
        return f"exit code {error.returncode}"
    return run_output["verdict"]


def release_with_canary(
    home_folder: Path, train_seed: int, fault_name: str, more_canary_settings: str = ""
) -> str:
    return train(
        home_folder,
        train_seed,
        f"model.fault={fault_name}",
        f"serve.canary={{{CANARY_SETTING}{more_canary_settings}}}",
    )


# changes by name: (function that makes the change, its expected result, versions that may answer
# during the change, the version among them that may return errors, or "")
CHANGES: dict[str, tuple[Callable[[Path], str], str, set[str], str]] = {
    "release": (lambda home: train(home, 2), "release", {"1", "2"}, ""),
    "failed-release": (
        lambda home: train(home, 3, "model.fault=unsteady"),
        "exit code 1",
        {"2"},
        "",
    ),
    "rollback": (lambda home: rekindle(home, "rollback", "digits")["version"], "1", {"1", "2"}, ""),
    "canary": (lambda home: release_with_canary(home, 4, "errors"), "exit code 3", {"1", "4"}, "4"),
    "canary-route": (
        lambda home: release_with_canary(home, 5, "errors", ROUTE_SETTING),
        "exit code 3",
        {"1", "5"},
        "5",
    ),
    "canary-passes": (
        lambda home: release_with_canary(home, 6, "", ROUTE_SETTING),
        "release",
        {"1", "6"},
        "",
    ),
}


def count_failures(
    change_name: str, answers: list[RequestAnswer], expected_versions: set[str], faulty_version: str
) -> list[Bar]:
    """Count the requests that failed, and the requests that an unexpected version answered, during
    the change `change_name`.

    `expected_versions`: versions that may answer; `faulty_version`: the version that may return
    errors, or "".
    """
    failed_answers = [
        answer
        for answer in answers
        if answer.status != 200 and not (answer.status == 500 and answer.version == faulty_version)
    ]
    unexpected_answers = [
        answer
        for answer in answers
        if answer.status == 200 and answer.version not in expected_versions
    ]
    answers_by_version = Counter(answer.version for answer in answers)
    failures_by_kind = Counter((answer.kind, answer.status) for answer in failed_answers)
    print(
        f"{change_name}: answers by version {answers_by_version}; failed {failures_by_kind}",
        file=sys.stderr,
    )

    return [
        make_bar(f"{change_name}: requests", len(answers), ""),
        make_bar(
            "  requests that failed, except for the candidate's fault", len(failed_answers), "", 0
        ),
        make_bar(
            "  answers of another version than the champion and the verified candidate",
            len(unexpected_answers),
            "",
            0,
        ),
    ]


def measure_rollback_times(
    answers: list[RequestAnswer],
    previous_version: str,
    start_seconds: float,
    command_seconds: float,
) -> list[Bar]:
    """Return the figures of a rollback: the duration `command_seconds` of its command, and the
    time from `start_seconds` until the last answer of the version `previous_version`."""
    last_answer_seconds = (
        max(
            answer.time
            for answer in answers
            if answer.version == previous_version and answer.kind not in REUSED_CONNECTIONS
        )
        - start_seconds
    )
    return [
        make_bar("  duration of the command", command_seconds, "s", 5),
        make_bar(
            "  time until the last answer of the previous version to a new connection",
            last_answer_seconds,
            "s",
            5,
        ),
    ]


def measure_change(
    home_folder: Path, traffic_clients: TrafficClients, change_name: str
) -> list[Bar]:
    """Make the change `change_name`; return how many requests failed during the change, and how
    many an unexpected version answered."""
    make_change, expected_outcome, expected_versions, faulty_version = CHANGES[change_name]
    first_answer_index = len(traffic_clients.answers)
    start_seconds = time.time()
    change_outcome = make_change(home_folder)
    change_seconds = time.time() - start_seconds

    if change_outcome != expected_outcome:
        raise SystemExit(f"{change_name} ended with {change_outcome}, not with {expected_outcome}")

    time.sleep(SETTLE_SECONDS)
    answers_during_change = traffic_clients.answers[first_answer_index:]
    bars = count_failures(change_name, answers_during_change, expected_versions, faulty_version)

    if change_name == "rollback":
        bars += measure_rollback_times(answers_during_change, "2", start_seconds, change_seconds)

    return bars


def main() -> int:
    options = make_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as temporary_folder:
        home_folder = Path(temporary_folder)
        try:
            train(home_folder, 1)
            with send_traffic(TrafficClients()) as traffic_clients:
                bars = [
                    bar_record
                    for change_name in CHANGES
                    for bar_record in measure_change(home_folder, traffic_clients, change_name)
                ]
        finally:
            rekindle(home_folder, "down")
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
