"""The state of one workflow that the engine's modules share: nodes, inputs, locks and pending
actions.

The functions of the other modules get a Context as their argument. The subclass Scheduler of
Context implements `execute`, so that these modules need not import the scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from argolocal.engine.inputs import Inputs
from argolocal.engine.nodes import (
    ExecutionOptions,
    KillPod,
    NodeTable,
    StartPod,
    format_time,
    parse_time,
)
from argolocal.engine.scope import Scope
from argolocal.manifest import volume_claims
from argolocal.manifest.allowed_values import COMPLETED_PHASES
from argolocal.manifest.resolve import make_qualified_name
from argolocal.manifest.types import Node, Task, Template


class Locks(Protocol):
    """Mutexes, semaphores and memoized outputs shared by the runs of one machine."""

    def acquire(self, owner_id: str, locks: list[tuple[str, int]]) -> tuple[str, str]: ...
    def holds_all_slots(self, lock_name: str, max_holders: int) -> bool: ...
    def release(self, owner_id: str) -> None: ...
    def close(self) -> None: ...
    def configmap(self, name: str) -> Mapping[str, str]: ...
    def load(
        self, cache_name: str, key: str, max_age: str | None, now: float
    ) -> tuple[bool, dict[str, Any] | None]: ...
    def save(
        self, cache_name: str, key: str, node_id: str, outputs: dict[str, Any] | None, now: float
    ) -> None: ...


@dataclass(slots=True)
class Expansion:
    """Values that the engine computes for one node and that are not part of the node's status. A
    restarted runner computes the values of an Expansion again."""

    # the node's template with all inputs and tags substituted
    template: Template | None = None
    # for the node of a loop or StepGroup: the tasks or steps that it consists of
    members: list[Task] | None = None
    # the `members` that are not fulfilled yet
    pending_tasks: list[Task] | None = None
    # for a DAG template: the Dag (dag.py) that executes it
    dag: Any = None
    # for a steps template: the scope of its next step group
    scope: Scope | None = None
    # for a steps template: number of completed step groups whose outputs `scope` already contains
    completed_group_count: int = 0
    # names of the children whose outputs.result the template references
    referenced_results: set[str] | None = None


class Context:
    """The state of one workflow. `shutdown` is "", Stop or Terminate. `locks` is None for a
    workflow without locks and memoization."""

    def __init__(
        self,
        workflow: dict[str, Any],
        workflow_status: dict[str, Any] | None = None,
        shutdown: str = "",
        locks: Locks | None = None,
    ) -> None:
        self.workflow = workflow
        self.spec = workflow["spec"]
        self.shutdown = shutdown
        self._locks = locks
        self.name: str = workflow["metadata"]["name"]
        # Argo's WorkflowStatus as plain data
        self.status: dict[str, Any] = workflow_status or {"phase": "", "nodes": {}}
        self.table = NodeTable(self.name, self.status)
        self.nodes = self.table.nodes
        self.inputs = Inputs(workflow, self.status)
        # nesting depth of the template that is being executed
        self.depth = 0
        # ids of nodes that hold locks
        self.lock_holders: set[str] = set()
        # ids of failed nodes that keep their locks until the next pass over the templates
        self.deferred_releases: set[str] = set()
        # ids of running daemons, in the order of their start
        self.daemons = {
            node_id: None for node_id, node in self.table.nodes.items() if node.get("daemoned")
        }
        # ids of pods that this process started
        self.started_pods: set[str] = set()
        self.actions: list[StartPod | KillPod] = []
        # name of a node → its expansion
        self.expansions: dict[str, Expansion] = {}
        # time of the next call of `advance` in unix seconds; None: on the next event
        self.wake: float | None = None
        # the last reason why a node could not run
        self.blocked_reason = ""

    def execute(
        self,
        name: str,
        caller: Task,
        arguments: dict[str, Any],
        options: ExecutionOptions,
        is_attempt: bool = False,
    ) -> Node:
        """Create node `name` or advance it as far as possible now, and return it. Raises
        LimitReached, and NodeError after marking the node as failed.

        `caller`: the step, task or hook that calls the node's template. `is_attempt`: the node is
        an attempt of a Retry node, which has already checked limits and locks.
        """
        raise NotImplementedError

    @property
    def locks(self) -> Locks:
        """The mutexes, semaphores and caches that all runs of this machine share."""
        assert self._locks, "this workflow uses locks or memoization: pass `locks`"
        return self._locks

    @property
    def done(self) -> bool:
        """True if the workflow has completed."""
        return self.status["phase"] in COMPLETED_PHASES

    @property
    def deadline(self) -> float | None:
        """The workflow's deadline in unix seconds; None if it has no limit."""
        deadline_seconds = self.spec.get("activeDeadlineSeconds")
        if deadline_seconds is not None:
            return parse_time(self.status["startedAt"]) + int(deadline_seconds)
        return None

    def wake_at(self, unix_time: float) -> None:
        """Request a call of `advance` at this time or earlier."""
        self.wake = unix_time if self.wake is None else min(self.wake, unix_time)

    def may_run(self, is_exit_handler: bool) -> bool:
        """Return True if nodes may start in spite of a shutdown; the shutdown Stop allows only exit
        handlers, and Terminate allows no node."""
        return not self.shutdown or (self.shutdown == "Stop" and is_exit_handler)

    def is_in_exit_handler(self, node: Node) -> bool:
        """Return True if the node belongs to an exit handler."""
        return ".onExit" in node["name"]

    def expansion(self, name: str) -> Expansion:
        """Return the Expansion of node `name`. The first call for a node creates an empty
        Expansion."""
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
        scope_text = node.get("templateScope", "")
        template_name = node.get("templateName", "")
        full_name = (
            template_name if scope_text.startswith("local/") else f"{scope_text}/{template_name}"
        )
        return {
            "name": node["displayName"],
            "template": make_qualified_name(node["templateRef"])
            if "templateRef" in node
            else full_name,
        }

    def strategy(self, template: Template) -> dict[str, Any] | None:
        """Return the retry strategy of the template or else of the workflow; None if both lack it.
        A strategy without a limit retries forever."""
        return template.get("retryStrategy", self.spec.get("retryStrategy"))

    def finish(self, phase: str, message: str, is_deadlocked: bool = False) -> None:
        """Set the final phase of the workflow, unless Argo would still wait for the outputs of
        running pods. `is_deadlocked`: end the workflow even if pods are running."""
        node_table = self.table

        running_pod_ids = {
            node_id
            for node_id in {*node_table.active_pods, *self.daemons}
            if node_table.nodes[node_id]["phase"] == "Running"
            or node_id in node_table.restored_pods
        }
        # Argo waits for the outputs of running pods before it sets the workflow's phase
        if running_pod_ids and not is_deadlocked:
            if node_table.needs_requeue or running_pod_ids - self.daemons.keys():
                return

            # Only daemons are running. The template that started the running daemons cannot
            # complete any longer, so it would never end them.
            phase = "Error"
            is_deadlocked = True
            message += " (a daemon still runs: Argo would wait for it for ever)"

        root_node = node_table.get(self.name)
        is_root_running = root_node is not None and root_node["phase"] == "Running"
        if phase == "Error" and is_root_running and not is_deadlocked:
            # the entrypoint is still running, so the error comes from the exit hook of a step
            node_table.mark(self.name, "Error", "Workflow operation error")

        self.status["phase"] = phase
        self.status["message"] = message

        self.status["finishedAt"] = format_time(node_table.now)
        if not volume_claims.keeps_volume_claims(self.spec, phase):
            self.status.pop("persistentVolumeClaims", None)

    def end_daemons(self, boundary_id: str) -> None:
        """Kill the daemons that a completed DAG or steps template has started."""
        for node in [self.table.nodes[node_id] for node_id in self.daemons]:
            if node.get("boundaryID") == boundary_id:
                self.daemons.pop(node["id"], None)
                node.pop("daemoned", None)
                self.table.mark(node["name"], "Succeeded")
                self.actions += [KillPod(node["id"])] if node["type"] == "Pod" else []
