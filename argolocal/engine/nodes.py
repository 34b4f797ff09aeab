"""The nodes of a workflow, stored as in `status.nodes`: names, ids, phases, messages and edges.

The names of nodes are the same as in Argo: the workflow's name for the entrypoint, PARENT.TASK for
a DAG task, PARENT[GROUP].STEP for a step, NAME(INDEX:ITEM) for an item of a loop, NAME(N) for an
attempt, and NAME.onExit for an exit hook. The behaviour follows Argo's operator.go (initializeNode,
markNodePhase, getOutboundNodes) and util/pod_name.go.
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
from argolocal.manifest.allowed_values import FAILED_PHASES, FULFILLED_PHASES
from argolocal.manifest.types import Node, Task, Template

# Maximum number of nodes of a run; the limit ends an endless recursion after about 10 s. A workflow
# with more nodes would exceed the size limit of Argo's status.
MAX_NODES = 50_000
LEAF_NODE_TYPES = ("Pod", "Container", "Skipped", "Suspend", "HTTP")


def is_fulfilled(node: Node) -> bool:
    """Return True if the dependents of a node may start, because the node has completed or is a
    running daemon."""
    return node["phase"] in FULFILLED_PHASES or bool(
        node.get("daemoned") and node["phase"] != "Pending"
    )


class LimitReached(Exception):
    """A node cannot start now, because a parallelism limit is reached."""


class ControllerCrash(Exception):
    """An error that ends the workflow: the run has more than MAX_NODES nodes, or a node is missing
    that Argo's controller would look up."""


class NodeTimedOut(NodeError):
    """The node's `timeout` passed before the node could run."""


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
class StartPod:
    """The action to start the pod of a node. The pod is killed at the unix time `deadline`, if it
    is not None."""

    id: str
    pod: str
    template: Any
    # True: store stdout as outputs.result
    capture: bool = False
    deadline: float | None = None
    # for a containerSet: name of a container → id of its node
    containers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KillPod:
    """The action to kill the pod of a node that is already completed."""

    id: str


@dataclass(frozen=True)
class PodStarted:
    """The event that the process of a pod has started."""

    id: str
    ip: str = ""
    host: str = os.uname().nodename


@dataclass(frozen=True)
class PodProgressed:
    """The event that a pod has reported its progress, as N/M."""

    id: str
    progress: str


@dataclass(frozen=True)
class PodEnded:
    """The event that a pod has completed and its outputs have been collected."""

    id: str
    phase: str
    message: str = ""
    outputs: dict[str, Any] | None = None


class Resources(Protocol):
    """The interface of the object that runs resource templates (controllers/kubectl.py)."""

    @property
    def busy(self) -> bool: ...
    def start(self, action: StartPod) -> list[PodStarted | PodEnded]: ...
    def poll(self) -> list[PodStarted | PodEnded]: ...
    def overdue_nodes(self, now: float) -> list[str]: ...
    def forget(self, node_id: str) -> None: ...
    def stop(self, grace_seconds: float) -> None: ...


@dataclass(frozen=True)
class NodeResumed:
    """The event that `argolocal resume` or `argo node set` changes a suspended node. `values`:
    output parameter → value. `phase`: final phase of the node, or "" if the node stays
    suspended."""

    id: str
    values: dict[str, str]
    phase: str = "Succeeded"
    message: str = ""


@dataclass(frozen=True)
class ExecutionOptions:
    """Options of the execution of a template (Argo's executeTemplateOpts).

    `boundary_id`: id of the node of the enclosing DAG or steps template, or "". `on_exit`: the
    template belongs to an exit handler. `deadline`: unix time at which pods are killed, or None.
    `node_flag`: value of the new node's `nodeFlag`.
    """

    boundary_id: str = ""
    on_exit: bool = False
    # first word of the tags that refer to sibling nodes: "tasks" or "steps"
    caller_kind: str = "steps"
    deadline: float | None = None
    node_flag: dict[str, bool] = field(default_factory=dict)


