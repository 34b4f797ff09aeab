"""Quoting of template tags in manifests, which prevents injection.

After Argo has replaced a tag by its value, a parser reads the text: the manifest of a resource
template is JSON, `when` is an expression, flags are read by kubectl, and the kubelet expands
`$(VARIABLE)` in arguments. Values such as the outputs of a step are untrusted, so each tag is
quoted for the syntax of the text that contains the tag.
"""

import re
from collections.abc import Callable
from typing import Any

from pydantic_core import to_jsonable_python

from rekindle.blocks.wiring import to_expression
from rekindle.step import SCALAR_TYPES, format_parameter

TEMPLATE_TAG = re.compile(r"\{\{(=?)(.*?)\}\}", re.DOTALL)
# tags that need no quotes, because Argo or Kubernetes has validated their values (names, times and
# paths)
SAFE_TAG = re.compile(
    r"workflow\.(name|namespace|uid|status|creationTimestamp(\.s)?)|pod\.name"
    r"|(inputs\.artifacts|outputs\.(artifacts|parameters))\.[\w-]+\.path"
)
WORD_PATTERN = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$"


def quote_in_json(manifest_value: object) -> Any:
    """Return the object with its template tags quoted, so that it can be rendered as JSON."""
    return _quote_json(manifest_value, "toJson({0})[1:-1]")


def format_input(input_value: object) -> str:
    """Format an input of a step as text. If the value of the input is not text, quote its template
    tags for JSON.

    Sections of the config and other pydantic models are first converted to plain values, also
    inside lists and mappings, since `_quote_json` finds no tags in a model.
    """
    if isinstance(input_value, SCALAR_TYPES):
        return format_parameter(input_value)

    plain_value = to_jsonable_python(input_value)
    return format_parameter(_quote_json(plain_value, "toJson(string({0}))[1:-1]"))


def quote_argument(argument_text: str) -> str:
    """Return an argument of a container with each `$` escaped, because the kubelet would replace
    `$(NAME)` by an environment variable."""
    quoted_pieces: list[str] = []
    previous_end = 0
    for tag_match in TEMPLATE_TAG.finditer(argument_text):
        quoted_pieces.append(argument_text[previous_end : tag_match.start()].replace("$", "$$"))
        quoted_pieces.append(
            _replace_tags(tag_match[0], lambda expression: f"replace({expression}, '$', '$$')")
        )
        previous_end = tag_match.end()
    quoted_pieces.append(argument_text[previous_end:].replace("$", "$$"))
    return "".join(quoted_pieces)


def quote_word(word_text: str) -> str:
    """Return the text with its tags changed so that `when` or kubectl can read it: the value of a
    tag becomes "" if the value is not a word.

    A word consists of letters, digits and `._/-`, and starts with a letter or digit. A word can
    therefore neither end a quoted text nor be read as an option of a command.
    """
    return _replace_tags(
        word_text, lambda expression: f"sprig.regexFind('{WORD_PATTERN}', {expression})"
    )


def skip_if(origin_expression: str) -> dict[str, Any]:
    """Return the task options that skip a task if the outputs of an earlier run are reused instead.
    `origin_expression`: expression for the RUN/TASK whose outputs are reused, "" if no outputs are
    reused.
    """
    # the condition contains RUN/TASK, because Argo shows the condition in the message of a skipped
    # task
    return {"when": quote_word(f"'{{{{={origin_expression}}}}}' == ''")}


def integer_tag(expression: str) -> str:
    """Return a template tag for the integer value of an expression. If the value is not an integer,
    Argo does not replace the tag, and Kubernetes rejects the object."""
    return f"{{{{=asInt({expression})}}}}"


def _quote_json(manifest_value: object, quoted_expression: str) -> Any:
    """Replace each template tag in the texts of a value. `quoted_expression`: expression of the
    new tag, with {0} for the expression of the old tag."""
    if isinstance(manifest_value, dict):
        return {
            _quote_json(name, quoted_expression): _quote_json(child_value, quoted_expression)
            for name, child_value in manifest_value.items()
        }
    if isinstance(manifest_value, (list, tuple)):
        return [_quote_json(child_value, quoted_expression) for child_value in manifest_value]
    if isinstance(manifest_value, str):
        return _replace_tags(manifest_value, quoted_expression.format)
    return manifest_value


def _replace_tags(quoted_text: str, quote_expression: Callable[[str], str]) -> str:
    def substitute(tag_match: re.Match[str]) -> str:
        is_expression, tag_content = tag_match.groups()
        if not is_expression and SAFE_TAG.fullmatch(tag_content.strip()):
            return tag_match[0]
        if is_expression:
            expression = tag_content
        else:
            expression = to_expression(tag_content.strip())
        return f"{{{{={quote_expression(expression)}}}}}"

    return TEMPLATE_TAG.sub(substitute, quoted_text)
