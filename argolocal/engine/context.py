"""The state of one workflow that the engine's modules share: nodes, inputs, locks and pending actions.

Each module takes a Context. The scheduler is a Context and implements `execute`, so no module imports the scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from argolocal.engine.inputs import Inputs
from argolocal.engine.nodes import Kill, NodeTable, Options, Start, format_time, parse_time
from argolocal.engine.scope import Scope
from argolocal.manifest import volumes
from argolocal.manifest.kinds import COMPLETED
from argolocal.manifest.resolve import qualified_name
from argolocal.manifest.types import Node, Task, Template


class Locks(Protocol):
    """Mutexes, semaphores and memoized outputs shared by the runs of one machine."""

    def acquire(self, caller: str, locks: list[tuple[str, int]]) -> tuple[str, str]: ...
    def holds_all_slots(self, name: str, limit: int) -> bool: ...
    def release(self, caller: str) -> None: ...
    def close(self) -> None: ...
    def configmap(self, name: str) -> Mapping[str, str]: ...
    def load(self, cache: str, key: str, max_age: str | None, now: float) -> tuple[bool, dict[str, Any] | None]: ...
    def save(self, cache: str, key: str, id: str, outputs: dict[str, Any] | None, now: float) -> None: ...


@dataclass(slots=True)
class Expansion:
    """Values derived for one node; not persisted, recomputed after a restart."""

    template: Template | None = None  # with inputs and tags substituted
    members: list[Task] | None = None  # of a loop or StepGroup: the expanded tasks or steps
    pending: list[Task] | None = None  # members not fulfilled yet
    dag: Any = None  # of a DAG template: its dag.Dag
    scope: Scope | None = None  # of a steps template: the scope of its next group
    complete_groups: int = 0  # of a steps template: completed groups, whose outputs are in the scope
    results_read: set[str] | None = None  # children whose outputs.result the template references


class Context:
    """One workflow. `shutdown` is "", Stop or Terminate; `locks` are shared with other runs."""

    def __init__(
        self,
        workflow: dict[str, Any],
        status: dict[str, Any] | None = None,
        shutdown: str = "",
        locks: Locks | None = None,
    ) -> None:
        self.workflow, self.spec, self.shutdown, self._locks = workflow, workflow["spec"], shutdown, locks
        self.name: str = workflow["metadata"]["name"]
        self.status: dict[str, Any] = status or {"phase": "", "nodes": {}}  # Argo's WorkflowStatus as plain data
        self.table = NodeTable(self.name, self.status)
        self.nodes = self.table.nodes
        self.inputs = Inputs(workflow, self.status)
        self.depth = 0  # of the template that is advanced
        self.lock_holders: set[str] = set()  # ids of nodes with locks
        self.release_deferred: set[str] = set()  # lock holders that failed before running: released on the next pass
        self.daemons = {id: None for id, node in self.table.nodes.items() if node.get("daemoned")}
        self.started: set[str] = set()  # ids of pods that this process started
        self.actions: list[Start | Kill] = []
        self.expansions: dict[str, Expansion] = {}  # by name of the node
        self.wake: float | None = None  # unix seconds: the latest time of the next `advance`; None: on the next event
        self.blocked_reason = ""  # why no node can run, if none can

    def execute(
        self, name: str, caller: Task, arguments: dict[str, Any], options: Options, retried: bool = False
    ) -> Node:
        """Advance node `name` as far as possible now. Raises Parallel, NodeError (the node is marked then)."""
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
        return parse_time(self.status["startedAt"]) + int(seconds) if seconds is not None else None

    def wake_at(self, when: float) -> None:
        self.wake = when if self.wake is None else min(self.wake, when)

    def may_run(self, on_exit: bool) -> bool:
        return not self.shutdown or (self.shutdown == "Stop" and on_exit)

    def on_exit(self, node: Node) -> bool:
        """Return True if a node belongs to an exit handler."""
        return ".onExit" in node["name"]

    def expansion(self, name: str) -> Expansion:
        """Return the expansion of node `name`, created on first use."""
        return self.expansions.setdefault(name, Expansion())

    def template_of(self, name: str) -> Template | None:
        """Return the template of node `name` with its inputs bound, if the node was executed before."""
        expansion = self.expansions.get(name)
        return expansion.template if expansion else None

    def caller(self, node: Node) -> Task:
        """Return the step, task or hook that called a node's template, recorded on the node; not for inline ones."""
        scope, name = node.get("templateScope", ""), node.get("templateName", "")
        plain = name if scope.startswith("local/") else f"{scope}/{name}"
        return {
            "name": node["displayName"],
            "template": qualified_name(node["templateRef"]) if "templateRef" in node else plain,
        }

    def strategy(self, template: Template) -> dict[str, Any] | None:
        """Return the template's retry strategy; an empty one retries forever."""
        return template.get("retryStrategy", self.spec.get("retryStrategy"))

    def finish(self, phase: str, message: str, deadlocked: bool = False) -> None:
        """Complete the workflow, unless pods still run whose outputs Argo would wait for."""
        table = self.table
        running = {
            id for id in {*table.active, *self.daemons} if table.nodes[id]["phase"] == "Running" or id in table.restored
        }
        if running and not deadlocked:  # Argo waits for their outputs and reassesses
            if table.requeue or running - self.daemons.keys():
                return
            # a daemon is killed only when its template completes, which cannot happen now
            phase, deadlocked = "Error", True
            message += " (a daemon still runs: Argo would wait for it for ever)"
        entry = table.get(self.name)
        if phase == "Error" and entry and entry["phase"] == "Running" and not deadlocked:  # after a step's exit hook
            table.mark(self.name, "Error", "Workflow operation error")
        self.status |= {"phase": phase, "message": message, "finishedAt": format_time(table.now)}
        if not volumes.keeps_claims(self.spec, phase):
            self.status.pop("persistentVolumeClaims", None)

    def end_daemons(self, boundary: str) -> None:
        """Kill the daemons started by a completed DAG or steps template."""
        for node in [self.table.nodes[id] for id in self.daemons]:
            if node.get("boundaryID") == boundary:
                self.daemons.pop(node["id"], None)
                node.pop("daemoned", None)
                self.table.mark(node["name"], "Succeeded")
                self.actions += [Kill(node["id"])] if node["type"] == "Pod" else []