@lru_cache(65536)
def hash_fnv32a(name: str) -> int:
    """Return the 32-bit FNV-1a hash of a name, which Argo's node ids and pod names contain."""
    hash_value = 0x811C9DC5
    for byte in name.encode():
        hash_value = ((hash_value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return hash_value


def format_time(unix_seconds: float) -> str:
    """Convert unix seconds to RFC 3339 with milliseconds. Argo stores whole seconds, which would be
    too coarse for short local steps."""
    return (
        datetime.fromtimestamp(unix_seconds, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


@lru_cache(4096)
def parse_time(text: str) -> float:
    """Convert RFC 3339 to unix seconds."""
    return datetime.fromisoformat(text).timestamp()


class NodeTable:
    """The nodes of one workflow. `changed_nodes` and `added_children` record the changes of the
    nodes since the last call of `drain_changes`."""

    def __init__(self, name: str, status: dict[str, Any]) -> None:
        self.name = name
        self.status: dict[str, Any] = status
        self.nodes: dict[str, Node] = status["nodes"]
        self.ids = {node["name"]: node_id for node_id, node in self.nodes.items()}

        self.active_pods = {
            node_id
            for node_id, node in self.nodes.items()
            if node["type"] == "Pod"
            and node["phase"] not in FULFILLED_PHASES
            and "synchronizationStatus" not in node
        }

        # ids of the pods that were active when an earlier runner died, and that this runner has
        # not restarted yet; they restart without regard to limits
        self.orphaned_pods = set(self.active_pods)
        # ids of the pods that were active when this process loaded the status
        self.restored_pods = frozenset(self.active_pods)
        self.changed_nodes: dict[str, None] = {}
        self.linked_children = {
            (node["name"], node_id)
            for node in self.nodes.values()
            for node_id in node.get("children", [])
        }
        # node id → ids of its new children
        self.added_children: dict[str, list[str]] = {}
        # (id of the boundary node, state of a child) → number of children in this state
        self.child_counts: Counter[tuple[str, str]] = Counter()

        for node in self.nodes.values():
            self._adjust_child_count(node, 1)

        self.now = 0.0
        # True if a node has become fulfilled, so that the scheduler must walk the templates again
        self.needs_requeue = False

    def drain_changes(self) -> dict[str, Any]:
        """Return the changes since the last call of this method: the changed nodes, and the new
        children of unchanged nodes."""
        changed_nodes = self.changed_nodes
        self.changed_nodes = {}
        added_children = self.added_children
        self.added_children = {}
        nodes = {node_id: self.nodes[node_id] for node_id in changed_nodes}

        return {
            "nodes": nodes,
            "children": {
                node_id: children
                for node_id, children in added_children.items()
                if node_id not in changed_nodes
            },
        }

    def id(self, name: str) -> str:
        """Return the id for a node name, even if the node does not exist."""
        if name == self.name:
            return name
        return f"{self.name}-{hash_fnv32a(name)}"

    def compute_pod_name(self, name: str, template_name: str) -> str:
        """Return the name of the pod of node `name`."""
        prefix = f"{self.name}-{template_name}" if template_name else self.name
        if name == self.name:
            return self.name
        return f"{prefix[:242]}-{hash_fnv32a(name)}"

    def get(self, name: str) -> Node | None:
        """Return node `name`, or None if it does not exist."""
        node_id = self.ids.get(name)
        if node_id is not None:
            return self.nodes[node_id]
        return None

    def create(
        self,
        name: str,
        node_type: str,
        phase: str,
        caller: Task,
        options: ExecutionOptions,
        message: str = "",
    ) -> Node:
        """Create a node that starts now and, if `phase` is final, also ends now. Raises
        ControllerCrash if the run has too many nodes."""
        if len(self.nodes) >= MAX_NODES:
            hint = (
                "end the recursion of templates that call themselves by a `when`, or split the"
                " workflow"
            )
            raise ControllerCrash(
                f"{name} would be node {MAX_NODES + 1} of the run: at most {MAX_NODES} nodes are"
                f" possible ({hint})"
            )

        boundary_node = self.nodes.get(options.boundary_id)
        relative_name = name[len(boundary_node["name"]) :] if boundary_node else name

        node: Any = {
            "id": self.id(name),
            "name": name,
            "displayName": re.sub(r"^(\[\d+\])?\.|^\.", "", relative_name)
            if boundary_node
            else name,
            "type": node_type,
            **_template_fields(caller, f"local/{self.name}"),
            "phase": phase,
            "startedAt": format_time(self.now),
            "finishedAt": format_time(self.now) if phase in FULFILLED_PHASES else None,
        }

        if options.boundary_id:
            node["boundaryID"] = options.boundary_id
        if message:
            node["message"] = message
        if options.node_flag:
            node["nodeFlag"] = dict(options.node_flag)

        self.nodes[node["id"]] = node
        self._adjust_child_count(node, 1)
        self.ids[name] = node["id"]
        self.changed_nodes[node["id"]] = None
        self.needs_requeue |= phase in FULFILLED_PHASES

        if node_type == "Pod":
            self.active_pods.add(node["id"])

        return node

    def get_or_create(
        self,
        name: str,
        node_type: str,
        phase: str,
        caller: Task,
        template: Template,
        options: ExecutionOptions,
    ) -> Node:
        """Return node `name`. A node that does not exist is created with the template's inputs."""
        node = self.get(name)
        if not node:
            node = self.create(name, node_type, phase, caller, options)
            record_inputs(node, template)
        return node

    def mark(self, name: str, phase: str, message: str | None = None) -> Node:
        """Set the phase of node `name`, and its `finishedAt` if the phase is final. If `message` is
        None, the node keeps its message; "" removes it. Return the marked node."""
        node = self.nodes[self.ids[name]]
        if node["phase"] != phase or (message is not None and message != node.get("message", "")):
            self.changed_nodes[node["id"]] = None

        self.needs_requeue |= phase in FULFILLED_PHASES and node["phase"] not in FULFILLED_PHASES
        self._adjust_child_count(node, -1)
        node["phase"] = phase
        self._adjust_child_count(node, 1)

        if message is not None:
            node["message"] = message
            if not message:
                del node["message"]

        if phase in FULFILLED_PHASES:
            node["finishedAt"] = node.get("finishedAt") or format_time(self.now)
            self.active_pods.discard(node["id"])
            self.orphaned_pods.discard(node["id"])

        return node

    def mark_error(self, name: str, caller: Task, options: ExecutionOptions, message: str) -> Node:
        """Set the phase of node `name` to Error, and return the node. If the node does not exist,
        create it with the phase Error."""
        if self.get(name):
            return self.mark(name, "Error", message)
        return self.create(name, "Skipped", "Error", caller, options, message)

    def link_child(self, parent_name: str, name: str) -> None:
        """Add node `name`, which need not exist yet, to the children of another node."""
        node = self.nodes[self.ids[parent_name]]
        children = node.setdefault("children", [])
        node_id = self.ids.get(name) or self.id(name)
        if (parent_name, node_id) not in self.linked_children:
            self.linked_children.add((parent_name, node_id))
            children.append(node_id)
            self.added_children.setdefault(node["id"], []).append(node_id)

    def list_outbound_nodes(self, node_id: str) -> list[str]:
        """Return the ids of a node's outbound nodes: its last descendants, which become the parents
        of the nodes that run after it. Raises ControllerCrash if a node is missing."""
        if node_id not in self.nodes:
            raise ControllerCrash("was unable to obtain node")

        node = self.nodes[node_id]
        child_ids = node.get("children", [])
        # as in Argo, a node with an inline template is not recognized as a containerSet
        has_named_template = node.get("templateName") or node.get("templateRef")

        is_container_set = (
            child_ids
            and has_named_template
            and self.nodes.get(child_ids[0], {}).get("type") == "Container"
        )

        is_group = node["type"] in ("Container", "TaskGroup") or (
            node["type"] == "Pod" and is_container_set
        )

        is_cached = node["type"] in ("Steps", "DAG") and node.get("memoizationStatus", {}).get(
            "hit"
        )
        if (
            is_cached
            or (node["type"] in LEAF_NODE_TYPES and not is_group)
            or (is_group and not child_ids)
        ):
            return [node_id]

        if is_group:
            return [
                outbound_id
                for child_id in child_ids
                for outbound_id in self._list_outbound_nodes(node, child_id)
            ]
        if node["type"] == "Retry" and child_ids:
            return child_ids[-1:]

        return [
            outbound_id
            for child_id in node.get("outboundNodes", [])
            for outbound_id in self.list_outbound_nodes(child_id)
        ]

    def _list_outbound_nodes(self, group_node: Node, child_id: str) -> list[str]:
        """Return the outbound nodes of a child of a loop, a container or a containerSet. A
        container is also an outbound node itself if the child runs after the containerSet."""
        if child_id not in self.nodes:
            raise ControllerCrash("was unable to obtain child node for child")
        if group_node["type"] == "Container" and self.nodes[child_id].get(
            "boundaryID"
        ) != group_node.get("boundaryID"):
            return [group_node["id"]]
        return self.list_outbound_nodes(child_id)

    def attempts(self, node: Node) -> list[Node]:
        """Return the attempts of a Retry node: its children except hooks. Raises ControllerCrash if
        a child is missing."""
        for index, node_id in enumerate(node.get("children", [])):
            if node_id not in self.nodes:
                raise ControllerCrash(
                    f'could not find node named "{node_id}", index {index} in Children of node'
                    f" {node['name']}"
                )
        children = (self.nodes[node_id] for node_id in node.get("children", []))
        return [child for child in children if child.get("nodeFlag", {}).get("retried")]

    def last_attempt(self, node: Node) -> Node:
        """Return the last attempt of a Retry node, or `node` itself if it does not have
        attempts."""
        attempts = self.attempts(node) if node["type"] == "Retry" else []
        if attempts:
            return attempts[-1]
        return node

    def are_hooks_completed(self, node: Node) -> bool:
        """Return True if all hooks that a node has started have completed."""
        children = (
            self.nodes[node_id] for node_id in node.get("children", []) if node_id in self.nodes
        )
        return all(
            child["phase"] in FULFILLED_PHASES
            for child in children
            if child.get("nodeFlag", {}).get("hooked")
        )

    def _adjust_child_count(self, node: Node, count_change: int) -> None:
        """Add `count_change` to the number of children of the boundary node that are in the same
        state as `node`: active, completed or failed."""
        if node["type"] in ("Pod", "Steps", "DAG") and (boundary_id := node.get("boundaryID")):
            if node["phase"] in FAILED_PHASES:
                counter_name = "failed"
            elif node["phase"] in FULFILLED_PHASES:
                counter_name = "completed"
            else:
                counter_name = "active"

            self.child_counts[boundary_id, counter_name] += count_change


def _template_fields(caller: Task, local_scope: str) -> dict[str, Any]:
    """Return the fields of a node that identify its template, which are `templateScope`, and
    `templateName` or `templateRef`."""
    template_reference = caller.get("templateRef")
    if template_reference:
        return {"templateRef": template_reference, "templateScope": local_scope}
    scope_text, _, name = caller.get("template", "").rpartition("/")
    return {"templateName": name, "templateScope": scope_text or local_scope}


def record_inputs(node: Node, template: Template) -> None:
    """Copy the template's inputs, with their values, to the node."""
    inputs = {
        input_kind: bound_inputs
        for input_kind, bound_inputs in template["inputs"].items()
        if bound_inputs
    }
    if inputs:
        node["inputs"] = inputs
