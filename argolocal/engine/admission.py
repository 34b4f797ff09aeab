"""Decide whether a node may run, based on parallelism limits, locks and memoized outputs.

A node that waits for a lock is Pending, and its message names the lock. A node with a cache hit
succeeds without running. Source: the functions operate, executeTemplate, markNodeWaitingForLock and
initializeCacheHitNode of Argo's operator.go.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from argolocal.engine.context import Context
from argolocal.engine.nodes import LimitReached, NodeError, Options, as_node_error, parse_time
from argolocal.language import gofmt
from argolocal.manifest.allowed_values import FULFILLED, NODE_TYPES
from argolocal.manifest.types import Node, Task, Template

LOCK_POLL_S = 0.2  # seconds between attempts to acquire a lock that another run may hold


def admit(context: Context) -> bool:
    """Acquire the workflow's locks. Return True if the workflow holds all its locks or is
    completed."""
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
    context: Context, name: str, caller: Task, template: Template, options: Options
) -> Node | None:
    """Acquire the node's locks and load its memoized outputs. Return the node, or None if it does
    not exist yet. Raises NodeError."""
    node = context.table.get(name)

    has_retries = context.strategy(template) is not None
    if has_retries:
        type = "Retry"
    else:
        type = next((type for kind, type in NODE_TYPES.items() if kind in template), "Pod")

    synchronization = template.get("synchronization")
    memoize = template.get("memoize")

    if synchronization:
        locks = _resolve_locks(context, synchronization)
        unavailable_lock, message = context.locks.acquire(context.table.id(name), locks)
        if unavailable_lock:
            node = context.table.get_or_create(name, type, "Pending", caller, template, options)
            node["synchronizationStatus"] = {"waiting": unavailable_lock}
            context.table.active_pods.discard(node["id"])

            if not context.locks.holds_all_slots(unavailable_lock, dict(locks)[unavailable_lock]):
                context.wake_at(context.table.now + LOCK_POLL_S)
            elif template.get("timeout"):
                context.wake_at(timeout_at(node, template))
            else:
                # without a timeout, only another node of this run can release the lock
                context.blocked_reason = message

            return context.table.mark(name, node["phase"], message)

        context.lock_holders.add(context.table.id(name))
        if node and node.pop("synchronizationStatus", None):
            context.table.mark(name, node["phase"], "")

    if memoize and (
        not node
        or (synchronization and node["phase"] == "Pending" and node["id"] not in context.started)
    ):
        status = memoization_status(memoize, hit=False)
        try:
            status["hit"], outputs = context.locks.load(
                status["cacheName"], status["key"], memoize.get("maxAge"), context.table.now
            )
        except Exception:
            context.deferred_releases.add(context.table.id(name))
            raise

        node = context.table.get_or_create(name, type, "Pending", caller, template, options)
        node["memoizationStatus"] = status
        if status["hit"]:
            node.update({"outputs": outputs} if outputs is not None else {})
            return context.table.mark(name, "Succeeded")

    return node


def timeout_at(node: Node, template: Template) -> float:
    """Return the time in unix seconds at which the `timeout` of a node expires. Raises
    ValueError."""
    return parse_time(node["startedAt"]) + gofmt.parse_seconds(template["timeout"])


def release_locks(context: Context) -> None:
    """Release the locks of completed nodes."""
    for id in context.lock_holders - context.deferred_releases:
        node = context.nodes.get(id)
        if not node or node["phase"] not in FULFILLED:
            continue
        context.lock_holders.discard(id)
        context.locks.release(id)


def memoization_status(memoize: dict[str, Any], hit: bool) -> dict[str, Any]:
    """Return the `memoizationStatus` of a node."""
    return {"hit": hit, "key": memoize["key"], "cacheName": memoize["cache"]["configMap"]["name"]}


def save_outputs(context: Context, node: Node) -> None:
    """Cache the outputs of a memoized node. Raises NodeError."""
    memoize = node["memoizationStatus"]
    with as_node_error():
        context.locks.save(
            memoize["cacheName"], memoize["key"], node["id"], node.get("outputs"), context.table.now
        )


def try_save_outputs(context: Context, node: Node) -> None:
    """Cache the outputs of a DAG or steps template. As in Argo, the template succeeds even if
    caching fails."""
    if node.get("memoizationStatus"):
        with contextlib.suppress(NodeError):
            save_outputs(context, node)


def check_parallelism(
    context: Context, template: Template, node: Node | None, boundary: str
) -> None:
    """Raise LimitReached if `parallelism` or `failFast` forbids running the node."""
    if node and context.table.orphaned_pods:
        return

    limit = context.spec.get("parallelism")
    if limit is not None and len(context.table.active_pods) >= int(limit):
        raise LimitReached
    if node and ("dag" in template or "steps" in template):
        _enforce_limits(context, node, template, lambda id: _count_active_pods(context, id))

    if boundary and (not node or node["phase"] not in ("Pending", "Running")):
        parent = context.nodes[boundary]
        parent_template = context.template_of(parent["name"]) or {}
        _enforce_limits(
            context, parent, parent_template, lambda id: context.table.child_counts[id, "active"]
        )


def _count_active_pods(context: Context, boundary: str) -> int:
    return sum(context.nodes[id].get("boundaryID") == boundary for id in context.table.active_pods)


def _enforce_limits(
    context: Context, parent: Node, template: Template, count_active: Callable[[str], int]
) -> None:
    """Raise LimitReached if `parallelism` or `failFast` in the template of the node `parent`
    forbids a new child.

    As in Argo, `count_active` counts only active pods when `parent` itself is checked, and all
    active children when a child is checked.
    """
    boundary = parent["id"]
    limit = template.get("parallelism")

    if template.get("failFast") is True and context.table.child_counts[boundary, "failed"]:
        if not _count_active_pods(context, boundary):
            message = "template has failed or errored children and failFast enabled"
            groups = [
                node
                for node in context.nodes.values()
                if node.get("boundaryID") == boundary and node["type"] == "StepGroup"
            ]
            if groups:
                context.table.mark(groups[-1]["name"], "Failed", message)

            context.table.mark(parent["name"], "Failed", message)

        raise LimitReached

    if limit is not None and count_active(boundary) >= int(limit):
        raise LimitReached


def _resolve_locks(context: Context, synchronization: dict[str, Any]) -> list[tuple[str, int]]:
    return resolve_locks(
        synchronization, context.workflow["metadata"]["namespace"], context.locks.configmap
    )


def resolve_locks(
    synchronization: dict[str, Any], namespace: str, configmap: Callable[[str], Mapping[str, str]]
) -> list[tuple[str, int]]:
    """Return the name and limit of each lock, semaphores first. Raises NodeError."""
    locks: list[tuple[str, int]] = []

    for semaphore in synchronization.get("semaphores") or []:
        reference = semaphore.get("configMapKeyRef") or {}
        config_map = reference.get("name", "")
        key = reference.get("key", "")
        name = f"{semaphore.get('namespace') or namespace}/ConfigMap/{config_map}/{key}"

        try:
            limit = int(configmap(config_map)[key])
            reason = "it is 0"
        except KeyError:
            limit = 0
            reason = f"the ConfigMap {config_map} does not contain {key}"
        except ValueError as error:
            limit = 0
            reason = str(error)

        if not limit:
            raise NodeError(f"failed to initialize semaphore {name} with limit: {reason}")

        locks.append((name, limit))

    for mutex in synchronization.get("mutexes") or []:
        locks.append((f"{mutex.get('namespace') or namespace}/Mutex/{mutex.get('name', '')}", 1))

    if len(set(locks)) < len(locks):
        raise NodeError("requested configuration is invalid: duplicate synchronization item found")

    return locks
