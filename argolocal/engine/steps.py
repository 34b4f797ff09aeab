"""Steps templates: groups run in sequence, the steps of a group in parallel.

A group completes when all its steps have. A group in phase Failed or Error fails the template, unless `continueOn`
allows it; the template's phase is Failed in both cases. Source: Argo's steps.go.
"""

from argolocal.engine import admission, hooks
from argolocal.engine import scope as scopes
from argolocal.engine.context import Context
from argolocal.engine.dag import resolve_references
from argolocal.engine.nodes import Crashed, NodeError, Options, Parallel, TimedOut, fulfilled
from argolocal.language.govaluate import WhenError, should_execute
from argolocal.language.substitute import Missing, TemplateError
from argolocal.manifest.kinds import FAILED, FULFILLED
from argolocal.manifest.loops import expand, has_loop
from argolocal.manifest.types import Node, Task, Template


def execute(context: Context, name: str, caller: Task, template: Template, options: Options) -> Node:
    """Advance a steps node."""
    node = context.table.get_or_create(name, "Steps", "Running", caller, template, options)
    expansion = context.expansion(name)
    scope = expansion.scope = expansion.scope or scopes.Scope()
    scope |= scopes.template_scope(context.status, template)
    inner = Options(node["id"], options.on_exit, "steps")
    complete = expansion.complete_groups
    group, previous = node, f"{name}[{complete - 1}]" if complete else ""
    for index, steps in enumerate(template["steps"][complete:], complete):
        group_name = f"{name}[{index}]"
        if not (group := context.table.get(group_name)):
            group = context.table.create(group_name, "StepGroup", "Running", {}, inner)
            _connect(context, name, previous, group_name)
        previous = group_name
        is_fulfilled = group["phase"] in FULFILLED and _children_fulfilled(context, group)
        if not is_fulfilled and Group(context, group_name, scope, inner).run(steps):
            return group
        if node["phase"] in FULFILLED:  # failFast ended the template
            return node
        if group["phase"] not in FULFILLED:
            return node
        if group["phase"] in FAILED:
            node["outboundNodes"] = _outbound(context, group)
            return context.table.mark(name, "Failed", group.get("message", ""))
        try:
            for step in steps:
                _add(context, scope, group, step, inner)
        except ValueError as error:
            raise NodeError(str(error)) from None
        expansion.complete_groups = index + 1
    group = context.nodes[context.table.ids[previous]] if previous else node
    node["outboundNodes"] = _outbound(context, group)
    if outputs := scopes.resolve_outputs(template, scope):
        node["outputs"] = outputs
        context.inputs.export(outputs)
    admission.try_save_outputs(context, node)
    return context.table.mark(name, "Succeeded")


def _children_fulfilled(context: Context, node: Node) -> bool:
    """Return True if all leaf descendants of a node are fulfilled (Argo's childrenFulfilled)."""
    children = node.get("children", [])
    return all(_children_fulfilled(context, context.nodes[id]) for id in children if id in context.nodes) and (
        bool(children) or fulfilled(node)
    )


def _connect(context: Context, name: str, previous: str, group: str) -> None:
    if not previous:
        context.table.child(name, group)
        return
    previous_node = context.nodes[context.table.ids[previous]]
    if not previous_node.get("children"):
        context.table.child(previous, group)
    for child in previous_node.get("children", []):
        for out in context.table.outbound(child):
            if out not in context.nodes:
                raise Crashed(f"could not obtain the out noden name for {out}")
            context.table.child(context.nodes[out]["name"], group)


def _outbound(context: Context, group: Node) -> list[str]:
    return [out for child in group.get("children", []) for out in context.table.outbound(child)]


def _add(context: Context, scope: scopes.Scope, group: Node, step: Task, options: Options) -> None:
    """Add a completed step to the scope of later groups."""
    name = f"{group['name']}.{step['name']}"
    node = context.table.get(name)
    if node:
        scopes.add_node(context.table, scope, "steps", step["name"], node)
        scopes.add_skipped(scope, "steps", step["name"], node, context.inputs.template(step), artifacts=True)
        return
    children = (context.nodes[id] for id in group.get("children", []))
    items = [child for child in children if child["name"].startswith(name + "(") and child["type"] != "Skipped"]
    if items:
        scopes.check_named(step)
    scopes.aggregate(scope, "steps", step["name"], items)
    scopes.add_node(context.table, scope, "steps", step["name"], group)


