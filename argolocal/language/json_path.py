"""JSONPath of Argo's `jsonpath(text, path)`: names, indexes, slices, wildcards and filters.

    select(json.loads(text), "$.people[?(@.age > 42 && @.name == 'Mo')].name")

The part of a path after a wildcard, slice or filter applies to each element; elements that do not
have this part are skipped. An index after a slice or filter applies to the resulting list. A filter
that cannot be evaluated for an element excludes the element. Paths with scripts, unions or `..`,
and filters with arithmetic, `!`, `in` or `=~` are rejected. Source: evilmonkeyinc/jsonpath v0.8.1
(token, script/standard).
"""

import re
from typing import Any

from argolocal.language.gofmt import COMPARISONS, format_v


class PathError(ValueError):
    """The path does not lead to a value."""


QUOTED_NAME = r"\['(?:[^'\\]+)'\]|\[\"(?:[^\"\\]+)\"\]"
TOKEN = re.compile(
    rf"(?P<all>\.\*|\[\*\])|(?P<name>\.[\w-]+|{QUOTED_NAME})|\[(?P<index>-?\d+)\]|\[(?P<slice>-?\d*:-?\d*(?::-?\d*)?)\]"
    r"|\[\?\((?P<filter>(?:'[^']*'|\"[^\"]*\"|\[(?:'[^']*'|\"[^\"]*\")\]|[^'\"\[\]])+)\)\]"
)
QUOTED_TEXT = r"'[^']*'|\"[^\"]*\""
OPERAND = rf"@(?:\.\w+|{QUOTED_NAME})*|{QUOTED_TEXT}|-?\d+(?:\.\d+)?|true|false|null"
FILTER_COMPARISON = re.compile(rf"\s*({OPERAND})\s*(?:([=!<>]=|[<>])\s*({OPERAND})\s*)?")
Token = tuple[str, str]  # kind, text


def select(value: object, path: str) -> Any:
    """Return the value or values at `path` in plain data. Raises PathError, or ValueError for an
    unsupported path."""
    return _apply(value, tokens(path))


def tokens(path: str) -> list[Token]:
    """Return the tokens of a path. Raises ValueError."""
    path_tokens: list[Token] = []

    position = 1 if path[:1] in ("$", "@") else 0
    while position < len(path) or not position:
        token = TOKEN.match(path, position) if position else None
        if not token:
            raise ValueError(
                f"jsonpath {path!r} is not supported at {path[position:]!r}: after $ use .name,"
                " ['name'], [0], [1:3], [*] and [?(@.name == 'x')], with &&, || and comparisons"
            )

        position = token.end()
        kind, text = next(
            (name, group) for name, group in token.groupdict().items() if group is not None
        )
        if kind == "name":
            text = text[1:] if text[0] == "." else text[2:-2]
        if kind == "filter":
            _parse_filter(text)

        path_tokens.append((kind, text))

    return path_tokens


def _apply(value: object, path_tokens: list[Token]) -> Any:
    if not path_tokens:
        return value

    kind, text = path_tokens[0]
    next_tokens = path_tokens[1:]

    if kind == "name":
        return _apply(_member(value, text), next_tokens)

    if kind == "index":
        if not isinstance(value, list) or not -len(value) <= int(text) < len(value):
            raise PathError(f"index: invalid token out of range: [{text}]")
        return _apply(value[int(text)], next_tokens)

    if not isinstance(value, list) and not (kind != "slice" and isinstance(value, dict)):
        raise PathError(f"{kind}: invalid token target")

    if isinstance(value, dict):
        elements = [value[key] for key in sorted(value)]
    else:
        elements = value

    if kind == "slice":
        elements = _slice(elements, text)
    elif kind == "filter":
        alternatives = _parse_filter(text)
        elements = [element for element in elements if _matches(element, alternatives)]

    if not next_tokens:
        return elements
    if next_tokens[0][0] == "index" and kind != "all":
        return _apply(elements, next_tokens)

    results: list[Any] = []
    for element in elements:
        try:
            results.append(_apply(element, next_tokens))
        except PathError:
            continue

    return [element for element in results if element is not None]


def _member(value: object, name: str) -> Any:
    if isinstance(value, dict) and name in value:
        return value[name]
    if name == "length" and isinstance(value, (dict, list, str)):
        return len(value.encode() if isinstance(value, str) else value)
    raise PathError(f"key: invalid token key '{name}' not found")


def _slice(elements: list[Any], text: str) -> list[Any]:
    start, end, step = (int(bound) if bound else None for bound in [*text.split(":"), ""][:3])
    if step == 0:
        raise PathError("range: invalid token out of range")
    if step is None or step > 0:
        return elements[start:end:step]
    return elements[start:end][::step]  # the elements from `start` to `end`, in reverse order


def _parse_filter(text: str) -> list[list[tuple[str, str, str]]]:
    """Parse a filter into the alternatives that `||` separates. An alternative is a list of
    comparisons that must all be true. Raises ValueError."""
    masked_text = re.sub(QUOTED_TEXT, lambda text: "_" * len(text[0]), text)
    alternatives: list[list[tuple[str, str, str]]] = [[]]
    position = 0

    for end in [*(match.start() for match in re.finditer(r"&&|\|\|", masked_text)), len(text)]:
        comparison = FILTER_COMPARISON.fullmatch(text, position, end)
        # Argo would read the letters `in` inside a name as an operator
        if not comparison or re.search(r"\.\w*in", re.sub(QUOTED_NAME, "", comparison[1])):
            raise ValueError(
                f"jsonpath: the filter ({text}) is not supported at {text[position:end]!r}: compare"
                " @.name or @['name'] with 'text', numbers, true, false and null, with && and ||"
                " between comparisons"
            )

        alternatives[-1].append((comparison[1], comparison[2] or "", comparison[3] or ""))
        alternatives += [[]] if text[end : end + 2] == "||" else []
        position = end + 2

    return alternatives


def _matches(element: object, alternatives: list[list[tuple[str, str, str]]]) -> bool:
    is_single = len(alternatives) == len(alternatives[0]) == 1
    try:
        results = [
            [_is_true(element, *comparison, is_single) for comparison in comparisons]
            for comparisons in alternatives
        ]
    except (PathError, ValueError):
        return False
    return any(map(all, results))


def _is_true(element: object, lhs: str, operator: str, rhs: str, is_single: bool) -> bool:
    left_value = _operand(element, lhs)
    if not operator:
        if is_single:
            return bool(left_value)
        return _require_bool(left_value)

    right_value = _operand(element, rhs)
    if all(
        isinstance(operand, (int, float)) and not isinstance(operand, bool)
        for operand in (left_value, right_value)
    ):
        return COMPARISONS[operator](left_value, right_value)

    if operator not in ("==", "!="):
        raise PathError("expected a number")

    return COMPARISONS[operator](_text(left_value), _text(right_value))


def _require_bool(value: object) -> bool:
    if value in (None, True, False):  # 1 and 0 are accepted, too, because they equal True and False
        return bool(value)
    raise PathError("expected a boolean")


def _operand(element: object, text: str) -> Any:
    if text[0] == "@":
        return _apply(element, tokens(text))
    if text[0] in "'\"":
        return text[1:-1]
    constants = {"true": True, "false": False, "null": None}
    if text in constants:
        return constants[text]
    return float(text)


def _text(value: object) -> str:
    """Format a value as Go's %v, but with quotes around a string."""
    if isinstance(value, str):
        return f"'{value}'"
    return format_v(value)
