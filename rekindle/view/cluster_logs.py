"""Merge the logs of all pods of a run (steps and training replicas), with the step as the prefix of
each line.

    Logs(cluster, "demo-4k2xp", out).follow()     # until the run ends and all lines are written

One thread per container reads the log. Reading continues after a broken connection, without
repeating lines. Pods may be deleted and recreated under the same name. `read_archived` reads the
logs of deleted pods.

    # in a pod: {"key": ..., "number": ..., "line": ...} for each line
    python -m rekindle.view.cluster_logs KEY...
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, count
from typing import Any, TextIO

from pydantic import Field

from argolocal.common.json_text import to_json
from argolocal.common.wording import visible, without_escapes
from argolocal.manifest.allowed_values import COMPLETED, FAILED
from argolocal.manifest.object_labels import NODE_NAME, REPLICA_TYPE, WORKFLOW
from argolocal.manifest.types import Object
from argolocal.view.display import is_terminal, log_line, task_of
from argolocal.view.summary import ERROR, Step, last_error
from rekindle.cluster import queue, remote
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import PODS, WORKFLOWS, Cluster
from rekindle.documents import Document
from rekindle.kubernetes_names import INSTANCE_LABEL
from rekindle.names import ArtifactKey, show
from rekindle.view.progress import progress_in

ARGO_CONTAINERS = ("init", "wait", "supervisor")
# lines that Argo's executor adds to the log of a step
EXECUTOR_LINE = re.compile(rb" argo=true( |$)|^Error: exit status \d+$")
Line = tuple[str, str]  # label of the pod, text of the line
COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
# a thread reconnects after this time without a line, because the connection may be dead
SILENCE_TIMEOUT_S = 300.0
DRAIN_TIMEOUT_S = 5.0  # time limit for reading the last log lines of a completed run
PROGRESS_INTERVAL_S = 3.0
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
        self, cluster: Cluster, name: str, out: TextIO, step: str = "", as_json: bool = False
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.step = step

        self.out = out
        self.as_json = as_json
        self.colors: dict[str, int] | None = {} if is_terminal(out) and not as_json else None

        self.lock = threading.Lock()
        self.readers: dict[tuple[str, str, int], threading.Thread] = {}
        self.ended = threading.Event()  # set when the run has completed or a thread failed
        self.completed = threading.Event()
        self.drained = threading.Event()  # set when threads must stop waiting for lines
        self.failed: Exception | None = None
        self.shown: set[str] = set()  # labels of pods with completely read logs
        # label of a pod → reason why some of its lines may be missing
        self.missing_lines_reasons: dict[str, str] = {}

    def print(self, workflow: Object) -> int:
        """Write the current logs, and the archived logs of deleted pods. Return the number of pods
        whose logs were written, plus the number of archived lines written."""
        pods = self.cluster.list_objects(PODS, f"{WORKFLOW}={self.name}")
        pods.sort(key=lambda pod: pod["metadata"]["creationTimestamp"])
        labels = {label_of(self.name, pod) for pod in pods}
        count = len([label for label in labels if self.step in label])

        for label, line in read_archived(self.cluster, workflow, self.step, labels):
            self._write(label, line)
            self.shown.add(label)
            count += 1

        for pod in pods:
            for container, starts in _started_containers(pod):
                self._read(pod, container, starts, follow=False)

        self._note_missing(workflow, "its pod is deleted, and its log is not in the object store.")
        return count

    def follow(self) -> None:
        """Write logs until the run is completed or deleted. Raises ApiError, BrokenPipeError if
        `out` is closed."""
        for watch in (self._watch_pods, self._watch_workflow):
            self._start_thread("watch", watch)

        self.ended.wait()
        if self.failed:
            raise self.failed

        # print the logs of pods that the watch has missed
        for pod in self.cluster.list_objects(PODS, f"{WORKFLOW}={self.name}"):
            self._start_readers(pod)

        self.completed.set()
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        for reader in list(self.readers.values()):
            reader.join(max(0.0, deadline - time.monotonic()))

        self.drained.set()
        if self.failed:
            raise self.failed

        hint = f"`rekindle logs {self.name} --cluster` reads archived logs."
        for reader in self.readers.values():
            if reader.is_alive():
                self.missing_lines_reasons[reader.name] = (
                    f"its log had not ended {DRAIN_TIMEOUT_S:g} s after the run. {hint}"
                )

        self._note_missing(self.workflow, f"its pod was deleted before its log was read. {hint}")

    def _note_missing(self, workflow: Object, reason: str) -> None:
        """For each started pod whose log was not read, record `reason` as the reason for missing
        lines."""
        for label in started_pod_labels(workflow):
            if self.step in label and label not in self.shown:
                self.missing_lines_reasons.setdefault(label, reason)

    def _start_thread(
        self, name: str, function: Callable[..., None], *args: Any
    ) -> threading.Thread:
        def run() -> None:
            try:
                function(*args)
            except (ApiError, BrokenPipeError) as error:
                self.failed = error
                self.ended.set()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _watch_workflow(self) -> None:
        for event_type, workflow in self.cluster.watch(WORKFLOWS, name=self.name):
            self.workflow = workflow
            if event_type == "DELETED":
                self.missing_lines_reasons[self.name] = (
                    "the run was deleted while its logs were read."
                )
            if event_type == "DELETED" or (workflow.get("status") or {}).get("phase") in COMPLETED:
                self.ended.set()
                return

    def _watch_pods(self) -> None:
        for event_type, pod in self.cluster.watch(PODS, labels=f"{WORKFLOW}={self.name}"):
            if self.completed.is_set():
                return
            if event_type != "DELETED":
                self._start_readers(pod)

    def _start_readers(self, pod: Object) -> None:
        with self.lock:
            for container, starts in _started_containers(pod):
                key = (pod["metadata"].get("uid", ""), container, starts)
                if key not in self.readers:
                    self.readers[key] = self._start_thread(
                        label_of(self.name, pod), self._read, pod, container, starts, True
                    )

    def _read(self, pod: Object, container: str, starts: int, follow: bool) -> None:
        label = label_of(self.name, pod)
        if self.step not in label:
            return

        lines = self._stream_lines(pod, container, starts, follow)
        if starts and (pod["metadata"].get("uid", ""), container, starts - 1) not in self.readers:
            lines = chain(
                self._stream_lines(pod, container, starts, follow=False, previous=True), lines
            )

        for line in lines:
            self._write(label, line)
        self.shown.add(label)

    def _stream_lines(
        self, pod: Object, container: str, starts: int, follow: bool, previous: bool = False
    ) -> Iterator[str]:
        """Yield each line that a container has logged since its last start (with `previous`: before
        it). Reconnecting repeats no lines."""
        query = {"timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if previous:
            query["previous"] = "true"

        # the newest timestamp, and the number of lines already read with this timestamp
        last = ""
        written = 0
        pause = 0.2

        while True:
            skip = written
            began = last

            try:
                # the Kubernetes API accepts only whole seconds as `sinceTime`
                if last:
                    query["sinceTime"] = re.sub(r"\.\d+", "", last)

                for raw in self.cluster.log(
                    pod["metadata"]["name"], container, SILENCE_TIMEOUT_S, **query
                ):
                    time_of_line, _, text = (
                        raw.decode(errors="replace").rstrip("\r\n").partition(" ")
                    )
                    if time_of_line < began:
                        continue
                    if time_of_line == began and skip > 0:
                        skip -= 1
                        continue

                    written = written + 1 if time_of_line == last else 1
                    pause = 0.2
                    last = time_of_line
                    yield text
            except ApiError as error:
                if error.code == 404:
                    self.missing_lines_reasons[label_of(self.name, pod)] = (
                        "its pod was deleted before its log was read to the end."
                    )
                    return

                # retry: the log does not exist yet
                if error.code == 400:
                    return

                if error.code in (401, 403):
                    raise
            else:
                if not follow or not self._is_running(pod, container, starts):
                    return

            if not follow or self.drained.wait(pause):
                return

            pause = min(5.0, pause * 2)

    def _is_running(self, pod: Object, container: str, starts: int) -> bool:
        """Return True if the container still runs. The end of a log stream does not show this,
        because the kubelet also ends the stream when it rotates the log."""
        try:
            now = self.cluster.find(PODS, pod["metadata"]["name"])
        except ApiError:
            return True

        if now is None or now["metadata"].get("uid") != pod["metadata"].get("uid"):
            return False

        statuses = (now.get("status") or {}).get("containerStatuses") or []
        running = [
            (status["name"], status.get("restartCount", 0))
            for status in statuses
            if "running" in (status.get("state") or {})
        ]
        return (container, starts) in running

    def _write(self, label: str, line: str) -> None:
        with self.lock:
            if self.colors is None:
                self.out.write(log_line(label, line, self.as_json) + "\n")
            else:
                color = self.colors.setdefault(label, COLORS[len(self.colors) % len(COLORS)])
                without_escapes(self.out).write(
                    f"\x1b[{color}m{visible(label)}\x1b[0m | {visible(line)}\n"
                )
            self.out.flush()


def started_pod_labels(workflow: Mapping[str, Any]) -> Iterator[str]:
    """Yield the labels of the pods that a run has started."""
    for node in ((workflow.get("status") or {}).get("nodes") or {}).values():
        if node["type"] == "Pod" and node.get("phase") in ("Running", *COMPLETED):
            yield _strip_workflow_name(workflow["metadata"]["name"], node["name"])


def label_of(name: str, pod: Mapping[str, Any]) -> str:
    """Return the label of a pod: `ship.release` for a step, `train-worker-0` for a pod of a step's
    job."""
    metadata = pod["metadata"]
    node = (metadata.get("annotations") or {}).get(NODE_NAME)
    return _strip_workflow_name(name, node or metadata["name"])


def _strip_workflow_name(workflow: str, name: str) -> str:
    return re.sub(r"^[.-]", "", name.removeprefix(workflow))


def _started_containers(pod: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the containers that may have written logs, with their restart counts."""
    status = pod.get("status") or {}
    for container in [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]:
        name = container["name"]
        state = container.get("state") or {}
        restarts = container.get("restartCount", 0)

        has_started = "running" in state or "terminated" in state or restarts
        if has_started and name not in ARGO_CONTAINERS:
            yield name, restarts


