"""Check tags: every `{{tag}}` must be closed and have a value."""

import difflib
import re
from dataclasses import dataclass

from argolocal.common.wording import truncate
from argolocal.language import expr
from argolocal.language.functions import ExprError
from argolocal.language.substitute import TAG
from argolocal.manifest.tag_scope import TagScope, find_strings
from argolocal.validate.findings import Findings

# placeholder for the value of a tag
UNKNOWN_VALUE = "\ue000"
# first words of the tags that must have a value, such as `inputs` in {{inputs.parameters.x}}
TAG_PREFIXES = {"inputs", "outputs", "tasks", "steps", "workflow", "item", "pod"}
# first words of all tags of Argo; other texts in braces, such as tags of Jinja, remain in the text
FIRST_WORDS = (*sorted(TAG_PREFIXES), "node", "lastRetry", "retries", "cronworkflow", "sprig")
# an unknown first word that is at least this similar to a known first word (from 0 to 1) is
# probably misspelt
MIN_SIMILARITY = 0.8
# tags that have a value in each attempt of a step
ATTEMPT_TAGS = (
    "node.name",
    "retries",
    "lastRetry.exitCode",
    "lastRetry.status",
    "lastRetry.duration",
    "lastRetry.message",
)
RETRY_TAG = re.compile(r"retries|lastRetry\..*")
# Argo does not check tags with the prefixes in UNCHECKED_TAGS (resolveAllVariables in validate.go).
# If such a tag has no value, it remains in the text.
UNCHECKED_TAGS = ("workflow.creationTimestamp", "workflow.scheduledTime", "workflow.duration")
METADATA_TAG = re.compile(r"workflow\.(label|annotation)s\.(.+)", re.DOTALL)


@dataclass(frozen=True)
class TextUse:
    """The way in which Argo uses a text with tags. The use of a text determines whether a tag
    without a value prevents the run.

    `has_all_parameters`: False if the workflow may have parameters that are not in the file, so
    that an unknown parameter is not an error. `is_validated` is True if Argo's validation reads the
    text. `is_used` is True if a run may use the text. `retries` is True if the template has a
    retryStrategy.
    """

    has_all_parameters: bool = True
    is_validated: bool = True
    is_used: bool = True
    retries: bool = True

    def is_fatal(self, tag: str, name: str) -> bool:
        """Return True if a tag without a value prevents the run, because Argo rejects the tag, or
        because a run would use the tag itself as text. `name`: name in the tag; the name lacks a
        value."""
        if name.startswith("workflow.parameters") and not self.has_all_parameters:
            return False
        if tag.startswith("="):
            # a tag `item` without a value fails only at run time, and labels may be added when the
            # workflow is submitted
            is_late = name.split(".")[0] == "item" or METADATA_TAG.fullmatch(name)
            return (self.is_validated or self.is_used) and not is_late
        if name.startswith(UNCHECKED_TAGS):
            return False
        return self.is_used or (self.is_validated and name != "item")


def check(findings: Findings, path: str, value: object, scope: TagScope, text_use: TextUse) -> None:
    """Check that every tag in the strings of `value` has a value, that is, is in `scope`."""
    for text_path, text in find_tagged_texts(findings, path, value):
        check_text(findings, text_path, text, scope, text_use)


