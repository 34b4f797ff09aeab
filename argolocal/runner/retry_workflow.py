"""Reset the status of a workflow as `argo retry` does. Source: Argo, workflow/util/util.go,
FormulateRetryWorkflow."""

from typing import Any


def reset_for_retry(status: dict[str, Any]) -> dict[str, Any]:
    """Return the status from which a failed or stopped workflow continues: without the nodes that
    have not succeeded, so that they run again."""
    nodes: dict[str, dict[str, Any]] = status["nodes"]
    groups = ("DAG", "Steps", "StepGroup", "TaskGroup")

    removed_ids = {
        id
        for id, node in nodes.items()
        if ".onExit" in node["name"]
        or (node.get("phase") != "Succeeded" and node["type"] not in groups)
        or (node.get("phase") in ("Skipped", "Omitted"))
        or (node["type"] == "Pod" and node.get("phase") != "Succeeded")
    }

    queue = list(removed_ids)
    for id in queue:
        children = [
            child
            for child in nodes[id].get("children", [])
            if child in nodes and child not in removed_ids
        ]
        removed_ids.update(children)
        queue.extend(children)

    nested_ids = {id for id, node in nodes.items() if _is_within(node, removed_ids, nodes)}
    kept_nodes = {id: node for id, node in nodes.items() if id not in removed_ids | nested_ids}
    for node in kept_nodes.values():
        node["children"] = [child for child in node.get("children", []) if child in kept_nodes]
        if node.get("phase") != "Succeeded":
            node["phase"] = "Running"
            node["finishedAt"] = None
            node.pop("message", None)
            node.pop("outputs", None)

    new_status = {
        "phase": "Running",
        "nodes": kept_nodes,
        "startedAt": status["startedAt"],
        "message": "",
        "finishedAt": None,
    }
    return new_status | ({"outputs": status["outputs"]} if status.get("outputs") else {})


def _is_within(
    node: dict[str, Any], removed_ids: set[str], nodes: dict[str, dict[str, Any]]
) -> bool:
    boundary = node.get("boundaryID")
    while boundary and boundary in nodes:
        if boundary in removed_ids:
            return True
        boundary = nodes[boundary].get("boundaryID")
    return False
