"""The state of one workflow that the engine's modules share: nodes, inputs, locks and pending
actions.

The functions of each module take a Context. The scheduler is a Context and implements `execute`, so
no module imports the scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from argolocal.engine.inputs import Inputs
from argolocal.engine.nodes import Kill, NodeTable, Options, Start, format_time, parse_time
from argolocal.engine.scope import Scope
from argolocal.manifest import volume_claims
from argolocal.manifest.allowed_values import COMPLETED
from argolocal.manifest.resolve import qualified_name
from argolocal.manifest.types import Node, Task, Template


class Locks(Protocol):
    """Mutexes, semaphores and memoized outputs shared by the runs of one machine."""

    def acquire(self, caller: str, locks: list[tuple[str, int]]) -> tuple[str, str]: ...
    def holds_all_slots(self, name: str, limit: int) -> bool: ...
    def release(self, caller: str) -> None: ...
    def close(self) -> None: ...
    def configmap(self, name: str) -> Mapping[str, str]: ...
    def load(
        self, cache: str, key: str, max_age: str | None, now: float
    ) -> tuple[bool, dict[str, Any] | None]: ...
    def save(
        self, cache: str, key: str, id: str, outputs: dict[str, Any] | None, now: float
    ) -> None: ...


@dataclass(slots=True)
class Expansion:
    """Values that the engine derives for one node. These values are not stored, so a restarted
    runner computes them again."""

    template: Template | None = None  # the node's template with all inputs and tags substituted
    members: list[Task] | None = None  # for a loop or StepGroup: the expanded tasks or steps
    pending_members: list[Task] | None = None  # the `members` that are not fulfilled yet
    dag: Any = None  # for a DAG template: the Dag (dag.py) that executes it
    scope: Scope | None = None  # for a steps template: the scope of its next group
    # for a steps template: number of completed groups whose outputs `scope` already contains
    complete_groups: int = 0
    # names of the children whose outputs.result the template references
    results_read: set[str] | None = None


class Context:
    """The state of one workflow. `shutdown` is "", Stop or Terminate; `locks` are shared with other
    runs."""

    def __init__(
        self,
        workflow: dict[str, Any],
        status: dict[str, Any] | None = None,
        shutdown: str = "",
        locks: Locks | None = None,
    ) -> None:
        self.workflow = workflow
        self.spec = workflow["spec"]
        self.shutdown = shutdown
        self._locks = locks
        self.name: str = workflow["metadata"]["name"]
        # Argo's WorkflowStatus as plain data
        self.status: dict[str, Any] = status or {"phase": "", "nodes": {}}
        self.table = NodeTable(self.name, self.status)
        self.nodes = self.table.nodes
        self.inputs = Inputs(workflow, self.status)
        self.depth = 0  # nesting level of the template that is being executed
        self.lock_holders: set[str] = set()  # ids of nodes that hold locks
        # ids of nodes that hold locks but failed before they ran; the next pass releases their
        # locks
        self.deferred_releases: set[str] = set()
        self.daemons = {id: None for id, node in self.table.nodes.items() if node.get("daemoned")}
        self.started: set[str] = set()  # ids of pods that this process started
        self.actions: list[Start | Kill] = []
        self.expansions: dict[str, Expansion] = {}  # name of a node → its expansion
        # time of the next call of `advance` in unix seconds; None: on the next event
        self.wake: float | None = None
        self.blocked_reason = ""  # reason why no node can run

    def execute(
        self,
        name: str,
        caller: Task,
        arguments: dict[str, Any],
        options: Options,
        is_attempt: bool = False,
    ) -> Node:
        """Advance node `name` as far as is possible now. Raises LimitReached. Before it raises
        NodeError, it marks the node as failed."""
        raise NotImplementedError

    @property
    def locks(self) -> Locks:
        assert self._locks, "this workflow uses locks or memoization: pass `locks`"
        return self._locks

    @property
    def done(self) -> bool:
        return self.status["phase"] in COMPLETED

    @property
    def deadline(self) -> float | None:
        """The workflow's deadline in unix seconds."""
        seconds = self.spec.get("activeDeadlineSeconds")
        if seconds is not None:
            return parse_time(self.status["startedAt"]) + int(seconds)
        return None

    def wake_at(self, unix_time: float) -> None:
        self.wake = unix_time if self.wake is None else min(self.wake, unix_time)

    def may_run(self, on_exit: bool) -> bool:
        return not self.shutdown or (self.shutdown == "Stop" and on_exit)

    def in_exit_handler(self, node: Node) -> bool:
        """Return True if the node belongs to an exit handler."""
        return ".onExit" in node["name"]

    def expansion(self, name: str) -> Expansion:
        """Return the values that the engine has derived for node `name`. On first use, they are
        empty."""
        return self.expansions.setdefault(name, Expansion())

    def template_of(self, name: str) -> Template | None:
        """Return the template of node `name` with its inputs bound, or None if this process has not
        executed the node."""
        expansion = self.expansions.get(name)
        if expansion:
            return expansion.template
        return None

    def caller(self, node: Node) -> Task:
        """Return the step, task or hook that called a node's template. The node must not have an
        inline template."""
        scope = node.get("templateScope", "")
        name = node.get("templateName", "")
        full_name = name if scope.startswith("local/") else f"{scope}/{name}"
        return {
            "name": node["displayName"],
            "template": qualified_name(node["templateRef"]) if "templateRef" in node else full_name,
        }

    def strategy(self, template: Template) -> dict[str, Any] | None:
        """Return the retry strategy of the template or, if it has none, of the workflow. A retry
        strategy without a limit retries forever."""
        return template.get("retryStrategy", self.spec.get("retryStrategy"))

    def finish(self, phase: str, message: str, is_deadlocked: bool = False) -> None:
        """Set the final phase of the workflow, unless Argo would still wait for the outputs of
        running pods."""
        table = self.table

        running_pods = {
            id
            for id in {*table.active_pods, *self.daemons}
            if table.nodes[id]["phase"] == "Running" or id in table.restored_pods
        }
        # Argo waits for the outputs of running pods before it sets the workflow's phase
        if running_pods and not is_deadlocked:
            if table.needs_requeue or running_pods - self.daemons.keys():
                return

            # only daemons still run: the template that started them can no longer complete, so they
            # would run forever
            phase = "Error"
            is_deadlocked = True
            message += " (a daemon still runs: Argo would wait for it for ever)"

        root_node = table.get(self.name)
        root_runs = root_node is not None and root_node["phase"] == "Running"
        if phase == "Error" and root_runs and not is_deadlocked:
            # the entrypoint still runs, so the exit hook of a step has failed
            table.mark(self.name, "Error", "Workflow operation error")

        self.status["phase"] = phase
        self.status["message"] = message

        self.status["finishedAt"] = format_time(table.now)
        if not volume_claims.keeps_volume_claims(self.spec, phase):
            self.status.pop("persistentVolumeClaims", None)

    def end_daemons(self, boundary: str) -> None:
        """Kill the daemons that a completed DAG or steps template has started."""
        for node in [self.table.nodes[id] for id in self.daemons]:
            if node.get("boundaryID") == boundary:
                self.daemons.pop(node["id"], None)
                node.pop("daemoned", None)
                self.table.mark(node["name"], "Succeeded")
                self.actions += [Kill(node["id"])] if node["type"] == "Pod" else []