def check_text(
    findings: Findings, path: str, text: str, scope: TagScope, text_use: TextUse
) -> None:
    """Check that all tags of one text have a value and are spelt correctly."""
    for tag in TAG.findall(text):
        referenced_names = _find_names(findings, path, tag)
        for referenced_name in referenced_names:
            # A tag that is only a first word, such as {{inputs}}, remains in the text, unless it is
            # an expression ({{=...}}).
            is_first_word = (
                referenced_name in TAG_PREFIXES
                and referenced_name != "item"
                and not tag.startswith("=")
            )
            is_name_prefix = any(
                other_name.startswith(f"{referenced_name}.") for other_name in referenced_names
            )
            if (
                referenced_name.split(".")[0] in TAG_PREFIXES
                and not (is_first_word or is_name_prefix)
                and not _has_value(tag, referenced_name, scope)
            ):
                problem = _describe_missing_value(findings, referenced_name, scope)
                findings.add(
                    path,
                    "tag",
                    f"{{{{{truncate(tag)}}}}}: {problem}",
                    text_use.is_fatal(tag, referenced_name),
                )

            is_variable = tag.startswith("=") and "." not in referenced_name
            if (
                not is_variable
                and not is_name_prefix
                and (correct_name := _correct_first_word(referenced_name))
            ):
                message = (
                    f'"{referenced_name}" is not a tag, so Argo leaves it in the text. Did you mean'
                    f' "{correct_name}"?'
                )
                findings.warn(path, "tag", f"{{{{{truncate(tag)}}}}}: {message}")

            if RETRY_TAG.fullmatch(referenced_name) and not text_use.retries:
                message = "the template does not have a retryStrategy: add one, or remove the tag."
                findings.warn(path, "tag", f"{{{{{truncate(tag)}}}}}: {message}")


def _correct_first_word(name: str) -> str:
    """If the first word of a tag seems to be misspelt, return the corrected tag, else ""."""
    first_word, separator, remaining_path = name.partition(".")
    if first_word in ("node", "retries", "lastRetry"):
        if name in ATTEMPT_TAGS or not separator:
            return ""
        choices = [tag for tag in ATTEMPT_TAGS if tag.startswith(first_word)]
        return difflib.get_close_matches(name, choices, 1, 0)[0]

    if first_word in FIRST_WORDS or not re.fullmatch(r"[A-Za-z]+", first_word):
        return ""

    similar_words = difflib.get_close_matches(
        first_word.lower(), map(str.lower, FIRST_WORDS), 1, MIN_SIMILARITY
    )
    if not similar_words:
        return ""

    word_index = [word.lower() for word in FIRST_WORDS].index(similar_words[0])
    return f"{FIRST_WORDS[word_index]}{separator}{remaining_path}"


def _has_value(tag: str, name: str, scope: TagScope) -> bool:
    if tag.startswith("="):
        return f"={name}" in scope
    return name in scope


def find_tagged_texts(findings: Findings, path: str, value: object) -> list[tuple[str, str]]:
    """Return (path, text) of the strings in `value` that contain tags. Unclosed tags are added to
    `findings`."""
    tagged_texts = [
        (text_path, text) for text_path, text in find_strings(value, path) if "{{" in text
    ]
    for text_path, text in tagged_texts:
        if "{{" in TAG.sub("", text):
            findings.add(
                text_path, "tag", f'"{truncate(text)}" has a {{{{ without }}}}: close the tag.'
            )
    return tagged_texts


def _describe_missing_value(findings: Findings, name: str, scope: TagScope) -> str:
    """Return the reason why a name does not have a value, and the remedy."""
    metadata_match = METADATA_TAG.fullmatch(name)
    if metadata_match:
        metadata_kind, metadata_key = metadata_match.groups()
        tag_prefix = f"workflow.{metadata_kind}s."
        metadata_keys = {
            tag.removeprefix(tag_prefix)
            for tag in scope.list_global_names()
            if tag.startswith(tag_prefix)
        }
        suggestion = findings.suggest(metadata_key, metadata_keys - {"json"})
        remedy = suggestion or f" Add it to {metadata_kind}s in the metadata, or remove the tag."

        return f'the workflow does not have the {metadata_kind} "{metadata_key}".{remedy}'

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


def _find_names(findings: Findings, path: str, tag: str) -> tuple[str, ...]:
    """Return the names in a tag. An expression that cannot be parsed is added to `findings`."""
    if not tag.startswith("="):
        return (tag.strip(),)
    try:
        return expr.find_identifiers(tag[1:])
    except ExprError as error:
        findings.warn(path, "tag", f"{{{{{truncate(tag)}}}}} cannot be parsed: {error}.")
        return ()
