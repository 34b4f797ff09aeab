"""The state machine of a workflow: it maps nodes, events and the time to new nodes and actions. The
state machine never reads a clock or a file.

    scheduler = Scheduler(workflow, status={})    # `status` is Argo's WorkflowStatus as plain data
    actions = scheduler.advance(now, events)

As in Argo's controller, each call of `advance` walks the templates from the entrypoint and compares
them with the nodes in `status`. Since everything is in `status`, the runner can resume a run from a
status that was stored on disk. The behaviour follows Argo's workflow/controller/operator.go,
exec_control.go, exit_handler.go (v4.1).
"""

import contextlib
import sys
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from argolocal.engine import admission, dag, hooks, leaf_templates, retry, steps, suspend
from argolocal.engine.context import Context
from argolocal.engine.nodes import (
    ControllerCrash,
    ExecutionOptions,
    KillPod,
    LimitReached,
    NodeError,
    NodeResumed,
    NodeTimedOut,
    PodEnded,
    PodProgressed,
    PodStarted,
    StartPod,
    format_time,
    parse_time,
)
from argolocal.errors import describe
from argolocal.manifest import volume_claims
from argolocal.manifest.allowed_values import FAILED_PHASES, FULFILLED_PHASES
from argolocal.manifest.types import Node, Task, Template

# maximum number of levels of nested templates; each level takes about a dozen nested Python calls
MAX_DEPTH = 100
TOO_DEEP_MESSAGE = (
    "Maximum recursion depth exceeded. "
    "See https://argo-workflows.readthedocs.io/en/release-4.1/scaling/#maximum-recursion-depth"
)
sys.setrecursionlimit(max(sys.getrecursionlimit(), 30 * MAX_DEPTH))
Event = PodStarted | PodProgressed | PodEnded | NodeResumed
WORKFLOW_PHASES = {"Skipped": "Succeeded", "Omitted": "Succeeded"}


