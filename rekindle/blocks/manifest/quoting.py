"""Quoting of template tags for the text in which they are replaced.

Argo replaces a tag by its value, and then the text may be parsed again: the manifest of a resource
template as JSON, `when` as an expression, flags by kubectl, arguments by the kubelet, which expands
`$(VARIABLE)`. Values such as the outputs of a step come from outside, so each tag is quoted for the
place where it stands.
"""

import re
from collections.abc import Callable
from typing import Any

from rekindle.blocks.wiring import to_expression
from rekindle.step import to_text

TAG = re.compile(r"\{\{(=?)(.*?)\}\}", re.DOTALL)
# values of these tags are names, numbers and paths that Argo or Kubernetes has validated
CLOSED = re.compile(
    r"workflow\.(name|namespace|uid|status|creationTimestamp(\.s)?)|pod\.name"
    r"|(inputs\.artifacts|outputs\.(artifacts|parameters))\.[\w-]+\.path"
)
WORD = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$"


def in_json(value: object) -> Any:
    """Return an object with the tags in its texts quoted for JSON, in which the object is
    rendered."""
    return _quote_json(value, "toJson({0})[1:-1]")


def input_text(value: object) -> str:
    """Format an input of a step. The tags in a value that the step reads as JSON are quoted for
    it."""
    return to_text(
        value if isinstance(value, str) else _quote_json(value, "toJson(string({0}))[1:-1]")
    )


def in_argument(text: str) -> str:
    """Return an argument of a container with its `$` escaped: the kubelet replaces `$(NAME)` by a
    variable's value."""
    pieces: list[str] = []
    end = 0
    for match in TAG.finditer(text):
        pieces.append(text[end : match.start()].replace("$", "$$"))
        pieces.append(
            _replace_tags(match[0], lambda expression: f"replace({expression}, '$', '$$')")
        )
        end = match.end()
    pieces.append(text[end:].replace("$", "$$"))
    return "".join(pieces)


def as_word(text: str) -> str:
    """Return a text for `when` or kubectl in which the value of a tag is empty unless it is a word.

    A word has only letters, digits and `._/-`, and starts with a letter or digit: it neither ends a
    quoted text nor is an option.
    """
    return _replace_tags(text, lambda expression: f"sprig.regexFind('{WORD}', {expression})")


def skip_if(origin: str) -> dict[str, Any]:
    """Return the task options that skip a task if the expression `origin`, RUN/TASK with its
    outputs, is not empty."""
    # Argo shows this condition in the message of a skipped task
    return {"when": as_word(f"'{{{{={origin}}}}}' == ''")}


def as_integer(expression: str) -> str:
    """Return a tag for the value of an expression as an integer; another value leaves the tag,
    which is refused."""
    return f"{{{{=asInt({expression})}}}}"


def _quote_json(value: object, quoted: str) -> Any:
    """Replace the tags in the texts of a value; `quoted`: the expression with {0} in place of that
    of the tag."""
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
        if not is_expression and CLOSED.fullmatch(content.strip()):
            return match[0]
        if is_expression:
            expression = content
        else:
            expression = to_expression(content.strip())
        return f"{{{{={quote(expression)}}}}}"

    return TAG.sub(substitute, text)
