"""Execute DAG templates: start tasks, collect the values of their tags, and determine the DAG's
phase.

In `depends`, the plain task name `A` means `(A.Succeeded || A.Skipped || A.Daemoned)`, so it is
false for an omitted task. The phase of a DAG depends on the phases of its targets, which are its
leaves by default. An omitted target counts with the phase of the tasks that it depends on. The
behaviour follows Argo's dag.go (assessDAGPhase) and common/ancestry.go.
"""

import re
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine import admission, hooks
from argolocal.engine import scope as scopes
from argolocal.engine.context import Context
from argolocal.engine.nodes import (
    ExecutionOptions,
    LimitReached,
    NodeError,
    NodeTimedOut,
    is_fulfilled,
)
from argolocal.engine.order import (
    BLOCKED_BY_LIMIT,
    TaskOrder,
    VisitResult,
    list_with_ancestors,
    parse_dependencies,
)
from argolocal.language.expr import evaluate_bool
from argolocal.language.functions import ExprError
from argolocal.language.govaluate import WhenError, should_execute
from argolocal.language.substitute import MissingValue, TemplateError
from argolocal.manifest.allowed_values import COMPLETED_PHASES, FAILED_PHASES, FULFILLED_PHASES
from argolocal.manifest.loops import expand_loop, has_loop
from argolocal.manifest.types import Node, Task, Template

TASK_NAME_WORD = re.compile(r"[-a-zA-Z0-9_]+")
# result of a task, as named in `depends` → phase of its node
PHASE_BY_RESULT = {
    "Succeeded": "Succeeded",
    "Failed": "Failed",
    "Errored": "Error",
    "Skipped": "Skipped",
    "Omitted": "Omitted",
}


