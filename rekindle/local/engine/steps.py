"""Steps templates: groups one after the other, the members of a group at once.

A group ends when all its members did; one that failed (or erred: a steps template turns both into Failed) ends the
template, unless `continueOn` allows it. Source: Argo's steps.go.
"""

from typing import TYPE_CHECKING, Any

from rekindle.argo.kinds import FAILED, FULFILLED
from rekindle.argo.language.govaluate import WhenError, should_execute
from rekindle.argo.language.substitute import Missing, TemplateError
from rekindle.argo.manifest.loops import expand, loops
from rekindle.local.engine import admission, hooks
from rekindle.local.engine import scope as scopes
from rekindle.local.engine.dag import resolve
from rekindle.local.engine.nodes import Crashed, Node, NodeError, Options, Parallel, TimedOut, fulfilled

if TYPE_CHECKING:
    from rekindle.local.engine.scheduler import Scheduler


def execute(
    scheduler: "Scheduler", name: str, holder: dict[str, Any], template: dict[str, Any], options: Options
) -> Node:
    """Brings a steps node as far as it can go."""
    node = scheduler.begun(name, "Steps", "Running", holder, template, options)
    scope: scopes.Scope = scheduler.memory.setdefault(("scope", name), scopes.Scope())
    scope |= scopes.of_template(scheduler, template)
    inner = Options(node["id"], options.on_exit, "steps")
    over = scheduler.memory.get(("over", name), 0)  # groups of which the scope has all
    group, before = node, f"{name}[{over - 1}]" if over else ""
    for index, steps in enumerate(template["steps"][over:], over):
        group_name = f"{name}[{index}]"
        if not (group := scheduler.get(group_name)):
            group = scheduler.create(group_name, "StepGroup", "Running", {}, inner)
            _connect(scheduler, name, before, group_name)
        before = group_name
        settled = group["phase"] in FULFILLED and _settled(scheduler, group)
        if not settled and Group(scheduler, group_name, scope, inner).run(steps):
            return group
        if node["phase"] in FULFILLED:  # failFast ended the whole
            return node
        if group["phase"] not in FULFILLED:
            return node
        if group["phase"] in FAILED:
            node["outboundNodes"] = _outbound(scheduler, group)
            return scheduler.mark(name, "Failed", group.get("message", ""))
        try:
            for step in steps:
                _add(scheduler, scope, group, step, inner)
        except ValueError as error:
            raise NodeError(str(error)) from None
        scheduler.memory["over", name] = index + 1
    group = scheduler.nodes[scheduler.ids[before]] if before else node
    node["outboundNodes"] = _outbound(scheduler, group)
    try:
        outputs = scopes.outputs_of(template, scope)
    except TemplateError as error:
        raise NodeError(str(error)) from None
    if outputs:
        node["outputs"] = outputs
        scheduler.export(outputs)
    admission.keep(scheduler, node)
    return scheduler.mark(name, "Succeeded")


def _settled(scheduler: "Scheduler", node: Node) -> bool:
    """Whether all below a node is over, as Argo looks at it: at what has nothing below it (childrenFulfilled)."""
    below = node.get("children", [])
    return all(_settled(scheduler, scheduler.nodes[id]) for id in below if id in scheduler.nodes) and (
        bool(below) or fulfilled(node)
    )


def _connect(scheduler: "Scheduler", name: str, before: str, group: str) -> None:
    if not before:
        scheduler.child(name, group)
        return
    previous = scheduler.nodes[scheduler.ids[before]]
    if not previous.get("children"):
        scheduler.child(before, group)
    for child in previous.get("children", []):
        for out in scheduler.outbound(child):
            if out not in scheduler.nodes:
                raise Crashed(f"could not obtain the out noden name for {out}")
            scheduler.child(scheduler.nodes[out]["name"], group)


def _outbound(scheduler: "Scheduler", group: Node) -> list[str]:
    return [out for child in group.get("children", []) for out in scheduler.outbound(child)]


def _add(scheduler: "Scheduler", scope: scopes.Scope, group: Node, step: dict[str, Any], options: Options) -> None:
    """What later groups see of a step."""
    name = f"{group['name']}.{step['name']}"
    node = scheduler.get(name)
    if node:
        scopes.add_node(scheduler, scope, "steps", step["name"], node)
        scopes.add_skipped(scope, "steps", step["name"], node, scheduler.template(step), artifacts=True)
        return
    children = (scheduler.nodes[id] for id in group.get("children", []))
    found = [each for each in children if each["name"].startswith(name + "(") and each["type"] != "Skipped"]
    if found:
        scopes.named(step)
    scopes.aggregate(scope, "steps", step["name"], found)
    scopes.add_node(scheduler, scope, "steps", step["name"], group)