def tail(
    cluster: Cluster, name: str, labels: list[str], deployment: str = "", line_count: int = 50
) -> str:
    """Return the last lines of the log of a pod of these steps or of `deployment`, preferably of a
    pod with an error; "" if neither the steps nor `deployment` have a pod."""
    pods = []
    for pod in cluster.list_objects(PODS, f"{WORKFLOW}={name}"):
        pod_label = label_of(name, pod)
        if any(
            pod_label == label or pod_label.startswith((f"{label}(", f"{label}-"))
            for label in labels
        ):
            pods.append(pod)

    if deployment:
        pods += cluster.list_objects(PODS, f"{INSTANCE_LABEL}={deployment}")

    texts = [
        _tail_of(cluster, pod, container, line_count)
        for pod in pods
        for container, _ in _started_containers(pod)
    ]
    return next(filter(ERROR.search, texts), texts[0] if texts else "")


def _tail_of(cluster: Cluster, pod: Mapping[str, Any], container: str, line_count: int) -> str:
    try:
        lines = cluster.log(pod["metadata"]["name"], container, tailLines=str(line_count))
        return b"".join(line for line in lines if not EXECUTOR_LINE.search(line)).decode(
            errors="replace"
        )
    except ApiError:
        # the pod was deleted, or reading is forbidden: report the failure without the pod's log
        return ""


