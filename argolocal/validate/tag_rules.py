"""Rules of tags: every `{{tag}}` is closed and has a value."""

from typing import Any

from argolocal.language import expr
from argolocal.language.functions import ExprError
from argolocal.language.substitute import TAG
from argolocal.manifest.tag_scope import Scope, texts
from argolocal.validate.findings import Findings

UNKNOWN = "\ue000"  # placeholder for the value of a tag
PREFIXES = {"inputs", "outputs", "tasks", "steps", "workflow", "item"}  # tags with other prefixes stay as text


def check(findings: Findings, path: str, value: Any, scope: Scope, whole: bool) -> None:
    """Every tag in `value` must be in `scope`. Not `whole`: the workflow's own parameters are not known yet."""
    for where, text in closed(findings, path, value):
        for tag in TAG.findall(text):
            for name in _read(findings, where, tag):
                known = name in scope or (tag.startswith("=") and f"={name}" in scope)
                if name.split(".")[0] in PREFIXES and not known:
                    why = f"{{{{{short(tag)}}}}}: {_unknown(findings, name, scope)}"
                    late = tag.startswith("=") and name.split(".")[0] == "item"  # Argo finds out when it gets there
                    findings.add(where, "tag", why, fatal=(whole or not name.startswith("workflow.")) and not late)


def closed(findings: Findings, path: str, value: Any) -> list[tuple[str, str]]:
    """Path and text of the strings in `value` that contain tags; reports unclosed ones."""
    tagged = [(where, text) for where, text in texts(value, path) if "{{" in text]
    for where, text in tagged:
        if "{{" in TAG.sub("", text):
            findings.add(where, "tag", f'"{short(text)}" has a {{{{ without }}}}: close the tag.')
    return tagged


def short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _unknown(findings: Findings, name: str, scope: Scope) -> str:
    if f"={name}" in scope:
        return f"for Argo's check nothing before this gives a value to {name}. It does not read {{{{={name}}}}}."
    return f"nothing gives a value to {name} here.{findings.hint(*scope.near(name))}"


def _read(findings: Findings, path: str, tag: str) -> tuple[str, ...]:
    """The names that a tag refers to."""
    if not tag.startswith("="):
        return (tag.strip(),)
    try:
        return expr.identifiers(tag[1:])
    except ExprError as error:
        findings.warn(path, "tag", f"{{{{{short(tag)}}}}} cannot be read: {error}.")
        return ()