class Group:
    """One group of parallel steps."""

    def __init__(self, scheduler: "Scheduler", name: str, scope: scopes.Scope, options: Options) -> None:
        self.s, self.name, self.scope, self.options = scheduler, name, scope, options

    def run(self, steps: list[dict[str, Any]]) -> bool:
        """Brings the group as far as it can go; marks it when it is over. Whether an exit hook could not run."""
        expanded = self._expanded(steps)
        if expanded is None:
            return False
        left, kept = self.s.memory.get(("left", self.name), expanded), []
        for index, step in enumerate(left):
            name = f"{self.name}.{step['name']}"
            node = self.s.get(name)
            if not node:
                try:
                    if not should_execute(step.get("when", "")):
                        reason = f"when '{step['when']}' evaluated false"
                        self.s.create(name, "Skipped", "Skipped", step, self.options, reason)
                        self.s.child(self.name, name)
                        continue
                except WhenError as error:
                    self.s.create(name, "Skipped", "Error", step, self.options, str(error))
                    self.s.child(self.name, name)
                    self.s.mark(self.name, "Error", str(error))
                    return False
            try:
                self.s.execute(name, step, step.get("arguments") or {}, self.options)
            except Parallel:
                if not node and not self.s.lost:  # a limit: those after it have not begun either
                    kept += left[index:]
                    break
            except TimedOut as error:
                self.s.mark(self.name, "Failed", str(error))
                return False
            except NodeError as error:
                self.s.child(self.name, name)
                self.s.mark(self.name, "Error", f"step group deemed errored due to child {name} error: {error}")
                return False
            if node := self.s.get(name):
                self.s.child(self.name, name)
            kept += [] if node and fulfilled(node) else [step]
        self.s.memory["left", self.name] = kept
        if not kept or any(step.get("hooks") or step.get("onExit") for step in expanded):
            return self._end({f"{self.name}.{step['name']}": step for step in expanded})
        return False

    def _expanded(self, steps: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        known = self.s.memory.get(("steps", self.name))
        if known is not None:
            return known
        expanded: list[dict[str, Any]] = []
        resolved, missing = list[dict[str, Any]](), ""
        try:
            for step in steps:
                try:
                    resolved.append(resolve(self.s, step, self.scope, scopes.UNRESOLVED))
                except Missing as error:  # Argo tries again, until it comes across another's error first
                    missing = str(error)
                except (TemplateError, WhenError) as error:
                    raise TemplateError(f"failed to resolve references: {error}") from None
            if missing:
                self.s.stuck = missing
                return None
            for step in resolved:
                found = expand(step, self.scope.parameters(self.s.globals))
                if loops(step) and not found:
                    name = f"{self.name}.{step['name']}"
                    self.s.create(name, "Skipped", "Skipped", step, self.options, "Skipped, empty params")
                    self.s.child(self.name, name)
                expanded += found
        except (TemplateError, WhenError, ValueError) as error:
            self.s.mark(self.name, "Error", str(error))
            return None
        self.s.memory[("steps", self.name)] = expanded
        return expanded

    def _end(self, steps: dict[str, dict[str, Any]]) -> bool:
        complete = True
        group = self.s.nodes[self.s.ids[self.name]]
        children = [self.s.nodes[id] for id in group.get("children", [])]
        for node in children:
            step = steps.get(node["name"], {}) if node["type"] != "Skipped" else {}
            hooked = step.get("hooks") or step.get("onExit")
            try:
                if hooked and not hooks.during(self.s, step, node, self.scope, self.options):
                    return False
            except NodeError as error:
                self.s.mark(self.name, "Error", str(error))
                return False
            try:
                if not fulfilled(node):
                    complete = False
                elif hooked:
                    complete &= hooks.after(self.s, step, node, self.scope, self.options)
            except NodeError as error:
                self.s.mark(self.name, "Error", str(error))
                return True
        if not complete:
            self.s.mark(self.name, "Running")
            return False
        for node in children:
            step = steps.get(node["name"], {})
            goes_on = step.get("continueOn") or {}
            allowed = goes_on.get("failed") if node["phase"] == "Failed" else goes_on.get("error")
            if node["phase"] in FAILED and not allowed:
                self.s.mark(self.name, "Failed", f"child '{node['id']}' failed")
                return False
        self.s.mark(self.name, "Succeeded")
        return False
