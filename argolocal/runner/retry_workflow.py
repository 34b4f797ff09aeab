"""Reset the status of a workflow as `argo retry` does. Source: Argo, workflow/util/util.go,
FormulateRetryWorkflow."""

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from argolocal.engine.nodes import hash_fnv32a

Nodes = dict[str, dict[str, Any]]

GROUP_TYPES = ("DAG", "Steps", "StepGroup", "TaskGroup")
# types of nodes whose children Argo creates again for other parameters
EXPANDED_TYPES = ("StepGroup", "TaskGroup")


def reset_for_retry(
    status: dict[str, Any], restarted_ids: Collection[str] = (), has_new_parameters: bool = False
) -> dict[str, Any]:
    """Return the first status of the retry of a failed or stopped workflow. Nodes that have not
    succeeded are removed, so that they run again.

    `restarted_ids`: nodes that also run again, although they succeeded, with all nodes after them.
    `has_new_parameters`: the groups with a node that runs again are created again.
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
    reset_ids = _enclosing_nodes(restarted_nodes, nodes)
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
    return new_status | ({"outputs": status["outputs"]} if status.get("outputs") else {})


def _add_later_nodes(removed_ids: Iterable[str], nodes: Mapping[str, Any]) -> set[str]:
    """Return the removed nodes, all nodes after them, and all nodes within them."""
    all_ids = set(removed_ids)
    queue = list(all_ids)
    for id in queue:
        children = [
            child
            for child in nodes[id].get("children", [])
            if child in nodes and child not in all_ids
        ]
        all_ids.update(children)
        queue.extend(children)

    return all_ids | {id for id, node in nodes.items() if _is_within(node, all_ids, nodes)}


def _enclosing_nodes(removed_ids: Collection[str], nodes: Mapping[str, Any]) -> set[str]:
    """Return the kept groups and Retry nodes that contain removed nodes, at any depth."""
    parents: dict[str, list[str]] = {}
    for id, node in nodes.items():
        for child in node.get("children", []):
            parents.setdefault(child, []).append(id)

    enclosing_ids: set[str] = set()
    queue = list(removed_ids)
    for id in queue:
        groups = [
            parent
            for parent in parents.get(id, [])
            if nodes[parent]["type"] in (*EXPANDED_TYPES, "Retry")
        ]
        boundary = nodes[id].get("boundaryID")
        for group in [*groups, *([boundary] if boundary in nodes else [])]:
            if group not in enclosing_ids and group not in removed_ids:
                enclosing_ids.add(group)
                queue.append(group)
    return enclosing_ids


def _is_within(
    node: Mapping[str, Any], removed_ids: Collection[str], nodes: Mapping[str, Any]
) -> bool:
    boundary_id = node.get("boundaryID")
    while boundary_id and boundary_id in nodes:
        if boundary_id in removed_ids:
            return True
        boundary_id = nodes[boundary_id].get("boundaryID")
    return False


def copy_for_resubmission(status: dict[str, Any], name: str, new_name: str) -> dict[str, Any]:
    """Return the first status of a copy of a failed workflow: the pods that succeeded are
    skipped, and their results are reused. `name`, `new_name`: names of the workflow and its copy.

    Source: Argo's FormulateResubmitWorkflow.
    """
    reset_status = reset_for_retry(copy.deepcopy(status))
    ids = {
        id: _rename_id(node["name"], name, new_name) for id, node in reset_status["nodes"].items()
    }
    nodes: Nodes = {}
    for id, node in reset_status["nodes"].items():
        new_node = {**node, "id": ids[id], "name": new_name + node["name"].removeprefix(name)}
        if node["displayName"] == name:
            new_node["displayName"] = new_name
        if str(node.get("templateScope") or "") == f"local/{name}":
            new_node["templateScope"] = f"local/{new_name}"
        if "boundaryID" in node:
            new_node["boundaryID"] = ids[node["boundaryID"]]
        for field in ("children", "outboundNodes"):
            if field in node:
                new_node[field] = [ids[other] for other in node[field]]
        if node["type"] == "Pod":
            new_node["type"] = new_node["phase"] = "Skipped"
            new_node["message"] = f"original pod: {id}"
        nodes[ids[id]] = new_node
    outputs = {"outputs": status["outputs"]} if status.get("outputs") else {}
    return {"phase": "", "nodes": nodes, **outputs}


def _rename_id(node_name: str, name: str, new_name: str) -> str:
    new_node_name = new_name + node_name.removeprefix(name)
    if new_node_name == new_name:
        return new_name
    return f"{new_name}-{hash_fnv32a(new_node_name)}"
