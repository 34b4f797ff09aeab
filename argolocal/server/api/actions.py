"""The URL paths of the API that change a workflow: stop, terminate, suspend, resume, set, retry and
resubmit. Source: Argo's workflow/util/util.go."""

import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from argolocal.common.checked_names import format_untrusted
from argolocal.common.files import write_atomically
from argolocal.common.json_text import loads, to_json
from argolocal.engine.nodes import format_time
from argolocal.engine.suspend import list_missing_parameters, list_suspended_nodes
from argolocal.manifest import object_labels
from argolocal.manifest import read as manifests
from argolocal.manifest.allowed_values import COMPLETED_PHASES, FAILED_PHASES
from argolocal.manifest.types import Node, Object
from argolocal.runner import requests
from argolocal.runner.requests import NodeChange, RunRequest
from argolocal.runner.retry_workflow import copy_for_resubmission, reset_for_retry
from argolocal.server.api.backend import Backend, refuse_invalid
from argolocal.server.api.bodies import Body
from argolocal.server.api.catalogue import Entry
from argolocal.server.api.errors import INTERNAL, INVALID_ARGUMENT, ApiError
from argolocal.server.api.selectors import match_node
from argolocal.server.api.workflows import override_parameters
from argolocal.state.journal import MANIFEST_FILE, Busy, RunFiles

# A runner reads a request within a second, unless the machine is busy.
# seconds that the process of a run needs after the end of the run
END_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0
SET_PHASES = ("", "Succeeded", "Failed", "Error")
PREVIOUS_WORKFLOW = "workflows.argoproj.io/resubmitted-from-workflow"
# labels of a run that its copy does not get
OWN_LABELS = (
    object_labels.PHASE_LABEL,
    object_labels.COMPLETED_LABEL,
    object_labels.ARCHIVING_STATUS_LABEL,
    *object_labels.CREATOR,
)

Perform = Callable[[Entry, Body], Object]


