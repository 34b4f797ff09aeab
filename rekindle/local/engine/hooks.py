"""Hooks: templates that run beside or after the workflow, a task or a step.

`exit` (or `onExit`) runs once its node is completed; any other runs once, when its expression is first true, while its
node runs or after it. Whatever comes after the node waits for its hooks. Source: Argo's exit_handler.go and hooks.go.
"""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rekindle.argo.kinds import COMPLETED, FAILED
from rekindle.argo.language.expr import truth
from rekindle.argo.language.functions import ExprError
from rekindle.argo.language.gofmt import structs
from rekindle.argo.language.substitute import TemplateError, expanded, substitute
from rekindle.local.engine.nodes import Node, NodeError, Options, Parallel, fulfilled
from rekindle.local.engine.scope import UNRESOLVED, Scope, absent_arguments, add_outputs, artifact_of

if TYPE_CHECKING:
    from rekindle.local.engine.scheduler import Scheduler
EXIT = "exit"


def of_workflow(scheduler: "Scheduler") -> bool:
    """Runs the workflow's hooks, but for exit; true when those that began are over."""
    s, done = scheduler, True
    try:
        for name, hook in _conditional(s.spec, s.name):
            if truth(hook["expression"], expanded(s.globals)) or s.get(name):
                node = s.execute(name, hook, hook.get("arguments") or {}, Options(flag={"hooked": True}))
                s.child(s.name, name)
                done &= bool(node and fulfilled(node))
    except Parallel:  # Argo takes its own limit for an error here
        s.mark(s.name, "Error", "Max parallelism reached")
        return True
    except (NodeError, ExprError) as error:
        s.mark(s.name, "Error", str(error))
        return True
    return done


def of_exit(scheduler: "Scheduler", holder: dict[str, Any]) -> dict[str, Any] | None:
    """The exit hook of the workflow, a step or a task: `onExit` goes first, and arguments default to the workflow's."""
    if holder.get("onExit"):
        return {"template": holder["onExit"], "arguments": scheduler.arguments()}
    hook = (holder.get("hooks") or {}).get(EXIT)
    if not hook or any((hook.get("arguments") or {}).values()):
        return hook
    return {**hook, "arguments": scheduler.arguments()}


def failures(scheduler: "Scheduler") -> str:
    """What an exit handler sees as `workflow.failures`."""
    failed = [
        {
            "displayName": node["displayName"],
            "message": node.get("message", ""),
            "templateName": (template := (node.get("templateRef") or {}).get("template") or node["templateName"]),
            "phase": node["phase"],
            "podName": scheduler.pod_name(node["name"], template),
            "finishedAt": re.sub(r"\.\d+", "", node.get("finishedAt") or "") or None,  # Argo keeps whole seconds
        }
        for node in scheduler.nodes.values()
        if node["phase"] in FAILED
    ]
    return json.dumps(structs(failed, failed[0]) if failed else "null", ensure_ascii=False)  # as Go quotes a text


def during(scheduler: "Scheduler", holder: dict[str, Any], node: Node, scope: Scope, options: Options) -> bool:
    """Runs the hooks of a step or task, but for exit; true when those that began are over. Raises NodeError."""
    s, done, values = scheduler, True, Scope(scope)
    values[f"{options.kind}.{holder['name']}.status"] = node["phase"]
    for name, hook in _conditional(holder, node["name"]):
        try:
            if not s.get(name) and not truth(hook["expression"], expanded(values.parameters(s.globals))):
                continue
            outputs = s.last(node).get("outputs")
            arguments = hook.get("arguments") or {}
            if outputs is not None:
                arguments = _resolved(s, arguments, values, options.kind, holder["name"], outputs)
            found = s.execute(name, hook, arguments, Options(options.boundary, flag={"hooked": True}))
        except Parallel as error:
            raise NodeError("Max parallelism reached") from error  # as in of_workflow
        except ExprError as error:
            raise NodeError(str(error)) from None
        s.child(node["name"], name)
        done &= bool(found and fulfilled(found))
    return done


def after(scheduler: "Scheduler", holder: dict[str, Any], node: Node, scope: Scope, options: Options) -> bool:
    """Runs the exit hook of a completed step or task; true when there is none or it is over.

    Raises NodeError where it cannot run, or not yet: an error of a group of steps, while a DAG goes on without it.
    """
    hook = of_exit(scheduler, holder)
    if not hook or node["phase"] not in COMPLETED or not scheduler.may_run(True):
        return True
    values = Scope(scope)
    values[f"{options.kind}.{holder['name']}.status"] = node["phase"]
    try:
        if hook.get("expression") and not truth(hook["expression"], expanded(values.parameters(scheduler.globals))):
            return True
    except ExprError as error:
        raise NodeError(str(error)) from None
    outputs = scheduler.last(node).get("outputs") or {}
    arguments = _resolved(scheduler, hook.get("arguments") or {}, values, options.kind, holder["name"], outputs)
    name = f"{node['name']}.onExit"
    options = Options(options.boundary, True, "steps", flag={"hooked": True})
    try:
        done = scheduler.execute(name, hook, arguments, options)
    except Parallel as error:
        raise NodeError("Max parallelism reached") from error
    finally:
        scheduler.child(node["name"], name)  # even if it cannot begin
    return bool(done and fulfilled(done))


def _conditional(holder: dict[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The hooks of a workflow, step or task but for exit, by the names of their nodes. Raises NodeError."""
    for key, hook in (holder.get("hooks") or {}).items():
        if key == EXIT:
            continue
        node = f"{name}.hooks.{key}"
        if not hook.get("expression"):
            raise NodeError(f"Expression required for hook {node}")
        yield node, hook


def _resolved(
    scheduler: "Scheduler", arguments: dict[str, Any], scope: Scope, kind: str, name: str, outputs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a hook, which can see what its own node gave. Raises NodeError."""
    if not arguments:
        return arguments
    add_outputs(scope, f"{kind}.{name}", outputs, missing="")
    try:
        arguments = absent_arguments(scope, arguments)
        arguments = substitute(arguments, scope.parameters(scheduler.globals))
        files = [artifact_of(scope, each, UNRESOLVED) for each in arguments.get("artifacts") or []]
    except TemplateError as error:
        raise NodeError(str(error)) from None
    return {**arguments, "artifacts": [each for each in files if each]}
