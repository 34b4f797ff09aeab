"""Show a run on a cluster like a local run, with the same tree, summary and exit codes.

    watch_run(cluster, "demo-4k2xp", as_json=False)
    # → 0 succeeded, 1 failed, 3 not released by the gate, 130 after Ctrl-C, which ends only the
    # display

With `as_json`, exactly one JSON object is written to stdout, and everything else to stderr.
"""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from argolocal.common import exit_codes
from argolocal.common.json_text import to_json
from argolocal.manifest.allowed_values import COMPLETED_PHASES
from argolocal.manifest.types import Object
from argolocal.view import display, summary
from rekindle.blocks.manifest import workflow_origin
from rekindle.cluster import queue
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import SERVICES, WORKFLOWS, Cluster
from rekindle.cluster.waiting_pods import add_waiting_reasons
from rekindle.cluster.workflows import (
    SHA256_ANNOTATION,
    decompress_nodes,
    get_effective_spec,
    is_offloaded,
    read_run,
)
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import REKINDLE_TOKEN
from rekindle.operations import results
from rekindle.view import cluster_logs, outcome

REFRESH_INTERVAL_S = 2.0


def watch_run(cluster: Cluster, run_name: str, *, as_json: bool) -> int:
    """Show a run until it completes. Raises ConfigError if the run does not exist."""
    workflow = read_run(cluster, run_name)
    output_stream = sys.stderr if as_json else sys.stdout
    describe_progress = cluster_logs.TrainingProgress(cluster, run_name).of

    try:
        with display.show_run(
            run_name, describe_progress, {"spec": get_effective_spec(workflow)}, output_stream
        ) as run_display:
            refresher = _RunRefresher(cluster, run_display)
            with refresher.refreshed():
                workflow = _watch_to_completion(cluster, run_name, refresher, run_display)
    except KeyboardInterrupt:
        cluster_flags = f" --cluster{cluster.flags}"
        sys.stderr.write(
            f"\n{run_name} continues; only the watch has ended\nwatch   rekindle status {run_name}"
            f" --watch{cluster_flags}\nstop    rekindle stop {run_name}{cluster_flags}\n"
        )
        return exit_codes.INTERRUPTED

    return print_outcome(cluster, workflow, as_json)


class _RunRefresher:
    """Shows the newest state of a run. Every few seconds, _RunRefresher checks for waiting pods,
    whose steps are shown as Pending."""

    def __init__(self, cluster: Cluster, run_display: display.RunDisplay) -> None:
        self._cluster = cluster
        self._shown = run_display
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
        refresh_thread = threading.Thread(target=self._refresh, name="waiting", daemon=True)
        refresh_thread.start()
        try:
            yield
        finally:
            self._ended.set()
            # limit the wait, because a request in progress may take long
            refresh_thread.join(REFRESH_INTERVAL_S)

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_INTERVAL_S):
            with self._lock:
                if self._workflow and not self._ended.is_set():
                    self._show()

    def _show(self) -> None:
        workflow = self._workflow
        if not workflow:
            return

        if workflow["status"].get("phase") not in COMPLETED_PHASES:
            # if the pods cannot be read, show the state that Argo reports
            with suppress(ApiError):
                workflow = add_waiting_reasons(self._cluster, workflow)

        self._shown({"phase": "Pending", "nodes": {}, **workflow["status"]})


def _watch_to_completion(
    cluster: Cluster, run_name: str, run_refresher: _RunRefresher, run_display: display.RunDisplay
) -> Object:
    unreachable = False

    def report_lost(error: ApiError) -> None:
        nonlocal unreachable
        if not unreachable:
            run_display.say(f"waiting for the cluster: {error}")
        unreachable = True

    for event_type, workflow in cluster.watch(WORKFLOWS, name=run_name, on_lost=report_lost):
        if unreachable:
            run_display.say("the cluster answers again")

        unreachable = False
        if event_type == "DELETED":
            raise RekindleError(
                f"{run_name} was deleted while it was watched: its outcome is unknown."
            )

        workflow = decompress_nodes(workflow)
        if workflow.get("status"):
            run_refresher.show(workflow)
            if workflow["status"].get("phase") in COMPLETED_PHASES:
                return workflow

    raise AssertionError("cluster.watch ends only by an exception")


