"""A run as the Workflow object of an Argo server: labels of its phase, times in whole seconds,
progress, conditions, and the references that the run has resolved.

    workflow = make_workflow(run, "argo", resource_version=17)

The behaviour follows Argo's workflow/controller/operator.go and workflow/progress/updater.go.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from argolocal.manifest import object_labels
from argolocal.manifest.allowed_values import API_VERSION, COMPLETED_PHASES, FULFILLED_PHASES
from argolocal.manifest.types import Object
from argolocal.page.sources import Run
from argolocal.runner.requests import RunRequest
from argolocal.state.progress import parse_progress

POD_NAME_FORMAT = "workflows.argoproj.io/pod-name-format"
# types of the nodes that count for the progress
EXECUTED_TYPES = ("Pod", "HTTP", "Plugin", "Suspend")
# first part of the name that a template of another object has in a run → True for a
# ClusterWorkflowTemplate
SCOPES = {"namespaced": False, "cluster": True}
# fields of the spec that a user changes while the workflow runs
CHANGING_FIELDS = ("suspend", "shutdown")
TIME_FIELDS = ("startedAt", "finishedAt")
INTERRUPTED_MESSAGE = "The process of the run has ended before the run: retry it to continue it"

# the progress of groups is only computed for runs with fewer nodes, because the computation takes
# quadratic time
MAX_PROGRESS_NODES = 1000


def make_workflow(
    run: Run,
    namespace: str,
    resource_version: int,
    request: RunRequest | None = None,
    has_nodes: bool = True,
    interrupted_at: str | None = None,
) -> Object:
    """Return the Workflow object of a run. `request`: a request to the run that its runner has not
    read yet. The value False of `has_nodes` leaves out the nodes, but not the progress.
    `interrupted_at`: time of the interruption of a run that no server continues; for clients, the
    run has ended with an error."""
    phase = run.phase
    if phase == "Interrupted":
        phase = "Error" if interrupted_at else "Running"
    resolved_spec = _restore_references(copy.deepcopy(dict(run.spec)))
    spec = resolved_spec
    status = _make_status(run, phase, has_nodes) | _describe_interruption(interrupted_at)
    if run.manifest.get("submittedSpec"):
        spec = copy.deepcopy(run.manifest["submittedSpec"])
        spec.update({field: run.spec.get(field) for field in CHANGING_FIELDS})
        reference = spec["workflowTemplateRef"]
        status["storedWorkflowTemplateSpec"] = {**resolved_spec, "workflowTemplateRef": reference}
        status["storedTemplates"] = {
            **_store_templates(resolved_spec, reference),
            **(status.get("storedTemplates") or {}),
        }
        for node in (status.get("nodes") or {}).values():
            if node.get("templateScope") == f"local/{run.name}":
                node["templateScope"] = "local/"

    if request and request.suspend is not None:
        spec["suspend"] = request.suspend or None
    if request and request.shutdown and phase not in COMPLETED_PHASES:
        spec["shutdown"] = request.shutdown
    spec = {key: value for key, value in spec.items() if value is not None}

    return {
        "apiVersion": API_VERSION,
        "kind": "Workflow",
        "metadata": _make_metadata(run, namespace, phase, resource_version),
        "spec": spec,
        "status": status,
    }


def _store_templates(spec: Object, reference: Object) -> Object:
    """Return the templates that a workflow takes from a WorkflowTemplate, by the name of each
    template in `storedTemplates`."""
    scope = "cluster" if reference.get("clusterScope") else "namespaced"
    return {
        f"{scope}/{reference['name']}/{template['name']}": template
        for template in spec.get("templates") or []
    }


def _describe_interruption(interrupted_at: str | None) -> Object:
    """Return the fields of the status of a run that was interrupted, and that no server
    continues."""
    if not interrupted_at:
        return {}
    return {"finishedAt": whole_seconds(interrupted_at), "message": INTERRUPTED_MESSAGE}


def whole_seconds(time: str | None) -> str | None:
    """Return a time of RFC 3339 without its fraction, as Kubernetes stores times."""
    if not time:
        return None
    return f"{time[:19]}Z"


def _make_metadata(run: Run, namespace: str, phase: str, resource_version: int) -> Object:
    metadata = copy.deepcopy(dict(run.manifest["metadata"]))
    is_completed = "true" if phase in COMPLETED_PHASES else "false"
    labels = {
        **(metadata.get("labels") or {}),
        object_labels.COMPLETED_LABEL: is_completed,
        object_labels.PHASE_LABEL: phase,
    }
    annotations = {**(metadata.get("annotations") or {}), POD_NAME_FORMAT: "v2"}
    return {
        **metadata,
        "namespace": namespace,
        "labels": labels,
        "annotations": annotations,
        "resourceVersion": str(resource_version),
        "generation": 1,
    }


def _make_status(run: Run, phase: str, has_nodes: bool) -> Object:
    nodes: Mapping[str, Mapping[str, Any]] = run.status.get("nodes") or {}
    own_progress = {
        id: parse_progress(node.get("progress")) or (int(node["phase"] == "Succeeded"), 1)
        for id, node in nodes.items()
        if node["type"] in EXECUTED_TYPES
    }
    done = sum(count for count, _ in own_progress.values())
    total = sum(count for _, count in own_progress.values())

    status: Object = {
        "phase": phase,
        "startedAt": whole_seconds(run.status.get("startedAt")),
        "finishedAt": whole_seconds(run.status.get("finishedAt")),
        "progress": f"{done}/{total}",
        "conditions": _make_conditions(phase, nodes.values()),
    }
    if run.status.get("message"):
        status["message"] = run.status["message"]
    for field in ("outputs", "persistentVolumeClaims"):
        if run.status.get(field):
            status[field] = run.status[field]
    if run.manifest.get("storedTemplates"):
        status["storedTemplates"] = {
            name: _restore_template_references(copy.deepcopy(template))
            for name, template in run.manifest["storedTemplates"].items()
        }
    if has_nodes and nodes:
        status["nodes"] = {id: _make_node(id, nodes, own_progress) for id in nodes}
    return status


def _make_node(
    id: str, nodes: Mapping[str, Mapping[str, Any]], own_progress: Mapping[str, tuple[int, int]]
) -> Object:
    node = dict(nodes[id])
    for field in TIME_FIELDS:
        node[field] = whole_seconds(node.get(field))

    if id in own_progress:
        done, total = own_progress[id]
    elif len(nodes) < MAX_PROGRESS_NODES:
        done, total = _sum_progress(id, nodes, own_progress)
    else:
        done, total = 0, 0
    if total:
        node["progress"] = f"{done}/{total}"
    if node["type"] == "Pod" and node["phase"] in FULFILLED_PHASES:
        node["taskResultSynced"] = True
    return node


def _sum_progress(
    id: str, nodes: Mapping[str, Mapping[str, Any]], own_progress: Mapping[str, tuple[int, int]]
) -> tuple[int, int]:
    """Return the sum of the progress of all pods among the descendants of a node."""
    seen = {id}
    queue = [id]
    done = total = 0
    for parent in queue:
        for child in nodes[parent].get("children") or []:
            if child in seen or child not in nodes:
                continue
            seen.add(child)
            queue.append(child)
            child_done, child_total = own_progress.get(child, (0, 0))
            done += child_done
            total += child_total
    return done, total


def _make_conditions(phase: str, nodes: Iterable[Mapping[str, Any]]) -> list[Object]:
    has_running_pod = any(node["type"] == "Pod" and node["phase"] == "Running" for node in nodes)
    return [
        {"type": "PodRunning", "status": str(has_running_pod and phase not in COMPLETED_PHASES)},
        {"type": "Completed", "status": str(phase in COMPLETED_PHASES)},
    ]


def _restore_references(spec: Object) -> Object:
    for template in spec.get("templates") or []:
        _restore_template_references(template)
    return spec


def _restore_template_references(template: Object) -> Object:
    """Replace the resolved names of a template's callees, such as namespaced/T/NAME, by the
    `templateRef` of the user."""
    for caller in _callers(template):
        scope, _, rest = str(caller.get("template") or "").partition("/")
        owner, separator, name = rest.partition("/")
        if scope not in SCOPES or not separator:
            continue
        del caller["template"]
        reference: Object = {"name": owner, "template": name}
        if SCOPES[scope]:
            reference["clusterScope"] = True
        caller["templateRef"] = reference
    return template


def _callers(template: Object) -> Iterator[Object]:
    """Yield the tasks and steps of a template, and the hooks of the tasks and steps."""
    groups = [(template.get("dag") or {}).get("tasks") or [], *(template.get("steps") or [])]
    for group in groups:
        for caller in group:
            yield caller
            yield from (caller.get("hooks") or {}).values()
            if isinstance(caller.get("inline"), dict):
                yield from _callers(caller["inline"])