class Group:
    """One group of parallel steps."""

    def __init__(self, context: Context, name: str, scope: scopes.Scope, options: Options) -> None:
        self.context, self.name, self.scope, self.options = context, name, scope, options
        self.table, self.inputs = context.table, context.inputs

    def run(self, steps: list[Task]) -> bool:
        """Advance the group and mark it when it completes. Return True if an exit hook could not run."""
        expanded = self._expand_steps(steps)
        if expanded is None:
            return False
        expansion = self.context.expansion(self.name)
        pending, unfinished = expanded if expansion.pending is None else expansion.pending, []
        for index, step in enumerate(pending):
            name = f"{self.name}.{step['name']}"
            node = self.table.get(name)
            if not node:
                try:
                    if not should_execute(step.get("when", "")):
                        reason = f"when '{step['when']}' evaluated false"
                        self.table.create(name, "Skipped", "Skipped", step, self.options, reason)
                        self.table.child(self.name, name)
                        continue
                except WhenError as error:
                    self.table.create(name, "Skipped", "Error", step, self.options, str(error))
                    self.table.child(self.name, name)
                    self.table.mark(self.name, "Error", str(error))
                    return False
            try:
                self.context.execute(name, step, step.get("arguments") or {}, self.options)
            except Parallel:
                if not node and not self.table.orphaned:  # a limit: the following steps have not started either
                    unfinished += pending[index:]
                    break
            except TimedOut as error:
                self.table.mark(self.name, "Failed", str(error))
                return False
            except NodeError as error:
                self.table.child(self.name, name)
                self.table.mark(self.name, "Error", f"step group deemed errored due to child {name} error: {error}")
                return False
            if node := self.table.get(name):
                self.table.child(self.name, name)
            unfinished += [] if node and fulfilled(node) else [step]
        expansion.pending = unfinished
        if not unfinished or any(step.get("hooks") or step.get("onExit") for step in steps):
            return self._assess({f"{self.name}.{step['name']}": step for step in expanded})
        return False

    def _expand_steps(self, steps: list[Task]) -> list[Task] | None:
        expansion = self.context.expansion(self.name)
        if expansion.members is not None:
            return expansion.members
        expanded: list[Task] = []
        resolved, missing = list[Task](), ""
        try:
            for step in steps:
                try:
                    resolved.append(resolve_references(self.context, step, self.scope, scopes.UNRESOLVED))
                except Missing as error:  # Argo retries this until another step's error comes first
                    missing = str(error)
                except (TemplateError, WhenError) as error:
                    raise TemplateError(f"failed to resolve references: {error}") from None
            if missing:
                self.context.blocked_reason = missing
                return None
            for step in resolved:
                items = expand(step, self.scope.parameters(self.inputs.globals))
                if has_loop(step) and not items:
                    name = f"{self.name}.{step['name']}"
                    self.table.create(name, "Skipped", "Skipped", step, self.options, "Skipped, empty params")
                    self.table.child(self.name, name)
                expanded += items
        except (TemplateError, WhenError, ValueError) as error:
            self.table.mark(self.name, "Error", str(error))
            return None
        expansion.members = expanded
        return expanded

    def _assess(self, steps: dict[str, Task]) -> bool:
        complete = True
        group = self.table.nodes[self.table.ids[self.name]]
        children = [self.table.nodes[id] for id in group.get("children", [])]
        for node in children:
            step: Task = steps.get(node["name"], {}) if node["type"] != "Skipped" else {}
            hooked = step.get("hooks") or step.get("onExit")
            try:
                if hooked and not hooks.run_conditional(self.context, step, node, self.scope, self.options):
                    return False
            except NodeError as error:
                self.table.mark(self.name, "Error", str(error))
                return False
            try:
                if not fulfilled(node):
                    complete = False
                elif hooked:
                    complete &= hooks.run_exit(self.context, step, node, self.scope, self.options)
            except NodeError as error:
                self.table.mark(self.name, "Error", str(error))
                return True
        if not complete:
            self.table.mark(self.name, "Running")
            return False
        for node in children:
            step = steps.get(node["name"], {})
            continue_on = step.get("continueOn") or {}
            allowed = continue_on.get("failed") if node["phase"] == "Failed" else continue_on.get("error")
            if node["phase"] in FAILED and not allowed:
                self.table.mark(self.name, "Failed", f"child '{node['id']}' failed")
                return False
        self.table.mark(self.name, "Succeeded")
        return False