class Dag:
    """The execution of a DAG template by one node."""

    def __init__(
        self, context: Context, name: str, template: Template, options: ExecutionOptions
    ) -> None:
        self.context = context
        self.name = name
        self.template = template
        self.on_exit = options.on_exit
        self.table = context.table
        self.inputs = context.inputs
        self.node_id = context.table.ids[name]
        self.tasks = {task["name"]: task for task in template["dag"]["tasks"]}
        # name of a task → names of the tasks that it depends on
        self.dependencies = {}
        # name of a task → its `depends` as an expression
        self.depends_expressions = {}

        for name, task in self.tasks.items():
            self.dependencies[name], self.depends_expressions[name] = parse_dependencies(
                task, self.tasks
            )

        depended_on_tasks = {name for names in self.dependencies.values() for name in names}
        target_name = template["dag"].get("target")
        self.targets = (
            target_name.split(" ") if target_name else sorted(set(self.tasks) - depended_on_tasks)
        )

        unknown_targets = [
            target_name for target_name in self.targets if target_name not in self.tasks
        ]
        if unknown_targets:
            raise NodeError(f"target {unknown_targets[0]} does not exist")

        self.looping_tasks = {name for name, task in self.tasks.items() if has_loop(task)}
        # name of a task → names of the ancestors that its fields may reference
        self.visible_ancestors: dict[str, list[str]] = {}
        eager_tasks = self.looping_tasks | {
            name for name, task in self.tasks.items() if task.get("when")
        }
        self.order = TaskOrder(self.targets, self.dependencies, eager_tasks)

    def node(self, task_name: str) -> Node | None:
        """Return the node of a task or of an item of a loop, or None if it does not exist yet."""
        return self.table.get(f"{self.name}.{task_name}")

    def child_options(self) -> ExecutionOptions:
        """Return the options for the execution of the DAG's tasks."""
        return ExecutionOptions(self.node_id, self.on_exit, "tasks")

    def scope(self, task_name: str) -> scopes.Scope:
        """Return the values of the tags that a task may use: inputs of the DAG, workflow outputs,
        and outputs of the task's ancestors. Raises ValueError if an item of a loop has a result
        that is not JSON."""
        scope = scopes.template_scope(self.context.status, self.template)
        if task_name not in self.visible_ancestors:
            self.visible_ancestors[task_name] = self._visible_ancestors(task_name)

        for name in self.visible_ancestors[task_name]:
            node = self.node(name)
            if node is None:
                raise ValueError(f"Ancestor task node {name} not found")
            if node["type"] == "TaskGroup":
                scopes.reject_inline_template(self.tasks[name])

            self.add_to_scope(scope, name, node)

        return scope

    def _visible_ancestors(self, task_name: str) -> list[str]:
        """Return the ancestors that a task's fields may reference, sorted by name. All ancestors
        that are loops are included."""
        task_json = to_json(self.tasks[task_name])
        referenced_names = self.looping_tasks | self.tasks.keys() & set(
            TASK_NAME_WORD.findall(task_json)
        )
        if "{{=" in task_json or "xpression" in task_json:
            # an expression may compute the name of a task, so any task may be referenced
            referenced_names = self.tasks.keys()
        referenced_names = referenced_names - {task_name}
        if not referenced_names <= set(self.dependencies[task_name]):
            referenced_names = referenced_names & set(
                list_with_ancestors([task_name], self.dependencies)
            )
        return sorted(referenced_names)

    def add_to_scope(self, scope: scopes.Scope, name: str, node: Node) -> None:
        """Add the node and the outputs of the task `name` to a scope."""
        if node["type"] == "TaskGroup":
            children = (
                self.table.nodes[node_id]
                for node_id in node.get("children", [])
                if node_id in self.table.nodes
            )
            scopes.add_loop_outputs(
                scope,
                "tasks",
                name,
                [child for child in children if child["name"].startswith(node["name"] + "(")],
            )

        scopes.add_node_tags(self.table, scope, "tasks", name, node)
        scopes.add_skipped_outputs(
            scope,
            "tasks",
            name,
            node,
            self.inputs.template(self.tasks[name]),
            includes_artifacts=False,
        )

    def visit(self, name: str) -> VisitResult:
        """Advance a task as far as possible, and return its VisitResult.

        Raises NodeError if a hook of a target fails, or if a target cannot read the outputs of a
        loop. An error of a target's hooks or inputs fails the whole DAG.
        """
        visit_result = self._visit(name)

        task = self.tasks[name]
        if (
            name in self.targets
            and (self.looping_tasks or task.get("hooks"))
            and (node := self.node(name))
        ):
            try:
                # run the hooks again, because `_visit` ran them before the task completed
                hooks.run_conditional_hooks(
                    self.context, task, node, self.scope(name), self.child_options()
                )
            except (NodeError, ValueError) as error:
                self.table.mark(self.name, "Error", str(error))
                raise NodeError(str(error)) from None

        return visit_result

    def _visit(self, name: str) -> VisitResult:
        """Advance a task and its hooks as far as possible, and return its VisitResult."""
        node = self.node(name)
        task = self.tasks[name]

        has_hooks = bool(task.get("hooks") or task.get("onExit"))
        if (
            node
            and has_hooks
            and node["phase"] in FULFILLED_PHASES
            and self._is_skipped_by_argo(name)
        ):
            return True, True

        if node and has_hooks and node["phase"] != "Pending":
            try:
                if not hooks.run_conditional_hooks(
                    self.context, task, node, self.scope(name), self.child_options()
                ):
                    return False, False
            except (NodeError, ValueError) as error:
                self.table.mark(node["name"], "Error", str(error))

        if node and node["phase"] in FULFILLED_PHASES:
            self.context.deferred_releases.discard(node["id"])
            # run the exit hook first, because `are_hooks_completed` also checks this hook
            is_completed = not has_hooks or self._exit_hook_completed(name, node)
            return self.table.are_hooks_completed(node), is_completed

        if not (node and node["type"] == "Pod" and node["id"] in self.context.started_pods):
            if not node and self.depends_expressions[name] and not self._may_start(name, task):
                node = self.node(name)
                return node is not None, node is not None

            if self._run_task(name, task):
                if self.table.orphaned_pods:
                    return (False, False)
                return BLOCKED_BY_LIMIT

            node = self.node(name)

        dependents_may_start = bool(
            node and is_fulfilled(node) and self.table.are_hooks_completed(node)
        )
        return dependents_may_start, bool(
            node and node["phase"] in FULFILLED_PHASES and not has_hooks
        )

    def _is_skipped_by_argo(self, name: str) -> bool:
        """Return True if Argo no longer visits the task because all its dependents have
        finished."""
        dependents = (self.node(dependent) for dependent in self.order.dependents[name])
        return name not in self.targets and all(
            node and node["phase"] in FULFILLED_PHASES for node in dependents
        )

    def _may_start(self, name: str, task: Task) -> bool:
        """Return True if the `depends` of a task is true. If `depends` is false or invalid, create
        the task's node, which is omitted or fails."""
        full_name = f"{self.name}.{name}"
        try:
            is_satisfied = self.evaluate_depends(name)
        except ExprError as error:
            self.table.create(
                full_name,
                "Skipped",
                "Error",
                task,
                self.child_options(),
                f"unable to evaluate expression: {error}",
            )

            self.connect(name, full_name)
            return False

        if is_satisfied is False:
            self.table.create(
                full_name,
                "Skipped",
                "Omitted",
                task,
                self.child_options(),
                "omitted: depends condition not met",
            )
            self.connect(name, full_name)

        return bool(is_satisfied)

    def evaluate_depends(self, name: str) -> bool | None:
        """Return the value of the task's `depends`, or None while one of its dependencies is
        unfinished. Raises ExprError."""
        expression_scope: dict[str, Any] = {}

        for dependency in self.dependencies[name]:
            node = self.node(dependency)
            if not node or not is_fulfilled(node) or not self.table.are_hooks_completed(node):
                return None

            result_values: dict[str, bool] = {
                result: node["phase"] == phase for result, phase in PHASE_BY_RESULT.items()
            }
            if node["type"] == "TaskGroup":
                item_ids = node.get("children", [])
            else:
                item_ids = []

            phases = [
                self.table.nodes[node_id]["phase"] if node_id in self.table.nodes else ""
                for node_id in item_ids
            ]
            result_values["Daemoned"] = bool(node.get("daemoned"))
            result_values["AnySucceeded"] = "Succeeded" in phases
            result_values["AllFailed"] = bool(phases) and all(phase == "Failed" for phase in phases)
            expression_scope[f"t{len(expression_scope)}"] = result_values

        return evaluate_bool(self.depends_expressions[name], expression_scope)

    def connect(self, task_name: str, node_name: str, group_name: str | None = None) -> None:
        """Make node `node_name` a child of node `group_name` or, without a group, of the nodes
        that `task_name` depends on."""
        if group_name:
            self.table.link_child(group_name, node_name)
        elif not self.dependencies[task_name]:
            self.table.link_child(self.name, node_name)
        else:
            for dependency in self.dependencies[task_name]:
                for node_id in self.table.list_outbound_nodes(
                    self.table.ids[f"{self.name}.{dependency}"]
                ):
                    # an exit hook that could not start does not have a node
                    if node_id not in self.table.nodes:
                        return
                    self.table.link_child(self.table.nodes[node_id]["name"], node_name)

    def _run_task(self, name: str, task: Task) -> bool:
        """Start or advance a task, or all items of its loop. Return True if a limit prevents all
        new tasks from starting."""
        full_name = f"{self.name}.{name}"
        expansion = self.context.expansion(full_name)

        member_tasks = expansion.members
        if member_tasks is None:
            try:
                scope = self.scope(name)
                try:
                    resolved_task = scopes.resolve_references(scope, task, self.inputs.globals)
                except MissingValue as error:
                    self.context.blocked_reason = str(error)
                    return False

                member_tasks = expand_loop(resolved_task, scope.parameters(self.inputs.globals))
            except (TemplateError, WhenError, ValueError) as error:
                self.table.mark_error(full_name, task, self.child_options(), str(error))
                self.connect(name, full_name)
                return False

            expansion.members = member_tasks

        group_node = self.node(name) if has_loop(task) else None
        group_node = group_node if group_node and group_node["type"] == "TaskGroup" else None
        if has_loop(task) and not member_tasks:
            self.table.create(
                full_name, "Skipped", "Skipped", task, self.child_options(), "Skipped, empty params"
            )
            self.connect(name, full_name)
            return False

        if has_loop(task) and not group_node:
            group_node = self.table.create(
                full_name, "TaskGroup", "Running", task, self.child_options()
            )
            self.connect(name, full_name)

        if expansion.pending_tasks is None:
            pending_tasks = member_tasks
        else:
            pending_tasks = expansion.pending_tasks

        unfinished_tasks = []
        is_complete = None

        for index, member_task in enumerate(pending_tasks):
            is_complete = self._run_member(
                name, task, member_task, full_name if group_node else None
            )
            if is_complete is None and not self.table.orphaned_pods:
                unfinished_tasks += pending_tasks[index:]
                break

            unfinished_tasks += [] if is_complete else [member_task]

        expansion.pending_tasks = unfinished_tasks
        if group_node and not unfinished_tasks:
            self.table.mark(
                full_name,
                _compute_loop_phase(
                    [
                        node
                        for member_task in member_tasks
                        if (node := self.node(member_task["name"]))
                    ]
                ),
            )

        return is_complete is None and not group_node and not self.node(name)

    def _run_member(
        self, name: str, task: Task, member_task: Task, group_name: str | None
    ) -> bool | None:
        """Start or advance a task, or one item of a loop. Return True if the task or item and its
        exit hook have completed, False if not, and None if Argo would stop visiting tasks at this
        point.

        As in Argo, the id of the task is added to its parent's children before the task starts. If
        the task cannot start, a child with this id is listed, but its node does not exist.
        """
        full_name = f"{self.name}.{member_task['name']}"
        options = self.child_options()

        node = self.node(member_task["name"])
        if (
            node
            and node["type"] == "Pod"
            and node["phase"] not in FULFILLED_PHASES
            and node["id"] in self.context.started_pods
        ):
            return is_fulfilled(node)

        if not node:
            self.connect(name, full_name, group_name)
            try:
                may_run = should_execute(member_task.get("when", ""))
                reason = f"when '{member_task.get('when')}' evaluated false"
            except WhenError as error:
                self.table.create(full_name, "Skipped", "Error", task, options, str(error))
                return True

            if not may_run:
                self.table.create(full_name, "Skipped", "Skipped", task, options, reason)
                return True

        try:
            member_node = self.context.execute(
                full_name, member_task, member_task.get("arguments") or {}, options
            )
        except LimitReached:
            if node:
                return False
            return None
        except NodeTimedOut:
            return None
        except NodeError as error:
            self.table.mark(full_name, "Error", f"task '{full_name}' errored: {error}")
            return None

        if member_node["phase"] in COMPLETED_PHASES and (task.get("hooks") or task.get("onExit")):
            return self._exit_hook_completed(name, member_node) or None

        member_node = self.node(member_task["name"]) or member_node
        if member_node["type"] == "Retry" and not group_name:
            return member_node["phase"] in FULFILLED_PHASES

        return is_fulfilled(member_node)

    def _exit_hook_completed(self, name: str, node: Node) -> bool:
        """Run the exit hook of a completed task. Return True if the task has no exit hook, or if
        the hook has completed."""
        try:
            return hooks.run_exit_hook(
                self.context, self.tasks[name], node, self.scope(name), self.child_options()
            )
        except (NodeError, ValueError):
            return False

    def assess_phase(self) -> str:
        """Return the phase of the DAG, computed from the phases of its targets. A completed loop
        whose phase was not set yet gets its phase."""
        live_nodes = (self.node(self.order.names[index]) for index in self.order.live_indexes)
        if any(
            node and not is_fulfilled(node) and not self._find_group_phase(node)
            for node in live_nodes
        ):
            return "Running"

        target_phases = {self.table.id(f"{self.name}.{name}"): "" for name in self.targets}
        node_queue = [
            (node_id, "Succeeded") for node_id in self.table.nodes[self.node_id].get("children", [])
        ]
        seen_branches = set(node_queue)

        for node_id, branch_phase in node_queue:
            node = self.table.nodes.get(node_id)
            if node is None:
                return "Running"

            if not is_fulfilled(node):
                phase = self._find_group_phase(node)
                if not phase:
                    return "Running"

                self.table.mark(node["name"], phase)

            if node["phase"] in COMPLETED_PHASES:
                branch_phase = node["phase"]
            if node_id in target_phases and target_phases[node_id] not in FAILED_PHASES:
                target_phases[node_id] = branch_phase

            for child in self._next_nodes(node):
                if (child, branch_phase) not in seen_branches:
                    seen_branches.add((child, branch_phase))
                    node_queue.append((child, branch_phase))

        dag_phase = "Succeeded"
        fails_fast = self.template["dag"].get("failFast") is not False

        for name in self.targets:
            branch_phase = target_phases[self.table.id(f"{self.name}.{name}")]
            if not branch_phase:
                dag_phase = "Running"
                if not fails_fast:
                    break
            elif branch_phase in FAILED_PHASES:
                continue_on = self.tasks[name].get("continueOn") or {}
                if continue_on.get("failed" if branch_phase == "Failed" else "error"):
                    continue

                dag_phase = branch_phase
                if fails_fast:
                    break

        return dag_phase

    def _find_group_phase(self, node: Node) -> str:
        """Return the final phase of a loop if all its started items are fulfilled; "" for an
        unfinished loop and for other nodes. Items of a loop that have not started when the others
        are fulfilled will never start."""
        item_ids = node.get("children", []) if node["type"] == "TaskGroup" else []
        nodes = (self.table.nodes.get(node_id) for node_id in reversed(item_ids))
        if not item_ids or any(not item_node or not is_fulfilled(item_node) for item_node in nodes):
            return ""
        return _compute_loop_phase([self.table.nodes[node_id] for node_id in item_ids])

    def _next_nodes(self, node: Node) -> list[str]:
        """Return the ids of a node's children. The attempts of a Retry node are replaced by their
        children."""
        if node["type"] != "Retry":
            return node.get("children", [])

        next_nodes: list[str] = []
        for child in (
            self.table.nodes[node_id]
            for node_id in reversed(node.get("children", []))
            if node_id in self.table.nodes
        ):
            next_nodes += (
                [child["id"]]
                if child.get("nodeFlag", {}).get("hooked")
                else child.get("children", [])
            )

        return next_nodes


