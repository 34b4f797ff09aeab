"""Copies the logs of pods to a private folder, so that the tabs can read them like local files. If
a log is forbidden or deleted, its copy contains a sentence with the reason."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from argolocal.common.checked_names import ObjectName
from argolocal.manifest.allowed_values import COMPLETED_PHASES
from argolocal.manifest.object_labels import WORKFLOW
from argolocal.manifest.types import Object
from argolocal.page.log_files import LocalLog, LogFile
from argolocal.view.summary import make_pod_name
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import PODS, Cluster
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import S3_BUCKET
from rekindle.view.cluster_logs import ARGO_CONTAINERS

POLL_INTERVAL_S = 2.0
# the logs of a run are no longer copied this long after the last request of a viewer
IDLE_AFTER_S = 60.0
FIRST_COPY_TIMEOUT_S = 3.0
# maximum number of bytes in the first read of a log
MAX_FIRST_BYTES = 64 << 20
MAX_PODS = 200
SILENCE_TIMEOUT_S = 10.0


class PodLogs:
    """The logs of the pods of several runs. `folder`: private folder for the copies."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.copies: dict[str, _RunCopy] = {}
        self.lock = Lock()

    def files(self, workflow: Object) -> Mapping[str, LogFile]:
        """Return the copies of the logs of a run, by the name of the pod. Start to copy the logs in
        the background, and wait up to three seconds for the first copies. The copies of the logs
        are kept up to date as long as `files` is called regularly."""
        run_name = workflow["metadata"]["name"]
        with self.lock:
            run_copy = self.copies.get(run_name)
            if run_copy is None:
                run_copy = _RunCopy(self.cluster, self.folder / run_name)
                self.copies[run_name] = run_copy

        run_copy.request(workflow)
        return {name: LocalLog(name, path) for name, path in list(run_copy.files.items())}


