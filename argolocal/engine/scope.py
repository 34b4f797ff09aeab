"""The tag values that a step or task may use: inputs of its template, workflow outputs, and outputs
of earlier steps or ancestor tasks.

A value is a string or an artifact (a dict). The value is None for an output of a skipped step if
the output does not have a default. The behaviour follows Argo's scope.go, and buildLocalScope and
processAggregateNodeOutputs of operator.go.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine.nodes import NodeError, NodeTable
from argolocal.language import gofmt
from argolocal.language.expr import evaluate
from argolocal.language.govaluate import WhenError, should_execute
from argolocal.language.substitute import STEP_OUTPUTS, TemplateError, nest_scope, substitute
from argolocal.manifest.loops import has_loop
from argolocal.manifest.types import Node, Task, Template

# start of Argo's error messages about arguments of steps and hooks
UNRESOLVED_PREFIX = "unable to resolve references: "
# value of an argument whose tag refers to an output without a value
ABSENT_VALUE_MARK = "__argo__internal__absent-optional"
# prefix of each path that has replaced a tag; the executor moves these paths below the pod's root
POD_PATH_MARK = "\ue000"


class Scope(dict[str, Any]):
    """Maps tags to values."""

    def parameters(self, global_values: Mapping[str, str] | None = None) -> "StringValues":
        """Return a view of the values of this scope that are strings or None, and of the values of
        the tags workflow.* in `global_values`."""
        return StringValues(self, global_values or {})


class StringValues(Mapping[str, str | None]):
    """A read-only view of the values of a scope that are strings or None. The values of tags are
    looked up on demand, because a step may use only one or two of a thousand tags."""

    def __init__(self, scope: Scope, global_values: Mapping[str, str]) -> None:
        self.scope = scope
        self.globals = global_values

    def __getitem__(self, name: str) -> str | None:
        value = self.scope.get(name, self)
        if value is None or isinstance(value, str):
            return value
        return self.globals[name]

    def __iter__(self) -> Iterator[str]:
        text_names = (
            name for name, value in self.scope.items() if value is None or isinstance(value, str)
        )
        return iter(dict.fromkeys((*self.globals, *text_names)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def template_scope(status: Mapping[str, Any], template: Template) -> Scope:
    """Return a scope with the inputs of a template and the workflow's outputs in `status`."""
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


def add_node_tags(table: NodeTable, scope: Scope, caller_kind: str, name: str, node: Node) -> None:
    """Add the tags `tasks.NAME.*` or `steps.NAME.*` of a node to the scope. A Retry node is
    represented by its last attempt. `caller_kind`: "tasks" or "steps"."""
    node = table.last_attempt(node)
    tag_prefix = f"{caller_kind}.{name}"
    scope[f"{tag_prefix}.id"] = node["id"]
    scope[f"{tag_prefix}.status"] = node["phase"]

    for time_field in ("startedAt", "finishedAt"):
        if node.get(time_field):
            scope[f"{tag_prefix}.{time_field}"] = node[time_field][:19] + "Z"

    for node_field, tag in (("podIP", "ip"), ("hostNodeName", "hostNodeName")):
        if node.get(node_field):
            scope[f"{tag_prefix}.{tag}"] = node[node_field]

    outputs = node.get("outputs") or {}
    for output_field, tag in (("result", "outputs.result"), ("exitCode", "exitCode")):
        if outputs.get(output_field) is not None:
            scope[f"{tag_prefix}.{tag}"] = outputs[output_field]

    add_outputs(scope, tag_prefix, outputs)


def reject_inline_template(caller: Mapping[str, Any]) -> None:
    """Raise ValueError if the step or task `caller`, a completed loop, has an inline template. Argo
    fails at such a loop, because Argo looks the template up by name."""
    if caller.get("inline"):
        raise ValueError("failed to get a template")


def add_outputs(
    scope: Scope, tag_prefix: str, outputs: Mapping[str, Any], default_value: str | None = None
) -> None:
    """Add the tags PREFIX.outputs.parameters.* and PREFIX.outputs.artifacts.* to the scope.
    `default_value`: value for a parameter that lacks one; with None, the tag of such a parameter is
    left out."""
    for parameter in outputs.get("parameters") or []:
        value = parameter.get("value", default_value)
        if value is not None:
            scope[f"{tag_prefix}.outputs.parameters.{parameter['name']}"] = value
    for artifact in outputs.get("artifacts") or []:
        scope[f"{tag_prefix}.outputs.artifacts.{artifact['name']}"] = artifact


def add_skipped_outputs(
    scope: Scope,
    caller_kind: str,
    name: str,
    node: Node,
    template: Template,
    includes_artifacts: bool,
) -> None:
    """If a node was skipped or omitted, add the outputs that its template declares, with their
    default values or else None."""
    if node.get("outputs") is not None or node["phase"] not in ("Skipped", "Omitted"):
        return
    outputs = template.get("outputs") or {}
    for parameter in outputs.get("parameters") or []:
        tag = f"{caller_kind}.{name}.outputs.parameters.{parameter['name']}"
        scope[tag] = (parameter.get("valueFrom") or {}).get("default")
    for artifact in (outputs.get("artifacts") or []) if includes_artifacts else ():
        scope[f"{caller_kind}.{name}.outputs.artifacts.{artifact['name']}"] = {}


