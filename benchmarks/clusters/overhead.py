"""Overhead on a cluster: seconds from `submit` to the first pod, and running time of the demo
versus a local run.

    python -m benchmarks.clusters.overhead [--json] [--runs 3] [--config configs/demo.yaml]

The benchmark requires the environment that tests/cluster/namespace.py describes, and creates its
own namespace. While no step or job of the run works, the time is attributed to Argo and the
kubelet. A model server that is ready does not count as work. All other time is attributed to
Rekindle. The overhead is Rekindle's time minus the duration of the same run on this machine; it is
caused by waiting and slower starts. The time of an event is when the watch reports it, because
timestamps of Kubernetes are rounded to seconds.
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

from argolocal.view.summary import parse_timestamp
from benchmarks.bars import make_bar, make_parser, report
from tests.cluster.namespace import create_namespace
from tests.cluster.run import DEMO, Namespace, Run, run_locally

# image of Argo's executor; the running time of its containers is not attributed to Rekindle
ARGO_CONTAINER_IMAGE = "argoexec"
HERA_IMPORT_PROGRAM = (
    "import time; start = time.perf_counter(); import hera.workflows; print(time.perf_counter() -"
    " start)"
)


@dataclass
class PodTimes:
    """The times of a pod: when it was created, when its first container started, and when its last
    container ended (or was ready).

    Argo's own containers in the pod are ignored.
    """

    name: str
    seen: float
    started: float | None = None
    completed: float | None = None


@contextmanager
def watch_objects(namespace: Namespace, object_kind: str, on_event: Any) -> Iterator[None]:
    """Call `on_event(object, Unix seconds)` for each event about an object of `object_kind` in the
    namespace."""
    watch_command = [
        "kubectl",
        "--namespace",
        namespace.kube.namespace,
        "get",
        object_kind,
        "--watch",
        "-o",
        "json",
    ]
    with subprocess.Popen(
        [*watch_command, "--output-watch-events"], stdout=subprocess.PIPE, text=True
    ) as watch_process:

        def read() -> None:
            assert watch_process.stdout
            for line in watch_process.stdout:
                on_event(json.loads(line)["object"], time.time())

        reader_thread = Thread(target=read, daemon=True)
        reader_thread.start()
        try:
            yield
        finally:
            watch_process.terminate()
            reader_thread.join()


def update_pod_times(
    pods_by_uid: dict[str, PodTimes], pod_manifest: dict[str, Any], now_seconds: float
) -> None:
    """Update the times of a pod after a watch event with its `pod_manifest`."""
    pod_times = pods_by_uid.setdefault(
        pod_manifest["metadata"]["uid"], PodTimes(pod_manifest["metadata"]["name"], now_seconds)
    )
    containers = pod_manifest["spec"]["containers"]
    container_statuses = pod_manifest["status"].get("containerStatuses", [])
    image_by_container = {container["name"]: container["image"] for container in containers}
    relevant_statuses = [
        container_status
        for container_status in container_statuses
        if ARGO_CONTAINER_IMAGE not in image_by_container[container_status["name"]]
    ]
    is_server = any(
        containers[0].get(probe_name) for probe_name in ("readinessProbe", "startupProbe")
    )

    if pod_times.started is None and any(
        "waiting" not in container_status.get("state", {}) for container_status in relevant_statuses
    ):
        pod_times.started = now_seconds

    is_completed = all(
        container_status.get("ready")
        if is_server
        else "terminated" in container_status.get("state", {})
        for container_status in relevant_statuses
    )
    if pod_times.completed is None and relevant_statuses and is_completed:
        pod_times.completed = now_seconds


def measure_union_seconds(intervals: list[tuple[float, float]]) -> float:
    """Return the total number of seconds that are inside at least one of the intervals."""
    total_seconds = 0.0
    covered_until = float("-inf")
    for interval_start, interval_end in sorted(intervals):
        total_seconds += max(interval_end - max(interval_start, covered_until), 0.0)
        covered_until = max(covered_until, interval_end)
    return total_seconds


@dataclass
class RunDurations:
    """Durations of one run, in seconds."""

    # from the start of the command to the creation of the workflow
    submit: float
    # duration of importing Hera, which `submit` includes; measured separately
    hera: float
    # from the creation of the workflow to its first pod
    first_pod: float
    # from the start of the command to the end of the workflow
    total: float
    # the part of `total` in which a container of the run, other than Argo's, was working
    working: float
    # duration of the same steps on this machine
    local: float


def measure_overhead(
    namespace: Namespace, config_path: Path, model_name: str, home_folder: Path
) -> tuple[RunDurations, list[PodTimes]]:
    """Run the pipeline on the cluster, then locally. Raises SystemExit if the run on the cluster
    fails."""
    pods_by_uid: dict[str, PodTimes] = {}
    creation_time_by_workflow: dict[str, float] = {}

    def created(workflow_manifest: dict[str, Any], now_seconds: float) -> None:
        creation_time_by_workflow.setdefault(workflow_manifest["metadata"]["name"], now_seconds)

    with (
        watch_objects(namespace, "workflows", created),
        watch_objects(namespace, "pods", lambda *event: update_pod_times(pods_by_uid, *event)),
    ):
        # wait until the watch has reported the objects that already exist
        time.sleep(2)
        existing_uids = set(pods_by_uid)
        start_seconds = time.time()
        submitted_run = Run.submit(namespace, f"name={model_name}", config=config_path)

        phase = submitted_run.wait_for_end()
        if phase != "Succeeded":
            raise SystemExit(phase)

        total_seconds = time.time() - start_seconds
        time.sleep(1)

    created_pods = sorted(
        (pod for uid, pod in pods_by_uid.items() if uid not in existing_uids),
        key=lambda pod: pod.seen,
    )
    local_steps = run_locally(
        home_folder, *namespace.sets([f"name={model_name}"]), config=config_path
    )["steps"]

    local_seconds = measure_union_seconds(
        [
            (parse_timestamp(step["started"]), parse_timestamp(step["finished"]))
            for step in local_steps
            if step["started"]
        ]
    )

    hera_import_seconds = float(
        subprocess.run(
            [sys.executable, "-c", HERA_IMPORT_PROGRAM], capture_output=True, check=True
        ).stdout
    )
    workflow_creation_time = creation_time_by_workflow[submitted_run.name]
    working_seconds = measure_union_seconds(
        [(pod.started, pod.completed) for pod in created_pods if pod.started and pod.completed]
    )

    return (
        RunDurations(
            workflow_creation_time - start_seconds,
            hera_import_seconds,
            created_pods[0].seen - workflow_creation_time,
            total_seconds,
            working_seconds,
            local_seconds,
        ),
        created_pods,
    )


def format_pod_table(pod_times: list[PodTimes]) -> str:
    """Format a table of pods. For each pod, the table has the seconds until its creation, until its
    start, and until its end (for a server: until it was ready)."""
    table_lines = [f"{'pod':44} {'at':>6} {'start':>6} {'ran':>6}  seconds"]
    for pod in pod_times:
        start_delay_seconds, running_seconds = (
            (pod.started - pod.seen, pod.completed - pod.started)
            if pod.started and pod.completed
            else (0.0, 0.0)
        )
        table_lines.append(
            f"{pod.name[:44]:44} {pod.seen - pod_times[0].seen:6.1f} {start_delay_seconds:6.1f}"
            f" {running_seconds:6.1f}"
        )
    return "\n".join(table_lines)


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument("--runs", type=int, default=3, help="number of runs (default: 3)")
    argument_parser.add_argument(
        "--config", type=Path, default=DEMO, help="config to run (default: configs/demo.yaml)"
    )
    options = argument_parser.parse_args()
    run_durations: list[RunDurations] = []

    with create_namespace() as namespace, TemporaryDirectory() as home_folder:
        for run_index in range(options.runs):
            durations_of_run, pods = measure_overhead(
                namespace, options.config, f"waits-{run_index}", Path(home_folder, str(run_index))
            )
            run_durations.append(durations_of_run)
            sys.stderr.write(f"{format_pod_table(pods)}\n{durations_of_run}\n")

    bars = [
        make_bar(
            "start of `rekindle submit` to creation of the workflow, without Hera's import",
            [run_duration.submit - run_duration.hera for run_duration in run_durations],
            "s",
            1.0,
        ),
        make_bar("the import of Hera", [run_duration.hera for run_duration in run_durations], "s"),
        make_bar(
            "creation of the workflow to its first pod (Argo)",
            [run_duration.first_pod for run_duration in run_durations],
            "s",
        ),
        make_bar(
            "start of `rekindle submit` to the end of the workflow",
            [run_duration.total for run_duration in run_durations],
            "s",
        ),
        make_bar(
            "time with a working container of the run",
            [run_duration.working for run_duration in run_durations],
            "s",
        ),
        make_bar(
            "time of the same steps on this machine",
            [run_duration.local for run_duration in run_durations],
            "s",
        ),
        make_bar(
            "overhead of Rekindle on the cluster",
            [run_duration.working - run_duration.local for run_duration in run_durations],
            "s",
            5.0,
        ),
    ]
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