class _RunCopy:
    """The copies of the logs of one run."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.files: dict[str, Path] = {}
        self.workflow: Object = {}
        self.requested_at = 0.0
        self.first_copy = Event()
        self.thread: Thread | None = None
        self.positions: dict[str, _Position] = {}
        # names of the logs that are copied to their end
        self.complete_names: set[str] = set()
        self.is_complete = False

    def request(self, workflow: Object) -> None:
        """Copy the logs in the background for IDLE_AFTER_S seconds from now on."""
        self.workflow = workflow
        self.requested_at = time.monotonic()
        if self.is_complete:
            return
        if self.thread is None or not self.thread.is_alive():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.thread = Thread(target=self._copy_logs, name="pod logs", daemon=True)
            self.thread.start()
        self.first_copy.wait(FIRST_COPY_TIMEOUT_S)

    def _copy_logs(self) -> None:
        while time.monotonic() - self.requested_at < IDLE_AFTER_S and not self.is_complete:
            phase = (self.workflow.get("status") or {}).get("phase")
            try:
                self._copy_once()
                self.is_complete = phase in COMPLETED_PHASES
            except RekindleError as error:
                self._write_missing(set(), f"The pods cannot be read: {error}")
            self.first_copy.set()
            time.sleep(POLL_INTERVAL_S)

    def _copy_once(self) -> None:
        labels = f"{WORKFLOW}={self.workflow['metadata']['name']}"
        pods = self.cluster.list_objects(PODS, labels)
        pods.sort(key=lambda pod: pod["metadata"].get("creationTimestamp") or "")
        for pod in pods[-MAX_PODS:]:
            for container, is_running in list_containers(pod):
                self._copy_container(pod["metadata"]["name"], container, is_running)

        names = {pod["metadata"]["name"] for pod in pods}
        self._write_missing(names, "The pod was deleted, and its log was not archived.")

    def _copy_container(self, pod: str, container: str, is_running: bool) -> None:
        name = pod if container == "main" else f"{pod}-{container}"
        if name in self.complete_names or not ObjectName.matches(name):
            return

        path = self._open_log_file(name)
        position = self.positions.setdefault(name, _Position())
        query = {"timestamps": "true", **position.query()}
        try:
            with path.open("ab") as file:
                for line in self.cluster.log(pod, container, SILENCE_TIMEOUT_S, **query):
                    text = position.advance(line)
                    if text is not None:
                        file.write(text)
        except ApiError as error:
            # the code 400 means that the log is not yet available, and 404 that the pod was deleted
            if error.code not in (400, 404):
                path.write_text(f"The log cannot be read: {error}\n")
                self.complete_names.add(name)
            return
        if not is_running:
            self.complete_names.add(name)

    def _write_missing(self, pods: set[str], reason: str) -> None:
        """For each pod that has ended, but is not in `pods`, write its archived log or the reason
        why it is missing."""
        run = self.workflow["metadata"]["name"]
        for node in ((self.workflow.get("status") or {}).get("nodes") or {}).values():
            if node.get("type") != "Pod" or node.get("phase") not in COMPLETED_PHASES:
                continue
            name = make_pod_name(run, node)
            if name not in pods and name not in self.files and ObjectName.matches(name):
                path = self._open_log_file(name)
                path.write_bytes(read_archived_log(run, node, reason))
                self.complete_names.add(name)

    def _open_log_file(self, log_name: str) -> Path:
        """Create the file of a log if it is missing, and return its path. The page lists the log as
        soon as the file exists."""
        path = self.folder / f"{log_name}.log"
        if log_name not in self.files:
            path.touch(mode=0o600)
            self.files[log_name] = path
        return path


class _Position:
    """The position up to which a log was read: the newest timestamp, and the number of lines read
    with this timestamp."""

    def __init__(self) -> None:
        self.last = ""
        self.count = 0
        self.skipped = 0

    def query(self) -> dict[str, str]:
        """Return the request parameters for the lines after this position."""
        self.skipped = 0
        if self.last:
            # Kubernetes accepts only whole seconds as sinceTime
            return {"sinceTime": re.sub(r"\.\d+", "", self.last)}
        return {"limitBytes": str(MAX_FIRST_BYTES)}

    def advance(self, log_line: bytes) -> bytes | None:
        """Return the text of a line without its timestamp; None for a line that was read before."""
        stamp, _, text = log_line.partition(b" ")
        timestamp = stamp.decode(errors="replace")
        if timestamp < self.last:
            return None
        if timestamp == self.last:
            self.skipped += 1
            if self.skipped <= self.count:
                return None
            self.count += 1
        else:
            self.last = timestamp
            self.count = 1
            self.skipped = 1
        return text if text.endswith(b"\n") else text + b"\n"


def list_containers(pod: Object) -> list[tuple[str, bool]]:
    """Return the names of a pod's containers that have started, except Argo's containers. The flag
    of a container is True while it runs."""
    status = pod.get("status") or {}
    containers = []
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        has_started = "running" in state or "terminated" in state
        if has_started and container["name"] not in ARGO_CONTAINERS:
            containers.append((container["name"], "running" in state))
    return containers


def read_archived_log(run: str, node: Mapping[str, Any], reason: str) -> bytes:
    """Return the archived log of a step, or a sentence that says why it is missing. The object
    store is read only if the user's environment configures it."""
    artifacts = (node.get("outputs") or {}).get("artifacts") or []
    keys = [
        (artifact.get("s3") or {}).get("key")
        for artifact in artifacts
        if artifact.get("name") == "main-logs"
    ]
    if not keys or not keys[0]:
        return f"{reason}\n".encode()

    step = str(node.get("displayName") or "")
    command = f"rekindle logs {run} {step} --cluster"
    if not os.environ.get(S3_BUCKET):
        return (
            f"The pod was deleted. Its log is in the object store, which {S3_BUCKET} and the"
            f" credentials of the store make readable here; `{command}` reads it, too.\n"
        ).encode()

    from rekindle.storage import Store

    try:
        return Store.from_env().short_retries().get(keys[0])
    except RekindleError as error:
        return f"The archived log cannot be read: {error}\n".encode()
