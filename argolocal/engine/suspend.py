"""Execute suspend templates, whose nodes wait for their duration or for `argolocal resume`.

    suspended(status)                                   # nodes that wait
    select_resume_values(status, {"approve": "YES"})    # {node id: {output: value}}

Values fill the outputs with `valueFrom: {supplied: {}}`; an output without a value gets its
default, or the default of the input with the same name.
Source: Argo's operator.go (executeSuspend, addRawOutputFields), workflow/util/util.go
(ResumeWorkflow, updateSuspendedNode); v4.1.
"""

from collections.abc import Mapping
from typing import Any

from argolocal.common import program
from argolocal.engine.context import Context
from argolocal.engine.nodes import NodeError, Options, Resumed, parse_time
from argolocal.errors import ConfigError, did_you_mean
from argolocal.language import gofmt
from argolocal.manifest.allowed_values import FAILED, FULFILLED
from argolocal.manifest.types import Node, Task, Template


def execute(
    context: Context, name: str, caller: Task, template: Template, options: Options
) -> Node:
    """Advance a suspend node. Raises NodeError."""
    node = context.table.get_or_create(name, "Suspend", "Running", caller, template, options)
    if node["phase"] == "Pending":  # a Pending node was waiting for a lock until now
        context.table.mark(name, "Running")
    if "outputs" not in node and (expected_parameters := _expected_parameters(template)):
        node["outputs"] = {"parameters": expected_parameters}

    duration = (template["suspend"] or {}).get("duration")
    if duration:
        resume_time = parse_time(node["startedAt"]) + gofmt.parse_seconds(str(duration))
        if context.table.now >= resume_time:
            return _complete(context, node)

        context.wake_at(resume_time)

    return node


def resume(context: Context, event: Resumed) -> None:
    """Resume or set the node of `event`, if the node is still suspended."""
    node = context.nodes.get(event.id)
    if not node or node["phase"] in FULFILLED:
        return

    for parameter in (node.get("outputs") or {}).get("parameters") or []:
        if parameter["name"] in event.values:
            parameter["value"] = event.values[parameter["name"]]
            parameter.pop("valueFrom", None)
            context.inputs.export({"parameters": [parameter]})

    context.table.changed_nodes[node["id"]] = None
    if event.phase in FAILED:
        context.table.mark(node["name"], event.phase, event.message)
        return

    if event.message:
        node["message"] = event.message
    if not event.phase:
        return

    try:
        _complete(context, node)
    except NodeError as error:
        context.table.mark(node["name"], "Error", str(error))


def suspended(status: Mapping[str, Any]) -> list[Node]:
    """Return the suspended nodes."""
    return [
        node
        for node in status.get("nodes", {}).values()
        if node["type"] == "Suspend" and node["phase"] == "Running"
    ]


def resume_hint(name: str, node: Node) -> str:
    """Return a sentence that says how to resume a suspended node of run `name`."""
    values = "".join(
        f" -p {parameter['name']}={parameter['valueFrom'].get('default', 'VALUE')}"
        for parameter in missing_parameters(node)
    )
    return (
        f"{node['displayName']} waits: `{program.name} resume {name}{values}` in another terminal"
        " resumes it"
    )


def select_resume_values(
    status: Mapping[str, Any], values: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Assign `values` to the outputs of the suspended nodes: {node id: {output: value}}. Raises
    ConfigError for unknown and missing values."""
    nodes = suspended(status)

    expected_sources = {
        parameter["name"]: parameter["valueFrom"]
        for node in nodes
        for parameter in missing_parameters(node)
    }

    for name in values:
        if name not in expected_sources:
            if expected_sources:
                hint = f"The suspended steps wait for {', '.join(expected_sources)}."
            else:
                hint = "The suspended steps do not wait for values."

            raise ConfigError(
                "no step waits for the value of"
                f" {name!r}.{did_you_mean(name, set(expected_sources))} {hint}"
            )

    missing_names = [
        name
        for name, source in expected_sources.items()
        if name not in values and source.get("default") is None
    ]
    if missing_names:
        raise ConfigError(
            f"a step waits for the value of {missing_names[0]!r}: pass it with -p"
            f" {missing_names[0]}=VALUE."
        )

    return {
        node["id"]: {
            parameter["name"]: values[parameter["name"]]
            for parameter in missing_parameters(node)
            if parameter["name"] in values
        }
        for node in nodes
    }


def _expected_parameters(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs = template["inputs"]["parameters"]
    defaults = {
        parameter["name"]: parameter["default"] for parameter in inputs if "default" in parameter
    }
    expected_parameters: list[dict[str, Any]] = []
    for parameter in (template.get("outputs") or {}).get("parameters") or []:
        source = dict(parameter["valueFrom"])
        if source.get("default") is None and parameter["name"] in defaults:
            source["default"] = defaults[parameter["name"]]
        expected_parameters.append({**parameter, "valueFrom": source})
    return expected_parameters


def missing_parameters(node: Node) -> list[dict[str, Any]]:
    """Return the outputs of a suspended node whose values are missing. A `default` in `valueFrom`
    is used if no value is given."""
    return [
        parameter
        for parameter in (node.get("outputs") or {}).get("parameters") or []
        if "valueFrom" in parameter
    ]


def _complete(context: Context, node: Node) -> Node:
    for parameter in missing_parameters(node):
        source = parameter.pop("valueFrom")
        if source.get("default") is None:
            parameter["valueFrom"] = source
            raise NodeError(
                f"raw output parameter '{parameter['name']}' has not been set and does not have a"
                " default value"
            )
        parameter["value"] = source["default"]
    return context.table.mark(node["name"], "Succeeded")


def check(template: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if `valueFrom.supplied` is set outside a suspend template, or missing in a
    suspend template."""
    for index, parameter in enumerate((template.get("outputs") or {}).get("parameters") or []):
        is_supplied = (parameter.get("valueFrom") or {}).get("supplied") is not None
        if is_supplied != ("suspend" in template):
            if is_supplied:
                rule = "is only for suspend templates"
            else:
                rule = "is missing: each output of a suspend template needs this field"
            raise ConfigError(f"{where}.outputs.parameters[{index}].valueFrom.supplied {rule}.")
