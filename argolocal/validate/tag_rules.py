"""Check tags: every `{{tag}}` must be closed and have a value."""

from typing import Any

from argolocal.language import expr
from argolocal.language.functions import ExprError
from argolocal.language.substitute import TAG
from argolocal.manifest.tag_scope import Scope, texts
from argolocal.validate.findings import Findings

UNKNOWN = "\ue000"  # placeholder for the value of a tag
PREFIXES = {"inputs", "outputs", "tasks", "steps", "workflow", "item"}  # first words of the tags that are substituted


def check(findings: Findings, path: str, value: Any, scope: Scope, parameters_known: bool) -> None:
    """Check that every tag in `value` is in `scope`. `parameters_known`: all parameters of the workflow are known."""
    for where, text in find_tagged_texts(findings, path, value):
        for tag in TAG.findall(text):
            for name in _names_in(findings, where, tag):
                is_known = name in scope or (tag.startswith("=") and f"={name}" in scope)
                if name.split(".")[0] in PREFIXES and not is_known:
                    message = f"{{{{{shorten(tag)}}}}}: {_unknown_message(findings, name, scope)}"
                    is_late = tag.startswith("=") and name.split(".")[0] == "item"  # such a tag fails only at run time
                    findings.add(
                        where, "tag", message, (parameters_known or not name.startswith("workflow.")) and not is_late
                    )


def find_tagged_texts(findings: Findings, path: str, value: Any) -> list[tuple[str, str]]:
    """Return path and text of the strings in `value` that contain tags, and report unclosed tags."""
    tagged_texts = [(where, text) for where, text in texts(value, path) if "{{" in text]
    for where, text in tagged_texts:
        if "{{" in TAG.sub("", text):
            findings.add(where, "tag", f'"{shorten(text)}" has a {{{{ without }}}}: close the tag.')
    return tagged_texts


def shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _unknown_message(findings: Findings, name: str, scope: Scope) -> str:
    if f"={name}" in scope:
        return f"Argo's validation does not know {name} here: write {{{{={name}}}}}, which is checked only in the run."
    return f"{name} does not have a value here.{findings.hint(*scope.find_alternatives(name))}"


def _names_in(findings: Findings, path: str, tag: str) -> tuple[str, ...]:
    """Return the names that a tag refers to."""
    if not tag.startswith("="):
        return (tag.strip(),)
    try:
        return expr.identifiers(tag[1:])
    except ExprError as error:
        findings.warn(path, "tag", f"{{{{{shorten(tag)}}}}} cannot be parsed: {error}.")
        return ()
