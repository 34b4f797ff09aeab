"""Find out why pods of a run do not start: no node has enough resources, an image is missing, a
quota is used up.

Argo knows only the pods that Argo itself has created. A step that has applied a job therefore has
the phase Running, even while the job's pods wait. `add_waiting_reasons` also reads the pods and
events of jobs and servers.

Sources: types PodCondition and ContainerStateWaiting of Kubernetes 1.34, and NodeStatus of Argo
3.7.
"""

import re
from collections.abc import Iterable, Mapping

from argolocal.manifest.allowed_values import COMPLETED_PHASES
from argolocal.manifest.object_labels import NODE_ID_ANNOTATION, WORKFLOW
from argolocal.manifest.types import Data, Object
from rekindle.cluster import queue
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import PODS, Cluster, Resource
from rekindle.cluster.workflows import get_effective_spec
from rekindle.kubernetes_names import INSTANCE_LABEL

EVENTS = Resource("v1", "events")
# `reason` of the events of a controller that could not create a pod
REFUSED_REASONS = ("FailedCreate", "FailedCreatePod")
# `reason` of a waiting container that is being started without a problem
STARTING_REASONS = ("ContainerCreating", "PodInitializing")
ACTIVE_PHASES = ("Pending", "Running")


def add_waiting_reasons(cluster: Cluster, workflow: Object) -> Object:
    """Return a copy of an active run that shows which steps wait. A step with a waiting pod, but
    without a running pod, has the phase Pending in this copy, and its message is the reason.

    The run gets the phase Pending if all of its active steps are Pending. Objects that the user may
    not read are ignored.
    """
    workflow_nodes = (workflow.get("status") or {}).get("nodes") or {}

    active_nodes = [
        workflow_node
        for workflow_node in workflow_nodes.values()
        if workflow_node["type"] == "Pod" and workflow_node.get("phase") in ACTIVE_PHASES
    ]
    if not active_nodes:
        return workflow

    name = workflow["metadata"]["name"]
    run_pods = _list_readable(cluster, PODS, f"{WORKFLOW}={name}")
    pods_by_node_id = {_read_annotation(pod, NODE_ID_ANNOTATION): pod for pod in run_pods}
    job_pods = [pod for pod in run_pods if not _read_annotation(pod, NODE_ID_ANNOTATION)]
    task_names = [_read_task_name(workflow_node) for workflow_node in active_nodes]

    changes_by_node_id: dict[str, Data] = {}

    for workflow_node in active_nodes:
        own_reason = find_waiting_reason(pods_by_node_id.get(workflow_node["id"], {}))
        if own_reason:
            changes_by_node_id[workflow_node["id"]] = {"phase": "Pending", "message": own_reason}
            continue

        server_name = _read_server_name(workflow_node)
        if server_name:
            started_pods = _list_readable(cluster, PODS, f"{INSTANCE_LABEL}={server_name}")
        else:
            started_pods = [
                pod
                for pod in job_pods
                if _find_task(name, pod["metadata"]["name"], task_names)
                == _read_task_name(workflow_node)
            ]

        if started_pods:
            changes_by_node_id[workflow_node["id"]] = _describe_changes(started_pods)
        elif _applies_object(workflow, workflow_node):
            object_prefix = server_name or f"{name}-{_read_task_name(workflow_node)}"
            waiting_cause = _find_creation_error(cluster, object_prefix) or _find_queue_reason(
                cluster, name, _read_task_name(workflow_node)
            )
            changes_by_node_id[workflow_node["id"]] = (
                {"phase": "Pending", "message": waiting_cause} if waiting_cause else {}
            )

    return _apply_changes(workflow, changes_by_node_id)


def describe_queue(cluster: Cluster, workflow: Object) -> list[str]:
    """Return a line for each job of an active run that waits in a queue, or a line with the missing
    permission; [] for a completed run."""
    if (workflow.get("status") or {}).get("phase") in COMPLETED_PHASES:
        return []
    is_queued = queue.has_queue(get_effective_spec(workflow))
    return queue.describe_waiting_jobs(cluster, workflow["metadata"]["name"], is_queued)


def find_waiting_reason(pod_object: Data) -> str:
    """Return the reason why a pod waits, as one line with the reason, a colon and a message; "" if
    the pod does not wait."""
    pod_status = pod_object.get("status") or {}
    for pod_condition in pod_status.get("conditions") or []:
        if pod_condition["type"] == "PodScheduled" and pod_condition.get("status") != "True":
            return _format_state(pod_condition)

    container_statuses = [
        *(pod_status.get("initContainerStatuses") or []),
        *(pod_status.get("containerStatuses") or []),
    ]
    for container_status in container_statuses:
        waiting_state = (container_status.get("state") or {}).get("waiting") or {}
        if waiting_state.get("reason") and waiting_state["reason"] not in STARTING_REASONS:
            return _format_state(waiting_state)

    return ""


