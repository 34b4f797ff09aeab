"""Lifecycle hooks: templates that run during or after the workflow, a task or a step.

The hook `exit` (or `onExit`) runs after its node has completed. Any other hook runs once, as soon
as its expression is true. Dependents of a node wait for the node's hooks. Source: Argo's
exit_handler.go and hooks.go.
"""

import re
from collections.abc import Iterator
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine.context import Context
from argolocal.engine.nodes import LimitReached, NodeError, Options, as_node_error, is_fulfilled
from argolocal.engine.scope import (
    UNRESOLVED_PREFIX,
    Scope,
    add_outputs,
    mark_absent_arguments,
    resolve_artifact,
)
from argolocal.language.expr import evaluate_bool
from argolocal.language.gofmt import dump_structs
from argolocal.language.substitute import nest_scope, substitute
from argolocal.manifest.allowed_values import COMPLETED, FAILED
from argolocal.manifest.types import Node, Task

EXIT_HOOK = "exit"
HOOK_FLAG = {"hooked": True}


def run_workflow_hooks(context: Context) -> bool:
    """Run the workflow's hooks except the exit hook. Return True if all started hooks have
    completed."""
    all_completed = True

    try:
        with as_node_error():
            for name, hook in _conditional_hooks(context.spec, context.name):
                if _is_true(context, hook, Scope()) or context.table.get(name):
                    all_completed &= _run(
                        context, name, hook, hook.get("arguments") or {}, Options(flag=HOOK_FLAG)
                    )
                    context.table.link_child(context.name, name)
    except NodeError as error:
        context.table.mark(context.name, "Error", str(error))
        return True

    return all_completed


def exit_hook(context: Context, caller: Task) -> Task | None:
    """Return the exit hook of a workflow, step or task, or None. An exit hook without arguments of
    its own receives the workflow's arguments."""
    if caller.get("onExit"):
        return {"template": caller["onExit"], "arguments": context.inputs.arguments()}
    hook = (caller.get("hooks") or {}).get(EXIT_HOOK)
    if not hook or any((hook.get("arguments") or {}).values()):
        return hook
    return {**hook, "arguments": context.inputs.arguments()}


def dump_failures(context: Context) -> str:
    """Return the failed nodes for the exit handler: a JSON list that is encoded as a JSON
    string."""
    failed_nodes = [
        {
            "displayName": node["displayName"],
            "message": node.get("message", ""),
            "templateName": (
                template := (node.get("templateRef") or {}).get("template") or node["templateName"]
            ),
            "phase": node["phase"],
            "podName": context.table.pod_name(node["name"], template),
            # remove the milliseconds, because Argo stores whole seconds
            "finishedAt": re.sub(r"\.\d+", "", node.get("finishedAt") or "") or None,
        }
        for node in context.nodes.values()
        if node["phase"] in FAILED
    ]
    if failed_nodes:
        text = dump_structs(failed_nodes, failed_nodes[0])
    else:
        text = "null"

    return to_json(text, ensure_ascii=False)


def run_conditional_hooks(
    context: Context, caller: Task, node: Node, scope: Scope, options: Options
) -> bool:
    """Run the hooks of a step or task except the exit hook. Return True if all started hooks have
    completed.

    Raises NodeError.
    """
    all_completed = True
    values = Scope({**scope, f"{options.kind}.{caller['name']}.status": node["phase"]})

    for name, hook in _conditional_hooks(caller, node["name"]):
        if context.table.get(name) or _is_true(context, hook, values):
            outputs = context.table.last_attempt(node).get("outputs")
            arguments = hook.get("arguments") or {}
            if outputs is not None:
                arguments = _resolve_arguments(
                    context, arguments, values, options.kind, caller["name"], outputs
                )

            all_completed &= _run(
                context, name, hook, arguments, Options(options.boundary, flag=HOOK_FLAG)
            )
            context.table.link_child(node["name"], name)

    return all_completed


def run_exit_hook(
    context: Context, caller: Task, node: Node, scope: Scope, options: Options
) -> bool:
    """Run the exit hook of a completed step or task. Return True if the hook completed or does not
    exist.

    Raises NodeError if the hook cannot run now; then a step group fails, but a DAG ignores the
    error.
    """
    hook = exit_hook(context, caller)
    if not hook or node["phase"] not in COMPLETED or not context.may_run(True):
        return True

    values = Scope({**scope, f"{options.kind}.{caller['name']}.status": node["phase"]})
    if hook.get("expression") and not _is_true(context, hook, values):
        return True

    outputs = context.table.last_attempt(node).get("outputs") or {}
    arguments = _resolve_arguments(
        context, hook.get("arguments") or {}, values, options.kind, caller["name"], outputs
    )
    name = f"{node['name']}.onExit"

    try:
        return _run(
            context, name, hook, arguments, Options(options.boundary, True, "steps", flag=HOOK_FLAG)
        )
    finally:
        # as in Argo, the hook's node becomes a child even if the hook could not start
        context.table.link_child(node["name"], name)


def _is_true(context: Context, hook: Task, scope: Scope) -> bool:
    return evaluate_bool(hook["expression"], nest_scope(scope.parameters(context.inputs.globals)))


def _run(
    context: Context, name: str, hook: Task, arguments: dict[str, Any], options: Options
) -> bool:
    """Run a hook. Return True if the hook has completed. Raises NodeError."""
    try:
        node = context.execute(name, hook, arguments, options)
    except LimitReached as error:  # for a hook, Argo treats a reached limit as an error
        raise NodeError("Max parallelism reached") from error
    return is_fulfilled(node)


def _conditional_hooks(caller: Task, name: str) -> Iterator[tuple[str, Task]]:
    """Yield the node name and the hook for each hook of a workflow, step or task except the exit
    hook. Raises NodeError."""
    for key, hook in (caller.get("hooks") or {}).items():
        if key == EXIT_HOOK:
            continue
        node = f"{name}.hooks.{key}"
        if not hook.get("expression"):
            raise NodeError(f"Expression required for hook {node}")
        yield node, hook


def _resolve_arguments(
    context: Context,
    arguments: dict[str, Any],
    scope: Scope,
    kind: str,
    name: str,
    outputs: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a hook, which can reference outputs of the hook's step or task.
    Raises NodeError."""
    if not arguments:
        return arguments
    add_outputs(scope, f"{kind}.{name}", outputs, default="")
    arguments = mark_absent_arguments(scope, arguments)
    arguments = substitute(arguments, scope.parameters(context.inputs.globals))
    artifacts = [
        resolve_artifact(scope, artifact, UNRESOLVED_PREFIX)
        for artifact in arguments.get("artifacts") or []
    ]
    return {**arguments, "artifacts": [artifact for artifact in artifacts if artifact]}
