"""Find out why pods of a run do not start: no node has enough resources, an image is missing, a
quota is used up.

Argo knows only the pods that it has created itself. A step that has applied a job therefore has the
phase Running, even while the job's pods wait. `add_waiting` also reads the pods and events of jobs
and servers.

Sources: types PodCondition and ContainerStateWaiting of Kubernetes 1.34, and NodeStatus of Argo
3.7.
"""

import re
from collections.abc import Iterable, Mapping

from argolocal.manifest.object_labels import NODE_ID, WORKFLOW
from argolocal.manifest.types import Data, Object
from rekindle.cluster import queue
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import PODS, Cluster, Resource
from rekindle.cluster.workflows import spec_of
from rekindle.kubernetes_names import INSTANCE_LABEL

EVENTS = Resource("v1", "events")
# `reason` of the events of a controller that could not create a pod
REFUSED_REASONS = ("FailedCreate", "FailedCreatePod")
# `reason` of a waiting container that is merely being started
STARTING_REASONS = ("ContainerCreating", "PodInitializing")
ACTIVE_PHASES = ("Pending", "Running")


def add_waiting(cluster: Cluster, workflow: Object) -> Object:
    """Return a copy of an active run; each step with a waiting pod, but without a running pod, has
    the phase Pending in this copy, and its message is the reason.

    The run gets the phase Pending if all of its active steps are Pending. Objects that the user may
    not read are ignored.
    """
    nodes = (workflow.get("status") or {}).get("nodes") or {}

    active_nodes = [
        node
        for node in nodes.values()
        if node["type"] == "Pod" and node.get("phase") in ACTIVE_PHASES
    ]
    if not active_nodes:
        return workflow

    name = workflow["metadata"]["name"]
    pods = _list_readable(cluster, PODS, f"{WORKFLOW}={name}")
    own_pods = {_annotation(pod, NODE_ID): pod for pod in pods}
    job_pods = [pod for pod in pods if not _annotation(pod, NODE_ID)]
    tasks = [_task_name(node) for node in active_nodes]

    changes: dict[str, Data] = {}

    for node in active_nodes:
        own_reason = waiting_reason(own_pods.get(node["id"], {}))
        if own_reason:
            changes[node["id"]] = {"phase": "Pending", "message": own_reason}
            continue

        server = _server_name(node)
        if server:
            started_pods = _list_readable(cluster, PODS, f"{INSTANCE_LABEL}={server}")
        else:
            started_pods = [
                pod
                for pod in job_pods
                if _find_task(name, pod["metadata"]["name"], tasks) == _task_name(node)
            ]

        if started_pods:
            changes[node["id"]] = _describe(started_pods)
        elif _applies_object(workflow, node):
            prefix = server or f"{name}-{_task_name(node)}"
            reason = _creation_error(cluster, prefix) or _queue_reason(
                cluster, name, _task_name(node)
            )
            changes[node["id"]] = {"phase": "Pending", "message": reason} if reason else {}

    return _apply_changes(workflow, changes)


def waiting_reason(pod: Data) -> str:
    """Return the reason why a pod waits, as one line `REASON: MESSAGE`; "" if the pod does not
    wait."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition.get("status") != "True":
            return _format_state(condition)

    containers = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    for container in containers:
        state = (container.get("state") or {}).get("waiting") or {}
        if state.get("reason") and state["reason"] not in STARTING_REASONS:
            return _format_state(state)

    return ""


def _format_state(state: Data) -> str:
    message = " ".join(str(state.get("message") or "").split())
    return ": ".join(text for text in (state.get("reason"), message) if text)


def _describe(pods: list[Object]) -> Data:
    """Return the changed fields of a step's node, derived from the pods of the object that the step
    has applied."""
    reasons = [reason for reason in map(waiting_reason, pods) if reason]
    if not reasons:
        return {}
    is_started = any((pod.get("status") or {}).get("phase") != "Pending" for pod in pods)
    if is_started:
        return {"message": f"{len(reasons)} of {len(pods)} pods wait: {reasons[0]}"}
    return {"phase": "Pending", "message": reasons[0]}


def _apply_changes(workflow: Object, changes: Mapping[str, Data]) -> Object:
    status = workflow["status"]
    nodes = {id: {**node, **changes.get(id, {})} for id, node in status["nodes"].items()}

    active_leaves = [
        node
        for node in nodes.values()
        if node["type"] in ("Pod", "Suspend") and node.get("phase") in ACTIVE_PHASES
    ]

    all_wait = all(node.get("phase") == "Pending" and node.get("message") for node in active_leaves)
    if all_wait and status.get("phase") == "Running":
        phase = "Pending"
    else:
        phase = status.get("phase")

    return {**workflow, "status": {**status, "nodes": nodes, "phase": phase}}


def _creation_error(cluster: Cluster, prefix: str) -> str:
    """Return the newest message of a controller that could not create a pod for the object `prefix`
    or an object whose name starts with `prefix`-."""
    events = [
        event
        for event in _list_readable(cluster, EVENTS)
        if event.get("reason") in REFUSED_REASONS
        and re.fullmatch(
            rf"{re.escape(prefix)}(-.*)?", str((event.get("involvedObject") or {}).get("name"))
        )
    ]

    newest = max(events, key=lambda event: event.get("lastTimestamp") or "", default=None)
    if newest:
        return _format_state(newest)

    return ""


def _queue_reason(cluster: Cluster, run: str, task: str) -> str:
    lines = queue.describe_waiting(cluster, run)
    return next(
        (line.removeprefix(f"{task} ") for line in lines if line.startswith(f"{task} waits")), ""
    )


def _list_readable(cluster: Cluster, resource: Resource, labels: str = "") -> list[Object]:
    """Return the objects of a kind; [] if the user may not read them."""
    try:
        return cluster.list_objects(resource, labels)
    except ApiError as error:
        if error.code != 403:
            raise
        return []


def _applies_object(workflow: Object, node: Data) -> bool:
    templates = spec_of(workflow).get("templates") or []
    return any(
        template["name"] == node.get("templateName") and "resource" in template
        for template in templates
    )


def _task_name(node: Data) -> str:
    """Return the name of a node's task, without the number of the attempt."""
    return re.sub(r"\(\d+\)$", "", str(node.get("displayName") or node["name"])).rpartition(".")[2]


def _find_task(run: str, pod: str, tasks: Iterable[str]) -> str:
    """Return the task whose job a pod of the run belongs to: the longest task name that the name of
    the pod contains."""
    names = [task for task in tasks if pod.startswith(f"{run}-{task}-")]
    return max(names, key=len, default="")


def _server_name(node: Data) -> str:
    """Return the name of the Deployment that a step starts or waits for."""
    parameters = (node.get("inputs") or {}).get("parameters") or []
    return next(
        (
            str(parameter.get("value") or "")
            for parameter in parameters
            if parameter["name"] == "server"
        ),
        "",
    )


def _annotation(pod: Data, name: str) -> str:
    return (pod["metadata"].get("annotations") or {}).get(name, "")
