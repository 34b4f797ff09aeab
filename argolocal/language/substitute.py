"""Substitute `{{tag}}` and `{{=expression}}` in the JSON text of an object, as Argo does.

A tag extends from the first `{{` to the next `}}`. Values are escaped, so that the JSON stays
valid. An unknown tag remains in the text. If its name matches the pattern `strict`, Missing is
raised instead. A tag with the value None (an output of a skipped step) and an unclosed `{{` are
errors. Source: Argo's util/template (simple_template.go, expression_template.go) and util/expand.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from argolocal.common.json_text import to_json
from argolocal.errors import NodeError
from argolocal.language.expr import evaluate, identifiers
from argolocal.language.functions import ExprError
from argolocal.language.gofmt import dumps
from argolocal.language.sprig import ARGO_FUNCTIONS

Scope = Mapping[str, str | None]
T = TypeVar("T")
# names of the tags that must have a value in the fields of a task or step
STEP_OUTPUTS = re.compile(r"(tasks|steps)(\.|$)")
ALL = re.compile("")


class TagPattern:
    """Finds tags in a text. The search ends at the last `}}`: otherwise, many unclosed `{{` would
    make it take O(n²)."""

    def __init__(self, marker: str = "") -> None:
        self.pattern = re.compile(rf"\{{\{{{marker}(.*?)\}}\}}", re.DOTALL)

    def findall(self, text: str) -> list[str]:
        """Return the text between the braces of each tag."""
        return self.pattern.findall(text[: text.rfind("}}") + 2])

    def sub(self, value: str | Callable[[re.Match[str]], str], text: str) -> str:
        """Return the text with each tag replaced."""
        end = text.rfind("}}") + 2
        return self.pattern.sub(value, text[:end]) + text[end:]


TAG = TagPattern()
EXPRESSION = TagPattern("=")
RESOLVED_LATER = {"item", "retries", "workflow.status", "workflow.failures"} | {
    f"lastRetry.{name}" for name in ("exitCode", "status", "duration", "message")
}
# control characters that Go's strconv.Quote escapes in a way that is invalid in JSON
INVALID_JSON_IF_QUOTED_BY_GO = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


class TemplateError(NodeError):
    """A tag cannot be substituted, now or later. The message equals Argo's."""


class Missing(TemplateError):
    """A tag that matches `strict` has no value yet. Argo would retry the substitution forever."""


def substitute(
    value: T, scope: Scope, strict: re.Pattern[str] | None = None, artifacts: bool = True
) -> T:
    """Replace the tags in `value`. Raises TemplateError.

    `artifacts`: accept tags of output artifacts that have no value, even if they match `strict`.
    """
    text = to_json(value)
    if "{{" not in text:
        return value
    return parse_result(replace(text, scope, strict, artifacts))


def parse_result(text: str) -> Any:
    """Parse JSON text that `replace` returned. Raises TemplateError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise TemplateError(
            "cannot finish template replacement because the result was invalid JSON"
        ) from None


def replace(
    text: str, scope: Scope, strict: re.Pattern[str] | None = None, artifacts: bool = True
) -> str:
    """Replace the tags in a JSON text, as `substitute` does."""
    pieces = []
    position = 0
    env = None

    while (start := text.find("{{", position)) >= 0:
        end = text.find("}}", start + 2)
        if end < 0:
            raise TemplateError(
                f'Cannot find end tag="}}}}" in the template="{text}" starting from'
                f' "{text[start:]}"'
            )

        pieces.append(text[position:start])
        tag = text[start + 2 : end]
        if tag.startswith("="):
            env = nest_scope(scope) if env is None else env
            pieces.append(_replace_expression(tag[1:], env, strict))
        else:
            pieces.append(_replace_tag(tag, scope, strict, artifacts))

        position = end + 2

    return "".join(pieces) + text[position:]


def escape(value: str) -> str:
    """Escape `value` so that it can be inserted into a JSON string. Raises TemplateError."""
    if INVALID_JSON_IF_QUOTED_BY_GO.search(value):
        raise TemplateError(
            "cannot finish template replacement because the result was invalid JSON"
        )
    return to_json(value)[1:-1]


def _replace_tag(tag: str, scope: Scope, strict: re.Pattern[str] | None, artifacts: bool) -> str:
    name = tag.strip()
    if name in scope:
        value = scope[name]
        if value is None:
            raise TemplateError(
                f"unable to substitute {{{{{tag}}}}}: "
                "output is an absent optional (skipped/omitted node with no default)"
            )

        return escape(value)

    outer, nested, inner = tag.rpartition("{{")
    if nested and outer and inner in scope:
        value = scope[inner]
        if value is None:
            raise TemplateError(
                f'unable to substitute nested tag {{{{{tag}}}}}: "{inner}" is an absent optional'
            )

        return "{{" + outer + escape(value)

    if strict and strict.match(name) and not (artifacts and ".outputs.artifacts." in name):
        raise Missing(f"failed to resolve {{{{{tag}}}}}")

    return "{{" + tag + "}}"


def _replace_expression(tag: str, env: Mapping[str, Any], strict: re.Pattern[str] | None) -> str:
    literal = "{{=" + tag + "}}"
    try:
        source = json.loads(f'"{tag}"')
    except json.JSONDecodeError as error:
        raise TemplateError(f"failed to unmarshall JSON expression: {error}") from None

    try:
        missing = [name for name in identifiers(source) if not _contains_path(env, name)]
    except ExprError as error:
        raise TemplateError(f"failed to evaluate expression: {error}") from None

    for name in missing:
        if strict and strict.match(name):
            raise Missing(f"failed to evaluate expression: {name} is missing")

    is_tolerant = bool(missing) or strict is None
    if is_tolerant and RESOLVED_LATER.intersection(missing):
        return literal

    failed_action = "evaluate"
    try:
        result = evaluate(source, env)
        if result is None and not is_tolerant:
            raise TemplateError(f"failed to evaluate expression {to_json(tag, ensure_ascii=False)}")
        if result is None:
            return literal

        failed_action = "marshal evaluated"
        text = dumps(result)
    except (ExprError, TypeError, ValueError) as error:
        if is_tolerant:
            return literal

        raise TemplateError(f"failed to {failed_action} expression: {error}") from None

    if text.startswith('"'):
        return text[1:-1]

    return to_json(text)[1:-1]


def _contains_path(env: Mapping[str, Any], name: str) -> bool:
    value: Any = env
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


def nest_scope(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested maps, and add Argo's functions. If the scope contains both `a`
    and `a.b`, the value of `a` is omitted."""
    env: dict[str, Any] = {}

    names = sorted(scope)
    for name, next_name in zip(names, [*names[1:], ""], strict=True):
        if next_name.startswith(name + "."):
            continue

        *path, last_key = name.split(".")
        node = env
        for key in path:
            inner = node.setdefault(key, {})
            if isinstance(inner, dict):
                node = inner
            else:
                node = node.__setitem__(key, {}) or node[key]

        node[last_key] = scope[name]

    return env | ARGO_FUNCTIONS
