"""Arguments of steps, tasks and workflows, and the inputs that templates need.

Source: Argo's validateArguments and ProcessArgs.
"""

from collections import Counter
from collections.abc import Iterable

from argolocal.errors import did_you_mean
from argolocal.language.gofmt import WHOLE, anystring
from argolocal.manifest import tag_scope
from argolocal.manifest.tag_scope import PARAMETER, Data, names
from argolocal.validate import tag_rules
from argolocal.validate.findings import Findings

KINDS = ("parameters", "artifacts")
LOCATIONS = ("s3", "gcs", "http", "git", "raw", "hdfs", "oss", "azure", "artifactory", "plugin")
SUPPLIED = (*LOCATIONS, "from", "fromExpression")
SOURCES = ("path", "jqFilter", "jsonPath", "parameter", "expression", "supplied")  # of an output parameter
OUTPUT_SOURCES = dict.fromkeys(("container", "script", "containerSet"), ("path",)) | {
    "resource": ("jsonPath", "jqFilter")
}
OUTPUT_SOURCES |= dict.fromkeys(("dag", "steps"), ("parameter", "expression"))
GIVEN = ("configMapKeyRef", "supplied", "event")


def check(findings: Findings, path: str, arguments: Data, later: bool = False) -> None:
    """Rules of `arguments`; `later`: values may be supplied later, as by -p."""
    unique(findings, path, arguments)
    for parameter in arguments.get("parameters") or []:
        _parameter(findings, f"{path}.parameters[{parameter.get('name')}]", parameter, later)
    for artifact in arguments.get("artifacts") or []:
        where = f"{path}.artifacts[{artifact.get('name')}]"
        located = any(kind in artifact for kind in LOCATIONS[1:]) or (artifact.get("s3") or {}).get("key")
        if artifact.get("from") and artifact.get("fromExpression"):
            findings.add(where, "argument", "it has both from and fromExpression: give one of them.")
        elif not artifact.get("from") and not located:
            no = (
                "fromExpression alone is not for arguments"
                if artifact.get("fromExpression")
                else "it comes from nowhere"
            )
            findings.add(
                where, "argument", f"{no}, and Argo refuses it, optional or not: give from, or a location (s3)."
            )


def unique(findings: Findings, path: str, fields: Data) -> None:
    """Names of parameters and artifacts must be valid and unique."""
    for kind in KINDS:
        for name, count in Counter(names(fields.get(kind))).items():
            if not PARAMETER.fullmatch(tag_rules.TAG.sub("x", name)) or count > 1:
                findings.add(f"{path}.{kind}", "name", f'"{name}" must be letters, digits, - and _, and there once.')


def supplied(
    findings: Findings, path: str, called: str, template: Data, given: Data, loose: bool = False, brought: bool = False
) -> None:
    """The template (named `called` in messages) must get its inputs.

    `loose`: extra arguments are allowed; `brought`: inputs may be supplied later.
    """
    for kind in KINDS:
        inputs = (template.get("inputs") or {}).get(kind) or []
        there, known = dict.fromkeys(names(given.get(kind))), set(names(inputs))
        _superfluous(findings, path, called, [name for name in there if not loose and name not in known], known)
        for item in inputs:
            if _required(item, kind) and item.get("name") not in there and not brought:
                why = f'{called} needs the input "{item.get("name")}", which is not supplied: add it.'
                findings.add(path, "input", why + findings.near(str(item.get("name")), there))


def outputs(findings: Findings, path: str, outputs: Data, type: str) -> None:
    """An output parameter must have exactly one source, which its type of template supports."""
    allowed = OUTPUT_SOURCES.get(type, SOURCES)
    for kind in ("parameters", "artifacts"):
        for output in outputs.get(kind) or []:
            where, name = f"{path}.outputs.{kind}[{output.get('name')}]", output.get("globalName")
            if name and not PARAMETER.fullmatch(tag_rules.TAG.sub("x", str(name))):
                findings.add(f"{where}.globalName", "name", f'"{name}" must be letters, digits, - and _.')
    for output in outputs.get("parameters") or []:
        where, source = f"{path}.outputs.parameters[{output.get('name')}]", output.get("valueFrom") or {}
        given = ["value"] * ("value" in output) + [key for key in SOURCES if source.get(key, "") != ""]
        if len(given) != 1 or ("value" in output and "valueFrom" in output):
            why = f"it is from {' and '.join(given) or 'nowhere'}: it must have exactly one valueFrom"
            findings.add(where, "output", f"{why}, here of {' or '.join(allowed)}.")
        elif given[0] not in (*allowed, "value"):
            why = f"{given[0]} is not for this kind of template: give {' or '.join(allowed)}."
            findings.add(f"{where}.valueFrom.{given[0]}", "output", why)


def timeout(findings: Findings, path: str, template: Data, given: Data, everywhere: Data) -> None:
    """A timeout from arguments must have a unit: Argo's check substitutes the values it knows."""
    known = {
        f"workflow.parameters.{parameter.get('name')}": parameter for parameter in everywhere.get("parameters") or []
    }
    for parameter in [*((template.get("inputs") or {}).get("parameters") or []), *(given.get("parameters") or [])]:
        known[f"inputs.parameters.{parameter.get('name')}"] = parameter
    values = {tag: anystring(parameter.get("value", parameter.get("default", ""))) for tag, parameter in known.items()}
    text = str(template.get("timeout", ""))
    for _ in range(2):  # an argument may itself be a tag
        text = tag_rules.TAG.sub(lambda tag: values.get(tag[1].strip(), tag[0]), text)
    if WHOLE.fullmatch(text):
        findings.add(
            path, "argument", f'the timeout of {template.get("name")} is "{text}" by it: give a unit, as in 30s.'
        )


def _superfluous(findings: Findings, path: str, called: str, extra: Iterable[str], known: set[str]) -> None:
    for name in extra:
        near = did_you_mean(name, known)  # without one it is only superfluous
        why = f'{called} has no input "{name}".{near or " Take it out."}'
        findings.add(path, "argument", why, fatal=bool(near))


def _parameter(findings: Findings, path: str, parameter: Data, later: bool) -> None:
    source, choices = parameter.get("valueFrom"), parameter.get("enum")
    if source is not None and not any(key in source for key in GIVEN):
        why = "of arguments it must have a configMapKeyRef, beside which a default may be. Give that, or a value."
        findings.add(f"{path}.valueFrom", "argument", why)
    elif source is None and "value" not in parameter and not later:
        findings.add(path, "argument", "it has no value: give one.")
    if not later and isinstance(choices, list) and choices:
        known, value = [anystring(choice) for choice in choices], parameter.get("value")
        if value is None or ("{{" not in (value := anystring(value)) and value not in known):
            findings.add(
                f"{path}.value", "argument", f'"{value}" is none of its enum: it must be {" or ".join(known)}.'
            )


def _required(item: Data, kind: str) -> bool:
    if kind == "parameters":
        return not tag_scope.supplied(item)
    return not item.get("optional") and not any(key in item for key in SUPPLIED)
