"""Decide whether a node may run now: check parallelism limits, acquire locks, and look up memoized
outputs.

A node that waits for a lock is Pending, and its message names the lock. A node whose memoized
outputs are found succeeds without running. The code follows the functions operate, executeTemplate,
markNodeWaitingForLock and initializeCacheHitNode of Argo's operator.go.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from argolocal.engine.context import Context
from argolocal.engine.nodes import (
    ExecutionOptions,
    LimitReached,
    NodeError,
    as_node_error,
    parse_time,
)
from argolocal.language import gofmt
from argolocal.manifest.allowed_values import FULFILLED_PHASES, NODE_TYPES
from argolocal.manifest.types import Node, Task, Template

# seconds between attempts to acquire a lock that another run may hold
LOCK_POLL_S = 0.2


def acquire_workflow_locks(context: Context) -> bool:
    """Acquire the workflow's locks. Return True if the workflow holds all its locks, or if it has
    ended. An error of a lock ends the workflow."""
    synchronization = context.spec.get("synchronization")
    if not synchronization or context.done:
        return True

    if context.shutdown and not context.nodes:
        context.finish("Failed", f"Stopped with strategy '{context.shutdown}'")
        return True

    try:
        with as_node_error():
            _, message = context.locks.acquire(
                context.name + "/", _resolve_locks(context, synchronization)
            )
    except NodeError as error:
        context.finish("Failed", f"Failed to acquire the synchronization lock. {error}")
        return True

    context.status["phase"] = "Pending" if message else "Running"
    context.status["message"] = message
    if message:
        context.wake_at(context.table.now + LOCK_POLL_S)

    return not message


def synchronize_and_memoize(
    context: Context, name: str, caller: Task, template: Template, options: ExecutionOptions
) -> Node | None:
    """Acquire the node's locks and load its memoized outputs. Return the node, or None if the node
    does not exist yet and may start. A node that waits for a lock, or whose outputs were found, is
    created and marked. Raises NodeError."""
    node = context.table.get(name)

    has_retries = context.strategy(template) is not None
    if has_retries:
        node_type = "Retry"
    else:
        node_type = next(
            (
                node_type
                for template_type, node_type in NODE_TYPES.items()
                if template_type in template
            ),
            "Pod",
        )

    synchronization = template.get("synchronization")
    memoization = template.get("memoize")

    if synchronization:
        locks = _resolve_locks(context, synchronization)
        unavailable_lock, message = context.locks.acquire(context.table.id(name), locks)
        if unavailable_lock:
            node = context.table.get_or_create(
                name, node_type, "Pending", caller, template, options
            )
            node["synchronizationStatus"] = {"waiting": unavailable_lock}
            context.table.active_pods.discard(node["id"])

            if not context.locks.holds_all_slots(unavailable_lock, dict(locks)[unavailable_lock]):
                context.wake_at(context.table.now + LOCK_POLL_S)
            elif template.get("timeout"):
                context.wake_at(compute_timeout_time(node, template))
            else:
                # without a timeout, only another node of this run can release the lock
                context.blocked_reason = message

            return context.table.mark(name, node["phase"], message)

        context.lock_holders.add(context.table.id(name))
        if node and node.pop("synchronizationStatus", None):
            context.table.mark(name, node["phase"], "")

    if memoization and (
        not node
        or (
            synchronization
            and node["phase"] == "Pending"
            and node["id"] not in context.started_pods
        )
    ):
        memo_status = make_memoization_status(memoization, is_cache_hit=False)
        try:
            memo_status["hit"], outputs = context.locks.load(
                memo_status["cacheName"],
                memo_status["key"],
                memoization.get("maxAge"),
                context.table.now,
            )
        except Exception:
            context.deferred_releases.add(context.table.id(name))
            raise

        node = context.table.get_or_create(name, node_type, "Pending", caller, template, options)
        node["memoizationStatus"] = memo_status
        if memo_status["hit"]:
            node.update({"outputs": outputs} if outputs is not None else {})
            return context.table.mark(name, "Succeeded")

    return node


def compute_timeout_time(node: Node, template: Template) -> float:
    """Return the unix time at which a node with `timeout` must have ended. Raises ValueError."""
    return parse_time(node["startedAt"]) + gofmt.parse_seconds(template["timeout"])


def release_locks(context: Context) -> None:
    """Release the locks of completed nodes, except the nodes in `deferred_releases`."""
    for node_id in context.lock_holders - context.deferred_releases:
        node = context.nodes.get(node_id)
        if not node or node["phase"] not in FULFILLED_PHASES:
            continue
        context.lock_holders.discard(node_id)
        context.locks.release(node_id)


def make_memoization_status(memoization: dict[str, Any], is_cache_hit: bool) -> dict[str, Any]:
    """Return the `memoizationStatus` of a node."""
    return {
        "hit": is_cache_hit,
        "key": memoization["key"],
        "cacheName": memoization["cache"]["configMap"]["name"],
    }


def save_outputs(context: Context, node: Node) -> None:
    """Store the outputs of a memoized node in its cache. Raises NodeError."""
    memoization = node["memoizationStatus"]
    with as_node_error():
        context.locks.save(
            memoization["cacheName"],
            memoization["key"],
            node["id"],
            node.get("outputs"),
            context.table.now,
        )


def try_save_outputs(context: Context, node: Node) -> None:
    """Store the outputs of a DAG or steps template in the cache if the template is memoized. As in
    Argo, the template succeeds even if storing fails."""
    if node.get("memoizationStatus"):
        with contextlib.suppress(NodeError):
            save_outputs(context, node)


def check_parallelism(
    context: Context, template: Template, node: Node | None, boundary_id: str
) -> None:
    """Raise LimitReached if `parallelism` or `failFast` of the workflow, the node or its parent
    forbids running the node. `node`: the node to check; None if it does not exist yet."""
    # pods that a dead runner left are restarted first, without limits
    if node and context.table.orphaned_pods:
        return

    max_parallel_pods = context.spec.get("parallelism")
    if max_parallel_pods is not None and len(context.table.active_pods) >= int(max_parallel_pods):
        raise LimitReached
    if node and ("dag" in template or "steps" in template):
        _enforce_limits(
            context, node, template, lambda node_id: _count_active_pods(context, node_id)
        )

    if boundary_id and (not node or node["phase"] not in ("Pending", "Running")):
        parent_node = context.nodes[boundary_id]
        parent_template = context.template_of(parent_node["name"]) or {}
        _enforce_limits(
            context,
            parent_node,
            parent_template,
            lambda node_id: context.table.child_counts[node_id, "active"],
        )


def _count_active_pods(context: Context, boundary_id: str) -> int:
    """Return the number of active pods that belong to the DAG or steps node `boundary_id`."""
    return sum(
        context.nodes[node_id].get("boundaryID") == boundary_id
        for node_id in context.table.active_pods
    )


def _enforce_limits(
    context: Context, parent_node: Node, template: Template, count_active: Callable[[str], int]
) -> None:
    """Raise LimitReached if `parallelism` or `failFast` in the `template` of `parent_node` forbids
    a new child. If `failFast` applies and all pods have ended, mark `parent_node` as failed.

    `count_active` returns the number of active children of a node. As in Argo, `count_active`
    counts only pods when `parent_node` itself is checked, and all nodes when a new child is
    checked.
    """
    boundary_id = parent_node["id"]
    max_parallel_pods = template.get("parallelism")

    if template.get("failFast") is True and context.table.child_counts[boundary_id, "failed"]:
        if not _count_active_pods(context, boundary_id):
            message = "template has failed or errored children and failFast enabled"
            child_groups = [
                node
                for node in context.nodes.values()
                if node.get("boundaryID") == boundary_id and node["type"] == "StepGroup"
            ]
            if child_groups:
                context.table.mark(child_groups[-1]["name"], "Failed", message)

            context.table.mark(parent_node["name"], "Failed", message)

        raise LimitReached

    if max_parallel_pods is not None and count_active(boundary_id) >= int(max_parallel_pods):
        raise LimitReached


def _resolve_locks(context: Context, synchronization: dict[str, Any]) -> list[tuple[str, int]]:
    """Call `resolve_locks` with the namespace and the ConfigMaps of the workflow."""
    return resolve_locks(
        synchronization, context.workflow["metadata"]["namespace"], context.locks.configmap
    )


def resolve_locks(
    synchronization: dict[str, Any],
    namespace: str,
    read_config_map: Callable[[str], Mapping[str, str]],
) -> list[tuple[str, int]]:
    """Return the name and the maximum number of holders of each lock, semaphores first. Raises
    NodeError."""
    locks: list[tuple[str, int]] = []

    for semaphore in synchronization.get("semaphores") or []:
        config_map_reference = semaphore.get("configMapKeyRef") or {}
        config_map_name = config_map_reference.get("name", "")
        key = config_map_reference.get("key", "")
        name = f"{semaphore.get('namespace') or namespace}/ConfigMap/{config_map_name}/{key}"

        try:
            max_holders = int(read_config_map(config_map_name)[key])
            reason = "it is 0"
        except KeyError:
            max_holders = 0
            reason = f"the ConfigMap {config_map_name} does not contain {key}"
        except ValueError as error:
            max_holders = 0
            reason = str(error)

        if not max_holders:
            raise NodeError(f"failed to initialize semaphore {name} with limit: {reason}")

        locks.append((name, max_holders))

    for mutex in synchronization.get("mutexes") or []:
        locks.append((f"{mutex.get('namespace') or namespace}/Mutex/{mutex.get('name', '')}", 1))

    if len(set(locks)) < len(locks):
        raise NodeError("requested configuration is invalid: duplicate synchronization item found")

    return locks
