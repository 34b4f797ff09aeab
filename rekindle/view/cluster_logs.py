"""What all pods of a run write: its steps and every replica of its training, merged, each line with its step.

    Logs(cluster, "demo-4k2xp", out).follow()     # until the run is over and all is said

Each container that runs is read by a thread of its own; a connection that breaks is taken up where it was, so no line
comes twice. Pods may come, go, and come again under the same name.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from rekindle.argo.kinds import COMPLETED
from rekindle.argo.names import NODE_NAME, REPLICA_TYPE, WORKFLOW
from rekindle.cluster.api import PODS, WORKFLOWS, Cluster, Object
from rekindle.cluster.errors import ApiError
from rekindle.view.display import is_terminal, log_line, progress_in
from rekindle.view.summary import Step

OURS = ("init", "wait", "supervisor")  # Argo's own containers
EXECUTOR = re.compile(rb" argo=true |^Error: exit status \d+$")  # its last words in the log of a step
COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
SILENCE = 300.0  # seconds without a line; then the connection is made anew, in case it died unnoticed
LAST_WORDS = 5.0  # seconds for the last lines after a run is over
PROGRESS_EVERY = 3.0


class Logs:
    """The logs of one run, written to `out`."""

    def __init__(self, cluster: Cluster, name: str, out: TextIO, step: str = "", as_json: bool = False) -> None:
        self.cluster, self.name, self.out, self.step, self.as_json = cluster, name, out, step, as_json
        self.colors: dict[str, int] | None = {} if is_terminal(out) and not as_json else None
        self.lock = threading.Lock()
        self.readers: dict[tuple[str, str, int], threading.Thread] = {}
        self.ended = threading.Event()  # the run, or a thread that could not go on
        self.over = threading.Event()
        self.gone = threading.Event()  # all that can be read has been
        self.failed: Exception | None = None

    def print(self) -> int:
        """What is there now; gives the number of pods."""
        pods = sorted(
            self.cluster.listed(PODS, f"{WORKFLOW}={self.name}"), key=lambda pod: pod["metadata"]["creationTimestamp"]
        )
        for pod in pods:
            for container, starts in _started(pod):
                self._read(pod, container, starts, follow=False)
        return len([pod for pod in pods if self.step in label_of(self.name, pod)])

    def follow(self) -> None:
        """Until the run is over or deleted, and all is said. Raises ApiError, BrokenPipeError if nobody reads `out`."""
        for watch in (self._watch_pods, self._watch_workflow):
            threading.Thread(target=self._try, args=(watch,), daemon=True).start()
        self.ended.wait()
        if self.failed:
            raise self.failed
        self._catch_up()
        self.over.set()
        until = time.monotonic() + LAST_WORDS
        for reader in list(self.readers.values()):
            reader.join(max(0.0, until - time.monotonic()))
        self.gone.set()
        if self.failed:
            raise self.failed

    def _try(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except (ApiError, BrokenPipeError) as error:
            self.failed = error
            self.ended.set()

    def _watch_workflow(self) -> None:
        for kind, workflow in self.cluster.watch(WORKFLOWS, name=self.name):
            if kind == "DELETED" or (workflow.get("status") or {}).get("phase") in COMPLETED:
                return self.ended.set()

    def _watch_pods(self) -> None:
        for kind, pod in self.cluster.watch(PODS, labels=f"{WORKFLOW}={self.name}"):
            if self.over.is_set():
                return
            if kind != "DELETED":
                self._begin(pod)

    def _catch_up(self) -> None:
        """A pod whose start was not heard of yet still has its log."""
        for pod in self.cluster.listed(PODS, f"{WORKFLOW}={self.name}"):
            self._begin(pod)

    def _begin(self, pod: Object) -> None:
        with self.lock:
            for container, starts in _started(pod):
                key = (pod["metadata"]["uid"], container, starts)
                if key not in self.readers:
                    reading = (self._read, pod, container, starts, True)
                    reader = threading.Thread(target=self._try, args=reading, daemon=True)
                    self.readers[key] = reader
                    reader.start()

    def _read(self, pod: Object, container: str, starts: int, follow: bool) -> None:
        label = label_of(self.name, pod)
        if self.step not in label:
            return
        if starts and (pod["metadata"]["uid"], container, starts - 1) not in self.readers:
            for line in self._lines(pod, container, follow=False, previous=True):
                self._say(label, line)
        for line in self._lines(pod, container, follow):
            self._say(label, line)

    def _lines(self, pod: Object, container: str, follow: bool, previous: bool = False) -> Iterator[str]:
        """The lines of one start of a container, each once, whatever happens to the connection."""
        path = PODS.path(self.cluster.namespace, pod["metadata"]["name"], "log")
        query = {"container": container, "timestamps": "true"}
        query |= {"follow": "true"} if follow else {}
        query |= {"previous": "true"} if previous else {}
        last, said, pause = "", 0, 0.2  # the newest time, and how many lines of that time were given
        while True:
            skip, began = said, last
            try:
                since = {"sinceTime": re.sub(r"\.\d+", "", last)} if last else {}  # it knows no less than seconds
                for raw in self.cluster.lines(path, query | since, SILENCE):
                    at, _, text = raw.decode(errors="replace").rstrip("\r\n").partition(" ")
                    if at < began or (at == began and skip > 0):
                        skip -= at == began
                        continue
                    last, said, pause = at, (said + 1 if at == last else 1), 0.2
                    yield text
            except ApiError as error:
                if error.code in (400, 404):  # nothing was written, or the pod is gone
                    return
                if error.code in (401, 403):
                    raise
            else:
                if not follow or not self._runs(pod, container):
                    return
            if not follow or self.gone.wait(pause):
                return
            pause = min(5.0, pause * 2)

    def _runs(self, pod: Object, container: str) -> bool:
        """Whether more may come: the kubelet ends a stream when it rotates the log, too."""
        try:
            now = self.cluster.find(PODS, pod["metadata"]["name"])
        except ApiError:
            return True
        if now is None or now["metadata"]["uid"] != pod["metadata"]["uid"]:
            return False
        states = {each["name"]: each for each in (now.get("status") or {}).get("containerStatuses") or []}
        before = {each["name"]: each for each in (pod.get("status") or {}).get("containerStatuses") or []}
        each = states.get(container) or {}
        return "running" in each.get("state", {}) and each["restartCount"] == before[container]["restartCount"]

    def _say(self, label: str, line: str) -> None:
        with self.lock:
            if self.colors is None:
                self.out.write(log_line(label, line, self.as_json) + "\n")
            else:
                color = self.colors.setdefault(label, COLORS[len(self.colors) % len(COLORS)])
                self.out.write(f"\x1b[{color}m{label}\x1b[0m | {line}\n")
            self.out.flush()


def label_of(name: str, pod: Mapping[str, Any]) -> str:
    """`ship.release` for a step, `train-worker-0` for a pod that a step's job made."""
    metadata = pod["metadata"]
    node = (metadata.get("annotations") or {}).get(NODE_NAME)
    return re.sub(r"^[.-]", "", (node or metadata["name"]).removeprefix(name))


