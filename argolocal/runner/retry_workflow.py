"""Reset the status of a workflow as `argo retry` does. Source: Argo, workflow/util/util.go, FormulateRetryWorkflow."""

from typing import Any


def reset(status: dict[str, Any]) -> dict[str, Any]:
    """Return the status to continue a failed or stopped workflow: completed nodes stay, the others run again."""
    nodes: dict[str, dict[str, Any]] = status["nodes"]
    groups = ("DAG", "Steps", "StepGroup", "TaskGroup")
    removed = {
        id
        for id, node in nodes.items()
        if ".onExit" in node["name"]
        or (node["phase"] != "Succeeded" and node["type"] not in groups)
        or (node["phase"] in ("Skipped", "Omitted"))
        or (node["type"] == "Pod" and node["phase"] != "Succeeded")
    }
    queue = list(removed)
    for id in queue:
        children = [child for child in nodes[id].get("children", []) if child in nodes and child not in removed]
        removed.update(children)
        queue.extend(children)
    nested = {id for id, node in nodes.items() if _is_within(node, removed, nodes)}
    kept = {id: node for id, node in nodes.items() if id not in removed | nested}
    for node in kept.values():
        node["children"] = [child for child in node.get("children", []) if child in kept]
        if node["phase"] != "Succeeded":
            node |= {"phase": "Running", "finishedAt": None}
            node.pop("message", None)
            node.pop("outputs", None)
    new = {"phase": "Running", "nodes": kept, "startedAt": status["startedAt"], "message": "", "finishedAt": None}
    return new | ({"outputs": status["outputs"]} if status.get("outputs") else {})


def _is_within(node: dict[str, Any], removed: set[str], nodes: dict[str, dict[str, Any]]) -> bool:
    boundary = node.get("boundaryID")
    while boundary and boundary in nodes:
        if boundary in removed:
            return True
        boundary = nodes[boundary].get("boundaryID")
    return False
