"""Lifecycle hooks: templates that run during or after the workflow, a task or a step.

The hook `exit` (or `onExit`) runs after its node has completed. Any hook other than `exit` runs
once, as soon as its expression is true. Tasks that depend on a node wait until the node's hooks
have completed. The behaviour follows Argo's exit_handler.go and hooks.go.
"""

import re
from collections.abc import Iterator
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine.context import Context
from argolocal.engine.nodes import (
    ExecutionOptions,
    LimitReached,
    NodeError,
    as_node_error,
    is_fulfilled,
)
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
from argolocal.manifest.allowed_values import COMPLETED_PHASES, FAILED_PHASES
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
                if _is_condition_true(context, hook, Scope()) or context.table.get(name):
                    all_completed &= _run_hook(
                        context,
                        name,
                        hook,
                        hook.get("arguments") or {},
                        ExecutionOptions(node_flag=HOOK_FLAG),
                    )
                    context.table.link_child(context.name, name)
    except NodeError as error:
        context.table.mark(context.name, "Error", str(error))
        return True

    return all_completed


def find_exit_hook(context: Context, caller: Task) -> Task | None:
    """Return the exit hook of a workflow, step or task, or None. An exit hook that does not specify
    arguments gets the workflow's arguments."""
    if caller.get("onExit"):
        return {"template": caller["onExit"], "arguments": context.inputs.arguments()}
    hook = (caller.get("hooks") or {}).get(EXIT_HOOK)
    if not hook or any((hook.get("arguments") or {}).values()):
        return hook
    return {**hook, "arguments": context.inputs.arguments()}


def dump_failures(context: Context) -> str:
    """Return the value of {{workflow.failures}}: the failed nodes as a JSON list, which is encoded
    a second time as a JSON string."""
    failed_nodes = [
        {
            "displayName": node["displayName"],
            "message": node.get("message", ""),
            "templateName": (
                template := (node.get("templateRef") or {}).get("template") or node["templateName"]
            ),
            "phase": node["phase"],
            "podName": context.table.compute_pod_name(node["name"], template),
            # remove the milliseconds, because Argo stores whole seconds
            "finishedAt": re.sub(r"\.\d+", "", node.get("finishedAt") or "") or None,
        }
        for node in context.nodes.values()
        if node["phase"] in FAILED_PHASES
    ]
    if failed_nodes:
        failures_json = dump_structs(failed_nodes, failed_nodes[0])
    else:
        failures_json = "null"

    return to_json(failures_json, ensure_ascii=False)


def run_conditional_hooks(
    context: Context, caller: Task, node: Node, scope: Scope, options: ExecutionOptions
) -> bool:
    """Run the hooks of a step or task, except the exit hook, whose expressions are true. Return
    True if all hooks that have started have completed. Raises NodeError."""
    all_completed = True
    hook_scope = Scope({**scope, f"{options.caller_kind}.{caller['name']}.status": node["phase"]})

    for name, hook in _conditional_hooks(caller, node["name"]):
        if context.table.get(name) or _is_condition_true(context, hook, hook_scope):
            outputs = context.table.last_attempt(node).get("outputs")
            arguments = hook.get("arguments") or {}
            if outputs is not None:
                arguments = _resolve_arguments(
                    context, arguments, hook_scope, options.caller_kind, caller["name"], outputs
                )

            all_completed &= _run_hook(
                context,
                name,
                hook,
                arguments,
                ExecutionOptions(options.boundary_id, node_flag=HOOK_FLAG),
            )
            context.table.link_child(node["name"], name)

    return all_completed


def run_exit_hook(
    context: Context, caller: Task, node: Node, scope: Scope, options: ExecutionOptions
) -> bool:
    """Run the exit hook of a completed step or task. Return True if the hook has completed, or if
    the hook does not exist or must not run.

    Raises NodeError if the hook cannot run now. The NodeError of a hook fails a step group, but a
    DAG ignores it.
    """
    hook = find_exit_hook(context, caller)
    if not hook or node["phase"] not in COMPLETED_PHASES or not context.may_run(True):
        return True

    hook_scope = Scope({**scope, f"{options.caller_kind}.{caller['name']}.status": node["phase"]})
    if hook.get("expression") and not _is_condition_true(context, hook, hook_scope):
        return True

    outputs = context.table.last_attempt(node).get("outputs") or {}
    arguments = _resolve_arguments(
        context,
        hook.get("arguments") or {},
        hook_scope,
        options.caller_kind,
        caller["name"],
        outputs,
    )
    name = f"{node['name']}.onExit"

    try:
        return _run_hook(
            context,
            name,
            hook,
            arguments,
            ExecutionOptions(options.boundary_id, True, "steps", node_flag=HOOK_FLAG),
        )
    finally:
        # as in Argo, the hook's node becomes a child even if the hook could not start
        context.table.link_child(node["name"], name)


def _is_condition_true(context: Context, hook: Task, scope: Scope) -> bool:
    """Return the value of a hook's expression. Raises ExprError."""
    return evaluate_bool(hook["expression"], nest_scope(scope.parameters(context.inputs.globals)))


def _run_hook(
    context: Context, name: str, hook: Task, arguments: dict[str, Any], options: ExecutionOptions
) -> bool:
    """Run a hook, and return True if it has completed. Raises NodeError."""
    try:
        node = context.execute(name, hook, arguments, options)
    # a parallelism limit that prevents a hook from starting is an error, as in Argo
    except LimitReached as error:
        raise NodeError("Max parallelism reached") from error
    return is_fulfilled(node)


def _conditional_hooks(caller: Task, name: str) -> Iterator[tuple[str, Task]]:
    """Yield (name of the hook's node, hook) for each hook of a workflow, step or task except the
    exit hook. `name` is the name of the node of the workflow, step or task. Raises NodeError."""
    for hook_name, hook in (caller.get("hooks") or {}).items():
        if hook_name == EXIT_HOOK:
            continue
        node_name = f"{name}.hooks.{hook_name}"
        if not hook.get("expression"):
            raise NodeError(f"Expression required for hook {node_name}")
        yield node_name, hook


def _resolve_arguments(
    context: Context,
    arguments: dict[str, Any],
    scope: Scope,
    caller_kind: str,
    name: str,
    outputs: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a hook with all tags replaced, and add the outputs of the hook's step
    or task to `scope`. Raises NodeError."""
    if not arguments:
        return arguments
    add_outputs(scope, f"{caller_kind}.{name}", outputs, default_value="")
    arguments = mark_absent_arguments(scope, arguments)
    arguments = substitute(arguments, scope.parameters(context.inputs.globals))
    artifacts = [
        resolve_artifact(scope, artifact, UNRESOLVED_PREFIX)
        for artifact in arguments.get("artifacts") or []
    ]
    return {**arguments, "artifacts": [artifact for artifact in artifacts if artifact]}
