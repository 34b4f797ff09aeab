"""Execute DAG templates: start tasks, collect the values of their tags, and determine the DAG's
phase.

In `depends`, the plain task name `A` means `(A.Succeeded || A.Skipped || A.Daemoned)`, so it is
false for an omitted task. The phase of a DAG follows from the phases of its targets (by default its
leaves); an omitted task has the phase of its parents here. Source: Argo's dag.go (assessDAGPhase)
and common/ancestry.go.
"""

import re
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine import admission, hooks
from argolocal.engine import scope as scopes
from argolocal.engine.context import Context
from argolocal.engine.nodes import LimitReached, NodeError, Options, TimedOut, is_fulfilled
from argolocal.engine.order import (
    BLOCKED_BY_LIMIT,
    Order,
    VisitResult,
    parse_dependencies,
    with_ancestors,
)
from argolocal.language.expr import evaluate_bool
from argolocal.language.functions import ExprError
from argolocal.language.govaluate import WhenError, should_execute
from argolocal.language.substitute import STEP_OUTPUTS, Missing, TemplateError, substitute
from argolocal.manifest.allowed_values import COMPLETED, FAILED, FULFILLED
from argolocal.manifest.loops import expand, has_loop
from argolocal.manifest.types import Node, Task, Template

WORD = re.compile(r"[-a-zA-Z0-9_]+")
PHASE_OF_RESULT = {
    "Succeeded": "Succeeded",
    "Failed": "Failed",
    "Errored": "Error",
    "Skipped": "Skipped",
    "Omitted": "Omitted",
}


