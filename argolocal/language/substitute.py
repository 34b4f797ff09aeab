"""Substitute `{{tag}}` and `{{=expression}}` in the JSON text of an object, as Argo does.

A tag extends from the first `{{` to the next `}}`. Values are escaped, so that the JSON stays
valid. An unknown tag remains in the text, unless its name matches the pattern `required_tags`: then
MissingValue is raised. A tag with the value None (an output of a skipped step) and an unclosed `{{`
are errors. The behaviour follows Argo's util/template (simple_template.go, expression_template.go)
and util/expand.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from argolocal.common.json_text import to_json
from argolocal.errors import NodeError
from argolocal.language.expr import evaluate, find_identifiers
from argolocal.language.functions import ExprError
from argolocal.language.gofmt import dumps
from argolocal.language.sprig import ARGO_FUNCTIONS

Scope = Mapping[str, str | None]
SubstitutedType = TypeVar("SubstitutedType")
# names of the tags that must have a value in the fields of a task or step
STEP_OUTPUTS = re.compile(r"(tasks|steps)(\.|$)")
EVERY_TAG = re.compile("")


class TagPattern:
    """Finds tags in a text. The search ends at the last `}}`, because it would otherwise take
    quadratic time in a text with many unclosed `{{`."""

    def __init__(self, marker: str = "") -> None:
        self.pattern = re.compile(rf"\{{\{{{marker}(.*?)\}}\}}", re.DOTALL)

    def findall(self, text: str) -> list[str]:
        """Return the text between the braces of each tag."""
        return self.pattern.findall(text[: text.rfind("}}") + 2])

    def sub(self, replacement: str | Callable[[re.Match[str]], str], text: str) -> str:
        """Return the text with each tag replaced."""
        end_index = text.rfind("}}") + 2
        return self.pattern.sub(replacement, text[:end_index]) + text[end_index:]


TAG = TagPattern()
EXPRESSION = TagPattern("=")
TAGS_RESOLVED_LATER = {"item", "retries", "workflow.status", "workflow.failures"} | {
    f"lastRetry.{name}" for name in ("exitCode", "status", "duration", "message")
}
# control characters for which Go's strconv.Quote writes escapes that are invalid in JSON
INVALID_JSON_IF_QUOTED_BY_GO = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


class TemplateError(NodeError):
    """A tag can never be substituted. The message of a TemplateError equals Argo's."""


class MissingValue(TemplateError):
    """A required tag does not have a value yet. Argo would repeat the substitution of the tag
    forever."""


def substitute(
    value: SubstitutedType,
    scope: Scope,
    required_tags: re.Pattern[str] | None = None,
    allows_missing_artifacts: bool = True,
) -> SubstitutedType:
    """Return `value` with all its tags replaced. Raises TemplateError.

    `required_tags`: pattern for the names of tags that must have a value.
    `allows_missing_artifacts`: tags of output artifacts may lack a value even if they match
    `required_tags`.
    """
    value_json = to_json(value)
    if "{{" not in value_json:
        return value
    return parse_result(replace_tags(value_json, scope, required_tags, allows_missing_artifacts))