def print_outcome(cluster: Cluster, workflow: Object, as_json: bool) -> int:
    """Print the outcome of a completed run and return the exit code."""
    workflow_status = workflow.get("status") or {}
    is_rekindle = workflow_origin.is_rekindle_manifest(workflow)
    exit_code = results.compute_exit_code(workflow_status, is_rekindle)
    service_endpoint = _find_endpoint(cluster, workflow_origin.pipeline_label(workflow))

    if as_json:
        print(to_json(describe_run(cluster, workflow)), flush=True)

    if exit_code in (0, results.NOT_RELEASED_EXIT_CODE):
        cost_text = results.compute_costs(
            workflow_status, {"spec": get_effective_spec(workflow)}
        ).get("words")
        outcome_facts = _endpoint_facts(cluster, workflow, service_endpoint) | {"cost": cost_text}
        text = outcome.describe_success(workflow_status, outcome_facts, is_rekindle)
        (sys.stderr if as_json else sys.stdout).write(text)
    else:
        sys.stderr.write("\n" + _describe_failure(cluster, workflow) + "\n")

    return exit_code


def describe_run(cluster: Cluster, workflow: Mapping[str, Any]) -> Object:
    """Return the run as `-o json` prints it."""
    workflow_metadata = workflow["metadata"]
    sha256 = (workflow_metadata.get("annotations") or {}).get(SHA256_ANNOTATION)
    run_facts = {
        "manifest_sha256": sha256,
        "namespace": workflow_metadata.get("namespace") or cluster.namespace,
        "endpoint": _find_endpoint(cluster, workflow_origin.pipeline_label(workflow)),
    }
    workflow_status = workflow.get("status") or {"phase": "Pending"}
    run_costs = results.compute_costs(workflow_status, {"spec": get_effective_spec(workflow)})
    return outcome.build_outcome(
        workflow_metadata["name"],
        workflow_status,
        **run_facts,
        **({"cost": run_costs} if run_costs else {}),
        **_describe_queue(cluster, workflow),
    )


def _describe_queue(cluster: Cluster, workflow: Mapping[str, Any]) -> Object:
    """Return the field `queue` of an active run with a queue, which contains the waiting jobs of
    the run, or the reason why these jobs cannot be read."""
    workflow_status = workflow.get("status") or {}
    if workflow_status.get("phase") in COMPLETED_PHASES or not queue.has_queue(
        get_effective_spec(workflow)
    ):
        return {}
    try:
        waiting_jobs = queue.find_waiting_jobs(cluster, workflow["metadata"]["name"])
    except ApiError as error:
        if error.code != 403:
            raise
        return {"queue": {"waiting": None, "problem": str(error)}}
    return {"queue": {"waiting": [asdict(waiting_job) for waiting_job in waiting_jobs]}}


def _find_endpoint(cluster: Cluster, run_name: str | None) -> str | None:
    """Return the URL of the pipeline's Service inside the cluster, if it exists."""
    try:
        service_object = cluster.find(SERVICES, run_name) if run_name else None
    except ApiError:
        # return no URL if the user may not read Services
        return None

    if service_object:
        return f"http://{run_name}.{cluster.namespace}:{service_object['spec']['ports'][0]['port']}"
    return None


def _endpoint_facts(
    cluster: Cluster, workflow: Object, service_endpoint: str | None
) -> dict[str, str | None]:
    name = workflow_origin.pipeline_label(workflow)
    service_port = service_endpoint and service_endpoint.rpartition(":")[2]
    forward_command = f"kubectl port-forward{cluster.flags} svc/{name} {service_port}"
    url = f"localhost:{service_port}/v1/models/{name}/example"
    request_command = f"curl -s {url}"

    if results.needs_token({"spec": get_effective_spec(workflow)}):
        # the command uses printf, a shell builtin, so that the token is not visible to other users
        # of the machine
        request_command = (
            f"printf 'Authorization: Bearer %s' \"${REKINDLE_TOKEN}\" | curl -s -H @- {url}"
        )

    return {
        "endpoint": service_endpoint and f"{service_endpoint} (inside the cluster)",
        "try it": service_endpoint and f"{forward_command} & {request_command}",
    }


def _describe_failure(cluster: Cluster, workflow: Object) -> str:
    name = workflow["metadata"]["name"]
    workflow_status = workflow.get("status") or {}
    if is_offloaded(workflow):
        return (
            f"{name}: {workflow_status.get('phase')}:"
            f" {workflow_status.get('message') or ''}\nsteps   in Argo's"
            f" database: `argo get {name}`"
        )

    failed_step = summary.find_failed_step(summary.list_steps(name, workflow_status))
    log_text = ""
    logs_command = ""
    cluster_flags = f" --cluster{cluster.flags}"

    if failed_step:
        attempt_name = str(
            summary.find_last_attempt(workflow_status, failed_step).get("name", "")
        ).removeprefix(f"{name}.")
        log_text = cluster_logs.read_last_lines(
            cluster,
            name,
            [attempt_name, failed_step.name],
            cluster_logs.list_input_parameters(failed_step).get("server", ""),
        )
        logs_command = f"rekindle logs {name} {failed_step.name}{cluster_flags}" if log_text else ""

    return summary.failure(
        name, workflow_status, log_text, logs_command, f"rekindle resume {name}{cluster_flags}"
    )