@dataclass(frozen=True)
class RetryOptions:
    """The settings of a retry. `selector`: nodes to run again although they succeeded; only used if
    `restarts_successful` is True. `parameters`: new values, as NAME=VALUE."""

    restarts_successful: bool
    selector: str
    parameters: Sequence[str]

    @classmethod
    def parse(cls, body: Body) -> "RetryOptions":
        """Return the options in the body of a request. Raises ApiError."""
        return cls(
            body.boolean("restartSuccessful"),
            body.text("nodeFieldSelector"),
            body.texts("parameters"),
        )

    def select_restarted(self, nodes: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the ids of the nodes to run again although they succeeded. Raises ApiError."""
        if not self.restarts_successful or not self.selector:
            return []
        return [id for id, node in nodes.items() if match_node(self.selector, node)]


class Actions:
    """The answers to requests that change a workflow."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def routes(self) -> list[Route]:
        actions: Mapping[str, Perform] = {
            "stop": self.stop,
            "terminate": self.terminate,
            "suspend": self.suspend,
            "resume": self.resume,
            "set": self.set,
            "retry": self.retry,
            "resubmit": self.resubmit,
        }
        return [
            Route(
                f"/workflows/{{namespace}}/{{name}}/{name}",
                self._make_answer(perform),
                methods=["PUT"],
            )
            for name, perform in actions.items()
        ]

    def _make_answer(self, perform: Perform) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            body = await Body.read(request)
            return await run_in_threadpool(answer, request, body)

        def answer(request: Request, body: Body) -> Response:
            parameters = request.path_params
            entry = self.backend.find_entry(parameters["namespace"], parameters["name"])
            return JSONResponse(perform(entry, body))

        return respond

    def stop(self, entry: Entry, body: Body) -> Object:
        """Stop a workflow, or fail the suspended nodes that a selector matches."""
        selector = body.text("nodeFieldSelector")
        if selector:
            change = NodeChange("Failed", body.text("message"))
            return self._change_nodes(entry, selector, change)
        return self._shut_down(entry, "Stop")

    def terminate(self, entry: Entry, body: Body) -> Object:
        """Stop a workflow without its exit handlers."""
        return self._shut_down(entry, "Terminate")

    def suspend(self, entry: Entry, body: Body) -> Object:
        """Let no further nodes of a workflow start."""
        workflow = self.backend.workflow(entry)
        if workflow["status"]["phase"] in COMPLETED_PHASES:
            raise ApiError(
                INTERNAL,
                "timed out waiting for the condition: cannot suspend completed workflows",
            )
        return self._send(entry, RunRequest(suspend=True))

    def resume(self, entry: Entry, body: Body) -> Object:
        """Resume a suspended workflow and its suspended nodes, or the nodes that a selector
        matches."""
        selector = body.text("nodeFieldSelector")
        if selector:
            return self._change_nodes(entry, selector, NodeChange())

        workflow = self.backend.workflow(entry)
        nodes = list_suspended_nodes(workflow["status"])
        for node in nodes:
            for parameter in list_missing_parameters(node):
                if (parameter.get("valueFrom") or {}).get("default") is None:
                    raise ApiError(
                        INTERNAL,
                        f"raw output parameter '{parameter['name']}' has not been set and does not"
                        " have a default value",
                    )
        if workflow["status"]["phase"] in COMPLETED_PHASES:
            return workflow
        changes = {node["id"]: NodeChange() for node in nodes}
        return self._send(entry, RunRequest(changes, suspend=False))

    def set(self, entry: Entry, body: Body) -> Object:
        """Set the phase, the message and the outputs of suspended nodes."""
        phase = body.text("phase")
        if phase not in SET_PHASES:
            raise ApiError(INVALID_ARGUMENT, f"{phase[:100]} is an invalid phase to set to")

        selector = body.text("nodeFieldSelector")
        outputs = _parse_outputs(body.text("outputParameters"))
        if not selector:
            raise ApiError(
                INTERNAL,
                "'set' currently only targets suspend nodes, use a node field selector to target"
                " them",
            )
        return self._change_nodes(entry, selector, NodeChange(phase, body.text("message"), outputs))

    def retry(self, entry: Entry, body: Body) -> Object:
        """Run a failed workflow again; the nodes that succeeded are not repeated."""
        return retry_run(self.backend, entry, RetryOptions.parse(body))

    def resubmit(self, entry: Entry, body: Body) -> Object:
        """Submit a copy of a workflow."""
        return resubmit_run(self.backend, entry, body.boolean("memoized"), body.texts("parameters"))

    def _shut_down(self, entry: Entry, strategy: str) -> Object:
        workflow = self.backend.workflow(entry)
        if workflow["status"]["phase"] in COMPLETED_PHASES:
            raise ApiError(
                INTERNAL,
                f'cannot shutdown a completed workflow: workflow: "{entry.name}", namespace:'
                f' "{self.backend.namespace}"',
            )
        return self._send(entry, RunRequest(shutdown=strategy))

    def _change_nodes(self, entry: Entry, selector: str, change: NodeChange) -> Object:
        """Change the suspended nodes that a selector matches. Raises ApiError if the selector
        matches no node."""
        workflow = self.backend.workflow(entry)
        nodes = [
            node for node in list_suspended_nodes(workflow["status"]) if match_node(selector, node)
        ]
        if not nodes:
            raise ApiError(
                INTERNAL,
                "currently, set only targets suspend nodes: no suspend nodes matching"
                f" nodeFieldSelector: {selector[:200]}",
            )
        for node in nodes:
            _check_outputs(node, change.outputs)
        return self._send(entry, RunRequest({node["id"]: change for node in nodes}))

    def _send(self, entry: Entry, request: RunRequest) -> Object:
        """Send a request to the runner of a workflow, and return the Workflow object after the
        change. A run that waits in the queue gets a request when it starts."""
        requests.send(self.backend.files(entry), request, REQUEST_TIMEOUT_S)
        return self.backend.read_again(entry.name)


def retry_run(backend: Backend, entry: Entry, options: RetryOptions) -> Object:
    """Queue a run again from the nodes that failed. Raises ApiError."""
    files = backend.files(entry)
    phase = backend.workflow(entry)["status"]["phase"]
    if phase == "Succeeded" and not (options.restarts_successful and options.selector):
        raise ApiError(
            INVALID_ARGUMENT,
            "To retry a succeeded workflow, set the options restartSuccessful and"
            " nodeFieldSelector",
        )
    if phase not in COMPLETED_PHASES:
        raise ApiError(INVALID_ARGUMENT, f"Cannot retry a workflow in phase {phase}")

    workflow, status, _ = refuse_invalid(lambda: _open_ended(files))
    try:
        _prepare_retry(files, workflow, status, options)
        files.queue_entry.parent.mkdir(exist_ok=True)
        files.queue_entry.touch()
    finally:
        files.close()
    return backend.read_again(entry.name)


def _open_ended(files: RunFiles) -> tuple[Object, Object, Mapping[str, Any]]:
    """Lock a run that has ended, and return its workflow, status and processes. The process of a
    run holds the lock of the run for a moment after the end of the run. Raises Busy for a run in
    progress, and ConfigError for an unknown run."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while True:
        try:
            return files.open()
        except Busy:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _prepare_retry(
    files: RunFiles, workflow: Object, status: Object, options: RetryOptions
) -> None:
    """Write the first status of a retried run. The caller has locked the run."""
    restarted_ids = options.select_restarted(status["nodes"])
    new_status = reset_for_retry(status, restarted_ids, bool(options.parameters))
    for field in ("spec", "submittedSpec"):
        if field in workflow:
            override_parameters(workflow[field], options.parameters)
    workflow["spec"].pop("shutdown", None)
    # delete a request that came when the run had just ended
    files.resume_request.unlink(missing_ok=True)
    shutil.rmtree(files.root / "creates", ignore_errors=True)
    write_atomically(files.root / MANIFEST_FILE, to_json(workflow, indent=1))
    files.snapshot({**new_status, "startedAt": format_time(time.time())})


def resubmit_run(
    backend: Backend, entry: Entry, is_memoized: bool, parameters: Sequence[str]
) -> Object:
    """Queue a copy of a run. With `is_memoized`, the copy takes over the results of the nodes that
    succeeded. Raises ApiError."""
    workflow = backend.workflow(entry)
    manifest = _make_resubmission(workflow, backend.namespace)
    override_parameters(manifest["spec"], parameters)
    if not is_memoized:
        return backend.submit(manifest)

    if workflow["status"]["phase"] not in FAILED_PHASES:
        raise ApiError(
            INVALID_ARGUMENT, "workflow must be Failed/Error to resubmit in memoized mode"
        )
    prefix = manifest["metadata"]["generateName"]
    name = manifests.ObjectIdentity(suffix=manifests.generate_suffix()).name(prefix)
    manifest["metadata"]["name"] = name
    status = backend.files(entry).load()[0]
    copied_status = copy_for_resubmission(status, entry.name, name)
    refuse_invalid(lambda: backend.queue.submit(manifest, status=copied_status))
    return backend.read_again(name)


def _make_resubmission(workflow: Object, namespace: str) -> Object:
    """Return the manifest of a copy of a workflow."""
    metadata = workflow["metadata"]
    labels = {name: value for name, value in metadata["labels"].items() if name not in OWN_LABELS}
    spec = {key: value for key, value in workflow["spec"].items() if key != "shutdown"}
    return {
        "apiVersion": workflow["apiVersion"],
        "kind": workflow["kind"],
        "metadata": {
            "generateName": metadata.get("generateName") or f"{metadata['name']}-",
            "namespace": namespace,
            "labels": {**labels, PREVIOUS_WORKFLOW: metadata["name"]},
            "annotations": metadata.get("annotations") or {},
        },
        "spec": spec,
    }


def _parse_outputs(text: str) -> dict[str, str]:
    """Return the values of output parameters in a JSON text. Raises ApiError."""
    if not text:
        return {}
    try:
        values = loads(text)
    except ValueError as error:
        raise ApiError(
            INVALID_ARGUMENT, f"unable to parse output parameter set request: {error}"
        ) from None
    if not isinstance(values, dict) or not all(isinstance(item, str) for item in values.values()):
        raise ApiError(
            INVALID_ARGUMENT,
            f"unable to parse output parameter set request: {format_untrusted(text)} must map"
            " names to strings",
        )
    return values


def _check_outputs(node: Node, outputs: Mapping[str, str]) -> None:
    """Raise ApiError for an output that a suspended node does not expect."""
    if outputs and "outputs" not in node:
        raise ApiError(
            INTERNAL,
            "cannot set output parameters because node is not expecting any raw parameters",
        )
    declared = {item["name"] for item in (node.get("outputs") or {}).get("parameters") or []}
    expected = {parameter["name"] for parameter in list_missing_parameters(node)}
    for name in outputs:
        if name not in declared:
            raise ApiError(INTERNAL, f"node is not expecting output parameter '{name[:200]}'")
        if name not in expected:
            raise ApiError(
                INTERNAL,
                f"cannot set output parameter '{name[:200]}' because it does not use valueFrom.raw"
                " or it was already set",
            )
