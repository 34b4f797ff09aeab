"""The nodes of a workflow, stored as in `status.nodes`: names, ids, phases, messages and edges.

Node names are Argo's: the entrypoint has the workflow's name, a DAG task PARENT.TASK, a step
PARENT[GROUP].STEP, a loop's item NAME(INDEX:ITEM), an attempt NAME(N), an exit hook NAME.onExit.
Source: Argo's operator.go (initializeNode, markNodePhase, getOutboundNodes) and util/pod_name.go.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Protocol

from argolocal.errors import NodeError, describe
from argolocal.manifest.allowed_values import FAILED, FULFILLED
from argolocal.manifest.types import Node, Task, Template

# Maximum number of nodes of a run. Fewer nodes already exceed the size limit of Argo's status. This
# runner creates as many nodes in about 10 s.
MAX_NODES = 50_000
LEAF_TYPES = ("Pod", "Container", "Skipped", "Suspend", "HTTP")


def is_fulfilled(node: Node) -> bool:
    """Return True if the dependents of a node may start, because the node has completed or is a
    running daemon."""
    return node["phase"] in FULFILLED or bool(node.get("daemoned") and node["phase"] != "Pending")


class LimitReached(Exception):
    """The node cannot start now, because a parallelism limit is reached."""


class ControllerCrash(Exception):
    """The workflow ends with an error, because Argo's controller would look up a missing node or
    the run has more than MAX_NODES nodes."""


class TimedOut(NodeError):
    """The node's `timeout` passed before it could run."""


@contextmanager
def as_node_error() -> Iterator[None]:
    """Convert an unexpected exception, such as an OSError, to a NodeError, so that it fails one
    node and not the runner."""
    try:
        yield
    except (NodeError, LimitReached, ControllerCrash):
        raise
    except Exception as error:
        raise NodeError(describe(error)) from error


@dataclass(frozen=True)
class Start:
    """The action to start the pod of a node. The pod is killed at the unix time `deadline`."""

    id: str
    pod: str
    template: Any
    capture: bool = False  # True: store stdout as outputs.result
    deadline: float | None = None
    # for a containerSet: name of a container → id of its node
    containers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kill:
    """The action to kill the pod of a node that is already completed."""

    id: str


@dataclass(frozen=True)
class PodStarted:
    """The event that the process of a pod started."""

    id: str
    ip: str = ""
    host: str = os.uname().nodename


@dataclass(frozen=True)
class PodEnded:
    """The event that a pod has completed and its outputs have been collected."""

    id: str
    phase: str
    message: str = ""
    outputs: dict[str, Any] | None = None


class Resources(Protocol):
    """Runs resource templates."""

    @property
    def busy(self) -> bool: ...
    def start(self, action: Start) -> list[PodStarted | PodEnded]: ...
    def poll(self) -> list[PodStarted | PodEnded]: ...
    def overdue_nodes(self, now: float) -> list[str]: ...
    def forget(self, id: str) -> None: ...
    def stop(self, grace: float) -> None: ...


@dataclass(frozen=True)
class Resumed:
    """The event that a suspended node was resumed or set, with values for its outputs. `phase`: the
    phase in which the node ends, or "" if it stays suspended."""

    id: str
    values: dict[str, str]
    phase: str = "Succeeded"
    message: str = ""


@dataclass(frozen=True)
class Options:
    """Options of the execution of a template (Argo's executeTemplateOpts)."""

    boundary: str = ""
    on_exit: bool = False
    kind: str = "steps"  # first word of the tags that refer to sibling nodes: "tasks" or "steps"
    deadline: float | None = None
    flag: dict[str, bool] = field(default_factory=dict)


