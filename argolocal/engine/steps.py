"""Execute steps templates: the groups run one after another, and the steps of a group in parallel.

A group completes when all its steps have completed. If a group ends in phase Failed or Error, the
template becomes Failed, unless `continueOn` allows this. Source: Argo's steps.go.
"""

from argolocal.engine import admission, hooks
from argolocal.engine import scope as scopes
from argolocal.engine.context import Context
from argolocal.engine.dag import resolve_references
from argolocal.engine.nodes import (
    ControllerCrash,
    LimitReached,
    NodeError,
    Options,
    TimedOut,
    is_fulfilled,
)
from argolocal.language.govaluate import WhenError, should_execute
from argolocal.language.substitute import Missing, TemplateError
from argolocal.manifest.allowed_values import FAILED, FULFILLED
from argolocal.manifest.loops import expand, has_loop
from argolocal.manifest.types import Node, Task, Template


def execute(
    context: Context, name: str, caller: Task, template: Template, options: Options
) -> Node:
    """Advance a steps node."""
    node = context.table.get_or_create(name, "Steps", "Running", caller, template, options)
    expansion = context.expansion(name)
    scope = expansion.scope = expansion.scope or scopes.Scope()
    scope.update(scopes.template_scope(context.status, template))
    step_options = Options(node["id"], options.on_exit, "steps")
    complete_groups = expansion.complete_groups
    group = node

    if complete_groups:
        previous_group_name = f"{name}[{complete_groups - 1}]"
    else:
        previous_group_name = ""

    for index, steps in enumerate(template["steps"][complete_groups:], complete_groups):
        group_name = f"{name}[{index}]"
        group = context.table.get(group_name)
        if not group:
            group = context.table.create(group_name, "StepGroup", "Running", {}, step_options)
            _connect_group(context, name, previous_group_name, group_name)

        previous_group_name = group_name
        is_done = group["phase"] in FULFILLED and _children_fulfilled(context, group)
        if not is_done and Group(context, group_name, scope, step_options).run(steps):
            return group
        if node["phase"] in FULFILLED:  # failFast ended the template
            return node
        if group["phase"] not in FULFILLED:
            return node

        if group["phase"] in FAILED:
            node["outboundNodes"] = _outbound_nodes(context, group)
            return context.table.mark(name, "Failed", group.get("message", ""))

        try:
            for step in steps:
                _add_step_outputs(context, scope, group, step, step_options)
        except ValueError as error:
            raise NodeError(str(error)) from None

        expansion.complete_groups = index + 1

    if previous_group_name:
        group = context.nodes[context.table.ids[previous_group_name]]
    else:
        group = node

    node["outboundNodes"] = _outbound_nodes(context, group)
    outputs = scopes.resolve_outputs(template, scope)
    if outputs:
        node["outputs"] = outputs
        context.inputs.export(outputs)

    admission.try_save_outputs(context, node)
    return context.table.mark(name, "Succeeded")


def _children_fulfilled(context: Context, node: Node) -> bool:
    """Return True if all leaf descendants of a node are fulfilled (Argo's childrenFulfilled)."""
    children = node.get("children", [])
    return all(
        _children_fulfilled(context, context.nodes[id]) for id in children if id in context.nodes
    ) and (bool(children) or is_fulfilled(node))


def _connect_group(context: Context, name: str, previous_group_name: str, group: str) -> None:
    if not previous_group_name:
        context.table.link_child(name, group)
        return
    previous_node = context.nodes[context.table.ids[previous_group_name]]
    if not previous_node.get("children"):
        context.table.link_child(previous_group_name, group)
    for child in previous_node.get("children", []):
        for out in context.table.outbound_nodes(child):
            if out not in context.nodes:
                raise ControllerCrash(f"could not obtain the out noden name for {out}")
            context.table.link_child(context.nodes[out]["name"], group)


def _outbound_nodes(context: Context, group: Node) -> list[str]:
    return [
        out for child in group.get("children", []) for out in context.table.outbound_nodes(child)
    ]


