"""The state of one workflow that the engine's modules share: nodes, inputs, locks and pending actions.

Each module takes a Context; the scheduler creates it and passes in `execute`, so no module imports the scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rekindle.argo.kinds import COMPLETED
from rekindle.argo.manifest import volumes
from rekindle.argo.manifest.resolve import called
from rekindle.local.engine.inputs import Inputs
from rekindle.local.engine.nodes import Kill, Node, NodeTable, Options, Start, moment, stamp
from rekindle.local.engine.scope import Scope


class Locks(Protocol):
    """Mutexes, semaphores and memoized outputs shared by the runs of one machine."""

    def acquire(self, caller: str, locks: list[tuple[str, int]]) -> tuple[str, str]: ...
    def alone(self, name: str, limit: int) -> bool: ...
    def release(self, caller: str) -> bool: ...
    def close(self) -> None: ...
    def configmap(self, name: str) -> Mapping[str, str]: ...
    def recall(self, cache: str, key: str, max_age: str | None, now: float) -> tuple[bool, dict[str, Any] | None]: ...
    def remember(self, cache: str, key: str, id: str, outputs: dict[str, Any] | None, now: float) -> None: ...


class Execute(Protocol):
    """Advances node `name` as far as possible now. Raises Parallel, NodeError (the node is marked then)."""

    def __call__(
        self, name: str, caller: dict[str, Any], arguments: dict[str, Any], options: Options, retried: bool = False
    ) -> Node | None: ...


@dataclass(slots=True)
class Expansion:
    """Values derived for one node; not persisted, recomputed after a restart."""

    template: dict[str, Any] | None = None  # with its inputs filled in
    members: list[dict[str, Any]] | None = None  # of a loop or step group: the expanded tasks or steps
    pending: list[dict[str, Any]] | None = None  # the members that are not fulfilled
    dag: Any = None  # the walk over a DAG's tasks (dag.Dag)
    scope: Scope | None = None  # of a steps template: what the next group can see
    complete_groups: int = 0  # of a steps template: how many groups the scope has
    results_read: set[str] | None = None  # names of the children whose outputs.result it references


class Context:
    """One workflow. `shutdown` is "", Stop or Terminate."""

    def __init__(
        self, workflow: dict[str, Any], status: dict[str, Any], shutdown: str, locks: Locks | None, execute: Execute
    ) -> None:
        self.workflow, self.spec, self.status = workflow, workflow["spec"], status
        self.name: str = workflow["metadata"]["name"]
        self.table = NodeTable(self.name, status)
        self.inputs = Inputs(workflow, status)
        self.shutdown, self._locks, self.execute = shutdown, locks, execute
        self.holding: set[str] = set()  # ids of nodes with locks
        self.leaked: set[str] = (
            set()
        )  # of these, nodes that failed before they ran: Argo releases them on its next pass
        self.daemons = {id: None for id, node in self.table.nodes.items() if node.get("daemoned")}
        self.started: set[str] = set()  # ids of pods for which this process got a Start
        self.actions: list[Start | Kill] = []
        self.expansions: dict[str, Expansion] = {}  # by name of the node
        self.wake: float | None = None  # unix seconds: the latest time of the next `advance`
        self.stuck = ""  # why no node can run, if none does

    @property
    def locks(self) -> Locks:
        assert self._locks, "locks and caches need a place"
        return self._locks

    @property
    def done(self) -> bool:
        return self.status["phase"] in COMPLETED

    @property
    def deadline(self) -> float | None:
        """Of the whole workflow, in unix seconds."""
        seconds = self.spec.get("activeDeadlineSeconds")
        return moment(self.status["startedAt"]) + int(seconds) if seconds is not None else None

    def wake_at(self, when: float) -> None:
        self.wake = when if self.wake is None else min(self.wake, when)

    def may_run(self, on_exit: bool) -> bool:
        return not self.shutdown or (self.shutdown == "Stop" and on_exit)

    def on_exit(self, node: Node) -> bool:
        """Whether a node belongs to an exit handler."""
        return ".onExit" in node["name"]

    def expansion(self, name: str) -> Expansion:
        """The expansion of node `name`, created on first use."""
        return self.expansions.setdefault(name, Expansion())

    def filled(self, name: str) -> dict[str, Any] | None:
        """The template of the node `name` with its inputs filled in, if it was entered."""
        expansion = self.expansions.get(name)
        return expansion.template if expansion else None

    def caller(self, node: Node) -> dict[str, Any]:
        """The step, task or hook that called a node's template, as recorded on the node; not for inline templates."""
        scope, name = node.get("templateScope", ""), node.get("templateName", "")
        plain = name if scope.startswith("local/") else f"{scope}/{name}"
        return {
            "name": node["displayName"],
            "template": called(node["templateRef"]) if "templateRef" in node else plain,
        }

    def strategy(self, template: dict[str, Any]) -> dict[str, Any] | None:
        """The template's retry strategy; an empty one retries forever."""
        return template.get("retryStrategy", self.spec.get("retryStrategy"))

    def finish(self, phase: str, message: str, stuck: bool = False) -> None:
        """Completes the workflow, unless pods still run whose outputs Argo would wait for."""
        table = self.table
        running = {
            id for id in {*table.active, *self.daemons} if table.nodes[id]["phase"] == "Running" or id in table.anew
        }
        if running and not stuck:  # Argo waits for their outputs and reassesses
            if table.again or running - self.daemons.keys():
                return
            # only the end of its template would have ended it
            phase, message, stuck = "Error", f"{message} (a daemon still runs: Argo would wait for it for ever)", True
        entry = table.get(self.name)
        if phase == "Error" and entry and entry["phase"] == "Running" and not stuck:  # as after the exit hook of a step
            table.mark(self.name, "Error", "Workflow operation error")
        self.status |= {"phase": phase, "message": message, "finishedAt": stamp(table.now)}
        if not volumes.kept(self.spec, phase):
            self.status.pop("persistentVolumeClaims", None)

    def end_daemons(self, boundary: str) -> None:
        """Kills the daemons started by a completed DAG or steps template."""
        for node in [self.table.nodes[id] for id in self.daemons]:
            if node.get("boundaryID") == boundary:
                self.daemons.pop(node["id"], None)
                node.pop("daemoned", None)
                self.table.mark(node["name"], "Succeeded")
                self.actions += [Kill(node["id"])] if node["type"] == "Pod" else []
