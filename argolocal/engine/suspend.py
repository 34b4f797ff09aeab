"""Execute suspend templates, whose nodes wait for their duration or for `argolocal resume`.

    list_suspended_nodes(status)
    select_resume_values(status, {"approve": "YES"})    # {node id: {output: value}}

The values that the user passes become the outputs with `valueFrom: {supplied: {}}`. An output for
which the user passes no value gets its default, or the default of the input with the same name. The
behaviour follows Argo's operator.go (executeSuspend, addRawOutputFields), workflow/util/util.go
(ResumeWorkflow, updateSuspendedNode); v4.1.
"""

from collections.abc import Mapping
from typing import Any

from argolocal.common import program
from argolocal.engine.context import Context
from argolocal.engine.nodes import ExecutionOptions, NodeError, NodeResumed, parse_time
from argolocal.errors import ConfigError, suggest_similar
from argolocal.language import gofmt
from argolocal.manifest.allowed_values import FAILED_PHASES, FULFILLED_PHASES
from argolocal.manifest.types import Node, Task, Template


def execute(
    context: Context, name: str, caller: Task, template: Template, options: ExecutionOptions
) -> Node:
    """Create or advance a suspend node, and return it. Raises NodeError."""
    node = context.table.get_or_create(name, "Suspend", "Running", caller, template, options)
    if node["phase"] == "Pending":  # a Pending node was waiting for a lock until now
        context.table.mark(name, "Running")
    if "outputs" not in node and (expected_parameters := _expected_parameters(template)):
        node["outputs"] = {"parameters": expected_parameters}

    duration = (template["suspend"] or {}).get("duration")
    if duration:
        resume_time = parse_time(node["startedAt"]) + gofmt.parse_seconds(str(duration))
        if context.table.now >= resume_time:
            return _complete_node(context, node)

        context.wake_at(resume_time)

    return node


def resume(context: Context, event: NodeResumed) -> None:
    """Apply the values and the phase of an event to its node, if the node is still suspended."""
    node = context.nodes.get(event.id)
    if not node or node["phase"] in FULFILLED_PHASES:
        return

    for parameter in (node.get("outputs") or {}).get("parameters") or []:
        if parameter["name"] in event.values:
            parameter["value"] = event.values[parameter["name"]]
            parameter.pop("valueFrom", None)
            context.inputs.export({"parameters": [parameter]})

    context.table.changed_nodes[node["id"]] = None
    if event.phase in FAILED_PHASES:
        context.table.mark(node["name"], event.phase, event.message)
        return

    if event.message:
        node["message"] = event.message
    if not event.phase:
        return

    try:
        _complete_node(context, node)
    except NodeError as error:
        context.table.mark(node["name"], "Error", str(error))


def list_suspended_nodes(status: Mapping[str, Any]) -> list[Node]:
    """Return the nodes that wait for their duration or for `argolocal resume`."""
    return [
        node
        for node in status.get("nodes", {}).values()
        if node["type"] == "Suspend" and node["phase"] == "Running"
    ]


def make_resume_hint(name: str, node: Node) -> str:
    """Return a sentence that says how to resume a suspended node of run `name`."""
    option_text = "".join(
        f" -p {parameter['name']}={parameter['valueFrom'].get('default', 'VALUE')}"
        for parameter in list_missing_parameters(node)
    )
    return (
        f"{node['displayName']} waits: `{program.name} resume {name}{option_text}` in another"
        " terminal resumes it"
    )


def select_resume_values(
    status: Mapping[str, Any], resume_values: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return {node id: {output: value}}, which assigns `resume_values` to all outputs with the same
    names. Raises ConfigError for an unknown name and for an output without a value."""
    suspended_nodes = list_suspended_nodes(status)

    expected_sources = {
        parameter["name"]: parameter["valueFrom"]
        for node in suspended_nodes
        for parameter in list_missing_parameters(node)
    }

    for name in resume_values:
        if name not in expected_sources:
            if expected_sources:
                hint = f"The suspended steps wait for {', '.join(expected_sources)}."
            else:
                hint = "The suspended steps do not wait for values."

            raise ConfigError(
                "no step waits for the value of"
                f" {name!r}.{suggest_similar(name, set(expected_sources))} {hint}"
            )

    missing_names = [
        name
        for name, value_source in expected_sources.items()
        if name not in resume_values and value_source.get("default") is None
    ]
    if missing_names:
        raise ConfigError(
            f"a step waits for the value of {missing_names[0]!r}: pass it with -p"
            f" {missing_names[0]}=VALUE."
        )

    return {
        node["id"]: {
            parameter["name"]: resume_values[parameter["name"]]
            for parameter in list_missing_parameters(node)
            if parameter["name"] in resume_values
        }
        for node in suspended_nodes
    }


def _expected_parameters(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs of a suspend template. An output without a default gets the default of the
    input with the same name."""
    input_parameters = template["inputs"]["parameters"]
    input_defaults = {
        parameter["name"]: parameter["default"]
        for parameter in input_parameters
        if "default" in parameter
    }
    expected_parameters: list[dict[str, Any]] = []
    for parameter in (template.get("outputs") or {}).get("parameters") or []:
        value_source = dict(parameter["valueFrom"])
        if value_source.get("default") is None and parameter["name"] in input_defaults:
            value_source["default"] = input_defaults[parameter["name"]]
        expected_parameters.append({**parameter, "valueFrom": value_source})
    return expected_parameters


def list_missing_parameters(node: Node) -> list[dict[str, Any]]:
    """Return the output parameters of a suspended node that do not have a value yet. The default of
    such a parameter is in its `valueFrom`."""
    return [
        parameter
        for parameter in (node.get("outputs") or {}).get("parameters") or []
        if "valueFrom" in parameter
    ]


def _complete_node(context: Context, node: Node) -> Node:
    """End a suspended node successfully, with the defaults of missing outputs. Raises NodeError if
    an output has neither a value nor a default."""
    for parameter in list_missing_parameters(node):
        value_source = parameter.pop("valueFrom")
        if value_source.get("default") is None:
            parameter["valueFrom"] = value_source
            raise NodeError(
                f"raw output parameter '{parameter['name']}' has not been set and does not have a"
                " default value"
            )
        parameter["value"] = value_source["default"]
    return context.table.mark(node["name"], "Succeeded")


def check_suspend(template: Mapping[str, Any], field_path: str) -> None:
    """Raise ConfigError for an output with `valueFrom.supplied` outside a suspend template, and for
    an output of a suspend template that lacks `valueFrom.supplied`."""
    for index, parameter in enumerate((template.get("outputs") or {}).get("parameters") or []):
        is_supplied = (parameter.get("valueFrom") or {}).get("supplied") is not None
        if is_supplied != ("suspend" in template):
            if is_supplied:
                supplied_rule = "is only for suspend templates"
            else:
                supplied_rule = "is missing: each output of a suspend template needs this field"
            raise ConfigError(
                f"{field_path}.outputs.parameters[{index}].valueFrom.supplied {supplied_rule}."
            )
