"""What holds a node back, or makes it needless: limits, locks that others hold, and outputs that a cache has kept.

A node that waits for a lock is Pending and says for which; one that is found in the cache succeeds without having run.
Source: Argo's operator.go (operate, executeTemplate, markNodeWaitingForLock, initializeCacheHitNode).
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rekindle.argo.kinds import FULFILLED, NODE_TYPES
from rekindle.argo.language import gofmt
from rekindle.local.engine.nodes import Node, NodeError, Options, Parallel, moment
from rekindle.local.locks import locks_of

if TYPE_CHECKING:
    from rekindle.local.engine.scheduler import Scheduler
POLL = 0.2  # seconds between two tries to get a lock that another run may hold


def admitted(scheduler: "Scheduler") -> bool:
    """Whether the workflow has the locks it asks for, or is over."""
    s, wanted = scheduler, scheduler.spec.get("synchronization")
    if not wanted or s.done:
        return True
    if s.shutdown and not s.nodes:
        s.finish("Failed", f"Stopped with strategy '{s.shutdown}'")
        return True
    try:
        _, message = s.shared.acquire(s.name + "/", _locks(s, wanted))
    except NodeError as error:
        s.finish("Failed", f"Failed to acquire the synchronization lock. {error}")
        return True
    s.status |= {"phase": "Pending" if message else "Running", "message": message}
    if message:
        s.wake_at(s.now + POLL)
    return not message


def before(
    scheduler: "Scheduler", name: str, holder: dict[str, Any], template: dict[str, Any], options: Options
) -> Node | None:
    """The node, if there is one already: it waits for a lock, or its outputs are in a cache. Raises NodeError."""
    s, node = scheduler, scheduler.get(name)
    retried = s.strategy(template) is not None
    type = "Retry" if retried else next((type for kind, type in NODE_TYPES.items() if kind in template), "Pod")
    lock, memo = template.get("synchronization"), template.get("memoize")
    if lock:
        locks = _locks(s, lock)
        waiting, message = s.shared.acquire(s.id(name), locks)
        if waiting:
            node = s.begun(name, type, "Pending", holder, template, options)
            node["synchronizationStatus"] = {"waiting": waiting}
            s.active.discard(node["id"])
            if not s.shared.alone(waiting, dict(locks)[waiting]):
                s.wake_at(s.now + POLL)
            elif template.get("timeout"):
                s.wake_at(times_out(node, template))
            else:
                s.stuck = message  # unless something of this run ends
            return s.mark(name, node["phase"], message)
        s.holding.add(s.id(name))
        if node and node.pop("synchronizationStatus", None):
            s.mark(name, node["phase"], "")
    if memo and (not node or (lock and node["phase"] == "Pending" and node["id"] not in s.started)):
        status = memoized(memo, hit=False)
        try:
            status["hit"], outputs = s.shared.recall(status["cacheName"], status["key"], memo.get("maxAge"), s.now)
        except NodeError:
            s.leaked.add(s.id(name))
            raise
        node = s.begun(name, type, "Pending", holder, template, options)
        node["memoizationStatus"] = status
        if status["hit"]:
            node |= {"outputs": outputs} if outputs is not None else {}
            return s.mark(name, "Succeeded")
    return node


def times_out(node: Node, template: dict[str, Any]) -> float:
    """When a node of a template with a `timeout` has had its time. Raises ValueError."""
    return moment(node["startedAt"]) + gofmt.seconds(template["timeout"])


def release(scheduler: "Scheduler") -> None:
    """Lets go of the locks of nodes that are over."""
    for id in scheduler.holding - scheduler.leaked:
        if not (node := scheduler.nodes.get(id)) or node["phase"] not in FULFILLED:
            continue
        scheduler.holding.discard(id)
        scheduler.shared.release(id)


def memoized(memo: dict[str, Any], hit: bool) -> dict[str, Any]:
    """`memoizationStatus` of a node."""
    return {"hit": hit, "key": memo["key"], "cacheName": memo["cache"]["configMap"]["name"]}


def remember(scheduler: "Scheduler", node: Node) -> None:
    """Keeps what a memoized node gave. Raises NodeError."""
    memo = node["memoizationStatus"]
    scheduler.shared.remember(memo["cacheName"], memo["key"], node["id"], node.get("outputs"), scheduler.now)


def keep(scheduler: "Scheduler", node: Node) -> None:
    """`remember` for a DAG or steps template, which on Argo succeeds even if that fails."""
    if node.get("memoizationStatus"):
        with contextlib.suppress(NodeError):
            remember(scheduler, node)


def limit(scheduler: "Scheduler", template: dict[str, Any], node: Node | None, boundary: str) -> None:
    """Raises Parallel where parallelism or failFast forbid going on."""
    if node and scheduler.lost:
        return
    if full(scheduler):
        raise Parallel
    if node and ("dag" in template or "steps" in template):
        _limited(scheduler, node, template, lambda id: _pods(scheduler, id))
    if boundary and (not node or node["phase"] not in ("Pending", "Running")):
        parent = scheduler.nodes[boundary]
        _limited(scheduler, parent, scheduler.memory.get(parent["name"], {}), lambda id: scheduler.tally[id, "active"])


def full(scheduler: "Scheduler") -> bool:
    limit = scheduler.spec.get("parallelism")
    return limit is not None and len(scheduler.active) >= int(limit)


def _pods(scheduler: "Scheduler", boundary: str) -> int:
    return sum(scheduler.nodes[id].get("boundaryID") == boundary for id in scheduler.active)


def _limited(scheduler: "Scheduler", parent: Node, template: dict[str, Any], count: Callable[[str], int]) -> None:
    """Argo holds a DAG or steps node up by its pods, and its children by all that is active beside them."""
    boundary, limit = parent["id"], template.get("parallelism")
    if template.get("failFast") is True and scheduler.tally[boundary, "failed"]:
        if not _pods(scheduler, boundary):
            message = "template has failed or errored children and failFast enabled"
            groups = [
                n for n in scheduler.nodes.values() if n.get("boundaryID") == boundary and n["type"] == "StepGroup"
            ]
            if groups:
                scheduler.mark(groups[-1]["name"], "Failed", message)
            scheduler.mark(parent["name"], "Failed", message)
        raise Parallel
    if limit is not None and count(boundary) >= int(limit):
        raise Parallel


def _locks(scheduler: "Scheduler", synchronization: dict[str, Any]) -> list[tuple[str, int]]:
    return locks_of(synchronization, scheduler.workflow["metadata"]["namespace"], scheduler.shared.cluster)
