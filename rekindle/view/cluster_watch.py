"""Show a run on a cluster like a local run, with the same tree, summary and exit codes.

    watch(cluster, "demo-4k2xp", as_json=False)
    # → 0 succeeded, 1 failed, 3 not released by the gate, 130 after Ctrl-C, which ends only this

With `as_json`, exactly one JSON object is written to stdout, and everything else to stderr.
"""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from argolocal.common import exit_codes
from argolocal.common.json_text import to_json
from argolocal.manifest.allowed_values import COMPLETED
from argolocal.manifest.types import Object
from argolocal.view import display, summary
from rekindle.blocks.manifest import workflow_origin
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import SERVICES, WORKFLOWS, Cluster
from rekindle.cluster.waiting_pods import add_waiting
from rekindle.cluster.workflows import (
    SHA256_ANNOTATION,
    decompress_nodes,
    is_offloaded,
    read_run,
    spec_of,
)
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import REKINDLE_TOKEN
from rekindle.operations import results
from rekindle.view import cluster_logs, outcome

REFRESH_INTERVAL_S = 2.0


def watch(cluster: Cluster, name: str, *, as_json: bool) -> int:
    """Show a run until it completes. Raises ConfigError if the run does not exist."""
    workflow = read_run(cluster, name)
    out = sys.stderr if as_json else sys.stdout
    progress = cluster_logs.TrainingProgress(cluster, name).of

    try:
        with display.show(name, progress, {"spec": spec_of(workflow)}, out) as shown:
            refresher = _RunRefresher(cluster, shown)
            with refresher.refreshed():
                workflow = _watch_to_completion(cluster, name, refresher, shown)
    except KeyboardInterrupt:
        flags = f" --cluster{cluster.flags}"
        sys.stderr.write(
            f"\n{name} continues; only the watch has ended\nwatch   rekindle status {name}"
            f" --watch{flags}\nstop    rekindle stop {name}{flags}\n"
        )
        return exit_codes.INTERRUPTED

    return print_outcome(cluster, workflow, as_json)


class _RunRefresher:
    """Shows the newest state of a run. Checks every few seconds for waiting pods, whose steps it
    shows as Pending."""

    def __init__(self, cluster: Cluster, shown: display.RunDisplay) -> None:
        self._cluster = cluster
        self._shown = shown
        self._workflow: Object | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def show(self, workflow: Object) -> None:
        with self._lock:
            self._workflow = workflow
            self._show()

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Redraw the run every few seconds during the `with` block, because the watch does not
        report changes of the jobs' pods."""
        thread = threading.Thread(target=self._refresh, name="waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            # limit the wait, because a request in progress may take long
            thread.join(REFRESH_INTERVAL_S)

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_INTERVAL_S):
            with self._lock:
                if self._workflow and not self._ended.is_set():
                    self._show()

    def _show(self) -> None:
        workflow = self._workflow
        if not workflow:
            return

        if workflow["status"].get("phase") not in COMPLETED:
            # if the pods cannot be read, show the state that Argo reports
            with suppress(ApiError):
                workflow = add_waiting(self._cluster, workflow)

        self._shown({"phase": "Pending", "nodes": {}, **workflow["status"]})


def _watch_to_completion(
    cluster: Cluster, name: str, refresher: _RunRefresher, shown: display.RunDisplay
) -> Object:
    unreachable = False

    def report_lost(error: ApiError) -> None:
        nonlocal unreachable
        if not unreachable:
            shown.say(f"waiting for the cluster: {error}")
        unreachable = True

    for kind, workflow in cluster.watch(WORKFLOWS, name=name, on_lost=report_lost):
        if unreachable:
            shown.say("the cluster answers again")

        unreachable = False
        if kind == "DELETED":
            raise RekindleError(f"{name} was deleted while it was watched: its outcome is unknown.")

        workflow = decompress_nodes(workflow)
        if workflow.get("status"):
            refresher.show(workflow)
            if workflow["status"].get("phase") in COMPLETED:
                return workflow

    raise AssertionError("cluster.watch ends only by an exception")