@lru_cache(65536)
def hash_fnv32a(name: str) -> int:
    """Return the 32-bit FNV-1a hash of a name, which Argo's node ids and pod names contain."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def format_time(now: float) -> str:
    """Convert unix seconds to RFC 3339 with milliseconds. Argo stores whole seconds, which would be
    too coarse for short local steps."""
    return (
        datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


@lru_cache(4096)
def parse_time(text: str) -> float:
    """Convert RFC 3339 to unix seconds."""
    return datetime.fromisoformat(text).timestamp()


class NodeTable:
    """The nodes of one workflow. `changed_nodes` and `added_children` contain the changes since the
    last call of `drain_changes`."""

    def __init__(self, name: str, status: dict[str, Any]) -> None:
        self.name = name
        self.status: dict[str, Any] = status
        self.nodes: dict[str, Node] = status["nodes"]
        self.ids = {node["name"]: id for id, node in self.nodes.items()}

        self.active_pods = {
            id
            for id, node in self.nodes.items()
            if node["type"] == "Pod"
            and node["phase"] not in FULFILLED
            and "synchronizationStatus" not in node
        }

        # ids of pods that a dead runner left and that this runner has not restarted yet; their
        # restart ignores limits
        self.orphaned_pods = set(self.active_pods)
        # ids of the pods that were active when this process loaded the status
        self.restored_pods = frozenset(self.active_pods)
        self.changed_nodes: dict[str, None] = {}
        self.linked_children = {
            (node["name"], id) for node in self.nodes.values() for id in node.get("children", [])
        }
        self.added_children: dict[str, list[str]] = {}  # node id → ids of its new children
        # (id of the boundary node, state of a child) → number of children in this state
        self.child_counts: Counter[tuple[str, str]] = Counter()

        for node in self.nodes.values():
            self._adjust_child_count(node, 1)

        self.now = 0.0
        # True if a node was fulfilled, so that the scheduler must walk the templates again
        self.needs_requeue = False

    def drain_changes(self) -> dict[str, Any]:
        """Return the changes since the last call: the changed nodes, and the new children of
        unchanged nodes."""
        changed_nodes = self.changed_nodes
        self.changed_nodes = {}
        added_children = self.added_children
        self.added_children = {}
        nodes = {id: self.nodes[id] for id in changed_nodes}

        return {
            "nodes": nodes,
            "children": {
                id: children for id, children in added_children.items() if id not in changed_nodes
            },
        }

    def id(self, name: str) -> str:
        if name == self.name:
            return name
        return f"{self.name}-{hash_fnv32a(name)}"

    def pod_name(self, name: str, template: str) -> str:
        prefix = f"{self.name}-{template}" if template else self.name
        if name == self.name:
            return self.name
        return f"{prefix[:242]}-{hash_fnv32a(name)}"

    def get(self, name: str) -> Node | None:
        id = self.ids.get(name)
        if id is not None:
            return self.nodes[id]
        return None

    def create(
        self, name: str, type: str, phase: str, caller: Task, options: Options, message: str = ""
    ) -> Node:
        """Create a node that starts now. If `phase` is a final phase, the node also ends now.
        Raises ControllerCrash."""
        if len(self.nodes) >= MAX_NODES:
            hint = (
                "end the recursion of templates that call themselves by a `when`, or split the"
                " workflow"
            )
            raise ControllerCrash(
                f"{name} would be node {MAX_NODES + 1} of the run: at most {MAX_NODES} nodes are"
                f" possible ({hint})"
            )

        boundary = self.nodes.get(options.boundary)
        relative_name = name[len(boundary["name"]) :] if boundary else name

        node: Any = {
            "id": self.id(name),
            "name": name,
            "displayName": re.sub(r"^(\[\d+\])?\.|^\.", "", relative_name) if boundary else name,
            "type": type,
            **_template_fields(caller, f"local/{self.name}"),
            "phase": phase,
            "startedAt": format_time(self.now),
            "finishedAt": format_time(self.now) if phase in FULFILLED else None,
        }

        if options.boundary:
            node["boundaryID"] = options.boundary
        if message:
            node["message"] = message
        if options.flag:
            node["nodeFlag"] = dict(options.flag)

        self.nodes[node["id"]] = node
        self._adjust_child_count(node, 1)
        self.ids[name] = node["id"]
        self.changed_nodes[node["id"]] = None
        self.needs_requeue |= phase in FULFILLED

        if type == "Pod":
            self.active_pods.add(node["id"])

        return node

    def get_or_create(
        self, name: str, type: str, phase: str, caller: Task, template: Template, options: Options
    ) -> Node:
        """Return node `name`. A node that does not exist is created with the template's inputs."""
        node = self.get(name)
        if not node:
            node = self.create(name, type, phase, caller, options)
            record_inputs(node, template)
        return node

    def mark(self, name: str, phase: str, message: str | None = None) -> Node:
        """Set phase and message of node `name`, and `finishedAt` if the phase is fulfilled."""
        node = self.nodes[self.ids[name]]
        if node["phase"] != phase or (message is not None and message != node.get("message", "")):
            self.changed_nodes[node["id"]] = None

        self.needs_requeue |= phase in FULFILLED and node["phase"] not in FULFILLED
        self._adjust_child_count(node, -1)
        node["phase"] = phase
        self._adjust_child_count(node, 1)

        if message is not None:
            node["message"] = message
            if not message:
                del node["message"]

        if phase in FULFILLED:
            node["finishedAt"] = node.get("finishedAt") or format_time(self.now)
            self.active_pods.discard(node["id"])
            self.orphaned_pods.discard(node["id"])

        return node

    def mark_error(self, name: str, caller: Task, options: Options, message: str) -> Node:
        """Set the phase of node `name` to Error. A missing node is created."""
        if self.get(name):
            return self.mark(name, "Error", message)
        return self.create(name, "Skipped", "Error", caller, options, message)

    def link_child(self, parent: str, name: str) -> None:
        node = self.nodes[self.ids[parent]]
        children = node.setdefault("children", [])
        id = self.ids.get(name) or self.id(name)
        if (parent, id) not in self.linked_children:
            self.linked_children.add((parent, id))
            children.append(id)
            self.added_children.setdefault(node["id"], []).append(id)

    def outbound_nodes(self, id: str) -> list[str]:
        """Return the outbound nodes of node `id`: its last descendants, which become the parents of
        the nodes that follow it. Raises ControllerCrash."""
        if id not in self.nodes:
            raise ControllerCrash("was unable to obtain node")

        node = self.nodes[id]
        children = node.get("children", [])
        # as in Argo, a node with an inline template is not recognized as a containerSet
        has_named_template = node.get("templateName") or node.get("templateRef")

        is_container_set = (
            children
            and has_named_template
            and self.nodes.get(children[0], {}).get("type") == "Container"
        )

        is_group = node["type"] in ("Container", "TaskGroup") or (
            node["type"] == "Pod" and is_container_set
        )

        is_cached = node["type"] in ("Steps", "DAG") and node.get("memoizationStatus", {}).get(
            "hit"
        )
        if (
            is_cached
            or (node["type"] in LEAF_TYPES and not is_group)
            or (is_group and not children)
        ):
            return [id]

        if is_group:
            return [out for child in children for out in self._outbound_nodes_of(node, child)]
        if node["type"] == "Retry" and children:
            return children[-1:]

        return [
            out for child in node.get("outboundNodes", []) for out in self.outbound_nodes(child)
        ]

    def _outbound_nodes_of(self, group: Node, child: str) -> list[str]:
        if child not in self.nodes:
            raise ControllerCrash("was unable to obtain child node for child")
        if group["type"] == "Container" and self.nodes[child].get("boundaryID") != group.get(
            "boundaryID"
        ):
            return [group["id"]]
        return self.outbound_nodes(child)

    def attempts(self, node: Node) -> list[Node]:
        """Return the attempts of a Retry node: its children except hooks.

        Raises ControllerCrash.
        """
        for index, id in enumerate(node.get("children", [])):
            if id not in self.nodes:
                raise ControllerCrash(
                    f'could not find node named "{id}", index {index} in Children of node'
                    f" {node['name']}"
                )
        children = (self.nodes[id] for id in node.get("children", []))
        return [child for child in children if child.get("nodeFlag", {}).get("retried")]

    def last_attempt(self, node: Node) -> Node:
        """Return the last attempt of a Retry node, or `node` itself if it does not have
        attempts."""
        attempts = self.attempts(node) if node["type"] == "Retry" else []
        if attempts:
            return attempts[-1]
        return node

    def hooks_completed(self, node: Node) -> bool:
        children = (self.nodes[id] for id in node.get("children", []) if id in self.nodes)
        return all(
            child["phase"] in FULFILLED
            for child in children
            if child.get("nodeFlag", {}).get("hooked")
        )

    def _adjust_child_count(self, node: Node, change: int) -> None:
        if node["type"] in ("Pod", "Steps", "DAG") and (boundary := node.get("boundaryID")):
            if node["phase"] in FAILED:
                state = "failed"
            elif node["phase"] in FULFILLED:
                state = "completed"
            else:
                state = "active"

            self.child_counts[boundary, state] += change


def _template_fields(caller: Task, local_scope: str) -> dict[str, Any]:
    """Return the fields of a node that name its template, such as `templateRef` for a template of
    another object."""
    reference = caller.get("templateRef")
    if reference:
        return {"templateRef": reference, "templateScope": local_scope}
    scope, _, name = caller.get("template", "").rpartition("/")
    return {"templateName": name, "templateScope": scope or local_scope}


def record_inputs(node: Node, template: Template) -> None:
    """Record the template's inputs on the node."""
    inputs = {kind: values for kind, values in template["inputs"].items() if values}
    if inputs:
        node["inputs"] = inputs
