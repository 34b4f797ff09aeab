"""The tag values that a step or task may use: inputs of its template, workflow outputs, and outputs
of earlier steps or ancestor tasks.

A value is a string, an artifact (a dict), or None for the output of a skipped step without a
default.
Source: Argo's scope.go, and buildLocalScope and processAggregateNodeOutputs of operator.go.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine.nodes import NodeError, NodeTable
from argolocal.language import gofmt
from argolocal.language.expr import evaluate
from argolocal.language.substitute import TemplateError, nest_scope, substitute
from argolocal.manifest.types import Node, Template

# start of Argo's error messages about arguments of steps and hooks
UNRESOLVED_PREFIX = "unable to resolve references: "
ABSENT_VALUE = "__argo__internal__absent-optional"
# marks a path that has replaced a tag; the executor moves marked paths below the pod's root
POD_PATH_MARK = "\ue000"


class Scope(dict[str, Any]):
    """Maps tags to values."""

    def parameters(self, globals: Mapping[str, str] | None = None) -> "StringValues":
        """Return a view of this scope's values that are a string or None, and of all values of
        `globals`."""
        return StringValues(self, globals or {})


class StringValues(Mapping[str, str | None]):
    """A view of the string values of a scope. The view copies no values, because a step may use
    only one or two of a thousand tags."""

    def __init__(self, scope: Scope, globals: Mapping[str, str]) -> None:
        self.scope = scope
        self.globals = globals

    def __getitem__(self, name: str) -> str | None:
        value = self.scope.get(name, self)
        if value is None or isinstance(value, str):
            return value
        return self.globals[name]

    def __iter__(self) -> Iterator[str]:
        texts = (
            name for name, value in self.scope.items() if value is None or isinstance(value, str)
        )
        return iter(dict.fromkeys((*self.globals, *texts)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def template_scope(status: Mapping[str, Any], template: Template) -> Scope:
    """Return a scope with the inputs of a template and the workflow outputs exported so far."""
    scope = Scope(
        {
            f"inputs.parameters.{parameter['name']}": parameter["value"]
            for parameter in template["inputs"]["parameters"]
        }
    )

    scope.update(
        {
            f"inputs.artifacts.{artifact['name']}": artifact
            for artifact in template["inputs"]["artifacts"]
        }
    )

    outputs = status.get("outputs") or {}

    scope.update(
        {
            f"workflow.outputs.parameters.{parameter['name']}": parameter["value"]
            for parameter in outputs.get("parameters") or []
        }
    )

    scope.update(
        {
            f"workflow.outputs.artifacts.{artifact['name']}": artifact
            for artifact in outputs.get("artifacts") or []
        }
    )

    return scope


def add_node(table: NodeTable, scope: Scope, kind: str, name: str, node: Node) -> None:
    """Add the tags `KIND.NAME.*` of a node, or of the last attempt of a Retry node. `kind` is tasks
    or steps."""
    node = table.last_attempt(node)
    prefix = f"{kind}.{name}"
    scope[f"{prefix}.id"] = node["id"]
    scope[f"{prefix}.status"] = node["phase"]

    for key in ("startedAt", "finishedAt"):
        if node.get(key):
            scope[f"{prefix}.{key}"] = node[key][:19] + "Z"

    for key, tag in (("podIP", "ip"), ("hostNodeName", "hostNodeName")):
        if node.get(key):
            scope[f"{prefix}.{tag}"] = node[key]

    outputs = node.get("outputs") or {}
    for key, tag in (("result", "outputs.result"), ("exitCode", "exitCode")):
        if outputs.get(key) is not None:
            scope[f"{prefix}.{tag}"] = outputs[key]

    add_outputs(scope, prefix, outputs)


def reject_inline_template(caller: Mapping[str, Any]) -> None:
    """Raise ValueError if the completed loop `caller` has an inline template, because Argo looks up
    a loop's template by its name."""
    if caller.get("inline"):
        raise ValueError("failed to get a template")


def add_outputs(
    scope: Scope, prefix: str, outputs: Mapping[str, Any], default: str | None = None
) -> None:
    """Add the tags PREFIX.outputs.parameters.* and PREFIX.outputs.artifacts.*."""
    for parameter in outputs.get("parameters") or []:
        value = parameter.get("value", default)
        if value is not None:
            scope[f"{prefix}.outputs.parameters.{parameter['name']}"] = value
    for artifact in outputs.get("artifacts") or []:
        scope[f"{prefix}.outputs.artifacts.{artifact['name']}"] = artifact


def add_skipped_outputs(
    scope: Scope, kind: str, name: str, node: Node, template: Template, artifacts: bool
) -> None:
    """Add the declared outputs of a node that was skipped or omitted: their default values, or
    None."""
    if node.get("outputs") is not None or node["phase"] not in ("Skipped", "Omitted"):
        return
    outputs = template.get("outputs") or {}
    for parameter in outputs.get("parameters") or []:
        tag = f"{kind}.{name}.outputs.parameters.{parameter['name']}"
        scope[tag] = (parameter.get("valueFrom") or {}).get("default")
    for artifact in (outputs.get("artifacts") or []) if artifacts else ():
        scope[f"{kind}.{name}.outputs.artifacts.{artifact['name']}"] = {}