def read_archived(
    cluster: Cluster, workflow: Object, step: str, present: Collection[str] = ()
) -> Iterator[Line]:
    """Yield (label, line) of the logs that Argo has archived, for steps whose pods are not
    `present`.

    The logs are read from the object store by a temporary pod. Raises ApiError or RekindleError if
    it fails.
    """
    keys: dict[str, str] = {}
    run = workflow["metadata"]["name"]

    for node in ((workflow.get("status") or {}).get("nodes") or {}).values():
        # skip the Retry node: it repeats the outputs of its last attempt, whose pod may still exist
        if node["type"] == "Retry":
            continue

        label = _strip_workflow_name(run, node["name"])
        if step not in label or label in present:
            continue

        for artifact in (node.get("outputs") or {}).get("artifacts") or []:
            key = (artifact.get("s3") or {}).get("key")
            if not key or artifact["name"] != "main-logs":
                continue

            if _is_log_of(run, key):
                keys[key] = label
            else:
                yield label, f"{show(key)} is not read: it is not the key of a log of this run"

    if keys:
        next_number = 0
        module = "rekindle.view.cluster_logs"
        for stored in remote.run_module(cluster, workflow, StoredLine, module, *keys):
            label = keys.get(stored.key, stored.key)
            missing_lines = stored.number - next_number
            if missing_lines:
                yield label, CUT_MESSAGE.format(missing_lines)

            next_number = stored.number + 1
            yield label, stored.line


