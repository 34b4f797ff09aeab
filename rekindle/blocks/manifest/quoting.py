"""Quoting of template tags in manifests, which prevents injection.

After Argo has replaced a tag by its value, a parser reads the text: the manifest of a resource
template is JSON, `when` is an expression, flags are read by kubectl, and the kubelet expands
`$(VARIABLE)` in arguments. Values such as the outputs of a step are untrusted, so each tag is
quoted for the syntax of the text around it.
"""

import re
from collections.abc import Callable
from typing import Any

from pydantic_core import to_jsonable_python

from rekindle.blocks.wiring import to_expression
from rekindle.step import SCALARS, to_text

TEMPLATE_TAG = re.compile(r"\{\{(=?)(.*?)\}\}", re.DOTALL)
# tags that need no quotes, because Argo or Kubernetes has validated their values (names, times and
# paths)
SAFE_TAG = re.compile(
    r"workflow\.(name|namespace|uid|status|creationTimestamp(\.s)?)|pod\.name"
    r"|(inputs\.artifacts|outputs\.(artifacts|parameters))\.[\w-]+\.path"
)
WORD_PATTERN = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$"


def quote_in_json(value: object) -> Any:
    """Return the object with its tags quoted for JSON, as which the object is rendered."""
    return _quote_json(value, "toJson({0})[1:-1]")


def format_input(value: object) -> str:
    """Format an input of a step as text. If the value is not text, quote its tags for JSON.

    Sections of the config and other models are first converted to plain values, also inside lists
    and mappings, since `_quote_json` finds no tags in a model.
    """
    if isinstance(value, SCALARS):
        return to_text(value)

    plain_value = to_jsonable_python(value)
    return to_text(_quote_json(plain_value, "toJson(string({0}))[1:-1]"))


def quote_argument(text: str) -> str:
    """Return an argument of a container with each `$` escaped, because the kubelet would replace
    `$(NAME)` by an environment variable."""
    pieces: list[str] = []
    end = 0
    for match in TEMPLATE_TAG.finditer(text):
        pieces.append(text[end : match.start()].replace("$", "$$"))
        pieces.append(
            _replace_tags(match[0], lambda expression: f"replace({expression}, '$', '$$')")
        )
        end = match.end()
    pieces.append(text[end:].replace("$", "$$"))
    return "".join(pieces)


def quote_word(text: str) -> str:
    """Return a text for `when` or kubectl. The value of a tag in this text is replaced by "" if it
    is not a word.

    A word has only letters, digits and `._/-`, and starts with a letter or digit: it can neither
    end a quoted text nor be read as an option.
    """
    return _replace_tags(
        text, lambda expression: f"sprig.regexFind('{WORD_PATTERN}', {expression})"
    )


def skip_if(origin: str) -> dict[str, Any]:
    """Return the task options that skip a task if the value of the expression `origin`, the
    RUN/TASK whose outputs are reused, is not empty."""
    # Argo shows the condition in the message of a skipped task, so the condition contains the
    # RUN/TASK
    return {"when": quote_word(f"'{{{{={origin}}}}}' == ''")}


def integer_tag(expression: str) -> str:
    """Return a tag for the integer value of an expression. If the value is not an integer, Argo
    does not replace the tag, and Kubernetes rejects the object."""
    return f"{{{{=asInt({expression})}}}}"


def _quote_json(value: object, quoted: str) -> Any:
    """Replace each template tag in the texts of a value. `quoted`: expression of the new tag, with
    {0} for the expression of the old tag."""
    if isinstance(value, dict):
        return {
            _quote_json(name, quoted): _quote_json(child, quoted) for name, child in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_quote_json(child, quoted) for child in value]
    if isinstance(value, str):
        return _replace_tags(value, quoted.format)
    return value


def _replace_tags(text: str, quote: Callable[[str], str]) -> str:
    def substitute(match: re.Match[str]) -> str:
        is_expression, content = match.groups()
        if not is_expression and SAFE_TAG.fullmatch(content.strip()):
            return match[0]
        if is_expression:
            expression = content
        else:
            expression = to_expression(content.strip())
        return f"{{{{={quote(expression)}}}}}"

    return TEMPLATE_TAG.sub(substitute, text)