class Scheduler(Context):
    """The state machine of one workflow."""

    def advance(self, now: float, events: Iterable[Event] = ()) -> list[StartPod | KillPod]:
        """Apply the events, advance all nodes as far as possible, and return the actions to take.
        After the call, `wake` is the unix time of the next call; None: call `advance` after the
        next event.

        As in Argo, an unexpected exception fails the node that is being executed. An unexpected
        exception outside a node fails the workflow.
        """
        self.table.now = now
        self.wake = None
        self.actions = []

        try:
            self._advance(now, events)
        except Exception as error:
            self.finish("Error", describe(error), is_deadlocked=True)

        return self.actions

    def _advance(self, now: float, events: Iterable[Event]) -> None:
        """Apply the events, and walk the templates until no node changes. End a workflow that can
        never complete."""
        if self.status["phase"]:
            duration_text = f"{now - parse_time(self.status['startedAt']):.6f}"
            self.inputs.globals["workflow.status"] = self.status["phase"]
            self.inputs.globals["workflow.duration"] = duration_text
        else:
            self.status["phase"] = "Running"
            self.status["startedAt"] = format_time(now)

        if "volumeClaimTemplates" in self.spec and not self.done:
            self.status["persistentVolumeClaims"] = volume_claims.list_claims(self.workflow)

        for event in events:
            try:
                self._apply_event(event)
            except Exception as error:
                self.table.mark(self.nodes[event.id]["name"], "Error", describe(error))

        if not admission.acquire_workflow_locks(self):
            return

        self._apply_limits()
        if self.spec.get("suspend") and not self.shutdown:
            return

        self.table.needs_requeue = True
        while self.table.needs_requeue and self.status["phase"] == "Running":
            self.table.needs_requeue = False
            self.blocked_reason = ""
            admission.release_locks(self)

            try:
                self._reconcile()
            except ControllerCrash as error:
                self.finish("Error", str(error))

            if (
                self.table.orphaned_pods
                and not self.table.needs_requeue
                and not self._can_progress(excluded_ids=self.table.orphaned_pods)
            ):
                for node in [self.nodes[node_id] for node_id in self.table.orphaned_pods]:
                    self._restart_orphan(node)

        if self.status["phase"] == "Running" and not self._can_progress():
            duration_text = "until the deadline" if self.deadline else "for ever"
            message = (
                f"{self.blocked_reason or 'nothing is left to run'}: Argo would wait"
                f" {duration_text}"
            )
            self.finish("Error", message, is_deadlocked=True)

        if self.deadline and self.status["phase"] == "Running" and now < self.deadline:
            self.wake_at(self.deadline)

    def _restart_orphan(self, node: Node) -> None:
        """Restart a pod that was running when the runner died, and whose parent node has already
        completed, so that walking the templates does not reach the pod."""
        retry_nodes = (
            retry_node for retry_node in self.nodes.values() if retry_node["type"] == "Retry"
        )
        outermost_node = next(
            (
                retry_node
                for retry_node in retry_nodes
                if node["id"] in retry_node.get("children", [])
            ),
            node,
        )

        options = ExecutionOptions(
            outermost_node.get("boundaryID", ""),
            self.is_in_exit_handler(outermost_node),
            node_flag=dict(outermost_node.get("nodeFlag", {})),
        )

        caller = self.caller(outermost_node)
        if caller["template"] in self.inputs.templates:
            with contextlib.suppress(NodeError, LimitReached, ControllerCrash):
                self.execute(
                    outermost_node["name"], caller, outermost_node.get("inputs", {}), options
                )

        if node["id"] in self.table.orphaned_pods:
            self.table.mark(node["name"], "Failed", "the runner of the pod died")

    def _can_progress(self, excluded_ids: AbstractSet[str] = frozenset()) -> bool:
        """Return True if an event of a pod, an HTTP request or a suspended node, or the passing of
        time, can advance the workflow. Pods with `excluded_ids` are ignored."""
        waiting_types = ("Suspend", "HTTP")
        return (
            # a daemon ends only when the template that started it completes
            bool(self.table.active_pods - self.daemons.keys() - excluded_ids)
            or self.wake is not None
            or any(
                node["type"] in waiting_types and node["phase"] not in FULFILLED_PHASES
                for node in self.nodes.values()
            )
        )

    def _apply_event(self, event: Event) -> None:
        """Update the node of an event. An event of a completed node is ignored."""
        if isinstance(event, NodeResumed):
            suspend.resume(self, event)
            return

        node = self.nodes[event.id]
        if node["phase"] in FULFILLED_PHASES:
            return

        if isinstance(event, PodProgressed):
            node["progress"] = event.progress
            self.table.changed_nodes[event.id] = None
            return

        if isinstance(event, PodStarted):
            if (self.template_of(node["name"]) or {}).get("daemon"):
                node["daemoned"] = True
                node["podIP"] = event.ip
                self.daemons[node["id"]] = None

            if node["type"] == "Pod":
                node["hostNodeName"] = event.host

            self.table.mark(node["name"], "Running", "")
            return

        for node_id in node.get("children", []) if node["type"] == "Pod" else ():
            self._end_containers(node_id)

        if event.outputs is not None:
            node["outputs"] = event.outputs
            self.inputs.export(event.outputs)

        phase = event.phase
        message = event.message
        self.daemons.pop(node["id"], None)

        if node.pop("daemoned", None) and phase == "Succeeded":
            # A daemon must run until the template that started it completes. The daemon of this
            # event ended before.
            phase = "Failed"

        if phase == "Succeeded" and node.get("memoizationStatus"):
            try:
                admission.save_outputs(self, node)
            except NodeError as error:
                phase = "Error"
                message = str(error)

        self.table.mark(node["name"], phase, message)
        self.expansions.pop(node["name"], None)

    def _end_containers(self, node_id: str) -> None:
        """Mark the unfinished containers of a completed pod as failed: the container with this node
        id, and the containers that depend on it."""
        node = self.nodes.get(node_id)
        if node and node["type"] == "Container":
            if node["phase"] not in FULFILLED_PHASES:
                self.table.mark(node["name"], "Failed", "Pod Failed whilst container running")
            for container_id in node.get("children", []):
                self._end_containers(container_id)

    def _apply_limits(self) -> None:
        """After a shutdown or the workflow's deadline, kill the nodes that must not run any
        longer."""
        is_overdue = bool(self.deadline and self.table.now >= self.deadline)
        if not (is_overdue or self.shutdown):
            return

        for node_id, node in list(self.nodes.items()):
            if node["phase"] in FULFILLED_PHASES or node["type"] not in ("Pod", "Suspend", "HTTP"):
                continue

            is_exit_handler = self.is_in_exit_handler(node)
            if self.shutdown and not self.may_run(is_exit_handler):
                if node["type"] != "Pod":
                    stop_message = "Stopped with strategy '{}'"
                else:
                    stop_message = "workflow shutdown with strategy:  {}"

                self.table.mark(node["name"], "Failed", stop_message.format(self.shutdown))
            elif is_overdue and not is_exit_handler:
                self.table.mark(node["name"], "Failed", "Step exceeded its deadline")
            else:
                continue

            self.actions.append(KillPod(node_id))

    def _reconcile(self) -> None:
        """Walk the templates once from the entrypoint, run the workflow's hooks, and set the
        workflow's final phase when the entrypoint and the exit handler have completed."""
        try:
            node = self.execute(
                self.name,
                {"template": self.spec["entrypoint"]},
                self.inputs.arguments(),
                ExecutionOptions(),
            )
        except LimitReached:
            return
        except NodeError as error:
            self.finish("Error", f"error in entry template execution: {error}")
            return

        phase: str = WORKFLOW_PHASES.get(node["phase"]) or node["phase"]
        self.inputs.globals["workflow.status"] = phase
        if self.spec.get("hooks") or node["phase"] in FULFILLED_PHASES:
            self.inputs.globals["workflow.failures"] = hooks.dump_failures(self)
        if not hooks.run_workflow_hooks(self) or node["phase"] not in FULFILLED_PHASES:
            return

        phase = WORKFLOW_PHASES.get(node["phase"]) or node["phase"]
        exit_node = None

        hook = hooks.find_exit_hook(self, self.spec)
        if hook:
            exit_node_name = f"{self.name}.onExit"
            if self.table.get(exit_node_name) or self.may_run(True):
                try:
                    options = ExecutionOptions(on_exit=True, node_flag=hooks.HOOK_FLAG)
                    exit_node = self.execute(
                        exit_node_name, hook, hook.get("arguments") or {}, options
                    )
                except LimitReached:
                    return
                except NodeError as error:
                    self.finish("Error", f"error in exit template execution : {error}")
                    return

                if exit_node["phase"] not in FULFILLED_PHASES:
                    return

        message = node.get("message", "")
        if phase in FAILED_PHASES and self.shutdown:
            message = f"Stopped with strategy '{self.shutdown}'"

        if phase == "Succeeded" and exit_node and exit_node["phase"] in FAILED_PHASES:
            phase = exit_node["phase"]
            message = exit_node.get("message", "")

        self.finish(phase, message if phase in FAILED_PHASES else "")

    def execute(
        self,
        name: str,
        caller: Task,
        arguments: dict[str, Any],
        options: ExecutionOptions,
        is_attempt: bool = False,
    ) -> Node:
        if not is_attempt:
            self.depth += 1

        try:
            if self.depth >= MAX_DEPTH:
                return self.table.mark_error(name, caller, options, TOO_DEEP_MESSAGE)
            return self._execute(name, caller, arguments, options, is_attempt)
        except (NodeError, LimitReached, ControllerCrash):
            raise
        except Exception as error:
            # fail only this node, so that exit handlers and retries still run
            return self.table.mark_error(name, caller, options, describe(error))
        finally:
            if not is_attempt:
                self.depth -= 1

    def _execute(
        self,
        name: str,
        caller: Task,
        arguments: dict[str, Any],
        options: ExecutionOptions,
        is_attempt: bool,
    ) -> Node:
        """Check limits, locks and memoized outputs of a node, then create or advance it."""
        node = self.table.get(name)
        if node and node["phase"] in FULFILLED_PHASES:
            self.deferred_releases.discard(node["id"])
            return node

        try:
            template = self.template_of(name) or self._bind_template(
                name, caller, arguments, options
            )
        except NodeError as error:
            self.table.mark_error(name, caller, options, str(error))
            raise

        if not is_attempt:
            if node and node["phase"] == "Pending" and node["id"] not in self.started_pods:
                pending_node = node
            else:
                pending_node = None

            if (
                pending_node
                and template.get("timeout")
                and self.table.now >= admission.compute_timeout_time(pending_node, template)
            ):
                self.table.mark(name, "Failed", "timeout")
                raise NodeTimedOut("timeout")

            admission.check_parallelism(self, template, node, options.boundary_id)

        self.expansion(name).template = template
        if not is_attempt and ("synchronization" in template or "memoize" in template):
            try:
                node = admission.synchronize_and_memoize(self, name, caller, template, options)
            except NodeError as error:
                self.table.mark_error(name, caller, options, str(error))
                raise

            if node and (node["phase"] in FULFILLED_PHASES or "synchronizationStatus" in node):
                return node

        strategy = self.strategy(template)
        if strategy is not None and not is_attempt:
            return retry.execute(self, name, caller, template, strategy, options)

        try:
            return self._run(name, caller, template, options)
        except NodeError as error:
            self.table.mark_error(name, caller, options, str(error))
            raise

    def _bind_template(
        self, name: str, caller: Task, arguments: dict[str, Any], options: ExecutionOptions
    ) -> Template:
        """Return the template of node `name` with the workflow's defaults and volumes, the values
        of its inputs, and substituted tags. Raises NodeError."""
        template = retry.merge_template_defaults(
            self.inputs.template(caller), self.spec.get("templateDefaults")
        )
        mounted_volumes = volume_claims.list_mounted_volumes(self.spec, self.status, template)
        if mounted_volumes:
            template = {**template, "volumes": mounted_volumes}

        if self.spec.get("archiveLogs"):
            template = {
                **template,
                "archiveLocation": {"archiveLogs": True, **(template.get("archiveLocation") or {})},
            }

        local_values = {"node.name": name, f"{options.caller_kind}.name": caller.get("name", "")}
        if (
            any(template_type in template for template_type in leaf_templates.LEAF_TEMPLATE_TYPES)
            and self.strategy(template) is None
        ):
            local_values["pod.name"] = self.table.compute_pod_name(name, template["name"])

        return self.inputs.process_args(template, arguments, local_values)

    def _run(self, name: str, caller: Task, template: Template, options: ExecutionOptions) -> Node:
        """Create or advance a node by the module for its type of template. Raises NodeError."""
        for template_type, template_module in (("dag", dag), ("steps", steps)):
            if template_type in template:
                try:
                    return template_module.execute(self, name, caller, template, options)
                finally:
                    # end the daemons of the template, even after an error
                    node = self.table.get(name)
                    if node and node["phase"] in FULFILLED_PHASES:
                        self.end_daemons(node["id"])

        if "suspend" in template:
            return suspend.execute(self, name, caller, template, options)
        if not any(
            template_type in template for template_type in leaf_templates.LEAF_TEMPLATE_TYPES
        ):
            raise NodeError(f"Template '{template['name']}' missing specification")

        return leaf_templates.execute(self, name, caller, template, options)