def _started(pod: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The containers that have written or may have, and how often each was started again."""
    status = pod.get("status") or {}
    for each in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        state = each.get("state") or {}
        if each["name"] not in OURS and ("running" in state or "terminated" in state or each["restartCount"]):
            yield each["name"], each["restartCount"]


def tail(cluster: Cluster, name: str, labels: list[str], size: int = 50) -> str:
    """What a pod of these steps said last; one that tells of an error, if any. "": all are gone."""
    texts = []
    for pod in cluster.listed(PODS, f"{WORKFLOW}={name}"):
        label = label_of(name, pod)
        if any(label == each or label.startswith((f"{each}(", f"{each}-")) for each in labels):
            texts += [_tail_of(cluster, pod, container, size) for container, _ in _started(pod)]
    told = [text for text in texts if re.search(r"^(error: |Traceback)", text, re.MULTILINE)]
    return next(iter(told or texts), "")


def _tail_of(cluster: Cluster, pod: Mapping[str, Any], container: str, size: int) -> str:
    path = PODS.path(cluster.namespace, pod["metadata"]["name"], "log")
    try:
        lines = cluster.lines(path, {"container": container, "tailLines": str(size)}, 10)
        return b"".join(line for line in lines if not EXECUTOR.search(line)).decode(errors="replace")
    except ApiError:  # gone meanwhile, or not ours to read: the failure is told without it
        return ""


class TrainingProgress:
    """How far the training of a run has come, asked of its workers every few seconds while somebody looks."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.found: dict[str, str] = {}
        self.wanted = threading.Event()
        threading.Thread(target=self._ask, name="progress", daemon=True).start()

    def of(self, row: Step) -> str:
        self.wanted.set()
        return next((text for pod, text in self.found.items() if pod.startswith(f"{self.name}-{row.label}-")), "")

    def _ask(self) -> None:
        while self.wanted.wait():
            self.wanted.clear()
            found = {}
            try:
                for pod in self.cluster.listed(PODS, f"{WORKFLOW}={self.name},{REPLICA_TYPE}=worker"):
                    if (pod.get("status") or {}).get("phase") == "Running":
                        container = pod["spec"]["containers"][0]["name"]
                        if text := progress_in(_tail_of(self.cluster, pod, container, 30)):
                            found[pod["metadata"]["name"]] = text
                            break
            except ApiError:  # the next question may be answered
                found = self.found
            self.found = found
            time.sleep(PROGRESS_EVERY)
