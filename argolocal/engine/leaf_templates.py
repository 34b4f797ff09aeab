"""Start leaf templates, which run as a pod or an HTTP request.

The behaviour follows Argo's operator.go (executeContainer, executeScript) and workflowpod.go.
"""

import re
from dataclasses import replace

from argolocal.common.json_text import to_json
from argolocal.engine import admission, retry
from argolocal.engine.context import Context
from argolocal.engine.inputs import SubstitutedTemplate
from argolocal.engine.nodes import ExecutionOptions, NodeError, StartPod, format_time, record_inputs
from argolocal.engine.pod_fields import add_workflow_fields
from argolocal.errors import ConfigError
from argolocal.language.substitute import substitute
from argolocal.manifest import pod_patch
from argolocal.manifest.patch import PatchError
from argolocal.manifest.types import Node, Task, Template

LEAF_TEMPLATE_TYPES = ("container", "script", "resource", "containerSet", "data", "http")
REVERSED_SUFFIXES = re.compile(r"(?:\)[^()]*\(|\][^\[\]]*\[)+")
RESULT_REFERENCE = r"""KIND(?:\.([-\w]+)\.|\[\\?['"]([-\w]+)\\?['"]\]\.)outputs\.result"""


def execute(
    context: Context, name: str, caller: Task, template: Template, options: ExecutionOptions
) -> Node:
    """Create the node if it does not exist, and add a StartPod action for its pod to
    `context.actions` unless the pod was started before. Raises NodeError."""
    node = context.table.get(name)
    if not node:
        node = context.table.create(
            name, "HTTP" if "http" in template else "Pod", "Pending", caller, options
        )
        record_inputs(node, template)

        memoization = template.get("memoize")
        if memoization:
            node["memoizationStatus"] = admission.make_memoization_status(
                memoization, is_cache_hit=False
            )

    if node["id"] in context.started_pods:
        return node

    is_exit_handler = options.on_exit or context.is_in_exit_handler(node)
    if not context.may_run(is_exit_handler):
        return context.table.mark(
            name, "Failed", f"workflow shutdown with strategy: {context.shutdown}"
        )

    if context.deadline and context.table.now >= context.deadline and not is_exit_handler:
        return context.table.mark(name, "Failed", "Step exceeded its deadline")

    pod_name = context.table.compute_pod_name(name, template["name"])
    resolved_template = _resolve_template(context, template, pod_name)
    deadline = _compute_deadline(context, node, template, resolved_template, options)

    context.started_pods.add(node["id"])
    if node["type"] == "Pod":
        context.table.active_pods.add(node["id"])

    context.table.orphaned_pods.discard(node["id"])
    if "containerSet" in template:
        container_node_ids = _create_container_nodes(context, node, template, caller, options)
    else:
        container_node_ids = {}

    captures_result = _captures_result(context, name, options.boundary_id)
    context.actions.append(
        StartPod(
            node["id"], pod_name, resolved_template, captures_result, deadline, container_node_ids
        )
    )

    return node


def _resolve_template(context: Context, template: Template, pod_name: str) -> Template:
    """Return the template with all tags substituted, and with the pod fields and patches of the
    workflow's spec. Raises NodeError."""
    input_values = {
        f"inputs.parameters.{parameter['name']}": parameter["value"]
        for parameter in template["inputs"]["parameters"]
    }

    try:
        tag_values = {**context.inputs.globals, **input_values, "pod.name": pod_name}
        if isinstance(template, SubstitutedTemplate):
            resolved_template = template
        else:
            resolved_template = substitute(template, tag_values)

        resolved_template = add_workflow_fields(resolved_template, context.spec, tag_values)
        pod_spec_patches = (
            substitute(context.spec.get("podSpecPatch"), tag_values),
            resolved_template.get("podSpecPatch"),
        )
        return pod_patch.apply_patches(resolved_template, pod_spec_patches)
    except (PatchError, ConfigError) as error:
        raise NodeError(f"Error applying PodSpecPatch: {error}") from None


def _compute_deadline(
    context: Context,
    node: Node,
    template: Template,
    resolved_template: Template,
    options: ExecutionOptions,
) -> float | None:
    """Return the unix time at which the pod is killed, or None if no field limits its time. Raises
    NodeError."""
    deadlines = [options.deadline] if options.deadline else []
    try:
        deadline_seconds = resolved_template.get("activeDeadlineSeconds")
        if deadline_seconds is not None:
            deadlines.append(context.table.now + retry.parse_int(deadline_seconds))
        if template.get("timeout"):
            deadlines.append(admission.compute_timeout_time(node, template))
    except ValueError as error:
        raise NodeError(str(error)) from None

    return min(deadlines, default=None)


def _captures_result(context: Context, name: str, boundary_id: str) -> bool:
    """Return True if the template of the parent node references `outputs.result` of the step or
    task whose node is `name`."""
    if not boundary_id:
        return False

    node = context.nodes[boundary_id]
    parent_template = context.template_of(node["name"]) or context.inputs.templates.get(
        context.caller(node)["template"], {}
    )
    caller_kind = "tasks" if "dag" in parent_template else "steps"

    expansion = context.expansion(node["name"])
    if expansion.referenced_results is None:
        references = re.findall(
            RESULT_REFERENCE.replace("KIND", caller_kind), to_json(parent_template)
        )
        expansion.referenced_results = {
            plain_name or quoted_name for plain_name, quoted_name in references
        }

    return remove_suffixes(name).rpartition(".")[2] in expansion.referenced_results


def remove_suffixes(name: str) -> str:
    """Remove the suffixes for attempts, loop items and groups from the name of a node."""
    # Match the reversed name: a search for a suffix would take quadratic time in a name with many
    # brackets.
    match = REVERSED_SUFFIXES.match(name[::-1])
    return name[: len(name) - match.end()] if match else name


def _create_container_nodes(
    context: Context, node: Node, template: Template, caller: Task, options: ExecutionOptions
) -> dict[str, str]:
    """Create the nodes of a containerSet's containers, or reset them after a crash of the runner.
    Return a mapping from the names of the containers to the ids of their nodes."""
    node_names = {
        container["name"]: f"{node['name']}.{container['name']}"
        for container in template["containerSet"]["containers"]
    }
    for name in node_names.values():
        container_node = context.table.get(name)
        if container_node:
            container_node["startedAt"] = format_time(context.table.now)
            container_node["finishedAt"] = None
            context.table.mark(name, "Pending", "")
        else:
            context.table.create(
                name, "Container", "Pending", caller, replace(options, boundary_id=node["id"])
            )

    for container in template["containerSet"]["containers"]:
        for parent_name in [
            node_names[dependency] for dependency in container.get("dependencies") or []
        ] or [node["name"]]:
            context.table.link_child(parent_name, node_names[container["name"]])

    return {name: context.table.ids[full_name] for name, full_name in node_names.items()}
