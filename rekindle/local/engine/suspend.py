"""Suspend templates: a node that waits until its duration is over, or somebody lets it go on (`rekindle resume`).

    waiting(status); requested(status, {"approve": "YES"})   # → {node id: the values that it is given}

A value is for the outputs that are `valueFrom: {supplied: {}}`; one that nobody gives is the default of the output or
of the input of that name. Source: Argo's operator.go (executeSuspend, addRawOutputFields), workflow/util/util.go
(ResumeWorkflow, updateSuspendedNode); v4.1.
"""

from collections.abc import Mapping
from typing import Any

from rekindle.argo.kinds import FULFILLED
from rekindle.argo.language import gofmt
from rekindle.errors import ConfigError, did_you_mean
from rekindle.local.engine.context import Context
from rekindle.local.engine.nodes import Node, NodeError, Options, Resumed, moment


def execute(context: Context, name: str, caller: dict[str, Any], template: dict[str, Any], options: Options) -> Node:
    """Brings a suspend node as far as it can go. Raises NodeError."""
    node = context.table.begun(name, "Suspend", "Running", caller, template, options)
    if node["phase"] == "Pending":  # it had waited for a lock
        context.table.mark(name, "Running")
    if "outputs" not in node and (expected := _expected(template)):
        node["outputs"] = {"parameters": expected}
    if duration := (template["suspend"] or {}).get("duration"):
        until = moment(node["startedAt"]) + gofmt.seconds(str(duration))
        if context.table.now >= until:
            return _over(context, node)
        context.wake_at(until)
    return node


def resume(context: Context, event: Resumed) -> None:
    """Lets a node go on that still waits."""
    node = context.table.nodes.get(event.id)
    if not node or node["phase"] in FULFILLED:
        return
    for each in (node.get("outputs") or {}).get("parameters") or []:
        if each["name"] in event.values:
            each["value"] = event.values[each["name"]]
            each.pop("valueFrom", None)
            context.inputs.export({"parameters": [each]})
    try:
        _over(context, node)
    except NodeError as error:
        context.table.mark(node["name"], "Error", str(error))


def waiting(status: Mapping[str, Any]) -> list[Node]:
    """The nodes that wait for somebody, or for their time."""
    return [n for n in status.get("nodes", {}).values() if n["type"] == "Suspend" and n["phase"] == "Running"]


def told(name: str, node: Node) -> str:
    """What lets a node of run `name` go on, in words."""
    values = "".join(f" -p {each['name']}={each['valueFrom'].get('default', 'VALUE')}" for each in _supplied(node))
    return f"{node['displayName']} waits: `rekindle resume {name}{values}` in another terminal lets it go on"


def requested(status: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What each waiting node is given. Raises ConfigError for a value that none waits for, and for one that lacks."""
    nodes = waiting(status)
    expected = {each["name"]: each["valueFrom"] for node in nodes for each in _supplied(node)}
    for name in values:
        if name not in expected:
            known = f"It waits for {', '.join(expected)}." if expected else "It waits for no value."
            raise ConfigError(f"no step waits for the value of {name!r}.{did_you_mean(name, set(expected))} {known}")
    lacking = [name for name, source in expected.items() if name not in values and source.get("default") is None]
    if lacking:
        raise ConfigError(f"a step waits for the value of {lacking[0]!r}: give it, as with -p {lacking[0]}=VALUE.")
    return {
        node["id"]: {each["name"]: values[each["name"]] for each in _supplied(node) if each["name"] in values}
        for node in nodes
    }


def _expected(template: dict[str, Any]) -> list[dict[str, Any]]:
    defaults = {each["name"]: each["default"] for each in template["inputs"]["parameters"] if "default" in each}
    found = []
    for each in (template.get("outputs") or {}).get("parameters") or []:
        source = dict(each["valueFrom"])
        if source.get("default") is None and each["name"] in defaults:
            source["default"] = defaults[each["name"]]
        found.append({**each, "valueFrom": source})
    return found


def _supplied(node: Node) -> list[dict[str, Any]]:
    return [each for each in (node.get("outputs") or {}).get("parameters") or [] if "valueFrom" in each]


def _over(context: Context, node: Node) -> Node:
    for each in _supplied(node):
        source = each.pop("valueFrom")
        if source.get("default") is None:
            each["valueFrom"] = source
            raise NodeError(f"raw output parameter '{each['name']}' has not been set and does not have a default value")
        each["value"] = source["default"]
    return context.table.mark(node["name"], "Succeeded")


def check(template: dict[str, Any], where: str) -> None:
    """Raises ConfigError where another than a suspended step waits for a value, or that has another output."""
    for index, each in enumerate((template.get("outputs") or {}).get("parameters") or []):
        supplied = (each.get("valueFrom") or {}).get("supplied") is not None
        if supplied != ("suspend" in template):
            rule = "is only for suspend templates" if supplied else "is missing: a suspended step has no other outputs"
            raise ConfigError(f"{where}.outputs.parameters[{index}].valueFrom.supplied {rule}.")
