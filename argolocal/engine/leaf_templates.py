"""Start leaf templates, which run as a pod or an HTTP request.

Source: Argo's operator.go (executeContainer, executeScript) and workflowpod.go.
"""

import re
from dataclasses import replace

from argolocal.common.json_text import to_json
from argolocal.engine import admission, retry
from argolocal.engine.context import Context
from argolocal.engine.inputs import SubstitutedTemplate
from argolocal.engine.nodes import NodeError, Options, Start, format_time, record_inputs
from argolocal.engine.pod_fields import add_workflow_fields
from argolocal.errors import ConfigError
from argolocal.language.substitute import substitute
from argolocal.manifest import pod_patch
from argolocal.manifest.patch import PatchError
from argolocal.manifest.types import Node, Task, Template

KINDS = ("container", "script", "resource", "containerSet", "data", "http")
REVERSED_SUFFIXES = re.compile(r"(?:\)[^()]*\(|\][^\[\]]*\[)+")
RESULT_REFERENCE = r"""KIND(?:\.([-\w]+)\.|\[\\?['"]([-\w]+)\\?['"]\]\.)outputs\.result"""


def execute(
    context: Context, name: str, caller: Task, template: Template, options: Options
) -> Node:
    """Add a Start action for the node's pod to `context.actions`, unless the pod has started.
    Raises NodeError."""
    node = context.table.get(name)
    if not node:
        node = context.table.create(
            name, "HTTP" if "http" in template else "Pod", "Pending", caller, options
        )
        record_inputs(node, template)

        memo = template.get("memoize")
        if memo:
            node["memoizationStatus"] = admission.memoization_status(memo, hit=False)

    if node["id"] in context.started:
        return node

    is_exit_handler = options.on_exit or context.in_exit_handler(node)
    if not context.may_run(is_exit_handler):
        return context.table.mark(
            name, "Failed", f"workflow shutdown with strategy: {context.shutdown}"
        )

    if context.deadline and context.table.now >= context.deadline and not is_exit_handler:
        return context.table.mark(name, "Failed", "Step exceeded its deadline")

    pod_name = context.table.pod_name(name, template["name"])
    scope = {
        f"inputs.parameters.{parameter['name']}": parameter["value"]
        for parameter in template["inputs"]["parameters"]
    }

    try:
        values = {**context.inputs.globals, **scope, "pod.name": pod_name}
        if isinstance(template, SubstitutedTemplate):
            resolved_template = template
        else:
            resolved_template = substitute(template, values)

        resolved_template = add_workflow_fields(resolved_template, context.spec, values)
        patches = (
            substitute(context.spec.get("podSpecPatch"), values),
            resolved_template.get("podSpecPatch"),
        )
        resolved_template = pod_patch.apply_patches(resolved_template, patches)
    except (PatchError, ConfigError) as error:
        raise NodeError(f"Error applying PodSpecPatch: {error}") from None

    deadlines = [options.deadline] if options.deadline else []
    try:
        seconds = resolved_template.get("activeDeadlineSeconds")
        if seconds is not None:
            deadlines.append(context.table.now + retry.parse_int(seconds))
        if template.get("timeout"):
            deadlines.append(admission.timeout_at(node, template))
    except ValueError as error:
        raise NodeError(str(error)) from None

    context.started.add(node["id"])
    if node["type"] == "Pod":
        context.table.active_pods.add(node["id"])

    context.table.orphaned_pods.discard(node["id"])
    if "containerSet" in template:
        containers = _create_container_nodes(context, node, template, caller, options)
    else:
        containers = {}

    deadline = min(deadlines, default=None)
    capture = _captures_result(context, name, options.boundary)
    context.actions.append(
        Start(node["id"], pod_name, resolved_template, capture, deadline, containers)
    )

    return node


def _captures_result(context: Context, name: str, boundary: str) -> bool:
    """Return True if the parent's template references `outputs.result` of step or task `name`."""
    if not boundary:
        return False

    node = context.nodes[boundary]
    parent = context.template_of(node["name"]) or context.inputs.templates.get(
        context.caller(node)["template"], {}
    )
    kind = "tasks" if "dag" in parent else "steps"

    expansion = context.expansion(node["name"])
    if expansion.results_read is None:
        references = re.findall(RESULT_REFERENCE.replace("KIND", kind), to_json(parent))
        expansion.results_read = {
            plain_name or quoted_name for plain_name, quoted_name in references
        }

    return remove_suffixes(name).rpartition(".")[2] in expansion.results_read


def remove_suffixes(name: str) -> str:
    """Remove the suffixes for attempts, loop items and groups from the name of a node."""
    # match the reversed name, because a search for the end would be repeated at each bracket
    match = REVERSED_SUFFIXES.match(name[::-1])
    return name[: len(name) - match.end()] if match else name


def _create_container_nodes(
    context: Context, node: Node, template: Template, caller: Task, options: Options
) -> dict[str, str]:
    """Create the nodes of a containerSet's containers, or reset them after a crash of the runner.
    Return {name of a container: node id}."""
    names = {
        container["name"]: f"{node['name']}.{container['name']}"
        for container in template["containerSet"]["containers"]
    }
    for name in names.values():
        container_node = context.table.get(name)
        if container_node:
            container_node["startedAt"] = format_time(context.table.now)
            container_node["finishedAt"] = None
            context.table.mark(name, "Pending", "")
        else:
            context.table.create(
                name, "Container", "Pending", caller, replace(options, boundary=node["id"])
            )

    for container in template["containerSet"]["containers"]:
        for parent in [names[dependency] for dependency in container.get("dependencies") or []] or [
            node["name"]
        ]:
            context.table.link_child(parent, names[container["name"]])

    return {name: context.table.ids[full_name] for name, full_name in names.items()}
