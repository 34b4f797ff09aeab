"""Merge the logs of all pods of a run (steps and training replicas), with the step as the prefix of
each line.

    Logs(cluster, "demo-4k2xp", out).follow()     # until the run ends and all lines are written

One thread per container reads the log of the container. After a broken connection, the thread
continues to read without repeating lines. Pods may be deleted and recreated under the same name.
`read_archived_lines` reads the logs of deleted pods.

    # in a pod: {"key": ..., "number": ..., "line": ...} for each line
    python -m rekindle.view.cluster_logs KEY...
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from typing import Any, TextIO

from pydantic import Field

from argolocal.common.json_text import to_json
from argolocal.common.wording import escape_control_chars, open_raw_stream
from argolocal.manifest.allowed_values import COMPLETED_PHASES, FAILED_PHASES
from argolocal.manifest.object_labels import (
    JOB_NAME_LABEL,
    NODE_NAME_ANNOTATION,
    REPLICA_TYPE_LABEL,
    WORKFLOW,
)
from argolocal.manifest.types import Object
from argolocal.view.display import format_log_line, is_terminal, parse_task_name
from argolocal.view.summary import ERROR_LINE, Step, describe_progress, find_last_error
from rekindle.cluster import queue, remote
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import PODS, WORKFLOWS, Cluster
from rekindle.documents import Document
from rekindle.kubernetes_names import INSTANCE_LABEL
from rekindle.names import ArtifactKey, format_untrusted
from rekindle.view.progress import choose_progress

ARGO_CONTAINERS = ("init", "wait", "supervisor")
# lines that Argo's executor adds to the log of a step
EXECUTOR_LINE = re.compile(rb" argo=true( |$)|^Error: exit status \d+$")
# a line of a log: label of the pod, text of the line
LabelledLine = tuple[str, str]
COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
# number of seconds without a line after which a thread reconnects, because the connection may be
# dead
SILENCE_TIMEOUT_S = 300.0
# time limit for reading the last log lines of a completed run
DRAIN_TIMEOUT_S = 5.0
PROGRESS_INTERVAL_S = 3.0
# states of a container that may still write lines
UNENDED_STATES = ("waiting", "running")
# a job may have hundreds of workers, of which usually the first one reports
MAX_PROGRESS_LOGS = 4
CUT_MESSAGE = (
    "({:,} earlier lines are missing: a node keeps only the end of a long log. Select one step:"
    " `logs NAME STEP`)"
)


class StoredLine(Document):
    """A line of an archived log. `key`: object key of the log; `number`: number of the line,
    counted over all printed logs."""

    key: str
    number: int = Field(ge=0)
    line: str


class Logs:
    """Writes the logs of one run to `out`."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        output_stream: TextIO,
        step_name: str = "",
        as_json: bool = False,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.step = step_name

        self.out = output_stream
        self.as_json = as_json
        self.colors: dict[str, int] | None = (
            {} if is_terminal(output_stream) and not as_json else None
        )

        self.lock = threading.Lock()
        self.readers: dict[tuple[str, str, int], threading.Thread] = {}
        # set when the run has completed or a thread failed
        self.ended = threading.Event()
        self.completed = threading.Event()
        # event that is set when threads must stop waiting for lines
        self.drained = threading.Event()
        self.failed: Exception | None = None
        # labels of pods with completely read logs
        self.shown: set[str] = set()
        # label of a pod → reason why some of its lines may be missing
        self.missing_lines_reasons: dict[str, str] = {}

    def print(self, workflow: Object) -> int:
        """Write the current logs of the run, and the archived logs of its deleted pods. Return the
        number of pods whose logs were written, plus the number of archived lines written."""
        run_pods = self.cluster.list_objects(PODS, f"{WORKFLOW}={self.name}")
        run_pods.sort(key=lambda run_pod: run_pod["metadata"]["creationTimestamp"])
        pod_labels = {get_pod_label(self.name, run_pod) for run_pod in run_pods}
        shown_pod_count = len([pod_label for pod_label in pod_labels if self.step in pod_label])

        for pod_label, line in read_archived_lines(self.cluster, workflow, self.step, pod_labels):
            self._write(pod_label, line)
            self.shown.add(pod_label)
            shown_pod_count += 1

        for run_pod in run_pods:
            for container, restart_count in _started_containers(run_pod):
                self._read(run_pod, container, restart_count, follows_log=False)

        self._note_missing(workflow, "its pod is deleted, and its log is not in the object store.")
        return shown_pod_count

    def follow(self) -> None:
        """Write logs until the run is completed or deleted. Raises ApiError, BrokenPipeError if
        `out` is closed."""
        for watch_function in (self._watch_pods, self._watch_workflow):
            self._start_thread("watch", watch_function)

        self.ended.wait()
        if self.failed:
            raise self.failed

        # print the logs of pods that the watch has missed
        for run_pod in self.cluster.list_objects(PODS, f"{WORKFLOW}={self.name}"):
            self._start_readers(run_pod)

        self.completed.set()
        drain_deadline = time.monotonic() + DRAIN_TIMEOUT_S
        for reader_thread in list(self.readers.values()):
            reader_thread.join(max(0.0, drain_deadline - time.monotonic()))

        self.drained.set()
        if self.failed:
            raise self.failed

        hint = f"`rekindle logs {self.name} --cluster` reads archived logs."
        for reader_thread in self.readers.values():
            if reader_thread.is_alive():
                self.missing_lines_reasons[reader_thread.name] = (
                    f"its log had not ended {DRAIN_TIMEOUT_S:g} s after the run. {hint}"
                )

        self._note_missing(self.workflow, f"its pod was deleted before its log was read. {hint}")

    def _note_missing(self, workflow: Object, missing_reason: str) -> None:
        """For each started pod whose log was not read, record `missing_reason` as the reason for
        missing lines."""
        for pod_label in started_pod_labels(workflow):
            if self.step in pod_label and pod_label not in self.shown:
                self.missing_lines_reasons.setdefault(pod_label, missing_reason)

    def _start_thread(
        self, thread_name: str, thread_function: Callable[..., None], *function_arguments: Any
    ) -> threading.Thread:
        def run() -> None:
            try:
                thread_function(*function_arguments)
            except (ApiError, BrokenPipeError) as error:
                self.failed = error
                self.ended.set()

        daemon_thread = threading.Thread(target=run, name=thread_name, daemon=True)
        daemon_thread.start()
        return daemon_thread

    def _watch_workflow(self) -> None:
        for event_type, workflow in self.cluster.watch(WORKFLOWS, name=self.name):
            self.workflow = workflow
            if event_type == "DELETED":
                self.missing_lines_reasons[self.name] = (
                    "the run was deleted while its logs were read."
                )
            if (
                event_type == "DELETED"
                or (workflow.get("status") or {}).get("phase") in COMPLETED_PHASES
            ):
                self.ended.set()
                return

    def _watch_pods(self) -> None:
        for event_type, pod in self.cluster.watch(PODS, labels=f"{WORKFLOW}={self.name}"):
            if self.completed.is_set():
                return
            if event_type != "DELETED":
                self._start_readers(pod)

    def _start_readers(self, run_pod: Object) -> None:
        with self.lock:
            for container, restart_count in _started_containers(run_pod):
                key = (run_pod["metadata"].get("uid", ""), container, restart_count)
                if key not in self.readers:
                    self.readers[key] = self._start_thread(
                        get_pod_label(self.name, run_pod),
                        self._read,
                        run_pod,
                        container,
                        restart_count,
                        True,
                    )

    def _read(
        self, pod: Object, container_name: str, restart_count: int, follows_log: bool
    ) -> None:
        pod_label = get_pod_label(self.name, pod)
        if self.step not in pod_label:
            return

        log_lines = self._stream_lines(pod, container_name, restart_count, follows_log)
        if (
            restart_count
            and (pod["metadata"].get("uid", ""), container_name, restart_count - 1)
            not in self.readers
        ):
            log_lines = chain(
                self._stream_lines(
                    pod, container_name, restart_count, follows_log=False, reads_previous_start=True
                ),
                log_lines,
            )

        for log_line in log_lines:
            self._write(pod_label, log_line)
        self.shown.add(pod_label)

    def _stream_lines(
        self,
        pod: Object,
        container_name: str,
        restart_count: int,
        follows_log: bool,
        reads_previous_start: bool = False,
    ) -> Iterator[str]:
        """Yield each line that a container has logged since its last start (with
        `reads_previous_start`: before it). No lines are repeated after a reconnect."""
        log_query = {"timestamps": "true"}
        if follows_log:
            log_query["follow"] = "true"
        if reads_previous_start:
            log_query["previous"] = "true"

        # the newest timestamp, and the number of lines already read with this timestamp
        last_time = ""
        written_lines = 0
        pause_seconds = 0.2

        while True:
            lines_to_skip = written_lines
            first_time = last_time

            try:
                # the Kubernetes API accepts only whole seconds as `sinceTime`
                if last_time:
                    log_query["sinceTime"] = re.sub(r"\.\d+", "", last_time)

                for raw_line in self.cluster.log(
                    pod["metadata"]["name"], container_name, SILENCE_TIMEOUT_S, **log_query
                ):
                    time_of_line, _, text = (
                        raw_line.decode(errors="replace").rstrip("\r\n").partition(" ")
                    )
                    if time_of_line < first_time:
                        continue
                    if time_of_line == first_time and lines_to_skip > 0:
                        lines_to_skip -= 1
                        continue

                    written_lines = written_lines + 1 if time_of_line == last_time else 1
                    pause_seconds = 0.2
                    last_time = time_of_line
                    yield text
            except ApiError as error:
                if error.code == 404:
                    self.missing_lines_reasons[get_pod_label(self.name, pod)] = (
                        "its pod was deleted before its log was read to the end."
                    )
                    return

                # The container has not started yet, or its log does not exist any more, for example
                # because the kubelet has deleted it.
                if error.code == 400 and not self._is_in_state(
                    pod, container_name, restart_count, UNENDED_STATES
                ):
                    return

                if error.code in (401, 403):
                    raise
            else:
                # The end of a log stream does not show that a container has ended, because the
                # kubelet also ends the stream when it rotates the log.
                if not follows_log or not self._is_in_state(
                    pod, container_name, restart_count, ["running"]
                ):
                    return

            if not follows_log or self.drained.wait(pause_seconds):
                return

            pause_seconds = min(5.0, pause_seconds * 2)

    def _is_in_state(
        self, pod: Object, container_name: str, restart_count: int, states: Sequence[str]
    ) -> bool:
        """Return True if the container, after `restart_count` restarts, is in one of the states, or
        if its state cannot be read."""
        try:
            current_pod = self.cluster.find(PODS, pod["metadata"]["name"])
        except ApiError:
            return True

        if current_pod is None or current_pod["metadata"].get("uid") != pod["metadata"].get("uid"):
            return False

        container_statuses = (current_pod.get("status") or {}).get("containerStatuses") or []
        matching_containers = [
            (container_status["name"], container_status.get("restartCount", 0))
            for container_status in container_statuses
            # a container without a state waits
            if not (container_status.get("state") or {"waiting": {}}).keys().isdisjoint(states)
        ]
        return (container_name, restart_count) in matching_containers

    def _write(self, pod_label: str, log_line: str) -> None:
        with self.lock:
            if self.colors is None:
                self.out.write(format_log_line(pod_label, log_line, self.as_json) + "\n")
            else:
                label_color = self.colors.setdefault(
                    pod_label, COLORS[len(self.colors) % len(COLORS)]
                )
                open_raw_stream(self.out).write(
                    f"\x1b[{label_color}m{escape_control_chars(pod_label)}\x1b[0m |"
                    f" {escape_control_chars(log_line)}\n"
                )
            self.out.flush()


