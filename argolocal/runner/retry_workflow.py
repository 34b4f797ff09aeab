"""What `argo retry` does to the status of a workflow. Source: Argo, workflow/util/util.go, FormulateRetryWorkflow."""

from typing import Any


def reset(status: dict[str, Any]) -> dict[str, Any]:
    """The status from which a failed or stopped workflow continues: completed nodes stay, the rest runs again."""
    nodes: dict[str, dict[str, Any]] = status["nodes"]
    groups = ("DAG", "Steps", "StepGroup", "TaskGroup")
    gone = {
        id
        for id, node in nodes.items()
        if ".onExit" in node["name"]
        or (node["phase"] != "Succeeded" and node["type"] not in groups)
        or (node["phase"] in ("Skipped", "Omitted"))
        or (node["type"] == "Pod" and node["phase"] != "Succeeded")
    }
    queue = list(gone)
    for id in queue:
        below = [child for child in nodes[id].get("children", []) if child in nodes and child not in gone]
        gone.update(below)
        queue.extend(below)
    inside = {id for id, node in nodes.items() if _within(node, gone, nodes)}
    kept = {id: node for id, node in nodes.items() if id not in gone | inside}
    for node in kept.values():
        node["children"] = [child for child in node.get("children", []) if child in kept]
        if node["phase"] != "Succeeded":
            node |= {"phase": "Running", "finishedAt": None}
            node.pop("message", None)
            node.pop("outputs", None)
    fresh = {"phase": "Running", "nodes": kept, "startedAt": status["startedAt"], "message": "", "finishedAt": None}
    return fresh | ({"outputs": status["outputs"]} if status.get("outputs") else {})


def _within(node: dict[str, Any], gone: set[str], nodes: dict[str, dict[str, Any]]) -> bool:
    boundary = node.get("boundaryID")
    while boundary and boundary in nodes:
        if boundary in gone:
            return True
        boundary = nodes[boundary].get("boundaryID")
    return False