def _add_step_outputs(
    context: Context, scope: scopes.Scope, group: Node, step: Task, options: Options
) -> None:
    """Add the outputs of a completed step to the scope of later groups."""
    name = f"{group['name']}.{step['name']}"

    node = context.table.get(name)
    if node:
        scopes.add_node(context.table, scope, "steps", step["name"], node)
        scopes.add_skipped_outputs(
            scope, "steps", step["name"], node, context.inputs.template(step), artifacts=True
        )
        return

    children = (context.nodes[id] for id in group.get("children", []))
    items = [
        child
        for child in children
        if child["name"].startswith(name + "(") and child["type"] != "Skipped"
    ]
    if items:
        scopes.reject_inline_template(step)

    scopes.add_loop_outputs(scope, "steps", step["name"], items)
    scopes.add_node(context.table, scope, "steps", step["name"], group)


class Group:
    """One group of parallel steps."""

    def __init__(self, context: Context, name: str, scope: scopes.Scope, options: Options) -> None:
        self.context = context
        self.name = name
        self.scope = scope
        self.options = options
        self.table = context.table
        self.inputs = context.inputs

    def run(self, steps: list[Task]) -> bool:
        """Advance the group, and mark it when it completes. Return True if the template is blocked,
        because an exit hook could not run."""
        expanded_steps = self._expand_steps(steps)
        if expanded_steps is None:
            return False

        expansion = self.context.expansion(self.name)
        if expansion.pending_members is None:
            pending_steps = expanded_steps
        else:
            pending_steps = expansion.pending_members

        unfinished_steps = []
        for index, step in enumerate(pending_steps):
            name = f"{self.name}.{step['name']}"
            node = self.table.get(name)
            if not node:
                try:
                    if not should_execute(step.get("when", "")):
                        reason = f"when '{step['when']}' evaluated false"
                        self.table.create(name, "Skipped", "Skipped", step, self.options, reason)
                        self.table.link_child(self.name, name)
                        continue
                except WhenError as error:
                    self.table.create(name, "Skipped", "Error", step, self.options, str(error))
                    self.table.link_child(self.name, name)
                    self.table.mark(self.name, "Error", str(error))

                    return False

            try:
                self.context.execute(name, step, step.get("arguments") or {}, self.options)
            except LimitReached:
                # a limit is reached, which also blocks the following steps
                if not node and not self.table.orphaned_pods:
                    unfinished_steps += pending_steps[index:]
                    break
            except TimedOut as error:
                self.table.mark(self.name, "Failed", str(error))
                return False
            except NodeError as error:
                self.table.link_child(self.name, name)
                self.table.mark(
                    self.name,
                    "Error",
                    f"step group deemed errored due to child {name} error: {error}",
                )
                return False

            node = self.table.get(name)
            if node:
                self.table.link_child(self.name, name)

            unfinished_steps += [] if node and is_fulfilled(node) else [step]

        expansion.pending_members = unfinished_steps
        if not unfinished_steps or any(step.get("hooks") or step.get("onExit") for step in steps):
            return self._assess({f"{self.name}.{step['name']}": step for step in expanded_steps})

        return False

    def _expand_steps(self, steps: list[Task]) -> list[Task] | None:
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
                        resolve_references(self.context, step, self.scope, scopes.UNRESOLVED_PREFIX)
                    )
                # Argo tries to resolve this step again in each pass, until another step fails
                except Missing as error:
                    missing_message = str(error)
                except (TemplateError, WhenError) as error:
                    raise TemplateError(f"failed to resolve references: {error}") from None

            if missing_message:
                self.context.blocked_reason = missing_message
                return None

            for step in resolved_steps:
                items = expand(step, self.scope.parameters(self.inputs.globals))
                if has_loop(step) and not items:
                    name = f"{self.name}.{step['name']}"
                    self.table.create(
                        name, "Skipped", "Skipped", step, self.options, "Skipped, empty params"
                    )
                    self.table.link_child(self.name, name)

                expanded_steps += items
        except (TemplateError, WhenError, ValueError) as error:
            self.table.mark(self.name, "Error", str(error))
            return None

        expansion.members = expanded_steps
        return expanded_steps

    def _assess(self, steps: dict[str, Task]) -> bool:
        all_completed = True
        group = self.table.nodes[self.table.ids[self.name]]

        children = [self.table.nodes[id] for id in group.get("children", [])]
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

            if node["phase"] in FAILED and not is_allowed:
                self.table.mark(self.name, "Failed", f"child '{node['id']}' failed")
                return False

        self.table.mark(self.name, "Succeeded")
        return False
