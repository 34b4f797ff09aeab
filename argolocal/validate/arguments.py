"""Check the arguments of steps, tasks and workflows against the inputs of the called templates.

Source: Argo's validateArguments and ProcessArgs.
"""

from collections import Counter

from argolocal.errors import did_you_mean
from argolocal.language.gofmt import INTEGER, to_argo_string
from argolocal.manifest import tag_scope
from argolocal.manifest.tag_scope import PARAMETER_NAME, names
from argolocal.manifest.types import Data
from argolocal.validate import tag_rules
from argolocal.validate.findings import Findings

KINDS = ("parameters", "artifacts")
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
# allowed fields of valueFrom in an output parameter
PARAMETER_SOURCES = ("path", "jqFilter", "jsonPath", "parameter", "expression", "supplied")
OUTPUT_SOURCES = dict.fromkeys(("container", "script", "containerSet"), ("path",)) | {
    "resource": ("jsonPath", "jqFilter")
}
OUTPUT_SOURCES.update(dict.fromkeys(("dag", "steps"), ("parameter", "expression")))
# allowed fields of valueFrom in an argument
VALUE_SOURCES = ("configMapKeyRef", "supplied", "event")


def check(findings: Findings, path: str, arguments: Data, allow_later: bool = False) -> None:
    """Check `arguments`. With `allow_later`, values may be missing, because the command-line option
    -p may set them later."""
    check_names(findings, path, arguments)
    for parameter in arguments.get("parameters") or []:
        _check_parameter(
            findings, f"{path}.parameters[{parameter.get('name')}]", parameter, allow_later
        )

    for artifact in arguments.get("artifacts") or []:
        where = f"{path}.artifacts[{artifact.get('name')}]"
        has_location = any(kind in artifact for kind in STORAGE_LOCATIONS[1:]) or (
            artifact.get("s3") or {}
        ).get("key")

        if artifact.get("from") and artifact.get("fromExpression"):
            findings.add(
                where, "argument", "both from and fromExpression are set: remove one of them."
            )
        elif not artifact.get("from") and not has_location:
            by_expression = artifact.get("fromExpression")
            if by_expression:
                reason = "fromExpression alone is not allowed"
            else:
                reason = "the artifact's source is missing"

            findings.add(
                where,
                "argument",
                f"{reason}: give from, or a location (s3), even for an optional artifact.",
            )


def check_names(findings: Findings, path: str, fields: Data) -> None:
    """Check that names of parameters and artifacts are valid and unique."""
    for kind in KINDS:
        for name, count in Counter(names(fields.get(kind))).items():
            if not PARAMETER_NAME.fullmatch(tag_rules.TAG.sub("x", name)) or count > 1:
                findings.add(
                    f"{path}.{kind}",
                    "name",
                    f'"{name}" must be letters, digits, - and _, and unique.',
                )


def check_inputs(
    findings: Findings,
    path: str,
    title: str,
    template: Data,
    passed_arguments: Data,
    allow_extra: bool = False,
    allow_later: bool = False,
) -> None:
    """Check that a call passes the required inputs of a template. `title`: description of the
    template in messages.

    `allow_extra`: accept arguments for which the template has no input. `allow_later`: accept
    missing arguments, because they may be set later.
    """
    for kind in KINDS:
        inputs = (template.get("inputs") or {}).get(kind) or []
        passed_names = dict.fromkeys(names(passed_arguments.get(kind)))

        input_names = set(names(inputs))
        for name in (
            [] if allow_extra else [name for name in passed_names if name not in input_names]
        ):
            # Argo accepts unknown arguments. The finding is fatal only if the name may be a
            # misspelling of an input whose argument is missing.
            suggestion = did_you_mean(name, input_names.difference(passed_names))
            message = f'{title} does not have the input "{name}".{suggestion or " Remove it."}'
            findings.add(path, "argument", message, fatal=bool(suggestion))

        for name in (
            []
            if allow_later
            else [str(item.get("name")) for item in inputs if _is_required(item, kind)]
        ):
            if name not in passed_names:
                message = f'{title} needs the input "{name}": add it to the arguments.'
                findings.add(path, "input", message + findings.suggest(name, passed_names))


