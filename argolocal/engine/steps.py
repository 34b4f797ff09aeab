"""Execute steps templates: the groups run one after another, and the steps of a group in parallel.

A group of steps completes when all its steps have completed. A failed step fails its group and the
template, unless the step's `continueOn` accepts the failure. Source: Argo's steps.go.
"""

from argolocal.engine import admission, hooks
from argolocal.engine import scope as scopes
from argolocal.engine.context import Context
from argolocal.engine.nodes import (
    ControllerCrash,
    ExecutionOptions,
    LimitReached,
    NodeError,
    NodeTimedOut,
    is_fulfilled,
)
from argolocal.language.govaluate import WhenError, should_execute
from argolocal.language.substitute import MissingValue, TemplateError
from argolocal.manifest.allowed_values import FAILED_PHASES, FULFILLED_PHASES
from argolocal.manifest.loops import expand_loop, has_loop
from argolocal.manifest.types import Node, Task, Template


def execute(
    context: Context, name: str, caller: Task, template: Template, options: ExecutionOptions
) -> Node:
    """Create or advance a steps node. Return the node of the steps template, or the node of a group
    whose exit hook could not run. Raises NodeError."""
    node = context.table.get_or_create(name, "Steps", "Running", caller, template, options)
    expansion = context.expansion(name)
    scope = expansion.scope = expansion.scope or scopes.Scope()
    scope.update(scopes.template_scope(context.status, template))
    step_options = ExecutionOptions(node["id"], options.on_exit, "steps")
    completed_group_count = expansion.completed_group_count
    group_node = node

    if completed_group_count:
        previous_group_name = f"{name}[{completed_group_count - 1}]"
    else:
        previous_group_name = ""

    for index, group_steps in enumerate(
        template["steps"][completed_group_count:], completed_group_count
    ):
        group_name = f"{name}[{index}]"
        group_node = context.table.get(group_name)
        if not group_node:
            group_node = context.table.create(group_name, "StepGroup", "Running", {}, step_options)
            _connect_group(context, name, previous_group_name, group_name)

        previous_group_name = group_name
        is_group_done = group_node["phase"] in FULFILLED_PHASES and _children_fulfilled(
            context, group_node
        )
        if not is_group_done:
            is_blocked = Group(context, group_name, scope, step_options).run(group_steps)
            if is_blocked:
                return group_node

        # the option `failFast` may have ended the template
        if node["phase"] in FULFILLED_PHASES:
            return node
        if group_node["phase"] not in FULFILLED_PHASES:
            return node

        if group_node["phase"] in FAILED_PHASES:
            node["outboundNodes"] = _outbound_nodes(context, group_node)
            return context.table.mark(name, "Failed", group_node.get("message", ""))

        try:
            for step in group_steps:
                _add_step_outputs(context, scope, group_node, step, step_options)
        except ValueError as error:
            raise NodeError(str(error)) from None

        expansion.completed_group_count = index + 1

    if previous_group_name:
        group_node = context.nodes[context.table.ids[previous_group_name]]
    else:
        group_node = node

    node["outboundNodes"] = _outbound_nodes(context, group_node)
    outputs = scopes.resolve_outputs(template, scope)
    if outputs:
        node["outputs"] = outputs
        context.inputs.export(outputs)

    admission.try_save_outputs(context, node)
    return context.table.mark(name, "Succeeded")


def _children_fulfilled(context: Context, node: Node) -> bool:
    """Return True if all descendants of a node that do not have children are fulfilled (Argo's
    childrenFulfilled)."""
    child_ids = node.get("children", [])
    return all(
        _children_fulfilled(context, context.nodes[node_id])
        for node_id in child_ids
        if node_id in context.nodes
    ) and (bool(child_ids) or is_fulfilled(node))


def _connect_group(context: Context, name: str, previous_group_name: str, group_name: str) -> None:
    """Make a group a child of the last nodes of the previous group, or of node `name` if it is the
    first group. Raises ControllerCrash."""
    if not previous_group_name:
        context.table.link_child(name, group_name)
        return
    previous_node = context.nodes[context.table.ids[previous_group_name]]
    if not previous_node.get("children"):
        context.table.link_child(previous_group_name, group_name)
    for child_id in previous_node.get("children", []):
        for outbound_id in context.table.list_outbound_nodes(child_id):
            if outbound_id not in context.nodes:
                raise ControllerCrash(f"could not obtain the out noden name for {outbound_id}")
            context.table.link_child(context.nodes[outbound_id]["name"], group_name)


def _outbound_nodes(context: Context, group_node: Node) -> list[str]:
    """Return the ids of the outbound nodes of all steps of a group."""
    return [
        outbound_id
        for child_id in group_node.get("children", [])
        for outbound_id in context.table.list_outbound_nodes(child_id)
    ]


def _add_step_outputs(
    context: Context, scope: scopes.Scope, group_node: Node, step: Task, options: ExecutionOptions
) -> None:
    """Add the outputs of a completed step to the scope of later step groups."""
    node_name = f"{group_node['name']}.{step['name']}"

    node = context.table.get(node_name)
    if node:
        scopes.add_node_tags(context.table, scope, "steps", step["name"], node)
        scopes.add_skipped_outputs(
            scope,
            "steps",
            step["name"],
            node,
            context.inputs.template(step),
            includes_artifacts=True,
        )
        return

    children = (context.nodes[node_id] for node_id in group_node.get("children", []))
    item_nodes = [
        child
        for child in children
        if child["name"].startswith(node_name + "(") and child["type"] != "Skipped"
    ]
    if item_nodes:
        scopes.reject_inline_template(step)

    scopes.add_loop_outputs(scope, "steps", step["name"], item_nodes)
    scopes.add_node_tags(context.table, scope, "steps", step["name"], group_node)