def add_loop_outputs(scope: Scope, caller_kind: str, name: str, nodes: Iterable[Node]) -> None:
    """Add the outputs of a loop as JSON lists, in the order of its items. Raises ValueError if the
    result of an item is not JSON."""
    item_nodes = (node for node in nodes if not node.get("nodeFlag"))

    ordered_nodes = sorted(
        item_nodes, key=lambda node: int(node["name"].rpartition("(")[2].partition(":")[0])
    )
    if not ordered_nodes:
        return

    parameter_rows = []
    parameter_columns = {}
    item_results = []

    for node in ordered_nodes:
        outputs = node.get("outputs")
        if not outputs or node["phase"] != "Succeeded":
            continue

        parameter_row = {
            parameter["name"]: parameter.get("value", "")
            for parameter in outputs.get("parameters") or []
        }
        if parameter_row:
            parameter_rows.append(parameter_row)

        for key, value in parameter_row.items():
            parameter_columns.setdefault(key, []).append(value)

        if outputs.get("result") is not None:
            item_results.append(gofmt.compact_json(outputs["result"]))

    tag_prefix = f"{caller_kind}.{name}.outputs"
    scope[f"{tag_prefix}.result"] = f"[{','.join(item_results)}]"
    scope[f"{tag_prefix}.parameters"] = gofmt.dumps(parameter_rows)

    for key, column_values in parameter_columns.items():
        scope[f"{tag_prefix}.parameters.{key}"] = gofmt.dumps(_parse_if_structured(column_values))


def _parse_if_structured(values: list[str]) -> list[Any]:
    """Return the values parsed as JSON if all are JSON lists or objects. If a value is anything
    else, return the strings unchanged."""
    try:
        parsed_values = [gofmt.parse_json(value, convert_int=float) for value in values]
    except ValueError:
        return values
    if all(isinstance(value, (list, dict)) for value in parsed_values):
        return parsed_values
    return values


def mark_absent_arguments(scope: Scope, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a step or task, in which each argument that consists of one tag with
    the value None is replaced by ABSENT_VALUE_MARK, so that the default of the input is used."""

    def mark(parameter: dict[str, Any]) -> dict[str, Any]:
        value = parameter.get("value")
        if isinstance(value, str) and value.startswith("{{") and value.endswith("}}"):
            tag = value[2:-2].strip()
            if tag in scope and scope[tag] is None:
                return {**parameter, "value": ABSENT_VALUE_MARK}
        return parameter

    if not arguments.get("parameters"):
        return arguments

    return {**arguments, "parameters": [mark(parameter) for parameter in arguments["parameters"]]}


def resolve_references(
    scope: Scope, task: Task, global_values: Mapping[str, str], message_prefix: str = ""
) -> Task:
    """Return a copy of a task or step with all tags replaced, except the tags of loop items.

    If the `when` condition is false, only the tags in `when` are replaced. Raises WhenError for an
    invalid condition, and TemplateError for an invalid tag; the message about an artifact starts
    with `message_prefix`.
    """
    tag_values = scope.parameters(global_values)
    task_fields = {key: value for key, value in task.items() if key != "hooks"}
    hook_fields = {"hooks": task["hooks"]} if "hooks" in task else {}

    if task.get("when"):
        when_condition = substitute(task["when"], tag_values, STEP_OUTPUTS)
        try:
            if not should_execute(when_condition):
                return task_fields | hook_fields | {"when": when_condition}
        except WhenError:
            if not has_loop(task):
                raise

    task_fields["arguments"] = mark_absent_arguments(scope, task_fields.get("arguments") or {})
    task_fields = substitute(task_fields, tag_values, STEP_OUTPUTS)

    artifacts = [
        resolve_artifact(scope, artifact, message_prefix)
        for artifact in task_fields["arguments"].get("artifacts") or []
    ]
    if artifacts:
        task_fields["arguments"] = {
            **task_fields["arguments"],
            "artifacts": [artifact for artifact in artifacts if artifact],
        }

    return task_fields | hook_fields


def resolve_artifact(
    scope: Scope, artifact: dict[str, Any], message_prefix: str = ""
) -> dict[str, Any] | None:
    """Return the artifact that `from` or `fromExpression` refers to, or None if an optional
    artifact is missing.

    Raises TemplateError, whose message starts with `message_prefix`.
    """
    artifact_source = artifact.get("from") or ""

    expression = artifact.get("fromExpression")
    if not artifact_source and not expression:
        return artifact

    try:
        if expression:
            resolved_artifact = evaluate(expression, nest_scope(scope))
        else:
            resolved_artifact = _read_tag(scope, artifact_source)
    except NodeError as error:
        if artifact.get("optional"):
            return None

        raise TemplateError(f"{message_prefix}{error}") from None

    if not isinstance(resolved_artifact, dict):
        raise TemplateError(f"Variable {{{{{artifact_source or expression}}}}} is not an artifact")

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
        resolved_parameter = {
            key: field_value for key, field_value in parameter.items() if key != "valueFrom"
        }
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
    """Return the value of an output parameter of a DAG or steps template. Raises TemplateError."""
    if "valueFrom" not in parameter:
        raise TemplateError("output parameters must have a valueFrom specified")

    value_source = parameter["valueFrom"] or {}
    default_value = value_source.get("default")
    value = None

    try:
        if value_source.get("expression"):
            value = evaluate(value_source["expression"], nest_scope(scope))
            if value is None:
                raise TemplateError(
                    f"failed to evaluate expression {to_json(value_source['expression'])}"
                )
        else:
            value = _read_tag(scope, value_source.get("parameter", ""))
    except NodeError as error:
        if default_value is None:
            raise TemplateError(str(error)) from None
        return default_value

    if value is not None:
        return gofmt.format_v(value)

    if default_value is None:
        raise TemplateError(
            f'output parameter "{parameter["name"]}": "{value_source.get("parameter", "")}" is an'
            " absent optional (skipped/omitted node output with no default)"
        )

    return default_value
