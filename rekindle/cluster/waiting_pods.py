"""Finds the reasons why pods of a run do not start: no node has room, an image is missing, a quota
is used up.

    workflow = add_waiting(cluster, workflow)    # its steps whose pods wait are Pending, with the
    reason as message

Argo knows only its own pods, and shows a step that has applied a job as Running. This module reads
the pods and events of jobs and servers, too. Sources: Kubernetes 1.34, PodCondition and
ContainerStateWaiting; Argo 3.7, NodeStatus.
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
# reasons of events of controllers that could not create a pod
REFUSED_REASONS = ("FailedCreate", "FailedCreatePod")
# states of a container that starts; Kueue and Argo show these, too
STARTING_REASONS = ("ContainerCreating", "PodInitializing")
ACTIVE_PHASES = ("Pending", "Running")


def add_waiting(cluster: Cluster, workflow: Object) -> Object:
    """Return an active run, in which steps are Pending if none of their pods runs and at least one
    waits.

    The message of the step is the reason. The run is Pending if all of its active steps are. What
    the user may not read is left out.
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
    pods = _list(cluster, PODS, f"{WORKFLOW}={name}")
    own_pods = {_annotation(pod, NODE_ID): pod for pod in pods}
    job_pods = [pod for pod in pods if not _annotation(pod, NODE_ID)]
    tasks = [_task(node) for node in active_nodes]

    changes: dict[str, Data] = {}

    for node in active_nodes:
        own_reason = waiting_reason(own_pods.get(node["id"], {}))
        if own_reason:
            changes[node["id"]] = {"phase": "Pending", "message": own_reason}
            continue

        server = _server(node)
        if server:
            started_pods = _list(cluster, PODS, f"{INSTANCE_LABEL}={server}")
        else:
            started_pods = [
                pod
                for pod in job_pods
                if _task_of(name, pod["metadata"]["name"], tasks) == _task(node)
            ]

        if started_pods:
            changes[node["id"]] = _describe(started_pods)
        elif _applies_object(workflow, node):
            prefix = server or f"{name}-{_task(node)}"
            reason = _refusal(cluster, prefix) or _queue_reason(cluster, name, _task(node))
            changes[node["id"]] = {"phase": "Pending", "message": reason} if reason else {}

    return _changed(workflow, changes)


def waiting_reason(pod: Data) -> str:
    """Return `REASON: MESSAGE` for a pod that waits, in one line, or ""."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition.get("status") != "True":
            return _reason(condition)

    containers = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    for container in containers:
        state = (container.get("state") or {}).get("waiting") or {}
        if state.get("reason") and state["reason"] not in STARTING_REASONS:
            return _reason(state)

    return ""


def _reason(state: Data) -> str:
    message = " ".join(str(state.get("message") or "").split())
    return ": ".join(text for text in (state.get("reason"), message) if text)


def _describe(pods: list[Object]) -> Data:
    """Return the fields of a step with these pods."""
    reasons = [reason for reason in map(waiting_reason, pods) if reason]
    if not reasons:
        return {}
    is_started = any((pod.get("status") or {}).get("phase") != "Pending" for pod in pods)
    if is_started:
        return {"message": f"{len(reasons)} of {len(pods)} pods wait: {reasons[0]}"}
    return {"phase": "Pending", "message": reasons[0]}


def _changed(workflow: Object, changes: Mapping[str, Data]) -> Object:
    status = workflow["status"]
    nodes = {id: {**node, **changes.get(id, {})} for id, node in status["nodes"].items()}

    active_leaves = [
        node
        for node in nodes.values()
        if node["type"] in ("Pod", "Suspend") and node.get("phase") in ACTIVE_PHASES
    ]

    all_wait = all(node["phase"] == "Pending" and node.get("message") for node in active_leaves)
    if all_wait and status.get("phase") == "Running":
        phase = "Pending"
    else:
        phase = status.get("phase")

    return {**workflow, "status": {**status, "nodes": nodes, "phase": phase}}


def _refusal(cluster: Cluster, prefix: str) -> str:
    """Return the newest message of a controller that could not create a pod of an object named
    `prefix`."""
    events = [
        event
        for event in _list(cluster, EVENTS)
        if event.get("reason") in REFUSED_REASONS
        and re.fullmatch(
            rf"{re.escape(prefix)}(-.*)?", str((event.get("involvedObject") or {}).get("name"))
        )
    ]

    newest = max(events, key=lambda event: event.get("lastTimestamp") or "", default=None)
    if newest:
        return _reason(newest)

    return ""


def _queue_reason(cluster: Cluster, run: str, task: str) -> str:
    lines = queue.describe_waiting(cluster, run)
    return next(
        (line.removeprefix(f"{task} ") for line in lines if line.startswith(f"{task} waits")), ""
    )


def _list(cluster: Cluster, resource: Resource, labels: str = "") -> list[Object]:
    """Return the objects of a kind; [] without permission to read them."""
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


def _task(node: Data) -> str:
    """Return the name of the task of a node, without the number of its attempt."""
    return re.sub(r"\(\d+\)$", "", str(node.get("displayName") or node["name"])).rpartition(".")[2]


def _task_of(run: str, pod: str, tasks: Iterable[str]) -> str:
    """Return the task whose job a pod of the run belongs to: the longest name that the pod's name
    contains."""
    names = [task for task in tasks if pod.startswith(f"{run}-{task}-")]
    return max(names, key=len, default="")


def _server(node: Data) -> str:
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
