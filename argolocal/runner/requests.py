"""Requests to the process that runs a workflow: stop, suspend or resume the workflow, or complete
its suspended steps.

    send(files, RunRequest(shutdown="Stop"))
    send(files, RunRequest(nodes={"demo-17": NodeChange("Failed", "rejected")}))

A request is a file `asked` in the folder of a run. The runner deletes the file of a request once
the request is in the journal. If no process runs the workflow, the next runner of the workflow
reads the file of the request when it starts.
"""

import contextlib
import fcntl
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from argolocal.common.files import write_atomically
from argolocal.common.json_text import read_object, to_json
from argolocal.engine.nodes import NodeResumed
from argolocal.state.journal import RunFiles

CHECK_INTERVAL_S = 0.02


@dataclass(frozen=True)
class NodeChange:
    """The change of a suspended node. `phase`: the new phase of the node, or "" if the node stays
    suspended. `outputs`: values of the node's output parameters."""

    phase: str = "Succeeded"
    message: str = ""
    outputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRequest:
    """A request to a run. `nodes`: changes by the id of the node. `suspend`: the new value of
    spec.suspend, or None to leave it unchanged. `shutdown` is Stop, Terminate or ""."""

    nodes: Mapping[str, NodeChange] = field(default_factory=dict)
    suspend: bool | None = None
    shutdown: str = ""

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "RunRequest":
        """Return the request in a file that `send` has written."""
        nodes = {id: NodeChange(**change) for id, change in document["nodes"].items()}
        return cls(nodes, document["suspend"], document["shutdown"])

    def followed_by(self, later: "RunRequest") -> "RunRequest":
        """Return one request that has the same effect as this request followed by `later`."""
        return RunRequest(
            {**self.nodes, **later.nodes},
            self.suspend if later.suspend is None else later.suspend,
            later.shutdown or self.shutdown,
        )

    def events(self) -> list[NodeResumed]:
        """Return the events for the scheduler."""
        return [
            NodeResumed(id, dict(change.outputs), change.phase, change.message)
            for id, change in self.nodes.items()
        ]


def send(files: RunFiles, request: RunRequest, timeout_s: float = 600.0) -> bool:
    """Send a request to a run, and wait until its runner has recorded the request. Return False if
    no process runs the workflow, or if recording takes longer than `timeout_s` seconds."""
    with _locked(files):
        pending_request = read_pending(files)
        if pending_request:
            request = pending_request.followed_by(request)
        write_atomically(files.resume_request, to_json(asdict(request)))

    deadline = time.monotonic() + timeout_s
    while files.resume_request.exists() and files.runner() and time.monotonic() < deadline:
        time.sleep(CHECK_INTERVAL_S)
    return not files.resume_request.exists()


def read_pending(files: RunFiles) -> RunRequest | None:
    """Return the request that the runner has not recorded yet, or None."""
    try:
        return RunRequest.parse(read_object(files.resume_request))
    except FileNotFoundError:
        return None


def complete(files: RunFiles, request: RunRequest) -> None:
    """Delete a request that is in the journal, unless a later request was added to its file."""
    with _locked(files):
        if read_pending(files) == request:
            files.resume_request.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(files: RunFiles) -> Iterator[None]:
    """Hold the lock for changing the request of a run during the `with` block."""
    with open(files.resume_request.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
