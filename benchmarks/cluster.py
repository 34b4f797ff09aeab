"""Overhead on a cluster: seconds from `submit` to the first pod, and running time of the demo
versus a local run.

    python -m benchmarks.cluster [--json] [--runs 3] [--config configs/demo.yaml]

Requires the environment that tests/cluster/namespace.py describes, and creates its own namespace.
While no step or job of the run works, the time is attributed to Argo and the kubelet. A model
server that is ready does not count as work. All other time is attributed to Rekindle. The overhead
is Rekindle's time minus the duration of the same run on this machine; it is caused by waiting and
slower starts. The time of an event is when the watch reports it, because timestamps of Kubernetes
are rounded to seconds.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from argolocal.view.summary import timestamp
from benchmarks.bars import bar, parser, report
from tests.cluster.namespace import create_namespace
from tests.cluster.run import DEMO, Namespace, Run, run_locally

# image of Argo's executor; the running time of its containers is not attributed to Rekindle
ARGO = "argoexec"
IMPORT = (
    "import time; start = time.perf_counter(); import hera.workflows; print(time.perf_counter() -"
    " start)"
)


@dataclass
class Pod:
    """The times of a pod: when it was created, when its first container started, and when its last
    container ended (or was ready).

    Argo's own containers are ignored.
    """

    name: str
    seen: float
    started: float | None = None
    completed: float | None = None


@contextmanager
def watch(namespace: Namespace, kind: str, on_event: Any) -> Iterator[None]:
    """Call `on_event(object, Unix seconds)` for each event about an object of `kind` in the
    namespace."""
    command = [
        "kubectl",
        "--namespace",
        namespace.kube.namespace,
        "get",
        kind,
        "--watch",
        "-o",
        "json",
    ]
    with subprocess.Popen(
        [*command, "--output-watch-events"], stdout=subprocess.PIPE, text=True
    ) as process:

        def read() -> None:
            assert process.stdout
            for line in process.stdout:
                on_event(json.loads(line)["object"], time.time())

        thread = Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            process.terminate()
            thread.join()


def update(pods: dict[str, Pod], manifest: dict[str, Any], now: float) -> None:
    """Update the times of a pod after a watch event with its `manifest`."""
    pod = pods.setdefault(manifest["metadata"]["uid"], Pod(manifest["metadata"]["name"], now))
    containers = manifest["spec"]["containers"]
    statuses = manifest["status"].get("containerStatuses", [])
    images = {container["name"]: container["image"] for container in containers}
    relevant = [status for status in statuses if ARGO not in images[status["name"]]]
    serves = any(containers[0].get(probe) for probe in ("readinessProbe", "startupProbe"))

    if pod.started is None and any("waiting" not in status.get("state", {}) for status in relevant):
        pod.started = now

    completed = all(
        status.get("ready") if serves else "terminated" in status.get("state", {})
        for status in relevant
    )
    if pod.completed is None and relevant and completed:
        pod.completed = now


def union(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals, in seconds."""
    total = 0.0
    end = float("-inf")
    for start, stop in sorted(intervals):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


@dataclass
class Figures:
    """Durations of one run, in seconds."""

    submit: float  # from the start of the command to the creation of the workflow
    # duration of importing Hera, which `submit` includes; measured separately
    hera: float
    first_pod: float  # from the creation of the workflow to its first pod
    total: float  # from the start of the command to the end of the workflow
    # the part of `total` in which a container of the run, other than Argo's, was working
    working: float
    local: float  # duration of the same steps on this machine


def measure(namespace: Namespace, config: Path, name: str, home: Path) -> tuple[Figures, list[Pod]]:
    """Run the pipeline on the cluster, then locally. Raises SystemExit if the run on the cluster
    fails."""
    pods: dict[str, Pod] = {}
    workflows: dict[str, float] = {}

    def created(workflow: dict[str, Any], now: float) -> None:
        workflows.setdefault(workflow["metadata"]["name"], now)

    with (
        watch(namespace, "workflows", created),
        watch(namespace, "pods", lambda *event: update(pods, *event)),
    ):
        time.sleep(2)  # wait until the watch has reported the objects that already exist
        existing = set(pods)
        start = time.time()
        run = Run.submit(namespace, f"name={name}", config=config)

        phase = run.wait_for_end()
        if phase != "Succeeded":
            raise SystemExit(phase)

        total = time.time() - start
        time.sleep(1)

    created_pods = sorted(
        (pod for uid, pod in pods.items() if uid not in existing), key=lambda pod: pod.seen
    )
    steps = run_locally(home, *namespace.sets([f"name={name}"]), config=config)["steps"]

    alone = union(
        [
            (timestamp(step["started"]), timestamp(step["finished"]))
            for step in steps
            if step["started"]
        ]
    )

    hera = float(
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, check=True).stdout
    )
    submitted = workflows[run.name]
    working = union(
        [(pod.started, pod.completed) for pod in created_pods if pod.started and pod.completed]
    )

    return (
        Figures(submitted - start, hera, created_pods[0].seen - submitted, total, working, alone),
        created_pods,
    )


def table(pods: list[Pod]) -> str:
    """Format a table of pods. For each pod, it has the seconds until its creation, until its start,
    and until its end (for a server: until it was ready)."""
    lines = [f"{'pod':44} {'at':>6} {'start':>6} {'ran':>6}  seconds"]
    for pod in pods:
        start, ran = (
            (pod.started - pod.seen, pod.completed - pod.started)
            if pod.started and pod.completed
            else (0.0, 0.0)
        )
        lines.append(f"{pod.name[:44]:44} {pod.seen - pods[0].seen:6.1f} {start:6.1f} {ran:6.1f}")
    return "\n".join(lines)


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--runs", type=int, default=3, help="number of runs (default: 3)")
    command.add_argument(
        "--config", type=Path, default=DEMO, help="config to run (default: configs/demo.yaml)"
    )
    options = command.parse_args()
    runs: list[Figures] = []

    with create_namespace() as namespace, TemporaryDirectory() as home:
        for index in range(options.runs):
            figures, pods = measure(
                namespace, options.config, f"waits-{index}", Path(home, str(index))
            )
            runs.append(figures)
            sys.stderr.write(f"{table(pods)}\n{figures}\n")

    bars = [
        bar(
            "start of `rekindle submit` to creation of the workflow, without Hera's import",
            [run.submit - run.hera for run in runs],
            "s",
            1.0,
        ),
        bar("the import of Hera", [run.hera for run in runs], "s"),
        bar(
            "creation of the workflow to its first pod (Argo)", [run.first_pod for run in runs], "s"
        ),
        bar(
            "start of `rekindle submit` to the end of the workflow",
            [run.total for run in runs],
            "s",
        ),
        bar("time with a working container of the run", [run.working for run in runs], "s"),
        bar("time of the same steps on this machine", [run.local for run in runs], "s"),
        bar(
            "overhead of Rekindle on the cluster",
            [run.working - run.local for run in runs],
            "s",
            5.0,
        ),
    ]
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
