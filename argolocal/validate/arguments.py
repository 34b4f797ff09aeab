"""Check the arguments of steps, tasks and workflows against the inputs of the called templates.

The behaviour follows Argo's validateArguments and ProcessArgs.
"""

from collections import Counter

from argolocal.errors import suggest_similar
from argolocal.language.gofmt import INTEGER, to_argo_string
from argolocal.manifest import tag_scope
from argolocal.manifest.tag_scope import PARAMETER_NAME, list_names
from argolocal.manifest.types import Data
from argolocal.validate import tag_rules
from argolocal.validate.findings import Findings

ARGUMENT_KINDS = ("parameters", "artifacts")
STORAGE_LOCATIONS = (
    "s3",
    "gcs",
    "http",
    "git",
    "raw",
    "hdfs",
    "oss",
    "azure",
    "artifactory",
    "plugin",
)
ARTIFACT_SOURCES = (*STORAGE_LOCATIONS, "from", "fromExpression")
# fields of valueFrom in an output parameter
PARAMETER_SOURCES = ("path", "jqFilter", "jsonPath", "parameter", "expression", "supplied")
# type of a template → allowed fields of valueFrom in its output parameters
OUTPUT_SOURCES = dict.fromkeys(("container", "script", "containerSet"), ("path",)) | {
    "resource": ("jsonPath", "jqFilter")
}
OUTPUT_SOURCES.update(dict.fromkeys(("dag", "steps"), ("parameter", "expression")))
# allowed fields of valueFrom in an argument
VALUE_SOURCES = ("configMapKeyRef", "supplied", "event")


def check_arguments(
    findings: Findings, path: str, arguments: Data, allows_missing_values: bool = False
) -> None:
    """Check the arguments of a workflow, step or task. `allows_missing_values` is True if a
    parameter may lack a value, because the command-line option -p may set the value later."""
    check_names(findings, path, arguments)
    for parameter in arguments.get("parameters") or []:
        _check_parameter(
            findings,
            f"{path}.parameters[{parameter.get('name')}]",
            parameter,
            allows_missing_values,
        )

    for artifact in arguments.get("artifacts") or []:
        artifact_path = f"{path}.artifacts[{artifact.get('name')}]"
        has_location = any(
            argument_kind in artifact for argument_kind in STORAGE_LOCATIONS[1:]
        ) or (artifact.get("s3") or {}).get("key")

        if artifact.get("from") and artifact.get("fromExpression"):
            findings.add(
                artifact_path,
                "argument",
                "both from and fromExpression are set: remove one of them.",
            )
        elif not artifact.get("from") and not has_location:
            uses_expression = artifact.get("fromExpression")
            if uses_expression:
                reason = "fromExpression alone is not allowed"
            else:
                reason = "the artifact's source is missing"

            findings.add(
                artifact_path,
                "argument",
                f"{reason}: give from, or a location (s3), even for an optional artifact.",
            )


def check_names(findings: Findings, path: str, named_fields: Data) -> None:
    """Check that names of parameters and artifacts are valid and unique."""
    for argument_kind in ARGUMENT_KINDS:
        for name, name_count in Counter(list_names(named_fields.get(argument_kind))).items():
            if not PARAMETER_NAME.fullmatch(tag_rules.TAG.sub("x", name)) or name_count > 1:
                findings.add(
                    f"{path}.{argument_kind}",
                    "name",
                    f'"{name}" must be letters, digits, - and _, and unique.',
                )


def check_inputs(
    findings: Findings,
    path: str,
    template_title: str,
    template: Data,
    passed_arguments: Data,
    allows_extra_arguments: bool = False,
    allows_missing_values: bool = False,
) -> None:
    """Check that a call passes the required inputs of a template. `template_title`: the template's
    name in messages.

    The value True of `allows_extra_arguments` accepts arguments that are not inputs of the
    template. The value True of `allows_missing_values` accepts missing arguments, because these
    arguments may be set later.
    """
    for argument_kind in ARGUMENT_KINDS:
        inputs = (template.get("inputs") or {}).get(argument_kind) or []
        passed_names = dict.fromkeys(list_names(passed_arguments.get(argument_kind)))

        input_names = set(list_names(inputs))
        for argument_name in (
            []
            if allows_extra_arguments
            else [
                argument_name for argument_name in passed_names if argument_name not in input_names
            ]
        ):
            # Argo accepts arguments that are not inputs of the called template. The finding about
            # an unknown argument is fatal only if the name of the argument may be a misspelling of
            # an input whose argument is missing.
            suggestion = suggest_similar(argument_name, input_names.difference(passed_names))
            message = (
                f"{template_title} does not have the input"
                f' "{argument_name}".{suggestion or " Remove it."}'
            )
            findings.add(path, "argument", message, fatal=bool(suggestion))

        for argument_name in (
            []
            if allows_missing_values
            else [
                str(declared_input.get("name"))
                for declared_input in inputs
                if _is_required(declared_input, argument_kind)
            ]
        ):
            if argument_name not in passed_names:
                message = (
                    f'{template_title} needs the input "{argument_name}": add it to the arguments.'
                )
                findings.add(path, "input", message + findings.suggest(argument_name, passed_names))