def print_outcome(cluster: Cluster, workflow: Object, as_json: bool) -> int:
    """Print the outcome of a completed run and return the exit code."""
    status = workflow.get("status") or {}
    is_rekindle = workflow_origin.is_rekindle(workflow)
    code = results.exit_code(status, is_rekindle)
    endpoint = _endpoint(cluster, workflow_origin.pipeline_label(workflow))

    if as_json:
        print(to_json(as_object(cluster, workflow)), flush=True)

    if code in (0, results.NOT_RELEASED):
        cost = results.costs(status, {"spec": spec_of(workflow)}).get("words")
        facts = _endpoint_facts(cluster, workflow, endpoint) | {"cost": cost}
        text = outcome.success(status, facts, is_rekindle)
        (sys.stderr if as_json else sys.stdout).write(text)
    else:
        sys.stderr.write("\n" + _describe_failure(cluster, workflow) + "\n")

    return code


def as_object(cluster: Cluster, workflow: Mapping[str, Any]) -> Object:
    """Return the run as `-o json` prints it."""
    metadata = workflow["metadata"]
    sha256 = (metadata.get("annotations") or {}).get(SHA256_ANNOTATION)
    facts = {
        "manifest_sha256": sha256,
        "namespace": metadata.get("namespace") or cluster.namespace,
        "endpoint": _endpoint(cluster, workflow_origin.pipeline_label(workflow)),
    }
    status = workflow.get("status") or {"phase": "Pending"}
    cost = results.costs(status, {"spec": spec_of(workflow)})
    return outcome.as_json(metadata["name"], status, **facts, **({"cost": cost} if cost else {}))


def _endpoint(cluster: Cluster, name: str | None) -> str | None:
    """Return the URL of the pipeline's Service inside the cluster, if it exists."""
    try:
        service = cluster.find(SERVICES, name) if name else None
    except ApiError:
        # a user without permission to read Services gets no URL
        return None

    if service:
        return f"http://{name}.{cluster.namespace}:{service['spec']['ports'][0]['port']}"
    return None


def _endpoint_facts(
    cluster: Cluster, workflow: Object, endpoint: str | None
) -> dict[str, str | None]:
    name = workflow_origin.pipeline_label(workflow)
    port = endpoint and endpoint.rpartition(":")[2]
    forward = f"kubectl port-forward{cluster.flags} svc/{name} {port}"
    url = f"localhost:{port}/v1/models/{name}/example"
    request = f"curl -s {url}"

    if results.needs_token({"spec": spec_of(workflow)}):
        # printf is a shell builtin, so the token is not visible to other users of the machine
        request = f"printf 'Authorization: Bearer %s' \"${REKINDLE_TOKEN}\" | curl -s -H @- {url}"

    return {
        "endpoint": endpoint and f"{endpoint} (inside the cluster)",
        "try it": endpoint and f"{forward} & {request}",
    }


def _describe_failure(cluster: Cluster, workflow: Object) -> str:
    name = workflow["metadata"]["name"]
    status = workflow.get("status") or {}
    if is_offloaded(workflow):
        return (
            f"{name}: {status.get('phase')}: {status.get('message') or ''}\nsteps   in Argo's"
            f" database: `argo get {name}`"
        )

    step = summary.failed_step(summary.steps(name, status))
    log = ""
    command = ""
    flags = f" --cluster{cluster.flags}"

    if step:
        attempt = str(summary.last_attempt(status, step).get("name", "")).removeprefix(f"{name}.")
        log = cluster_logs.tail(
            cluster, name, [attempt, step.name], cluster_logs.inputs_of(step).get("server", "")
        )
        command = f"rekindle logs {name} {step.name}{flags}" if log else ""

    return summary.failure(name, status, log, command, f"rekindle resume {name}{flags}")