def check_outputs(findings: Findings, path: str, outputs: Data, template_type: str) -> None:
    """Check that each output parameter has exactly one source of its value, and that the template's
    type supports this source."""
    allowed_sources = OUTPUT_SOURCES.get(template_type, PARAMETER_SOURCES)

    for kind in ("parameters", "artifacts"):
        for output in outputs.get(kind) or []:
            where = f"{path}.outputs.{kind}[{output.get('name')}]"
            name = output.get("globalName")
            if name and not PARAMETER_NAME.fullmatch(tag_rules.TAG.sub("x", str(name))):
                findings.add(
                    f"{where}.globalName", "name", f'"{name}" must be letters, digits, - and _.'
                )

    for output in outputs.get("parameters") or []:
        where = f"{path}.outputs.parameters[{output.get('name')}]"
        source = output.get("valueFrom") or {}

        sources = ["value"] * ("value" in output) + [
            key for key in PARAMETER_SOURCES if source.get(key, "") != ""
        ]
        if len(sources) != 1 or ("value" in output and "valueFrom" in output):
            message = (
                f"the output has {' and '.join(sources) or 'no source'}: it must have exactly one"
                " valueFrom"
            )
            findings.add(where, "output", f"{message}, with {' or '.join(allowed_sources)}.")
        elif sources[0] not in (*allowed_sources, "value"):
            message = (
                f"{sources[0]} is not for this type of template: give"
                f" {' or '.join(allowed_sources)}."
            )
            findings.add(f"{where}.valueFrom.{sources[0]}", "output", message)


def check_timeout(
    findings: Findings, path: str, template: Data, passed_arguments: Data, workflow_arguments: Data
) -> None:
    """Check that a timeout whose value comes from arguments has a unit. Argo checks the unit after
    it has substituted the known values."""
    values: dict[str, str] = {}

    inputs = template.get("inputs") or {}
    for prefix, holder in (
        ("workflow", workflow_arguments),
        ("inputs", inputs),
        ("inputs", passed_arguments),
    ):
        for parameter in holder.get("parameters") or []:
            value = parameter.get("value", parameter.get("default", ""))
            values[f"{prefix}.parameters.{parameter.get('name')}"] = to_argo_string(value)

    text = str(template.get("timeout", ""))
    for _ in range(2):  # the value of an argument may itself be a tag
        text = tag_rules.TAG.sub(lambda tag: values.get(tag[1].strip(), tag[0]), text)

    if INTEGER.fullmatch(text):
        message = (
            f'arguments set the timeout of {template.get("name")} to "{text}": give a unit, as in'
            " 30s."
        )
        findings.add(path, "argument", message)


def _check_parameter(findings: Findings, path: str, parameter: Data, allow_later: bool) -> None:
    source = parameter.get("valueFrom")
    choices = parameter.get("enum")

    if source is not None and not any(key in source for key in VALUE_SOURCES):
        message = (
            "in arguments, valueFrom must have a configMapKeyRef (and may have a default). Give it,"
            " or a value."
        )
        findings.add(f"{path}.valueFrom", "argument", message)
    elif source is None and "value" not in parameter and not allow_later:
        findings.add(path, "argument", "the value is missing: give a value.")

    if not allow_later and isinstance(choices, list) and choices:
        allowed_values = [to_argo_string(choice) for choice in choices]
        value = parameter.get("value")
        if value is None or (
            "{{" not in (value := to_argo_string(value)) and value not in allowed_values
        ):
            findings.add(
                f"{path}.value",
                "argument",
                f'"{value}" is not in the enum: it must be {" or ".join(allowed_values)}.',
            )


def _is_required(item: Data, kind: str) -> bool:
    if kind == "parameters":
        return not tag_scope.has_value(item)
    return not item.get("optional") and not any(key in item for key in ARTIFACT_SOURCES)
