"""`{{tag}}` and `{{=expression}}`: textual substitution on the JSON of a whole object, as Argo does it.

A tag runs from the first `{{` to the next `}}`; its value goes in escaped, so it stays inside its string. A tag that
nobody knows stays as it is, unless it is strict (then Missing); a tag whose value is None (the output of a skipped
step) is an error. An unclosed `{{` is an error wherever it stands. Source: Argo's util/template (simple_template.go,
expression_template.go) and util/expand.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from argolocal.errors import NodeError
from argolocal.language.expr import evaluate, identifiers
from argolocal.language.functions import ExprError
from argolocal.language.gofmt import dumps
from argolocal.language.sprig import ARGO

Scope = Mapping[str, str | None]
T = TypeVar("T")
STEPS = re.compile(r"(tasks|steps)(\.|$)")  # what must be known in the fields of a task or step
ALL = re.compile("")


class Tags:
    """Finds the `{{tag}}`s of a text. Nothing behind the last `}}` is searched, so that many `{{` cost no more."""

    def __init__(self, kind: str = "") -> None:
        self.pattern = re.compile(rf"\{{\{{{kind}(.*?)\}}\}}", re.DOTALL)

    def findall(self, text: str) -> list[str]:
        """Return what is between the braces of each tag."""
        return self.pattern.findall(text[: text.rfind("}}") + 2])

    def sub(self, value: str | Callable[[re.Match[str]], str], text: str) -> str:
        """Return the text with each tag replaced."""
        end = text.rfind("}}") + 2
        return self.pattern.sub(value, text[:end]) + text[end:]


TAG = Tags()
EXPRESSION = Tags("=")
LATE = {"item", "retries", "workflow.status", "workflow.failures"} | {
    f"lastRetry.{name}" for name in ("exitCode", "status", "duration", "message")
}
UNQUOTABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # Go's strconv.Quote writes these in a way JSON cannot read


class TemplateError(NodeError):
    """A substitution that cannot succeed; the message is Argo's."""


class Missing(TemplateError):
    """A strict tag has no value yet: Argo would retry forever."""


def substitute(value: T, scope: Scope, strict: re.Pattern[str] | None = None, artifacts: bool = True) -> T:
    """`value` with its tags replaced. `artifacts`: strict tags of output artifacts may stay. Raises TemplateError."""
    text = json.dumps(value)
    if "{{" not in text:
        return value
    return loaded(replace(text, scope, strict, artifacts))


def loaded(text: str) -> Any:
    """Parse JSON text that `replace` returned. Raises TemplateError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise TemplateError("cannot finish template replacement because the result was invalid JSON") from None


def replace(text: str, scope: Scope, strict: re.Pattern[str] | None = None, artifacts: bool = True) -> str:
    """`substitute` on JSON text."""
    out, at, env = [], 0, None
    while (start := text.find("{{", at)) >= 0:
        end = text.find("}}", start + 2)
        if end < 0:
            raise TemplateError(f'Cannot find end tag="}}}}" in the template="{text}" starting from "{text[start:]}"')
        out.append(text[at:start])
        tag = text[start + 2 : end]
        if tag.startswith("="):
            env = expanded(scope) if env is None else env
            out.append(_expression(tag[1:], env, strict))
        else:
            out.append(_simple(tag, scope, strict, artifacts))
        at = end + 2
    return "".join(out) + text[at:]


def quoted(value: str) -> str:
    """`value` escaped for a JSON string."""
    if UNQUOTABLE.search(value):
        raise TemplateError("cannot finish template replacement because the result was invalid JSON")
    return json.dumps(value)[1:-1]


def _simple(tag: str, scope: Scope, strict: re.Pattern[str] | None, artifacts: bool) -> str:
    name = tag.strip()
    if name in scope:
        value = scope[name]
        if value is None:
            raise TemplateError(
                f"unable to substitute {{{{{tag}}}}}: "
                "output is an absent optional (skipped/omitted node with no default)"
            )
        return quoted(value)
    outer, nested, inner = tag.rpartition("{{")
    if nested and outer and inner in scope:
        value = scope[inner]
        if value is None:
            raise TemplateError(f'unable to substitute nested tag {{{{{tag}}}}}: "{inner}" is an absent optional')
        return "{{" + outer + quoted(value)
    if strict and strict.match(name) and not (artifacts and ".outputs.artifacts." in name):
        raise Missing(f"failed to resolve {{{{{tag}}}}}")
    return "{{" + tag + "}}"


def _expression(tag: str, env: Mapping[str, Any], strict: re.Pattern[str] | None) -> str:
    literal = "{{=" + tag + "}}"
    try:
        source = json.loads(f'"{tag}"')
    except json.JSONDecodeError as error:
        raise TemplateError(f"failed to unmarshall JSON expression: {error}") from None
    try:
        missing = [name for name in identifiers(source) if not _known(env, name)]
    except ExprError as error:
        raise TemplateError(f"failed to evaluate expression: {error}") from None
    for name in missing:
        if strict and strict.match(name):
            raise Missing(f"failed to evaluate expression: {name} is missing")
    tolerant = bool(missing) or strict is None
    if tolerant and LATE.intersection(missing):
        return literal
    failed = "evaluate"
    try:
        if (result := evaluate(source, env)) is None and not tolerant:
            raise TemplateError(f"failed to evaluate expression {json.dumps(tag, ensure_ascii=False)}")
        if result is None:
            return literal
        failed = "marshal evaluated"
        text = dumps(result)
    except (ExprError, TypeError, ValueError) as error:
        if tolerant:
            return literal
        raise TemplateError(f"failed to {failed} expression: {error}") from None
    return text[1:-1] if text.startswith('"') else json.dumps(text)[1:-1]


def _known(env: Mapping[str, Any], name: str) -> bool:
    value: Any = env
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def expanded(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested maps, plus Argo's functions; a key that is also a prefix of another is dropped."""
    env: dict[str, Any] = {}
    names = sorted(scope)
    for name, following in zip(names, [*names[1:], ""], strict=True):
        if following.startswith(name + "."):
            continue
        *path, last = name.split(".")
        place = env
        for part in path:
            inner = place.setdefault(part, {})
            place = inner if isinstance(inner, dict) else place.__setitem__(part, {}) or place[part]
        place[last] = scope[name]
    return env | ARGO
