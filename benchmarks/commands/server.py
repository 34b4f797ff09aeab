"""Speed and memory of `argolocal server`: many queued workflows, and a long list of finished runs.

    python -m benchmarks.commands.server [--json] [--queued 1000] [--places 10] [--finished 10000]

All workflows are queued before the server starts; each workflow sleeps for a second. The delay of
the next start is the time from the end of a run, as its journal says, until the next run in the
queue has started. The list of runs is requested from a server that has read the runs once.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from argolocal.engine.nodes import parse_time
from argolocal.page.server import TOKEN_FILE
from argolocal.runner.cluster import LocalCluster
from argolocal.server.queue import submit
from argolocal.server.server_lock import find_server
from argolocal.state.journal import JOURNAL_FILE, MANIFEST_FILE, RunFiles
from benchmarks.bars import Bar, make_bar, make_parser, report

MEMORY_LIMIT_MB = 200
LIST_LIMIT_S = 0.3
NEXT_START_LIMIT_S = 0.2
TIMEOUT_S = 3600.0
# the request of `argo list`
API_LIST = (
    "/api/v1/workflows/argo?fields=metadata,items.metadata,items.spec,items.status.phase,"
    "items.status.message,items.status.finishedAt,items.status.startedAt,"
    "items.status.estimatedDuration,items.status.progress"
)
MANIFEST: dict[str, Any] = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "Workflow",
    "spec": {
        "entrypoint": "main",
        "templates": [
            {"name": "main", "container": {"image": "busybox", "command": ["sleep", "1"]}}
        ],
    },
}


@contextmanager
def start_server(home: Path, places: int) -> Iterator[psutil.Process]:
    """Start a server, wait until it answers requests, and end it at the end of the `with` block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "argolocal", "server", "--parallelism", str(places)],
        env={**os.environ, "ARGOLOCAL_HOME": str(home)},
        stdout=subprocess.DEVNULL,
    )
    try:
        while not find_server(home):
            time.sleep(0.02)
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def measure_memory(server: psutil.Process) -> float:
    """Return the memory in MB that only the server and its fork server use."""
    processes = [server, *server.children()]
    return sum(process.memory_full_info().uss for process in processes) / 1e6


def measure_queue(home: Path, count: int, places: int) -> list[Bar]:
    """Queue workflows, and run them on a server with the given parallelism."""
    cluster = LocalCluster(home)
    start = time.monotonic()
    for number in range(count):
        submit(cluster, {**MANIFEST, "metadata": {"name": f"run-{number:05}"}})
    queued_s = time.monotonic() - start

    memory: list[float] = []
    with start_server(home, places) as server:
        start = time.monotonic()
        while any((home / "queue").iterdir()):
            memory.append(measure_memory(server))
            time.sleep(1.0)
            if time.monotonic() - start > TIMEOUT_S:
                raise TimeoutError(f"the queue is not empty after {TIMEOUT_S:g} s")
        total_s = time.monotonic() - start

    statuses = [RunFiles(home, f"run-{number:05}").load()[0] for number in range(count)]
    starts = sorted(parse_time(status["startedAt"]) for status in statuses)
    ends = sorted(parse_time(status["finishedAt"]) for status in statuses)
    delays = [begin - end for begin, end in zip(starts[places:], ends, strict=False)]
    succeeded = sum(status["phase"] == "Succeeded" for status in statuses)
    page_text = f"{count} workflows, {places} at a time"
    return [
        make_bar("workflows that succeeded", succeeded, "", count, "more", page_text),
        make_bar("one workflow is queued", queued_s / count, "s"),
        make_bar("one workflow of the queue", total_s / count, "s", remark_text=page_text),
        make_bar(
            "the next run starts after the end of another", delays or [0.0], "s", NEXT_START_LIMIT_S
        ),
        make_bar("memory of the server, at most", max(memory, default=0.0), "MB", MEMORY_LIMIT_MB),
    ]


def copy_runs(home: Path, count: int) -> None:
    """Copy a finished run until the home (directory of all runs) has `count` runs."""
    source = RunFiles(home, "run-00000")
    manifest = (source.root / MANIFEST_FILE).read_text()
    journal = (source.root / JOURNAL_FILE).read_text()
    existing = sum(1 for _ in RunFiles.all(home))
    for run_number in range(existing, count):
        run_name = f"run-{run_number:05}"
        root = home / "runs" / run_name
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        (root / MANIFEST_FILE).write_text(manifest.replace(source.name, run_name))
        (root / JOURNAL_FILE).write_text(journal.replace(source.name, run_name))


def measure_request(client: httpx.Client, address: str) -> float:
    """Return the seconds until the answer to a request is complete."""
    start = time.monotonic()
    client.get(address).raise_for_status()
    return time.monotonic() - start


def measure_list(home: Path, count: int, requests: int) -> list[Bar]:
    """Request the list of runs from a server with many finished runs."""
    copy_runs(home, count)
    with start_server(home, 1) as server:
        running = find_server(home)
        assert running
        token = (home / TOKEN_FILE).read_text()
        client = httpx.Client(
            base_url=f"http://127.0.0.1:{running.port}",
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
            timeout=TIMEOUT_S,
        )
        start = time.monotonic()
        # the filter `q` makes the server read the rows of all runs
        assert client.get("/?q=run-").json()["count"] == count
        first_s = time.monotonic() - start

        seconds: list[float] = []
        cpu_start = server.cpu_times()
        for number in range(requests):
            start = time.monotonic()
            # use a new address, so that the answer is not in the memory of the server
            json.loads(client.get(f"/?page={1 + number}").content)
            seconds.append(time.monotonic() - start)
        cpu_end = server.cpu_times()
        cpu_s = cpu_end.user + cpu_end.system - cpu_start.user - cpu_start.system
        api_seconds = [measure_request(client, API_LIST) for _ in range(requests + 1)]
        memory = measure_memory(server)
    return [
        make_bar(f"first list of {count} runs", first_s, "s"),
        make_bar(f"list of {count} finished runs", seconds, "s", LIST_LIMIT_S),
        make_bar(
            f"all {count} runs by the API, as `argo list`", api_seconds[1:], "s", LIST_LIMIT_S
        ),
        make_bar("CPU of the server for one list", cpu_s / requests, "s"),
        make_bar(f"memory of the server with {count} runs", memory, "MB", MEMORY_LIMIT_MB),
    ]


def main() -> int:
    command = make_parser(__doc__)
    command.add_argument("--queued", type=int, default=1000)
    command.add_argument("--places", type=int, default=10)
    command.add_argument("--finished", type=int, default=10_000)
    command.add_argument("--requests", type=int, default=20)
    options = command.parse_args()

    with tempfile.TemporaryDirectory() as name:
        home = Path(name) / "home"
        bars = measure_queue(home, options.queued, options.places)
        bars += measure_list(home, options.finished, options.requests)
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
