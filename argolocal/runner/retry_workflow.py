"""Reset the status of a workflow as `argo retry` does. The behaviour follows Argo's
workflow/util/util.go (FormulateRetryWorkflow)."""

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from argolocal.engine.nodes import hash_fnv32a

Nodes = dict[str, dict[str, Any]]

GROUP_TYPES = ("DAG", "Steps", "StepGroup", "TaskGroup")
# types of nodes whose children Argo creates again if a retry has new parameters
EXPANDED_TYPES = ("StepGroup", "TaskGroup")


def reset_for_retry(
    status: dict[str, Any], restarted_ids: Collection[str] = (), has_new_parameters: bool = False
) -> dict[str, Any]:
    """Return the status with which the retry of a failed or stopped workflow starts. Nodes that
    have not succeeded are removed, so that they run again. The nodes in `status` are changed.

    `restarted_ids`: nodes that also run again, with all nodes after them, although they have
    succeeded. `has_new_parameters` is True if groups with a node that runs again must be created
    again.
    """
    nodes: Nodes = status["nodes"]
    removed_ids = {
        node_id
        for node_id, node in nodes.items()
        if ".onExit" in node["name"]
        or (node.get("phase") != "Succeeded" and node["type"] not in GROUP_TYPES)
        or (node.get("phase") in ("Skipped", "Omitted"))
        or (node["type"] == "Pod" and node.get("phase") != "Succeeded")
    }
    restarted_nodes = _add_later_nodes(
        (node_id for node_id in restarted_ids if node_id in nodes), nodes
    )
    reset_ids = _find_enclosing_nodes(restarted_nodes, nodes)
    removed_ids = _add_later_nodes(removed_ids | restarted_nodes, nodes)

    if has_new_parameters:
        expanded_children = {
            child_id
            for node_id, node in nodes.items()
            if node["type"] in EXPANDED_TYPES
            and (node.get("phase") != "Succeeded" or node_id in reset_ids)
            for child_id in node.get("children", [])
        }
        removed_ids = _add_later_nodes(removed_ids | (expanded_children & nodes.keys()), nodes)

    kept_nodes = {node_id: node for node_id, node in nodes.items() if node_id not in removed_ids}
    for node_id, node in kept_nodes.items():
        for field in ("children", "outboundNodes"):
            if field in node or field == "children":
                node[field] = [other for other in node.get(field, []) if other in kept_nodes]
        if node.get("phase") != "Succeeded" or node_id in reset_ids:
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
    if status.get("outputs"):
        new_status["outputs"] = status["outputs"]

    return new_status


def _add_later_nodes(node_ids: Iterable[str], nodes: Mapping[str, Any]) -> set[str]:
    """Return the ids of the given nodes, of all nodes after them, and of all nodes inside of these
    nodes."""
    all_ids = set(node_ids)
    queue = list(all_ids)
    for node_id in queue:
        new_children = [
            child_id
            for child_id in nodes[node_id].get("children", [])
            if child_id in nodes and child_id not in all_ids
        ]
        all_ids.update(new_children)
        queue.extend(new_children)

    inner_ids = {node_id for node_id, node in nodes.items() if _is_within(node, all_ids, nodes)}
    return all_ids | inner_ids


def _find_enclosing_nodes(node_ids: Collection[str], nodes: Mapping[str, Any]) -> set[str]:
    """Return the ids of the groups and Retry nodes that contain the given nodes at any depth,
    without the given nodes."""
    parents: dict[str, list[str]] = {}
    for parent_id, node in nodes.items():
        for child_id in node.get("children", []):
            parents.setdefault(child_id, []).append(parent_id)

    enclosing_ids: set[str] = set()
    queue = list(node_ids)
    for node_id in queue:
        group_ids = [
            parent_id
            for parent_id in parents.get(node_id, [])
            if nodes[parent_id]["type"] in (*EXPANDED_TYPES, "Retry")
        ]
        boundary_id = nodes[node_id].get("boundaryID")
        if boundary_id in nodes:
            group_ids.append(boundary_id)

        for group_id in group_ids:
            if group_id not in enclosing_ids and group_id not in node_ids:
                enclosing_ids.add(group_id)
                queue.append(group_id)

    return enclosing_ids


def _is_within(
    node: Mapping[str, Any], group_ids: Collection[str], nodes: Mapping[str, Any]
) -> bool:
    """Return True if a node is inside of one of the groups, at any depth."""
    boundary_id = node.get("boundaryID")
    while boundary_id and boundary_id in nodes:
        if boundary_id in group_ids:
            return True
        boundary_id = nodes[boundary_id].get("boundaryID")
    return False


def copy_for_resubmission(status: dict[str, Any], name: str, new_name: str) -> dict[str, Any]:
    """Return the status with which a copy of a failed workflow starts. Pods that have succeeded are
    skipped, and their results are reused. `name`, `new_name`: names of the workflow and its copy.

    Source: Argo's FormulateResubmitWorkflow.
    """
    reset_status = reset_for_retry(copy.deepcopy(status))
    new_ids = {
        node_id: _make_new_id(node["name"], name, new_name)
        for node_id, node in reset_status["nodes"].items()
    }
    nodes: Nodes = {}
    for node_id, node in reset_status["nodes"].items():
        new_id = new_ids[node_id]
        new_node = {**node, "id": new_id, "name": new_name + node["name"].removeprefix(name)}
        if node["displayName"] == name:
            new_node["displayName"] = new_name
        if str(node.get("templateScope") or "") == f"local/{name}":
            new_node["templateScope"] = f"local/{new_name}"
        if "boundaryID" in node:
            new_node["boundaryID"] = new_ids[node["boundaryID"]]
        for field in ("children", "outboundNodes"):
            if field in node:
                new_node[field] = [new_ids[other_id] for other_id in node[field]]
        if node["type"] == "Pod":
            new_node["type"] = "Skipped"
            new_node["phase"] = "Skipped"
            new_node["message"] = f"original pod: {node_id}"
        nodes[new_id] = new_node

    outputs = {"outputs": status["outputs"]} if status.get("outputs") else {}
    return {"phase": "", "nodes": nodes, **outputs}


def _make_new_id(node_name: str, name: str, new_name: str) -> str:
    """Return the id of the node in the copy of the workflow `name`, whose name is `new_name`."""
    new_node_name = new_name + node_name.removeprefix(name)
    if new_node_name == new_name:
        return new_name
    return f"{new_name}-{hash_fnv32a(new_node_name)}"