def started_pod_labels(workflow: Mapping[str, Any]) -> Iterator[str]:
    """Yield the labels of the pods that a run has started."""
    for workflow_node in ((workflow.get("status") or {}).get("nodes") or {}).values():
        if workflow_node["type"] == "Pod" and workflow_node.get("phase") in (
            "Running",
            *COMPLETED_PHASES,
        ):
            yield _strip_workflow_name(workflow["metadata"]["name"], workflow_node["name"])


def get_pod_label(run_name: str, pod: Mapping[str, Any]) -> str:
    """Return the label of a pod for log lines, such as `ship.release` for a step, or
    `train-worker-0` for a pod of a step's job."""
    pod_metadata = pod["metadata"]
    node_name = (pod_metadata.get("annotations") or {}).get(NODE_NAME_ANNOTATION)
    return _strip_workflow_name(run_name, node_name or pod_metadata["name"])


def _strip_workflow_name(workflow_name: str, full_name: str) -> str:
    return re.sub(r"^[.-]", "", full_name.removeprefix(workflow_name))


def _started_containers(pod: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the containers that may have written logs, with their restart counts."""
    pod_status = pod.get("status") or {}
    for container_status in [
        *(pod_status.get("initContainerStatuses") or []),
        *(pod_status.get("containerStatuses") or []),
    ]:
        name = container_status["name"]
        container_state = container_status.get("state") or {}
        restart_count = container_status.get("restartCount", 0)

        has_started = (
            "running" in container_state or "terminated" in container_state or restart_count
        )
        if has_started and name not in ARGO_CONTAINERS:
            yield name, restart_count


def read_last_lines(
    cluster: Cluster,
    run_name: str,
    step_labels: list[str],
    deployment_name: str = "",
    line_count: int = 50,
) -> str:
    """Return the last lines of the log of a pod of these steps or of `deployment_name`,
    preferably of a pod with an error; "" if neither the steps nor `deployment_name` have a pod."""
    matching_pods = []
    for run_pod in cluster.list_objects(PODS, f"{WORKFLOW}={run_name}"):
        pod_label = get_pod_label(run_name, run_pod)
        if any(
            pod_label == step_label or pod_label.startswith((f"{step_label}(", f"{step_label}-"))
            for step_label in step_labels
        ):
            matching_pods.append(run_pod)

    if deployment_name:
        matching_pods += cluster.list_objects(PODS, f"{INSTANCE_LABEL}={deployment_name}")

    pod_logs = [
        _read_last_lines(cluster, run_pod, container_name, line_count)
        for run_pod in matching_pods
        for container_name, _ in _started_containers(run_pod)
    ]
    return next(filter(ERROR_LINE.search, pod_logs), pod_logs[0] if pod_logs else "")


def _read_last_lines(
    cluster: Cluster, pod: Mapping[str, Any], container_name: str, line_count: int
) -> str:
    try:
        log_lines = cluster.log(pod["metadata"]["name"], container_name, tailLines=str(line_count))
        return b"".join(line for line in log_lines if not EXECUTOR_LINE.search(line)).decode(
            errors="replace"
        )
    except ApiError:
        # if the pod was deleted or reading is forbidden, report the failure without the pod's log
        return ""


def read_archived_lines(
    cluster: Cluster, workflow: Object, step_name: str, present_labels: Collection[str] = ()
) -> Iterator[LabelledLine]:
    """Yield (label, line) of the logs that Argo has archived, for steps whose pods are not
    `present_labels`.

    The logs are read from the object store by a temporary pod. Raises ApiError or RekindleError if
    the temporary pod fails.
    """
    label_by_key: dict[str, str] = {}
    run_name = workflow["metadata"]["name"]

    for workflow_node in ((workflow.get("status") or {}).get("nodes") or {}).values():
        # skip the Retry node, because it repeats the outputs of its last attempt, whose pod may
        # still exist
        if workflow_node["type"] == "Retry":
            continue

        step_label = _strip_workflow_name(run_name, workflow_node["name"])
        if step_name not in step_label or step_label in present_labels:
            continue

        for log_artifact in (workflow_node.get("outputs") or {}).get("artifacts") or []:
            key = (log_artifact.get("s3") or {}).get("key")
            if not key or log_artifact["name"] != "main-logs":
                continue

            if _is_log_of_run(run_name, key):
                label_by_key[key] = step_label
            else:
                yield (
                    step_label,
                    f"{format_untrusted(key)} is not read: it is not the key of a log of this run",
                )

    if label_by_key:
        next_number = 0
        module_name = "rekindle.view.cluster_logs"
        for stored_line in remote.run_module(
            cluster, workflow, StoredLine, module_name, *label_by_key
        ):
            step_label = label_by_key.get(stored_line.key, stored_line.key)
            missing_lines = stored_line.number - next_number
            if missing_lines:
                yield step_label, CUT_MESSAGE.format(missing_lines)

            next_number = stored_line.number + 1
            yield step_label, stored_line.line


def _is_log_of_run(run_name: str, key: str) -> bool:
    """Return True if a key may belong to an archived log of a run: one folder is named like the
    run, and the file is named CONTAINER.log.

    Without this check, a client could write any key into the status of a run, and the pod would
    read it with its bucket credentials.
    """
    if not ArtifactKey.matches(key):
        return False
    *key_folders, file = key.split("/")
    return run_name in key_folders and file.endswith(".log")


def _print_stored_lines(log_keys: Iterable[str]) -> None:
    """Print each line of the objects `log_keys` as a JSON object that includes the number of the
    line. For a missing object, print one line that reports the missing object."""
    from rekindle.storage import NotFound, Store

    object_store = Store.from_env()
    line_numbers = count()

    for key in log_keys:
        try:
            log_lines = object_store.get(key).decode(errors="replace").splitlines()
        except NotFound:
            log_lines = [f"{object_store.uri(key)} does not exist"]

        for line in log_lines:
            print(to_json({"key": key, "number": next(line_numbers), "line": line}))


def list_input_parameters(step_row: Step) -> dict[str, str]:
    """Return the input parameters of a step."""
    input_parameters = ((step_row.node or {}).get("inputs") or {}).get("parameters") or []
    return {
        input_parameter["name"]: str(input_parameter.get("value", ""))
        for input_parameter in input_parameters
    }


class TrainingProgress:
    """The progress of a run's training. As long as `of` is called regularly, a thread reads the
    progress from the workers' logs every few seconds. If no worker runs, `of` returns the reason
    why the job is waiting in its queue."""

    def __init__(self, cluster: Cluster, run_name: str) -> None:
        self.cluster = cluster
        self.name = run_name
        self.progress: dict[str, str] = {}
        self.requested = threading.Event()
        threading.Thread(target=self._poll, name="progress", daemon=True).start()

    def of(self, row: Step) -> str:
        if row.phase in FAILED_PHASES:
            step_labels = [row.name.partition("(")[0], parse_task_name(row)]
            server_name = list_input_parameters(row).get("server", "")
            # if the logs cannot be read, only the message of the step is shown
            with suppress(ApiError):
                return find_last_error(
                    read_last_lines(self.cluster, self.name, step_labels, server_name)
                )
            return ""

        self.requested.set()
        pod_prefix = f"{self.name}-{row.label}-"
        return next(
            (text for pod_name, text in self.progress.items() if pod_name.startswith(pod_prefix)),
            describe_progress(row),
        )

    def _poll(self) -> None:
        while self.requested.wait():
            self.requested.clear()
            try:
                progress_by_pod = self._read_progress()
            # after an error of the cluster or a log with strange lines, keep the previous progress,
            # because the next poll may succeed
            except Exception:
                progress_by_pod = self.progress

            self.progress = progress_by_pod
            time.sleep(PROGRESS_INTERVAL_S)

    def _read_progress(self) -> dict[str, str]:
        """Return the progress of each job by the prefix of the names of its pods, or, if no worker
        runs, the reason why the job waits."""
        logs_by_job: dict[str, list[str]] = {}
        worker_selector = f"{WORKFLOW}={self.name},{REPLICA_TYPE_LABEL}=worker"
        for training_pod in self.cluster.list_objects(PODS, worker_selector):
            if (training_pod.get("status") or {}).get("phase") != "Running":
                continue

            job_name = training_pod["metadata"]["labels"].get(JOB_NAME_LABEL, "")
            job_logs = logs_by_job.setdefault(job_name, [])
            if len(job_logs) < MAX_PROGRESS_LOGS:
                containers = (training_pod.get("spec") or {}).get("containers") or [{}]
                job_logs.append(
                    _read_last_lines(self.cluster, training_pod, containers[0].get("name", ""), 30)
                )

        if not logs_by_job:
            reasons = [
                line.partition(" ") for line in queue.describe_waiting_jobs(self.cluster, self.name)
            ]
            return {f"{self.name}-{step}-": queue_reason for step, _, queue_reason in reasons}

        return {f"{job_name}-": choose_progress(logs) for job_name, logs in logs_by_job.items()}


if __name__ == "__main__":
    _print_stored_lines(sys.argv[1:])
