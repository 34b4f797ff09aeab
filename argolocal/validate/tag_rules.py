"""Check tags: every `{{tag}}` must be closed and have a value."""

import difflib
import re
from dataclasses import dataclass

from argolocal.common.wording import cut
from argolocal.language import expr
from argolocal.language.functions import ExprError
from argolocal.language.substitute import TAG
from argolocal.manifest.tag_scope import Scope, find_strings
from argolocal.validate.findings import Findings

UNKNOWN = "\ue000"  # placeholder for the value of a tag
# first words of the tags that Argo substitutes, such as `inputs` in {{inputs.parameters.x}}
PREFIXES = {"inputs", "outputs", "tasks", "steps", "workflow", "item", "pod"}
# all first words of Argo's tags; tags with other first words, such as tags of Jinja, remain in the
# text
FIRST_WORDS = (*sorted(PREFIXES), "node", "lastRetry", "retries", "cronworkflow", "sprig")
# if an unknown first word is at least this similar to a known one (from 0 to 1), it counts as
# misspelt
SIMILARITY = 0.8
# tags that have a value in each attempt of a step; other tags with the same first words remain in
# the text
ATTEMPT_TAGS = (
    "node.name",
    "retries",
    "lastRetry.exitCode",
    "lastRetry.status",
    "lastRetry.duration",
    "lastRetry.message",
)
RETRY_TAG = re.compile(r"retries|lastRetry\..*")
# Argo does not check tags with these prefixes. If they have no value, they remain in the text.
# Source: validate.go, resolveAllVariables.
UNCHECKED = ("workflow.creationTimestamp", "workflow.scheduledTime", "workflow.duration")
METADATA_TAG = re.compile(r"workflow\.(label|annotation)s\.(.+)", re.DOTALL)


@dataclass(frozen=True)
class TextUse:
    """The use of a text. It determines whether a tag without a value in the text prevents the run.

    `parameters_known`: False if the workflow may have parameters that are not in the file, so that
    an unknown name is not an error. `is_validated`: Argo's validation
    reads the text. `is_used`: True if a run may use the text. `retries`: True if the template has a
    retryStrategy.
    """

    parameters_known: bool = True
    is_validated: bool = True
    is_used: bool = True
    retries: bool = True

    def is_fatal(self, tag: str, name: str) -> bool:
        """Return True if the missing value of a tag is fatal: Argo rejects the tag, or a run would
        use the tag as text. `name`: a name that the tag refers to."""
        if name.startswith("workflow.parameters") and not self.parameters_known:
            return False
        if tag.startswith("="):
            # Not fatal are `item`, which fails only at run time, and labels, which may be added
            # when the workflow is submitted.
            is_late = name.split(".")[0] == "item" or METADATA_TAG.fullmatch(name)
            return (self.is_validated or self.is_used) and not is_late
        if name.startswith(UNCHECKED):
            return False
        return self.is_used or (self.is_validated and name != "item")


def check(findings: Findings, path: str, value: object, scope: Scope, text_use: TextUse) -> None:
    """Check that every tag in `value` is in `scope`."""
    for where, text in find_tagged_texts(findings, path, value):
        check_text(findings, where, text, scope, text_use)


def check_text(findings: Findings, path: str, text: str, scope: Scope, text_use: TextUse) -> None:
    for tag in TAG.findall(text):
        names = _names_in(findings, path, tag)
        for name in names:
            # A tag that consists of only a first word, such as {{inputs}}, remains in the text,
            # except in an expression ({{=...}}).
            is_first_word = name in PREFIXES and name != "item" and not tag.startswith("=")
            is_part = any(other.startswith(f"{name}.") for other in names)
            if (
                name.split(".")[0] in PREFIXES
                and not (is_first_word or is_part)
                and not _has_value(tag, name, scope)
            ):
                message = f"{{{{{cut(tag)}}}}}: {_unknown_message(findings, name, scope)}"
                findings.add(path, "tag", message, text_use.is_fatal(tag, name))

            is_variable = tag.startswith("=") and "." not in name
            if not is_variable and not is_part and (correct_name := _correct_first_word(name)):
                message = (
                    f'"{name}" is not a tag, so Argo leaves it in the text. Did you mean'
                    f' "{correct_name}"?'
                )
                findings.warn(path, "tag", f"{{{{{cut(tag)}}}}}: {message}")

            if RETRY_TAG.fullmatch(name) and not text_use.retries:
                message = "the template does not have a retryStrategy: add one, or remove the tag."
                findings.warn(path, "tag", f"{{{{{cut(tag)}}}}}: {message}")


def _correct_first_word(name: str) -> str:
    """If the first word of a tag seems to be misspelt, return the corrected tag, else ""."""
    first_word, dot, path = name.partition(".")
    if first_word in ("node", "retries", "lastRetry"):
        if name in ATTEMPT_TAGS or not dot:
            return ""
        choices = [tag for tag in ATTEMPT_TAGS if tag.startswith(first_word)]
        return difflib.get_close_matches(name, choices, 1, 0)[0]

    if first_word in FIRST_WORDS or not re.fullmatch(r"[A-Za-z]+", first_word):
        return ""

    similar_words = difflib.get_close_matches(
        first_word.lower(), map(str.lower, FIRST_WORDS), 1, SIMILARITY
    )
    if not similar_words:
        return ""

    index = [word.lower() for word in FIRST_WORDS].index(similar_words[0])
    return f"{FIRST_WORDS[index]}{dot}{path}"


def _has_value(tag: str, name: str, scope: Scope) -> bool:
    if tag.startswith("="):
        return f"={name}" in scope
    return name in scope


def find_tagged_texts(findings: Findings, path: str, value: object) -> list[tuple[str, str]]:
    """Return path and text of the strings in `value` that contain tags, and report unclosed
    tags."""
    tagged_texts = [(where, text) for where, text in find_strings(value, path) if "{{" in text]
    for where, text in tagged_texts:
        if "{{" in TAG.sub("", text):
            findings.add(where, "tag", f'"{cut(text)}" has a {{{{ without }}}}: close the tag.')
    return tagged_texts


def _unknown_message(findings: Findings, name: str, scope: Scope) -> str:
    metadata = METADATA_TAG.fullmatch(name)
    if metadata:
        kind, key = metadata.groups()
        prefix = f"workflow.{kind}s."
        keys = {tag.removeprefix(prefix) for tag in scope.global_names() if tag.startswith(prefix)}
        suggestion = findings.suggest(key, keys - {"json"})
        remedy = suggestion or f" Add it to {kind}s in the metadata, or remove the tag."

        return f'the workflow does not have the {kind} "{key}".{remedy}'

    if name == "workflow.scheduledTime":
        return (
            "only a workflow of a CronWorkflow has a scheduled time: remove the tag, or run it by a"
            " CronWorkflow."
        )

    if f"={name}" in scope:
        return (
            f"Argo's validation does not know {name} here: write {{{{={name}}}}}, which is checked"
            " only in the run."
        )

    return f"{name} does not have a value here.{findings.hint(*scope.find_alternatives(name))}"


def _names_in(findings: Findings, path: str, tag: str) -> tuple[str, ...]:
    """Return the names that a tag refers to."""
    if not tag.startswith("="):
        return (tag.strip(),)
    try:
        return expr.identifiers(tag[1:])
    except ExprError as error:
        findings.warn(path, "tag", f"{{{{{cut(tag)}}}}} cannot be parsed: {error}.")
        return ()