def add_loop_outputs(scope: Scope, kind: str, name: str, nodes: Iterable[Node]) -> None:
    """Add the outputs of a loop as JSON lists, in the order of its items. Raises ValueError if a
    result is not JSON."""
    items = (node for node in nodes if not node.get("nodeFlag"))

    ordered_nodes = sorted(
        items, key=lambda node: int(node["name"].rpartition("(")[2].partition(":")[0])
    )
    if not ordered_nodes:
        return

    rows = []
    columns = {}
    results = []

    for node in ordered_nodes:
        outputs = node.get("outputs")
        if not outputs or node["phase"] != "Succeeded":
            continue

        row = {
            parameter["name"]: parameter.get("value", "")
            for parameter in outputs.get("parameters") or []
        }
        if row:
            rows.append(row)

        for key, value in row.items():
            columns.setdefault(key, []).append(value)

        if outputs.get("result") is not None:
            results.append(gofmt.compact(outputs["result"]))

    prefix = f"{kind}.{name}.outputs"
    scope[f"{prefix}.result"] = f"[{','.join(results)}]"
    scope[f"{prefix}.parameters"] = gofmt.dumps(rows)

    for key, values in columns.items():
        scope[f"{prefix}.parameters.{key}"] = gofmt.dumps(_parse_if_structured(values))


def _parse_if_structured(values: list[str]) -> list[Any]:
    """Return the parsed values if all strings are JSON lists or maps, else return the strings
    unchanged."""
    try:
        parsed_values = [gofmt.parse_json(value, convert_int=float) for value in values]
    except ValueError:
        return values
    if all(isinstance(value, (list, dict)) for value in parsed_values):
        return parsed_values
    return values


def mark_absent_arguments(scope: Scope, arguments: dict[str, Any]) -> dict[str, Any]:
    """Mark each argument that is a single tag with the value None as absent, so that the input's
    default applies."""

    def mark(parameter: dict[str, Any]) -> dict[str, Any]:
        value = parameter.get("value")
        if isinstance(value, str) and value.startswith("{{") and value.endswith("}}"):
            tag = value[2:-2].strip()
            if tag in scope and scope[tag] is None:
                return {**parameter, "value": ABSENT_VALUE}
        return parameter

    if not arguments.get("parameters"):
        return arguments

    return {**arguments, "parameters": [mark(parameter) for parameter in arguments["parameters"]]}


def resolve_artifact(
    scope: Scope, artifact: dict[str, Any], message_prefix: str = ""
) -> dict[str, Any] | None:
    """Return the artifact that `from` or `fromExpression` refers to, or None if an optional
    artifact is missing.

    Raises TemplateError, whose message starts with `message_prefix`.
    """
    source = artifact.get("from") or ""

    expression = artifact.get("fromExpression")
    if not source and not expression:
        return artifact

    try:
        if expression:
            resolved_artifact = evaluate(expression, nest_scope(scope))
        else:
            resolved_artifact = _read_tag(scope, source)
    except NodeError as error:
        if artifact.get("optional"):
            return None

        raise TemplateError(f"{message_prefix}{error}") from None

    if not isinstance(resolved_artifact, dict):
        raise TemplateError(f"Variable {{{{{source or expression}}}}} is not an artifact")

    resolved_artifact = {**resolved_artifact, "name": artifact["name"]}
    if artifact.get("subPath") and resolved_artifact.get("s3"):
        sub_path = substitute(artifact["subPath"], scope.parameters())
        resolved_artifact["s3"] = {
            **resolved_artifact["s3"],
            "key": f"{resolved_artifact['s3']['key'].rstrip('/')}/{sub_path}",
        }

    return resolved_artifact


def _read_tag(scope: Scope, source: str) -> Any:
    """Return the value of a tag, or of an expression in braces. Raises NodeError."""
    tag = source.removeprefix("{{").removesuffix("}}").strip()
    if tag.startswith("="):
        return evaluate(tag[1:], nest_scope(scope))
    if tag not in scope:
        raise TemplateError(f'Unable to resolve: "{tag}"')
    return scope[tag]


def resolve_outputs(template: Template, scope: Scope) -> dict[str, Any] | None:
    """Return the outputs of a DAG or steps template. Raises TemplateError."""
    declared_outputs = template.get("outputs") or {}
    outputs: dict[str, Any] = {}

    for parameter in declared_outputs.get("parameters") or []:
        value = _output_value(parameter, scope)
        resolved_parameter = {key: item for key, item in parameter.items() if key != "valueFrom"}
        resolved_parameter["value"] = value
        outputs.setdefault("parameters", []).append(resolved_parameter)

    for artifact in declared_outputs.get("artifacts") or []:
        resolved_artifact = resolve_artifact(
            scope, artifact, "unable to resolve outputs from scope: "
        )
        if resolved_artifact and (artifact.get("from") or artifact.get("fromExpression")):
            if artifact.get("globalName"):
                global_name = {"globalName": artifact["globalName"]}
            else:
                global_name = {}

            resolved_artifact = {
                key: value for key, value in resolved_artifact.items() if key != "globalName"
            }
            outputs.setdefault("artifacts", []).append(resolved_artifact | global_name)

    return outputs or None


def _output_value(parameter: dict[str, Any], scope: Scope) -> str:
    if "valueFrom" not in parameter:
        raise TemplateError("output parameters must have a valueFrom specified")

    source = parameter["valueFrom"] or {}
    default = source.get("default")
    value = None

    try:
        if source.get("expression"):
            value = evaluate(source["expression"], nest_scope(scope))
            if value is None:
                raise TemplateError(
                    f"failed to evaluate expression {to_json(source['expression'])}"
                )
        else:
            value = _read_tag(scope, source.get("parameter", ""))
    except NodeError as error:
        if default is None:
            raise TemplateError(str(error)) from None
        return default

    if value is not None:
        return gofmt.format_v(value)

    if default is None:
        raise TemplateError(
            f'output parameter "{parameter["name"]}": "{source.get("parameter", "")}" is an absent'
            " optional (skipped/omitted node output with no default)"
        )

    return default