def parse_result(text: str) -> Any:
    """Parse JSON text that `replace_tags` returned. Raises TemplateError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise TemplateError(
            "cannot finish template replacement because the result was invalid JSON"
        ) from None


def replace_tags(
    text: str,
    scope: Scope,
    required_tags: re.Pattern[str] | None = None,
    allows_missing_artifacts: bool = True,
) -> str:
    """Replace the tags in a JSON text, as `substitute` does."""
    text_pieces = []
    position = 0
    expression_scope = None

    while (start_index := text.find("{{", position)) >= 0:
        end_index = text.find("}}", start_index + 2)
        if end_index < 0:
            raise TemplateError(
                f'Cannot find end tag="}}}}" in the template="{text}" starting from'
                f' "{text[start_index:]}"'
            )

        text_pieces.append(text[position:start_index])
        tag = text[start_index + 2 : end_index]
        if tag.startswith("="):
            expression_scope = nest_scope(scope) if expression_scope is None else expression_scope
            text_pieces.append(_replace_expression(tag[1:], expression_scope, required_tags))
        else:
            text_pieces.append(_replace_tag(tag, scope, required_tags, allows_missing_artifacts))

        position = end_index + 2

    return "".join(text_pieces) + text[position:]


def escape_json_text(value: str) -> str:
    """Escape `value` so that it can be inserted into a JSON string. Raises TemplateError."""
    if INVALID_JSON_IF_QUOTED_BY_GO.search(value):
        raise TemplateError(
            "cannot finish template replacement because the result was invalid JSON"
        )
    return to_json(value)[1:-1]


def _replace_tag(
    tag: str, scope: Scope, required_tags: re.Pattern[str] | None, allows_missing_artifacts: bool
) -> str:
    """Return the text that replaces {{tag}}: the value as part of a JSON string, or the tag itself
    if it is unknown. Raises TemplateError."""
    name = tag.strip()
    if name in scope:
        value = scope[name]
        if value is None:
            raise TemplateError(
                f"unable to substitute {{{{{tag}}}}}: "
                "output is an absent optional (skipped/omitted node with no default)"
            )

        return escape_json_text(value)

    outer_text, opening_braces, inner_tag = tag.rpartition("{{")
    if opening_braces and outer_text and inner_tag in scope:
        value = scope[inner_tag]
        if value is None:
            raise TemplateError(
                f'unable to substitute nested tag {{{{{tag}}}}}: "{inner_tag}" is an absent'
                " optional"
            )

        return "{{" + outer_text + escape_json_text(value)

    if (
        required_tags
        and required_tags.match(name)
        and not (allows_missing_artifacts and ".outputs.artifacts." in name)
    ):
        raise MissingValue(f"failed to resolve {{{{{tag}}}}}")

    return "{{" + tag + "}}"


def _replace_expression(
    tag: str, expression_scope: Mapping[str, Any], required_tags: re.Pattern[str] | None
) -> str:
    """Return the text that replaces {{=tag}}: the value of the expression as part of a JSON string,
    or the tag itself if it cannot be evaluated yet. Raises TemplateError."""
    original_text = "{{=" + tag + "}}"
    try:
        expression_text = json.loads(f'"{tag}"')
    except json.JSONDecodeError as error:
        raise TemplateError(f"failed to unmarshall JSON expression: {error}") from None

    try:
        missing_names = [
            name
            for name in find_identifiers(expression_text)
            if not _contains_path(expression_scope, name)
        ]
    except ExprError as error:
        raise TemplateError(f"failed to evaluate expression: {error}") from None

    for name in missing_names:
        if required_tags and required_tags.match(name):
            raise MissingValue(f"failed to evaluate expression: {name} is missing")

    keeps_failed_tag = bool(missing_names) or required_tags is None
    if keeps_failed_tag and TAGS_RESOLVED_LATER.intersection(missing_names):
        return original_text

    failed_action = "evaluate"
    try:
        expression_value = evaluate(expression_text, expression_scope)
        if expression_value is None and not keeps_failed_tag:
            raise TemplateError(f"failed to evaluate expression {to_json(tag, ensure_ascii=False)}")
        if expression_value is None:
            return original_text

        failed_action = "marshal evaluated"
        value_json = dumps(expression_value)
    except (ExprError, TypeError, ValueError) as error:
        if keeps_failed_tag:
            return original_text

        raise TemplateError(f"failed to {failed_action} expression: {error}") from None

    if value_json.startswith('"'):
        return value_json[1:-1]

    return to_json(value_json)[1:-1]


def _contains_path(expression_scope: Mapping[str, Any], name: str) -> bool:
    """Return True if the scope contains a dotted name."""
    value: Any = expression_scope
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


def nest_scope(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scope for expressions: nested maps instead of dotted keys, and Argo's functions. If
    the scope contains both `a` and `a.b`, the value of `a` is left out."""
    nested_scope: dict[str, Any] = {}

    sorted_names = sorted(scope)
    for name, next_name in zip(sorted_names, [*sorted_names[1:], ""], strict=True):
        if next_name.startswith(name + "."):
            continue

        *parent_keys, last_key = name.split(".")
        parent_scope = nested_scope
        for key in parent_keys:
            child_scope = parent_scope.setdefault(key, {})
            if isinstance(child_scope, dict):
                parent_scope = child_scope
            else:
                parent_scope = parent_scope.__setitem__(key, {}) or parent_scope[key]

        parent_scope[last_key] = scope[name]

    return nested_scope | ARGO_FUNCTIONS
