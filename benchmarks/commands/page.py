"""Speed of the page of runs, with its server and a headless Chromium.

    python -m benchmarks.commands.page [--json] [--nodes 500 5000] [--viewers 20]

The figure "first view" of a run is the time from the request until the page is loaded, answered by
a server that has not read this run yet. The time of an event is the delay from writing the line in
the journal or log until the slowest viewer's screen shows it. For the load at rest, one viewer
shows the list of runs, a second viewer shows a run, and a third viewer shows the run's log. The
figure "slowdown" compares the CPU time of the same work with and without three viewers of the page.

"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil
from playwright.sync_api import Browser
from playwright.sync_api import Page as BrowserPage

from argolocal.state.journal import RunFiles
from benchmarks.bars import Bar, make_bar, make_parser, report
from tests.browser import PageServer, start_browser, start_page

LOG_LINE = b"2026-11-29 12:00:00 step %d loss 0.12345 learning rate 0.001 of worker 3\n"
FIRST_VIEW_LIMITS_S = {500: 1.0, 5000: 3.0}
EVENT_LIMIT_S = 1.0
EVENT_TIMEOUT_S = 30.0
# JavaScript that records when the page first shows each event, either a number of finished steps or
# a line of the log
OBSERVER_SCRIPT = """() => {
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


@dataclass
class EventCase:
    """A kind of event whose delay is measured. The page in the tab `tab_path` shows the number of
    an event; `cause_event` causes the event with a given number."""

    name: str
    tab_path: str
    first_event_number: int
    cause_event: Callable[[int], None]


class WrittenRun:
    """A simulated run: this process writes its files, as a runner would."""

    def __init__(self, home_folder: Path, run_name: str, task_count: int, phase: str) -> None:
        self.files = RunFiles(home_folder, run_name)
        self.name = run_name
        task_documents = [
            {"name": f"t{task_index}", "template": "work"}
            | ({"depends": f"t{max(0, task_index - 10)}"} if task_index else {})
            for task_index in range(task_count)
        ]
        template_documents = [
            {"name": "main", "dag": {"tasks": task_documents}},
            {"name": "work", "container": {"image": "busybox", "command": ["true"]}},
        ]
        self.files.create(
            {
                "apiVersion": "argoproj.io/v1alpha1",
                "kind": "Workflow",
                "metadata": {"name": run_name},
                "spec": {"entrypoint": "main", "templates": template_documents},
            }
        )
        root_node = self._node(run_name, "DAG", phase) | {
            "children": [
                self._make_node_id(task_index) for task_index in range(min(task_count, 10))
            ]
        }
        nodes_by_name = {run_name: root_node}
        for task_index in range(task_count):
            node = self.task(task_index, phase)
            if task_index + 10 < task_count:
                node["children"] = [self._make_node_id(task_index + 10)]
            nodes_by_name[node["id"]] = node
        self.files.append(
            {"status": {"phase": phase, "startedAt": _format_now()}, "nodes": nodes_by_name}
        )
        if phase == "Succeeded":
            self.files.append(
                {
                    "status": {
                        "phase": phase,
                        "startedAt": _format_now(),
                        "finishedAt": _format_now(),
                    }
                }
            )
            self.files.close()

    def _make_node_id(self, task_index: int) -> str:
        return f"{self.name}-{task_index + 1000}"

    def _node(self, node_name: str, node_type: str, phase: str) -> dict[str, Any]:
        return {
            "id": node_name,
            "name": node_name,
            "displayName": node_name.rpartition(".")[2],
            "type": node_type,
            "templateName": "work",
            "phase": phase,
            "startedAt": _format_now(),
            "finishedAt": _format_now() if phase == "Succeeded" else None,
        }

    def task(self, task_index: int, phase: str) -> dict[str, Any]:
        """Return the node of a simulated task, as in the status of a workflow."""
        node = self._node(f"{self.name}.t{task_index}", "Pod", phase)
        return node | {"id": self._make_node_id(task_index), "boundaryID": self.name}

    def finish_task(self, task_index: int) -> None:
        node = self.task(task_index, "Succeeded")
        self.files.append({"nodes": {node["id"]: node}})

    @property
    def log(self) -> Path:
        return self.files.logs / f"{self.name}-work-1000.log"


def _format_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def measure_first_view(page_server: PageServer, browser: Browser, page_path: str) -> float:
    """Return the seconds from the request until the page is loaded."""
    browser_page = page_server.open(browser, "/icon")
    start_seconds = time.monotonic()
    browser_page.goto(f"{page_server.root}{page_path}", wait_until="load")
    load_seconds = time.monotonic() - start_seconds
    browser_page.context.close()
    return load_seconds


def measure_views(home_folder: Path, node_counts: list[int], browser: Browser) -> list[Bar]:
    """Measure how many seconds the first view of each large run takes, with a new server for each
    run."""
    bars: list[Bar] = []
    for node_count in node_counts:
        written_run = WrittenRun(home_folder, f"nodes-{node_count}", node_count, "Succeeded")
        for tab_name in ("overview", "timeline"):
            with start_page(home_folder) as page_server:
                load_seconds = measure_first_view(
                    page_server, browser, f"/runs/{written_run.name}/{tab_name}"
                )
                limit_seconds = FIRST_VIEW_LIMITS_S.get(node_count)
                bars.append(
                    make_bar(
                        f"first view of {node_count:,} nodes, {tab_name}",
                        load_seconds,
                        "s",
                        limit_seconds,
                    )
                )
    return bars


def measure_log(home_folder: Path, log_megabytes: int, browser: Browser) -> list[Bar]:
    """Return the seconds to open a large log at its end, and to search it."""
    written_run = WrittenRun(home_folder, "large-log", 1, "Succeeded")
    log_bytes = log_megabytes * 1_000_000
    log_block = b"".join(LOG_LINE % line_index for line_index in range(10_000))
    with written_run.log.open("wb") as log_file:
        while log_file.tell() < log_bytes:
            log_file.write(log_block)

    log_address = f"/runs/{written_run.name}/logs?pod={written_run.log.stem}"
    with start_page(home_folder) as page_server:
        server_process = psutil.Process(page_server.process.pid)
        open_seconds = measure_first_view(page_server, browser, log_address)
        search_seconds = [
            _request_seconds(page_server, f"{log_address}&find={searched_text}")
            for searched_text in ("absent", "LOSS")
        ]
        find_error_seconds = _request_seconds(page_server, f"{log_address}&mark=error")
        memory_megabytes = server_process.memory_info().rss / 1e6
    figure_prefix = f"log of {log_megabytes} MB"
    return [
        make_bar(f"{figure_prefix}: opens at its end", open_seconds, "s", 1.0),
        make_bar(f"{figure_prefix}: search", max(search_seconds), "s", 3.0),
        make_bar(f"{figure_prefix}: first error, if there is none", find_error_seconds, "s", 3.0),
        make_bar(f"{figure_prefix}: memory of the server afterwards", memory_megabytes, "MB", 120),
    ]


def _request_seconds(page_server: PageServer, request_path: str) -> float:
    start_seconds = time.monotonic()
    http_response = page_server.get(request_path, "text/html")
    assert http_response.status_code == 200, http_response.text
    return time.monotonic() - start_seconds


def measure_events(
    home_folder: Path, viewer_count: int, event_count: int, browser: Browser
) -> list[Bar]:
    """Measure how many seconds pass until all viewers of a run, or of its log, see an event."""
    written_run = WrittenRun(home_folder, "live", 100, "Running")
    written_run.log.write_bytes(b"the start\n")
    bars: list[Bar] = []

    def print_event(event_number: int) -> None:
        with written_run.log.open("a") as log_file:
            log_file.write(f"event {event_number}\n")

    event_cases = [
        EventCase(
            name="a step ends",
            tab_path="overview",
            first_event_number=1,
            cause_event=lambda event_number: written_run.finish_task(event_number - 1),
        ),
        EventCase(
            name="a line of a log",
            tab_path=f"logs?pod={written_run.log.stem}",
            first_event_number=1001,
            cause_event=print_event,
        ),
    ]
    for event_case in event_cases:
        with start_page(home_folder) as page_server:
            browser_pages = [
                page_server.open(browser, f"/runs/{written_run.name}/{event_case.tab_path}")
                for _ in range(viewer_count)
            ]
            for browser_page in browser_pages:
                browser_page.evaluate(OBSERVER_SCRIPT)
            slowest_seconds = [
                _measure_slowest_viewer(
                    browser_pages,
                    event_case.first_event_number + event_index,
                    event_case.cause_event,
                )
                for event_index in range(event_count)
            ]
            for browser_page in browser_pages:
                browser_page.context.close()
        remark_text = f"slowest of {viewer_count} viewers"
        bars.append(
            make_bar(
                f"event on the screen: {event_case.name}",
                max(slowest_seconds),
                "s",
                EVENT_LIMIT_S,
                remark_text=remark_text,
            )
        )
        bars.append(
            make_bar(f"event on the screen: {event_case.name}, median", slowest_seconds, "s")
        )
    written_run.files.close()
    return bars


def _measure_slowest_viewer(
    browser_pages: list[BrowserPage], event_number: int, cause_event: Callable[[int], None]
) -> float:
    """Cause an event, and return the seconds until every page shows it."""
    start_time = time.time()
    cause_event(event_number)
    deadline = start_time + EVENT_TIMEOUT_S
    seen_times: list[float] = []
    while len(seen_times) < len(browser_pages) and time.time() < deadline:
        time.sleep(0.1)
        page_seen_times = [
            browser_page.evaluate("number => window.seenAt[number] ?? 0", event_number)
            for browser_page in browser_pages
        ]
        seen_times = [seen_time / 1000 for seen_time in page_seen_times if seen_time]
    if len(seen_times) < len(browser_pages):
        return EVENT_TIMEOUT_S
    return max(seen_times) - start_time


@contextmanager
def _start_viewers(page_server: PageServer, run_names: list[str]) -> Iterator[None]:
    """Start another process that simulates browsers, which request a page of the runs after each
    change."""
    spawn_context = multiprocessing.get_context("spawn")
    ready_semaphore = spawn_context.Semaphore(0)
    viewer_process = spawn_context.Process(
        target=_view_runs,
        args=(page_server.root, page_server.token, run_names, ready_semaphore),
        daemon=True,
    )
    viewer_process.start()
    for _ in run_names:
        ready_semaphore.acquire()
    try:
        yield
    finally:
        viewer_process.kill()
        viewer_process.join()


def _view_runs(
    root_url: str, access_token: str, run_names: list[str], ready_semaphore: Any
) -> None:
    def look(run_name: str) -> None:
        request_headers = {"Authorization": f"Bearer {access_token}", "Accept": "text/html"}
        page_url = f"{root_url}/runs/{run_name}" if run_name else root_url
        with (
            httpx.Client(headers=request_headers, timeout=None) as http_client,
            http_client.stream("GET", f"{root_url}/events?run={run_name}") as event_stream,
        ):
            ready_semaphore.release()
            for event_line in event_stream.iter_lines():
                if event_line.startswith("data:"):
                    http_client.get(page_url)

    threads = [Thread(target=look, args=(run_name,)) for run_name in run_names]
    for thread in threads:
        thread.start()


def measure_idle_load(home_folder: Path, measured_seconds: float, browser: Browser) -> list[Bar]:
    """Return the load and the memory of the server while three viewers look at a quiet run."""
    written_run = WrittenRun(home_folder, "quiet", 20, "Running")
    written_run.log.write_bytes(b"the start\n")
    with start_page(home_folder) as page_server:
        page_paths = ["/", f"/runs/{written_run.name}", f"/runs/{written_run.name}/logs"]
        browser_pages = [page_server.open(browser, page_path) for page_path in page_paths]
        server_process = psutil.Process(page_server.process.pid)
        time.sleep(1)
        start_cpu_times = server_process.cpu_times()
        time.sleep(measured_seconds)
        end_cpu_times = server_process.cpu_times()
        memory_megabytes = server_process.memory_info().rss / 1e6
        for browser_page in browser_pages:
            browser_page.context.close()
    written_run.files.close()
    cpu_load = (
        end_cpu_times.user + end_cpu_times.system - start_cpu_times.user - start_cpu_times.system
    ) / measured_seconds
    return [
        make_bar("server with three viewers at rest", 100 * cpu_load, "% of a core", 2),
        make_bar("memory of the server at rest", memory_megabytes, "MB", 120),
    ]


def _append_events(written_run: WrittenRun, writing_seconds: float) -> float:
    """Write 100 events per second, and return the CPU seconds that the writing takes."""
    start_cpu_seconds = time.thread_time()
    for event_number in range(int(100 * writing_seconds)):
        written_run.finish_task(event_number % 100)
        time.sleep(0.01)
    return time.thread_time() - start_cpu_seconds


def measure_busy_load(home_folder: Path, measured_seconds: float, run_count: int) -> list[Bar]:
    """Measure the server's load during a run with 100 events per second, and how much CPU time
    three viewers add to the work of the run."""
    written_run = WrittenRun(home_folder, "busy", 100, "Running")
    slowdown_ratios: list[float] = []
    cpu_loads: list[float] = []
    with start_page(home_folder) as page_server:
        server_process = psutil.Process(page_server.process.pid)
        for _ in range(run_count):
            unwatched_cpu_seconds = _append_events(written_run, measured_seconds)
            with _start_viewers(page_server, ["", written_run.name, written_run.name]):
                start_cpu_times = server_process.cpu_times()
                watched_cpu_seconds = _append_events(written_run, measured_seconds)
                end_cpu_times = server_process.cpu_times()
            cpu_loads.append(
                100
                * (
                    end_cpu_times.user
                    + end_cpu_times.system
                    - start_cpu_times.user
                    - start_cpu_times.system
                )
                / measured_seconds
            )
            # CPU seconds that the viewers add, in percent of the duration of a run with 100 events
            # per second
            slowdown_ratios.append(
                100 * (watched_cpu_seconds - unwatched_cpu_seconds) / measured_seconds
            )
    written_run.files.close()
    return [
        make_bar("server next to 100 events per second, three viewers", cpu_loads, "% of a core"),
        make_bar("the same run is slowed by its viewers", slowdown_ratios, "%", 1),
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument("--nodes", type=int, nargs="+", default=[500, 5000])
    argument_parser.add_argument("--log-megabytes", type=int, default=200)
    argument_parser.add_argument("--viewers", type=int, default=20)
    argument_parser.add_argument("--events", type=int, default=10)
    argument_parser.add_argument("--seconds", type=float, default=20.0)
    argument_parser.add_argument("--runs", type=int, default=5)
    options = argument_parser.parse_args()

    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as temporary_folder, start_browser() as browser:
        home_folder = Path(temporary_folder) / "home"
        bars += measure_views(home_folder, options.nodes, browser)
        bars += measure_log(home_folder, options.log_megabytes, browser)
        bars += measure_events(home_folder, options.viewers, options.events, browser)
        bars += measure_idle_load(home_folder, options.seconds, browser)
        bars += measure_busy_load(home_folder, options.seconds / 4, options.runs)
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