def check_outputs(findings: Findings, path: str, outputs: Data, template_type: str) -> None:
    """Check that each output parameter has exactly one source of its value, and that the template's
    type supports this source."""
    allowed_sources = OUTPUT_SOURCES.get(template_type, PARAMETER_SOURCES)

    for argument_kind in ("parameters", "artifacts"):
        for output in outputs.get(argument_kind) or []:
            output_path = f"{path}.outputs.{argument_kind}[{output.get('name')}]"
            global_name = output.get("globalName")
            if global_name and not PARAMETER_NAME.fullmatch(
                tag_rules.TAG.sub("x", str(global_name))
            ):
                findings.add(
                    f"{output_path}.globalName",
                    "name",
                    f'"{global_name}" must be letters, digits, - and _.',
                )

    for output in outputs.get("parameters") or []:
        output_path = f"{path}.outputs.parameters[{output.get('name')}]"
        value_source = output.get("valueFrom") or {}

        used_sources = ["value"] * ("value" in output) + [
            source_name
            for source_name in PARAMETER_SOURCES
            if value_source.get(source_name, "") != ""
        ]
        if len(used_sources) != 1 or ("value" in output and "valueFrom" in output):
            message = (
                f"the output has {' and '.join(used_sources) or 'no source'}: it must have exactly"
                " one valueFrom"
            )
            findings.add(output_path, "output", f"{message}, with {' or '.join(allowed_sources)}.")
        elif used_sources[0] not in (*allowed_sources, "value"):
            message = (
                f"{used_sources[0]} is not for this type of template: give"
                f" {' or '.join(allowed_sources)}."
            )
            findings.add(f"{output_path}.valueFrom.{used_sources[0]}", "output", message)


def check_timeout(
    findings: Findings, path: str, template: Data, passed_arguments: Data, workflow_arguments: Data
) -> None:
    """Check that a timeout that takes its value from an argument has a unit. Argo rejects a timeout
    without a unit after it has replaced the tags."""
    tag_values: dict[str, str] = {}

    inputs = template.get("inputs") or {}
    for tag_prefix, field_owner in (
        ("workflow", workflow_arguments),
        ("inputs", inputs),
        ("inputs", passed_arguments),
    ):
        for parameter in field_owner.get("parameters") or []:
            value = parameter.get("value", parameter.get("default", ""))
            tag_values[f"{tag_prefix}.parameters.{parameter.get('name')}"] = to_argo_string(value)

    timeout_text = str(template.get("timeout", ""))
    # the value of an argument may itself be a tag, so replace twice
    for _ in range(2):
        timeout_text = tag_rules.TAG.sub(
            lambda tag_match: tag_values.get(tag_match[1].strip(), tag_match[0]), timeout_text
        )

    if INTEGER.fullmatch(timeout_text):
        message = (
            f'arguments set the timeout of {template.get("name")} to "{timeout_text}": give a'
            " unit, as in 30s."
        )
        findings.add(path, "argument", message)


def _check_parameter(
    findings: Findings, path: str, parameter: Data, allows_missing_values: bool
) -> None:
    value_source = parameter.get("valueFrom")
    enum_values = parameter.get("enum")

    if value_source is not None and not any(
        source_name in value_source for source_name in VALUE_SOURCES
    ):
        message = (
            "in arguments, valueFrom must have a configMapKeyRef (and may have a default). Give it,"
            " or a value."
        )
        findings.add(f"{path}.valueFrom", "argument", message)
    elif value_source is None and "value" not in parameter and not allows_missing_values:
        findings.add(path, "argument", "the value is missing: give a value.")

    if not allows_missing_values and isinstance(enum_values, list) and enum_values:
        allowed_values = [to_argo_string(enum_value) for enum_value in enum_values]
        value = parameter.get("value")
        if value is None or (
            "{{" not in (value := to_argo_string(value)) and value not in allowed_values
        ):
            findings.add(
                f"{path}.value",
                "argument",
                f'"{value}" is not in the enum: it must be {" or ".join(allowed_values)}.',
            )


def _is_required(declared_input: Data, argument_kind: str) -> bool:
    """Return True if a caller must pass this input."""
    if argument_kind == "parameters":
        return not tag_scope.has_value(declared_input)
    return not declared_input.get("optional") and not any(
        source_name in declared_input for source_name in ARTIFACT_SOURCES
    )