def _format_state(waiting_state: Data) -> str:
    state_message = " ".join(str(waiting_state.get("message") or "").split())
    return ": ".join(text for text in (waiting_state.get("reason"), state_message) if text)


def _describe_changes(job_pods: list[Object]) -> Data:
    """Return the changed fields of a step's node, which follow from the pods of the object that the
    step has applied."""
    waiting_reasons = [
        pod_reason for pod_reason in map(find_waiting_reason, job_pods) if pod_reason
    ]
    if not waiting_reasons:
        return {}
    is_started = any((pod.get("status") or {}).get("phase") != "Pending" for pod in job_pods)
    if is_started:
        return {
            "message": f"{len(waiting_reasons)} of {len(job_pods)} pods wait: {waiting_reasons[0]}"
        }
    return {"phase": "Pending", "message": waiting_reasons[0]}


def _apply_changes(workflow: Object, changes_by_node_id: Mapping[str, Data]) -> Object:
    workflow_status = workflow["status"]
    changed_nodes = {
        node_id: {**workflow_node, **changes_by_node_id.get(node_id, {})}
        for node_id, workflow_node in workflow_status["nodes"].items()
    }

    active_leaves = [
        workflow_node
        for workflow_node in changed_nodes.values()
        if workflow_node["type"] in ("Pod", "Suspend")
        and workflow_node.get("phase") in ACTIVE_PHASES
    ]

    is_waiting = all(
        workflow_node.get("phase") == "Pending" and workflow_node.get("message")
        for workflow_node in active_leaves
    )
    if is_waiting and workflow_status.get("phase") == "Running":
        run_phase = "Pending"
    else:
        run_phase = workflow_status.get("phase")

    return {**workflow, "status": {**workflow_status, "nodes": changed_nodes, "phase": run_phase}}


def _find_creation_error(cluster: Cluster, object_prefix: str) -> str:
    """Return the newest message of a controller that could not create a pod; "" if none exists. The
    missing pod belongs to the object `object_prefix`, or to an object whose name starts with
    `object_prefix` and "-"."""
    creation_events = [
        creation_event
        for creation_event in _list_readable(cluster, EVENTS)
        if creation_event.get("reason") in REFUSED_REASONS
        and re.fullmatch(
            rf"{re.escape(object_prefix)}(-.*)?",
            str((creation_event.get("involvedObject") or {}).get("name")),
        )
    ]

    newest_event = max(
        creation_events,
        key=lambda creation_event: creation_event.get("lastTimestamp") or "",
        default=None,
    )
    if newest_event:
        return _format_state(newest_event)

    return ""


def _find_queue_reason(cluster: Cluster, run_name: str, task_name: str) -> str:
    reason_lines = queue.describe_waiting_jobs(cluster, run_name)
    return next(
        (
            line.removeprefix(f"{task_name} ")
            for line in reason_lines
            if line.startswith(f"{task_name} waits")
        ),
        "",
    )


def _list_readable(cluster: Cluster, resource: Resource, label_selector: str = "") -> list[Object]:
    """Return the objects of a kind; [] if the user may not read them."""
    try:
        return cluster.list_objects(resource, label_selector)
    except ApiError as error:
        if error.code != 403:
            raise
        return []


def _applies_object(workflow: Object, workflow_node: Data) -> bool:
    workflow_templates = get_effective_spec(workflow).get("templates") or []
    return any(
        template["name"] == workflow_node.get("templateName") and "resource" in template
        for template in workflow_templates
    )


def _read_task_name(workflow_node: Data) -> str:
    """Return the name of a node's task, without the number of the attempt."""
    return re.sub(
        r"\(\d+\)$", "", str(workflow_node.get("displayName") or workflow_node["name"])
    ).rpartition(".")[2]


def _find_task(run_name: str, pod_name: str, task_names: Iterable[str]) -> str:
    """Return the task whose job a pod of the run belongs to: the longest task name that the name of
    the pod contains."""
    matching_tasks = [task for task in task_names if pod_name.startswith(f"{run_name}-{task}-")]
    return max(matching_tasks, key=len, default="")


def _read_server_name(workflow_node: Data) -> str:
    """Return the name of the Deployment that a step starts or waits for."""
    input_parameters = (workflow_node.get("inputs") or {}).get("parameters") or []
    return next(
        (
            str(input_parameter.get("value") or "")
            for input_parameter in input_parameters
            if input_parameter["name"] == "server"
        ),
        "",
    )


def _read_annotation(pod_object: Data, annotation_name: str) -> str:
    return (pod_object["metadata"].get("annotations") or {}).get(annotation_name, "")