class Dag:
    """The execution of one DAG template, which has one node."""

    def __init__(self, context: Context, name: str, template: Template, options: Options) -> None:
        self.context = context
        self.name = name
        self.template = template
        self.on_exit = options.on_exit
        self.table = context.table
        self.inputs = context.inputs
        self.boundary = context.table.ids[name]
        self.tasks = {task["name"]: task for task in template["dag"]["tasks"]}
        self.needs = {}  # name of a task → names of its dependencies
        self.conditions = {}  # name of a task → its `depends` as an expression

        for name, task in self.tasks.items():
            self.needs[name], self.conditions[name] = parse_dependencies(task, self.tasks)

        needed_tasks = {name for names in self.needs.values() for name in names}
        target = template["dag"].get("target")
        self.targets = target.split(" ") if target else sorted(set(self.tasks) - needed_tasks)

        unknown_targets = [target for target in self.targets if target not in self.tasks]
        if unknown_targets:
            raise NodeError(f"target {unknown_targets[0]} does not exist")

        self.looping_tasks = {name for name, task in self.tasks.items() if has_loop(task)}
        # name of a task → names of the ancestors that its fields may reference
        self.visible_ancestors: dict[str, list[str]] = {}
        eager_tasks = self.looping_tasks | {
            name for name, task in self.tasks.items() if task.get("when")
        }
        self.order = Order(self.targets, self.needs, eager_tasks)

    def node(self, task: str) -> Node | None:
        return self.table.get(f"{self.name}.{task}")

    def options(self) -> Options:
        return Options(self.boundary, self.on_exit, "tasks")

    def scope(self, task: str) -> scopes.Scope:
        """Return the scope of `task`, with tags of its ancestors. Raises ValueError if a loop's
        result is not JSON."""
        scope = scopes.template_scope(self.context.status, self.template)
        if task not in self.visible_ancestors:
            self.visible_ancestors[task] = self._visible_ancestors(task)

        for name in self.visible_ancestors[task]:
            node = self.node(name)
            if node is None:
                raise ValueError(f"Ancestor task node {name} not found")
            if node["type"] == "TaskGroup":
                scopes.reject_inline_template(self.tasks[name])

            self.add_to_scope(scope, name, node)

        return scope

    def _visible_ancestors(self, task: str) -> list[str]:
        text = to_json(self.tasks[task])
        ancestors = self.looping_tasks | self.tasks.keys() & set(WORD.findall(text))
        if "{{=" in text or "xpression" in text:
            # an expression may compute the name of a task, so all tasks must be in scope, so all
            # tasks must be in scope
            ancestors = self.tasks.keys()
        ancestors = ancestors - {task}
        if not ancestors <= set(self.needs[task]):
            ancestors = ancestors & set(with_ancestors([task], self.needs))
        return sorted(ancestors)

    def add_to_scope(self, scope: scopes.Scope, name: str, node: Node) -> None:
        """Add the node and the outputs of the task `name` to a scope."""
        if node["type"] == "TaskGroup":
            children = (
                self.table.nodes[id] for id in node.get("children", []) if id in self.table.nodes
            )
            scopes.add_loop_outputs(
                scope,
                "tasks",
                name,
                [child for child in children if child["name"].startswith(node["name"] + "(")],
            )

        scopes.add_node(self.table, scope, "tasks", name, node)
        scopes.add_skipped_outputs(
            scope, "tasks", name, node, self.inputs.template(self.tasks[name]), artifacts=False
        )

    def visit(self, name: str) -> VisitResult:
        """Advance a task as far as possible, and return its VisitResult.

        Raises NodeError, which fails the whole DAG, if a target cannot read a loop's outputs or a
        target's hook fails.
        """
        state = self._visit(name)

        task = self.tasks[name]
        if (
            name in self.targets
            and (self.looping_tasks or task.get("hooks"))
            and (node := self.node(name))
        ):
            try:
                # run the hooks again, because `_visit` ran them before the task completed
                hooks.run_conditional_hooks(
                    self.context, task, node, self.scope(name), self.options()
                )
            except (NodeError, ValueError) as error:
                self.table.mark(self.name, "Error", str(error))
                raise NodeError(str(error)) from None

        return state

    def _visit(self, name: str) -> VisitResult:
        node = self.node(name)
        task = self.tasks[name]

        has_hooks = bool(task.get("hooks") or task.get("onExit"))
        if node and has_hooks and node["phase"] in FULFILLED and self._is_skipped_by_argo(name):
            return True, True

        if node and has_hooks and node["phase"] != "Pending":
            try:
                if not hooks.run_conditional_hooks(
                    self.context, task, node, self.scope(name), self.options()
                ):
                    return False, False
            except (NodeError, ValueError) as error:
                self.table.mark(node["name"], "Error", str(error))

        if node and node["phase"] in FULFILLED:
            self.context.deferred_releases.discard(node["id"])
            # run the exit hook before `hooks_completed`, which also waits for the exit hook
            completed = not has_hooks or self._exit_hook_completed(name, node)
            return self.table.hooks_completed(node), completed

        if not (node and node["type"] == "Pod" and node["id"] in self.context.started):
            if not node and self.conditions[name] and not self._may_start(name, task):
                node = self.node(name)
                return node is not None, node is not None

            if self._run(name, task):
                if self.table.orphaned_pods:
                    return (False, False)
                return BLOCKED_BY_LIMIT

            node = self.node(name)

        dependents_may_start = bool(
            node and is_fulfilled(node) and self.table.hooks_completed(node)
        )
        return dependents_may_start, bool(node and node["phase"] in FULFILLED and not has_hooks)

    def _is_skipped_by_argo(self, name: str) -> bool:
        """Return True if Argo no longer visits the task because all its dependents have
        finished."""
        dependents = (self.node(dependent) for dependent in self.order.dependents[name])
        return name not in self.targets and all(
            node and node["phase"] in FULFILLED for node in dependents
        )

    def _may_start(self, name: str, task: Task) -> bool:
        full_name = f"{self.name}.{name}"
        try:
            is_satisfied = self.evaluate_depends(name)
        except ExprError as error:
            self.table.create(
                full_name,
                "Skipped",
                "Error",
                task,
                self.options(),
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
                self.options(),
                "omitted: depends condition not met",
            )
            self.connect(name, full_name)

        return bool(is_satisfied)

    def evaluate_depends(self, name: str) -> bool | None:
        """Return True if task `name` should run, False if not, and None while one of its
        dependencies is unfinished. Raises ExprError."""
        scope: dict[str, Any] = {}

        for dependency in self.needs[name]:
            node = self.node(dependency)
            if not node or not is_fulfilled(node) or not self.table.hooks_completed(node):
                return None

            results: dict[str, bool] = {
                result: node["phase"] == phase for result, phase in PHASE_OF_RESULT.items()
            }
            if node["type"] == "TaskGroup":
                items = node.get("children", [])
            else:
                items = []

            phases = [
                self.table.nodes[id]["phase"] if id in self.table.nodes else "" for id in items
            ]
            results["Daemoned"] = bool(node.get("daemoned"))
            results["AnySucceeded"] = "Succeeded" in phases
            results["AllFailed"] = bool(phases) and all(phase == "Failed" for phase in phases)
            scope[f"t{len(scope)}"] = results

        return evaluate_bool(self.conditions[name], scope)

    def connect(self, task: str, name: str, group: str | None = None) -> None:
        """Make node `name` a child of node `group` or, without a group, of the nodes that `task`
        depends on."""
        if group:
            self.table.link_child(group, name)
        elif not self.needs[task]:
            self.table.link_child(self.name, name)
        else:
            for dependency in self.needs[task]:
                for id in self.table.outbound_nodes(self.table.ids[f"{self.name}.{dependency}"]):
                    if id not in self.table.nodes:  # an exit hook that could not start has no node
                        return
                    self.table.link_child(self.table.nodes[id]["name"], name)

    def _run(self, name: str, task: Task) -> bool:
        """Run a task. Return True if a limit blocks all new tasks."""
        full_name = f"{self.name}.{name}"
        expansion = self.context.expansion(full_name)

        members = expansion.members
        if members is None:
            try:
                scope = self.scope(name)
                try:
                    resolved_task = resolve_references(self.context, task, scope)
                except Missing as error:
                    self.context.blocked_reason = str(error)
                    return False

                members = expand(resolved_task, scope.parameters(self.inputs.globals))
            except (TemplateError, WhenError, ValueError) as error:
                self.table.mark_error(full_name, task, self.options(), str(error))
                self.connect(name, full_name)
                return False

            expansion.members = members

        group = self.node(name) if has_loop(task) else None
        group = group if group and group["type"] == "TaskGroup" else None
        if has_loop(task) and not members:
            self.table.create(
                full_name, "Skipped", "Skipped", task, self.options(), "Skipped, empty params"
            )
            self.connect(name, full_name)
            return False

        if has_loop(task) and not group:
            group = self.table.create(full_name, "TaskGroup", "Running", task, self.options())
            self.connect(name, full_name)

        if expansion.pending_members is None:
            pending_members = members
        else:
            pending_members = expansion.pending_members

        unfinished_members = []
        is_complete = None

        for index, member in enumerate(pending_members):
            is_complete = self._run_member(name, task, member, full_name if group else None)
            if is_complete is None and not self.table.orphaned_pods:
                unfinished_members += pending_members[index:]
                break

            unfinished_members += [] if is_complete else [member]

        expansion.pending_members = unfinished_members
        if group and not unfinished_members:
            self.table.mark(
                full_name,
                _loop_phase([node for member in members if (node := self.node(member["name"]))]),
            )

        return is_complete is None and not group and not self.node(name)

    def _run_member(self, name: str, task: Task, member: Task, group: str | None) -> bool | None:
        """Run a task, or one item of a loop. Return True if the task or item and its exit hook have
        completed, and None if Argo would stop visiting tasks here.

        As in Argo, the parent lists the child's id before the child starts, so the id of a task
        that cannot start belongs to no node.
        """
        full_name = f"{self.name}.{member['name']}"
        options = self.options()

        node = self.node(member["name"])
        if (
            node
            and node["type"] == "Pod"
            and node["phase"] not in FULFILLED
            and node["id"] in self.context.started
        ):
            return is_fulfilled(node)

        if not node:
            self.connect(name, full_name, group)
            try:
                may_run = should_execute(member.get("when", ""))
                reason = f"when '{member.get('when')}' evaluated false"
            except WhenError as error:
                self.table.create(full_name, "Skipped", "Error", task, options, str(error))
                return True

            if not may_run:
                self.table.create(full_name, "Skipped", "Skipped", task, options, reason)
                return True

        try:
            result = self.context.execute(full_name, member, member.get("arguments") or {}, options)
        except LimitReached:
            if node:
                return False
            return None
        except TimedOut:
            return None
        except NodeError as error:
            self.table.mark(full_name, "Error", f"task '{full_name}' errored: {error}")
            return None

        if result["phase"] in COMPLETED and (task.get("hooks") or task.get("onExit")):
            return self._exit_hook_completed(name, result) or None

        result = self.node(member["name"]) or result
        if result["type"] == "Retry" and not group:
            return result["phase"] in FULFILLED

        return is_fulfilled(result)

    def _exit_hook_completed(self, name: str, node: Node) -> bool:
        """Run the exit hook of a completed task. Return True if the hook has completed or does not
        exist, else False."""
        try:
            return hooks.run_exit_hook(
                self.context, self.tasks[name], node, self.scope(name), self.options()
            )
        except (NodeError, ValueError):
            return False

    def assess_phase(self) -> str:
        """Return the phase of the DAG, which follows from the phases of its targets."""
        live_nodes = (self.node(self.order.names[index]) for index in self.order.live_indexes)
        if any(
            node and not is_fulfilled(node) and not self._group_phase(node) for node in live_nodes
        ):
            return "Running"

        targets = {self.table.id(f"{self.name}.{name}"): "" for name in self.targets}
        queue = [(id, "Succeeded") for id in self.table.nodes[self.boundary].get("children", [])]
        seen_branches = set(queue)

        for id, branch_phase in queue:
            node = self.table.nodes.get(id)
            if node is None:
                return "Running"

            if not is_fulfilled(node):
                phase = self._group_phase(node)
                if not phase:
                    return "Running"

                self.table.mark(node["name"], phase)

            if node["phase"] in COMPLETED:
                branch_phase = node["phase"]
            if id in targets and targets[id] not in FAILED:
                targets[id] = branch_phase

            for child in self._next_nodes(node):
                if (child, branch_phase) not in seen_branches:
                    seen_branches.add((child, branch_phase))
                    queue.append((child, branch_phase))

        result = "Succeeded"
        fail_fast = self.template["dag"].get("failFast") is not False

        for name in self.targets:
            branch_phase = targets[self.table.id(f"{self.name}.{name}")]
            if not branch_phase:
                result = "Running"
                if not fail_fast:
                    break
            elif branch_phase in FAILED:
                continue_on = self.tasks[name].get("continueOn") or {}
                if continue_on.get("failed" if branch_phase == "Failed" else "error"):
                    continue

                result = branch_phase
                if fail_fast:
                    break

        return result

    def _group_phase(self, node: Node) -> str:
        """Return the phase of a loop whose started items are all fulfilled and whose other items
        will never start, else ""."""
        items = node.get("children", []) if node["type"] == "TaskGroup" else []
        nodes = (self.table.nodes.get(id) for id in reversed(items))
        if not items or any(not item or not is_fulfilled(item) for item in nodes):
            return ""
        return _loop_phase([self.table.nodes[id] for id in items])

    def _next_nodes(self, node: Node) -> list[str]:
        if node["type"] != "Retry":
            return node.get("children", [])

        next_nodes: list[str] = []
        for child in (
            self.table.nodes[id]
            for id in reversed(node.get("children", []))
            if id in self.table.nodes
        ):
            next_nodes += (
                [child["id"]]
                if child.get("nodeFlag", {}).get("hooked")
                else child.get("children", [])
            )

        return next_nodes