def _is_log_of(run: str, key: str) -> bool:
    """Return True if a key may belong to an archived log of a run: one folder is named like the
    run, and the file is named CONTAINER.log.

    Without this check, a client could write any key into the status of a run, and the pod would
    read it with its bucket credentials.
    """
    if not ArtifactKey.matches(key):
        return False
    *folders, file = key.split("/")
    return run in folders and file.endswith(".log")


def _print_stored(keys: Iterable[str]) -> None:
    """Print each line of the objects `keys` as a JSON object that includes the number of the line.
    For a missing object, print one line that reports it."""
    from rekindle.storage import NotFound, Store

    store = Store.from_env()
    numbers = count()

    for key in keys:
        try:
            lines = store.get(key).decode(errors="replace").splitlines()
        except NotFound:
            lines = [f"{store.uri(key)} does not exist"]

        for line in lines:
            print(to_json({"key": key, "number": next(numbers), "line": line}))


def inputs_of(row: Step) -> dict[str, str]:
    """Return the input parameters of a step."""
    parameters = ((row.node or {}).get("inputs") or {}).get("parameters") or []
    return {parameter["name"]: str(parameter.get("value", "")) for parameter in parameters}


class TrainingProgress:
    """The progress of a run's training. As long as `of` is called regularly, a thread reads it from
    the workers' logs every few seconds. If no worker runs, `of` returns the reason why the job is
    waiting in its queue."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.progress: dict[str, str] = {}
        self.requested = threading.Event()
        threading.Thread(target=self._poll, name="progress", daemon=True).start()

    def of(self, row: Step) -> str:
        if row.phase in FAILED:
            labels = [row.name.partition("(")[0], task_of(row)]
            server = inputs_of(row).get("server", "")
            # if the logs cannot be read, only the message of the step is shown
            with suppress(ApiError):
                return last_error(tail(self.cluster, self.name, labels, server))
            return ""

        self.requested.set()
        prefix = f"{self.name}-{row.label}-"
        return next(
            (text for pod, text in self.progress.items() if pod.startswith(prefix)),
            "",
        )

    def _poll(self) -> None:
        while self.requested.wait():
            self.requested.clear()
            progress = {}

            try:
                for pod in self.cluster.list_objects(
                    PODS, f"{WORKFLOW}={self.name},{REPLICA_TYPE}=worker"
                ):
                    if (pod.get("status") or {}).get("phase") == "Running":
                        containers = (pod.get("spec") or {}).get("containers") or [{}]
                        container = containers[0].get("name", "")
                        text = progress_in(_tail_of(self.cluster, pod, container, 30))
                        if text:
                            progress[pod["metadata"]["name"]] = text
                            break
                else:
                    for line in queue.describe_waiting(self.cluster, self.name):
                        step, _, reason = line.partition(" ")
                        progress[f"{self.name}-{step}-"] = reason
            # an error of the cluster, or of a log with strange lines: keep the previous progress,
            # because the next poll may succeed
            except Exception:
                progress = self.progress

            self.progress = progress
            time.sleep(PROGRESS_INTERVAL_S)


if __name__ == "__main__":
    _print_stored(sys.argv[1:])