def _compute_loop_phase(nodes: list[Node]) -> str:
    """Return the phase of a loop: the last failed phase of its items' `nodes`, or Succeeded."""
    failed_phases = [node["phase"] for node in nodes if node["phase"] in FAILED_PHASES]
    if failed_phases:
        return failed_phases[-1]
    return "Succeeded"


def execute(
    context: Context, name: str, caller: Task, template: Template, options: ExecutionOptions
) -> Node:
    """Create or advance a DAG node, and return it. Raises NodeError."""
    node = context.table.get_or_create(name, "DAG", "Running", caller, template, options)
    expansion = context.expansion(name)
    dag: Dag = expansion.dag or Dag(context, name, template, options)
    expansion.dag = dag
    dag.order.walk(dag.visit, lambda task: dag.connect(task, f"{name}.{task}"))

    if node["phase"] in FULFILLED_PHASES:
        return node

    is_stopped = context.shutdown and not options.on_exit
    if is_stopped and all(
        context.table.are_hooks_completed(target_node)
        for target_name in dag.targets
        if (target_node := dag.node(target_name))
    ):
        phase = "Failed"
    else:
        phase = dag.assess_phase()

    if phase == "Running":
        return node

    if phase == "Succeeded":
        try:
            scope = scopes.template_scope(context.status, template)
            for task in dag.tasks:
                task_node = dag.node(task)
                if task_node:
                    dag.add_to_scope(scope, task, task_node)
                    context.inputs.export(task_node.get("outputs") or {})

            outputs = scopes.resolve_outputs(template, scope)
        except ValueError as error:
            raise NodeError(str(error)) from None

        if outputs:
            # The outputs of the DAG are not exported here, because a DAG may be a task of another
            # DAG, which exports them together with the outputs of its other tasks.
            node["outputs"] = outputs

        admission.try_save_outputs(context, node)

    # as in Argo, this field is missing if the DAG's outputs cannot be resolved
    node["outboundNodes"] = [
        outbound_id
        for target_name in dag.targets
        if (target_node := dag.node(target_name))
        for outbound_id in context.table.list_outbound_nodes(target_node["id"])
    ]
    return context.table.mark(name, phase)