def _loop_phase(nodes: list[Node]) -> str:
    """Return the phase of a loop. `nodes`: the nodes of its items."""
    failed_phases = [node["phase"] for node in nodes if node["phase"] in FAILED]
    if failed_phases:
        return failed_phases[-1]
    return "Succeeded"


def resolve_references(
    context: Context, task: Task, scope: scopes.Scope, message_prefix: str = ""
) -> Task:
    """Return a copy of a task or step with all tags replaced, except the tags of loop items.

    Raises WhenError, and TemplateError. The message of an error about an artifact starts with
    `message_prefix`.
    """
    values = scope.parameters(context.inputs.globals)
    body = {key: value for key, value in task.items() if key != "hooks"}
    hook_fields = {"hooks": task["hooks"]} if "hooks" in task else {}

    if task.get("when"):
        when = substitute(task["when"], values, STEP_OUTPUTS)
        try:
            if not should_execute(when):
                return body | hook_fields | {"when": when}
        except WhenError:
            if not has_loop(task):
                raise

    body["arguments"] = scopes.mark_absent_arguments(scope, body.get("arguments") or {})
    body = substitute(body, values, STEP_OUTPUTS)

    artifacts = [
        scopes.resolve_artifact(scope, artifact, message_prefix)
        for artifact in body["arguments"].get("artifacts") or []
    ]
    if artifacts:
        body["arguments"] = {
            **body["arguments"],
            "artifacts": [artifact for artifact in artifacts if artifact],
        }

    return body | hook_fields


def execute(
    context: Context, name: str, caller: Task, template: Template, options: Options
) -> Node:
    """Advance a DAG node."""
    node = context.table.get_or_create(name, "DAG", "Running", caller, template, options)
    expansion = context.expansion(name)
    dag: Dag = expansion.dag or Dag(context, name, template, options)
    expansion.dag = dag
    dag.order.walk(dag.visit, lambda task: dag.connect(task, f"{name}.{task}"))

    if node["phase"] in FULFILLED:
        return node

    is_stopped = context.shutdown and not options.on_exit
    if is_stopped and all(
        context.table.hooks_completed(target_node)
        for target in dag.targets
        if (target_node := dag.node(target))
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
            # do not export the outputs here, because the enclosing DAG exports the outputs of its
            # tasks
            node["outputs"] = outputs

        admission.try_save_outputs(context, node)

    # as in Argo, this field is missing if the DAG's outputs cannot be resolved
    node["outboundNodes"] = [
        out
        for target in dag.targets
        if (target_node := dag.node(target))
        for out in context.table.outbound_nodes(target_node["id"])
    ]
    return context.table.mark(name, phase)
