"""Speed of the page of runs, with its server and a headless Chromium.

    python -m benchmarks.commands.page [--json] [--nodes 500 5000] [--viewers 20]

The first view of a run is the time from the request until the page is loaded, from a server that
has not read this run yet. The time of an event is the delay from writing the line in the journal or
log until the slowest viewer's screen shows it. For the load at rest, one viewer shows the list of
runs, one a run, and one the run's log. The slowdown compares the CPU time of the same work with and
without three viewers of the page.

"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil
from playwright.sync_api import Browser
from playwright.sync_api import Page as BrowserPage

from argolocal.state.journal import RunFiles
from benchmarks.bars import Bar, bar, parser, report
from tests.browser import PageServer, start_browser, start_page

LOG_LINE = b"2026-11-29 12:00:00 step %d loss 0.12345 learning rate 0.001 of worker 3\n"
FIRST_VIEW_LIMITS_S = {500: 1.0, 5000: 3.0}
EVENT_LIMIT_S = 1.0
TIMEOUT_S = 30.0
# JavaScript that records when the page first shows each event, either a number of finished steps or
# a line of the log
OBSERVER = """() => {
    window.seenAt = {};
    const look = () => {
        const head = document.querySelector("#run-head")?.textContent ?? "";
        const line = document.querySelector(".lines")?.lastElementChild?.textContent ?? "";
        for (const match of [head.match(/(\\d+) of \\d+ steps/), line.match(/event (\\d+)/)]) {
            if (match && !(match[1] in window.seenAt)) window.seenAt[match[1]] = Date.now();
        }
    };
    new MutationObserver(look).observe(document.body, {
        subtree: true, childList: true, characterData: true, attributes: true,
    });
    look();
}"""


class WrittenRun:
    """A simulated run: this process writes its files, as a runner would."""

    def __init__(self, home: Path, name: str, count: int, phase: str) -> None:
        self.files = RunFiles(home, name)
        self.name = name
        tasks = [
            {"name": f"t{index}", "template": "work"}
            | ({"depends": f"t{max(0, index - 10)}"} if index else {})
            for index in range(count)
        ]
        templates = [
            {"name": "main", "dag": {"tasks": tasks}},
            {"name": "work", "container": {"image": "busybox", "command": ["true"]}},
        ]
        self.files.create(
            {
                "apiVersion": "argoproj.io/v1alpha1",
                "kind": "Workflow",
                "metadata": {"name": name},
                "spec": {"entrypoint": "main", "templates": templates},
            }
        )
        root = self._node(name, "DAG", phase) | {
            "children": [self._id(index) for index in range(min(count, 10))]
        }
        nodes = {name: root}
        for index in range(count):
            node = self.task(index, phase)
            if index + 10 < count:
                node["children"] = [self._id(index + 10)]
            nodes[node["id"]] = node
        self.files.append({"status": {"phase": phase, "startedAt": _now()}, "nodes": nodes})
        if phase == "Succeeded":
            self.files.append(
                {"status": {"phase": phase, "startedAt": _now(), "finishedAt": _now()}}
            )
            self.files.close()

    def _id(self, index: int) -> str:
        return f"{self.name}-{index + 1000}"

    def _node(self, name: str, type: str, phase: str) -> dict[str, Any]:
        return {
            "id": name,
            "name": name,
            "displayName": name.rpartition(".")[2],
            "type": type,
            "templateName": "work",
            "phase": phase,
            "startedAt": _now(),
            "finishedAt": _now() if phase == "Succeeded" else None,
        }

    def task(self, index: int, phase: str) -> dict[str, Any]:
        """Return the workflow node of a task."""
        node = self._node(f"{self.name}.t{index}", "Pod", phase)
        return node | {"id": self._id(index), "boundaryID": self.name}

    def finish_task(self, index: int) -> None:
        node = self.task(index, "Succeeded")
        self.files.append({"nodes": {node["id"]: node}})

    @property
    def log(self) -> Path:
        return self.files.logs / f"{self.name}-work-1000.log"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def first_view(server: PageServer, browser: Browser, path: str) -> float:
    """Return the seconds from the request until the page is loaded."""
    page = server.open(browser, "/icon")
    start = time.monotonic()
    page.goto(f"{server.root}{path}", wait_until="load")
    seconds = time.monotonic() - start
    page.context.close()
    return seconds


def measure_views(home: Path, counts: list[int], browser: Browser) -> list[Bar]:
    """Measure how many seconds the first view of each large run takes, with a new server for
    each."""
    bars: list[Bar] = []
    for count in counts:
        run = WrittenRun(home, f"nodes-{count}", count, "Succeeded")
        for tab in ("overview", "timeline"):
            with start_page(home) as server:
                seconds = first_view(server, browser, f"/runs/{run.name}/{tab}")
                limit = FIRST_VIEW_LIMITS_S.get(count)
                bars.append(bar(f"first view of {count:,} nodes, {tab}", seconds, "s", limit))
    return bars


def measure_log(home: Path, megabytes: int, browser: Browser) -> list[Bar]:
    """Return the seconds to open a large log at its end, and to search it."""
    run = WrittenRun(home, "large-log", 1, "Succeeded")
    size = megabytes * 1_000_000
    block = b"".join(LOG_LINE % index for index in range(10_000))
    with run.log.open("wb") as file:
        while file.tell() < size:
            file.write(block)

    address = f"/runs/{run.name}/logs?pod={run.log.stem}"
    with start_page(home) as server:
        process = psutil.Process(server.process.pid)
        opened = first_view(server, browser, address)
        searches = [
            _request_seconds(server, f"{address}&find={text}") for text in ("absent", "LOSS")
        ]
        error = _request_seconds(server, f"{address}&mark=error")
        memory = process.memory_info().rss / 1e6
    name = f"log of {megabytes} MB"
    return [
        bar(f"{name}: opens at its end", opened, "s", 1.0),
        bar(f"{name}: search", max(searches), "s", 3.0),
        bar(f"{name}: first error, if there is none", error, "s", 3.0),
        bar(f"{name}: memory of the server afterwards", memory, "MB", 120),
    ]


def _request_seconds(server: PageServer, path: str) -> float:
    start = time.monotonic()
    answer = server.get(path, "text/html")
    assert answer.status_code == 200, answer.text
    return time.monotonic() - start


def measure_events(home: Path, viewers: int, events: int, browser: Browser) -> list[Bar]:
    """Measure how many seconds pass until all viewers of a run, or of its log, see an event."""
    run = WrittenRun(home, "live", 100, "Running")
    run.log.write_bytes(b"the start\n")
    bars: list[Bar] = []

    def print_event(number: int) -> None:
        with run.log.open("a") as file:
            file.write(f"event {number}\n")

    # (name of the event, page, number of the first event, function that causes an event)
    cases: tuple[tuple[str, str, int, Callable[[int], None]], ...] = (
        ("a step ends", "overview", 1, lambda number: run.finish_task(number - 1)),
        ("a line of a log", f"logs?pod={run.log.stem}", 1001, print_event),
    )
    for name, path, first, cause in cases:
        with start_page(home) as server:
            pages = [server.open(browser, f"/runs/{run.name}/{path}") for _ in range(viewers)]
            for page in pages:
                page.evaluate(OBSERVER)
            seconds = [_slowest(pages, number, cause) for number in range(first, first + events)]
            for page in pages:
                page.context.close()
        text = f"slowest of {viewers} viewers"
        bars.append(
            bar(f"event on the screen: {name}", max(seconds), "s", EVENT_LIMIT_S, text=text)
        )
        bars.append(bar(f"event on the screen: {name}, median", seconds, "s"))
    run.files.close()
    return bars


def _slowest(pages: list[BrowserPage], number: int, cause: Callable[[int], None]) -> float:
    """Cause an event, and return the seconds until every page shows it."""
    start = time.time()
    cause(number)
    end = start + TIMEOUT_S
    times: list[float] = []
    while len(times) < len(pages) and time.time() < end:
        time.sleep(0.1)
        seen = [page.evaluate("number => window.seenAt[number] ?? 0", number) for page in pages]
        times = [value / 1000 for value in seen if value]
    if len(times) < len(pages):
        return TIMEOUT_S
    return max(times) - start


@contextmanager
def _viewers(server: PageServer, runs: list[str]) -> Iterator[None]:
    """Simulate browsers in another process, which request a page of the runs after each change."""
    context = multiprocessing.get_context("spawn")
    ready = context.Semaphore(0)
    process = context.Process(
        target=_look, args=(server.root, server.token, runs, ready), daemon=True
    )
    process.start()
    for _ in runs:
        ready.acquire()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _look(root: str, token: str, runs: list[str], ready: Any) -> None:
    def look(run: str) -> None:
        headers = {"Authorization": f"Bearer {token}", "Accept": "text/html"}
        address = f"{root}/runs/{run}" if run else root
        with (
            httpx.Client(headers=headers, timeout=None) as client,
            client.stream("GET", f"{root}/events?run={run}") as stream,
        ):
            ready.release()
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    client.get(address)

    threads = [Thread(target=look, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()


def measure_rest(home: Path, seconds: float, browser: Browser) -> list[Bar]:
    """Return the load and the memory of the server while three viewers look at a quiet run."""
    run = WrittenRun(home, "quiet", 20, "Running")
    run.log.write_bytes(b"the start\n")
    with start_page(home) as server:
        paths = ["/", f"/runs/{run.name}", f"/runs/{run.name}/logs"]
        pages = [server.open(browser, path) for path in paths]
        process = psutil.Process(server.process.pid)
        time.sleep(1)
        start = process.cpu_times()
        time.sleep(seconds)
        end = process.cpu_times()
        memory = process.memory_info().rss / 1e6
        for page in pages:
            page.context.close()
    run.files.close()
    load = (end.user + end.system - start.user - start.system) / seconds
    return [
        bar("server with three viewers at rest", 100 * load, "% of a core", 2),
        bar("memory of the server at rest", memory, "MB", 120),
    ]


def _append_events(run: WrittenRun, seconds: float) -> float:
    """Write 100 events per second, and return the CPU seconds that the writing takes."""
    start = time.thread_time()
    for number in range(int(100 * seconds)):
        run.finish_task(number % 100)
        time.sleep(0.01)
    return time.thread_time() - start


def measure_busy(home: Path, seconds: float, runs: int) -> list[Bar]:
    """Measure the server's load during a run with 100 events per second, and how much CPU time
    three viewers add to the run."""
    run = WrittenRun(home, "busy", 100, "Running")
    slowdowns: list[float] = []
    loads: list[float] = []
    with start_page(home) as server:
        process = psutil.Process(server.process.pid)
        for _ in range(runs):
            alone = _append_events(run, seconds)
            with _viewers(server, ["", run.name, run.name]):
                start = process.cpu_times()
                watched = _append_events(run, seconds)
                end = process.cpu_times()
            loads.append(100 * (end.user + end.system - start.user - start.system) / seconds)
            # in percent of the duration of a run with 100 events per second
            slowdowns.append(100 * (watched - alone) / seconds)
    run.files.close()
    return [
        bar("server next to 100 events per second, three viewers", loads, "% of a core"),
        bar("the same run is slowed by its viewers", slowdowns, "%", 1),
    ]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--nodes", type=int, nargs="+", default=[500, 5000])
    command.add_argument("--log-megabytes", type=int, default=200)
    command.add_argument("--viewers", type=int, default=20)
    command.add_argument("--events", type=int, default=10)
    command.add_argument("--seconds", type=float, default=20.0)
    command.add_argument("--runs", type=int, default=5)
    options = command.parse_args()

    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as name, start_browser() as browser:
        home = Path(name) / "home"
        bars += measure_views(home, options.nodes, browser)
        bars += measure_log(home, options.log_megabytes, browser)
        bars += measure_events(home, options.viewers, options.events, browser)
        bars += measure_rest(home, options.seconds, browser)
        bars += measure_busy(home, options.seconds / 4, options.runs)
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