class Group:
    """One group of parallel steps."""

    def __init__(
        self, context: Context, name: str, scope: scopes.Scope, options: ExecutionOptions
    ) -> None:
        self.context = context
        self.name = name
        self.scope = scope
        self.options = options
        self.table = context.table
        self.inputs = context.inputs

    def run(self, steps: list[Task]) -> bool:
        """Advance the group, and mark it when it completes. Return True if the steps template
        cannot continue now, because an exit hook could not run."""
        expanded_steps = self._expand_steps(steps)
        if expanded_steps is None:
            return False

        expansion = self.context.expansion(self.name)
        if expansion.pending_tasks is None:
            pending_steps = expanded_steps
        else:
            pending_steps = expansion.pending_tasks

        unfinished_steps = []
        for index, step in enumerate(pending_steps):
            node_name = f"{self.name}.{step['name']}"
            node = self.table.get(node_name)
            if not node:
                try:
                    if not should_execute(step.get("when", "")):
                        reason = f"when '{step['when']}' evaluated false"
                        self.table.create(
                            node_name, "Skipped", "Skipped", step, self.options, reason
                        )
                        self.table.link_child(self.name, node_name)
                        continue
                except WhenError as error:
                    self.table.create(node_name, "Skipped", "Error", step, self.options, str(error))
                    self.table.link_child(self.name, node_name)
                    self.table.mark(self.name, "Error", str(error))

                    return False

            try:
                self.context.execute(node_name, step, step.get("arguments") or {}, self.options)
            except LimitReached:
                # the limit that prevents this step from starting also prevents the following steps
                # from starting
                if not node and not self.table.orphaned_pods:
                    unfinished_steps += pending_steps[index:]
                    break
            except NodeTimedOut as error:
                self.table.mark(self.name, "Failed", str(error))
                return False
            except NodeError as error:
                self.table.link_child(self.name, node_name)
                self.table.mark(
                    self.name,
                    "Error",
                    f"step group deemed errored due to child {node_name} error: {error}",
                )
                return False

            node = self.table.get(node_name)
            if node:
                self.table.link_child(self.name, node_name)

            unfinished_steps += [] if node and is_fulfilled(node) else [step]

        expansion.pending_tasks = unfinished_steps
        if not unfinished_steps or any(step.get("hooks") or step.get("onExit") for step in steps):
            return self._assess_phase(
                {f"{self.name}.{step['name']}": step for step in expanded_steps}
            )

        return False

    def _expand_steps(self, steps: list[Task]) -> list[Task] | None:
        """Return the steps with their tags replaced, and each loop replaced by its items. Return
        None if a tag does not have a value yet, or after an error, which fails the group."""
        expansion = self.context.expansion(self.name)
        if expansion.members is not None:
            return expansion.members

        expanded_steps: list[Task] = []
        resolved_steps = list[Task]()
        missing_message = ""

        try:
            for step in steps:
                try:
                    resolved_steps.append(
                        scopes.resolve_references(
                            self.scope, step, self.inputs.globals, scopes.UNRESOLVED_PREFIX
                        )
                    )
                # Argo tries to resolve this step again in each pass, until another step fails
                except MissingValue as error:
                    missing_message = str(error)
                except (TemplateError, WhenError) as error:
                    raise TemplateError(f"failed to resolve references: {error}") from None

            if missing_message:
                self.context.blocked_reason = missing_message
                return None

            for step in resolved_steps:
                expanded_items = expand_loop(step, self.scope.parameters(self.inputs.globals))
                if has_loop(step) and not expanded_items:
                    node_name = f"{self.name}.{step['name']}"
                    self.table.create(
                        node_name, "Skipped", "Skipped", step, self.options, "Skipped, empty params"
                    )
                    self.table.link_child(self.name, node_name)

                expanded_steps += expanded_items
        except (TemplateError, WhenError, ValueError) as error:
            self.table.mark(self.name, "Error", str(error))
            return None

        expansion.members = expanded_steps
        return expanded_steps

    def _assess_phase(self, steps: dict[str, Task]) -> bool:
        all_completed = True
        group_node = self.table.nodes[self.table.ids[self.name]]

        children = [self.table.nodes[node_id] for node_id in group_node.get("children", [])]
        for node in children:
            step: Task = steps.get(node["name"], {}) if node["type"] != "Skipped" else {}
            has_hooks = step.get("hooks") or step.get("onExit")

            try:
                if has_hooks and not hooks.run_conditional_hooks(
                    self.context, step, node, self.scope, self.options
                ):
                    return False
            except NodeError as error:
                self.table.mark(self.name, "Error", str(error))
                return False

            try:
                if not is_fulfilled(node):
                    all_completed = False
                elif has_hooks:
                    all_completed &= hooks.run_exit_hook(
                        self.context, step, node, self.scope, self.options
                    )
            except NodeError as error:
                self.table.mark(self.name, "Error", str(error))
                return True

        if not all_completed:
            self.table.mark(self.name, "Running")
            return False

        for node in children:
            step = steps.get(node["name"], {})
            continue_on = step.get("continueOn") or {}
            if node["phase"] == "Failed":
                is_allowed = continue_on.get("failed")
            else:
                is_allowed = continue_on.get("error")

            if node["phase"] in FAILED_PHASES and not is_allowed:
                self.table.mark(self.name, "Failed", f"child '{node['id']}' failed")
                return False

        self.table.mark(self.name, "Succeeded")
        return False
