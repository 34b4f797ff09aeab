"""JSONPath of Argo's `jsonpath(text, path)`: names, indexes, slices, wildcards and filters.

    select_values(json.loads(text), "$.people[?(@.age > 42 && @.name == 'Mo')].name")

After a wildcard, slice or filter, the remaining path is applied to each element, and elements
without a value at this path are skipped. An index after a slice or filter selects from the
resulting list. A filter that cannot be evaluated for an element excludes the element. Paths with
scripts, unions or `..`, and filters with arithmetic, `!`, `in` or `=~` are rejected. Source:
evilmonkeyinc/jsonpath v0.8.1 (token, script/standard).
"""

import re
from typing import Any

from argolocal.language.gofmt import COMPARISONS, format_v


class PathError(ValueError):
    """A value does not exist at the path."""


QUOTED_NAME = r"\['(?:[^'\\]+)'\]|\[\"(?:[^\"\\]+)\"\]"
TOKEN = re.compile(
    rf"(?P<all>\.\*|\[\*\])|(?P<name>\.[\w-]+|{QUOTED_NAME})|\[(?P<index>-?\d+)\]|\[(?P<slice>-?\d*:-?\d*(?::-?\d*)?)\]"
    r"|\[\?\((?P<filter>(?:'[^']*'|\"[^\"]*\"|\[(?:'[^']*'|\"[^\"]*\")\]|[^'\"\[\]])+)\)\]"
)
QUOTED_TEXT = r"'[^']*'|\"[^\"]*\""
OPERAND = rf"@(?:\.\w+|{QUOTED_NAME})*|{QUOTED_TEXT}|-?\d+(?:\.\d+)?|true|false|null"
FILTER_COMPARISON = re.compile(rf"\s*({OPERAND})\s*(?:([=!<>]=|[<>])\s*({OPERAND})\s*)?")
Token = tuple[str, str]  # kind, text


def select_values(value: object, path: str) -> Any:
    """Return the value or the list of values at `path` in parsed JSON. Raises PathError, or
    ValueError for an unsupported path."""
    return _select(value, parse_path(path))


def parse_path(path: str) -> list[Token]:
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
        token_kind, token_text = next(
            (group_name, group_text)
            for group_name, group_text in token.groupdict().items()
            if group_text is not None
        )
        if token_kind == "name":
            token_text = token_text[1:] if token_text[0] == "." else token_text[2:-2]
        if token_kind == "filter":
            _parse_filter(token_text)

        path_tokens.append((token_kind, token_text))

    return path_tokens


def _select(value: object, path_tokens: list[Token]) -> Any:
    """Return the value or the list of values at a parsed path. Raises PathError."""
    if not path_tokens:
        return value

    token_kind, token_text = path_tokens[0]
    next_tokens = path_tokens[1:]

    if token_kind == "name":
        return _select(_get_member(value, token_text), next_tokens)

    if token_kind == "index":
        if not isinstance(value, list) or not -len(value) <= int(token_text) < len(value):
            raise PathError(f"index: invalid token out of range: [{token_text}]")
        return _select(value[int(token_text)], next_tokens)

    if not isinstance(value, list) and not (token_kind != "slice" and isinstance(value, dict)):
        raise PathError(f"{token_kind}: invalid token target")

    if isinstance(value, dict):
        elements = [value[key] for key in sorted(value)]
    else:
        elements = value

    if token_kind == "slice":
        elements = _slice_elements(elements, token_text)
    elif token_kind == "filter":
        alternatives = _parse_filter(token_text)
        elements = [element for element in elements if _matches(element, alternatives)]

    if not next_tokens:
        return elements
    if next_tokens[0][0] == "index" and token_kind != "all":
        return _select(elements, next_tokens)

    selected_values: list[Any] = []
    for element in elements:
        try:
            selected_values.append(_select(element, next_tokens))
        except PathError:
            continue

    return [element for element in selected_values if element is not None]


def _get_member(value: object, name: str) -> Any:
    if isinstance(value, dict) and name in value:
        return value[name]
    if name == "length" and isinstance(value, (dict, list, str)):
        return len(value.encode() if isinstance(value, str) else value)
    raise PathError(f"key: invalid token key '{name}' not found")


def _slice_elements(elements: list[Any], slice_text: str) -> list[Any]:
    start_index, end_index, step = (
        int(bound) if bound else None for bound in [*slice_text.split(":"), ""][:3]
    )
    if step == 0:
        raise PathError("range: invalid token out of range")
    if step is None or step > 0:
        return elements[start_index:end_index:step]
    # the elements from `start_index` to `end_index`, in reverse order
    return elements[start_index:end_index][::step]


def _parse_filter(filter_text: str) -> list[list[tuple[str, str, str]]]:
    """Parse a filter into the alternatives that `||` separates. An alternative is a list of
    comparisons that must all be true. Raises ValueError."""
    masked_text = re.sub(QUOTED_TEXT, lambda filter_text: "_" * len(filter_text[0]), filter_text)
    alternatives: list[list[tuple[str, str, str]]] = [[]]
    position = 0

    for comparison_end in [
        *(match.start() for match in re.finditer(r"&&|\|\|", masked_text)),
        len(filter_text),
    ]:
        comparison = FILTER_COMPARISON.fullmatch(filter_text, position, comparison_end)
        # Argo would read the letters `in` inside a name as an operator
        if not comparison or re.search(r"\.\w*in", re.sub(QUOTED_NAME, "", comparison[1])):
            raise ValueError(
                f"jsonpath: the filter ({filter_text}) is not supported at"
                f" {filter_text[position:comparison_end]!r}: compare @.name or @['name'] with"
                " 'text', numbers, true, false and null, with && and || between comparisons"
            )

        alternatives[-1].append((comparison[1], comparison[2] or "", comparison[3] or ""))
        alternatives += [[]] if filter_text[comparison_end : comparison_end + 2] == "||" else []
        position = comparison_end + 2

    return alternatives


def _matches(element: object, alternatives: list[list[tuple[str, str, str]]]) -> bool:
    """Return True if a filter (see `_parse_filter`) selects the element."""
    is_single = len(alternatives) == len(alternatives[0]) == 1
    try:
        alternative_results = [
            [_is_comparison_true(element, *comparison, is_single) for comparison in comparisons]
            for comparisons in alternatives
        ]
    except (PathError, ValueError):
        return False
    return any(map(all, alternative_results))


def _is_comparison_true(
    element: object, left_operand: str, operator: str, right_operand: str, is_single: bool
) -> bool:
    left_value = _evaluate_operand(element, left_operand)
    if not operator:
        if is_single:
            return bool(left_value)
        return _require_bool(left_value)

    right_value = _evaluate_operand(element, right_operand)
    if all(
        isinstance(operand, (int, float)) and not isinstance(operand, bool)
        for operand in (left_value, right_value)
    ):
        return COMPARISONS[operator](left_value, right_value)

    if operator not in ("==", "!="):
        raise PathError("expected a number")

    return COMPARISONS[operator](_format_operand(left_value), _format_operand(right_value))


def _require_bool(value: object) -> bool:
    # this comparison also accepts 1 and 0, which equal True and False
    if value in (None, True, False):
        return bool(value)
    raise PathError("expected a boolean")


def _evaluate_operand(element: object, text: str) -> Any:
    if text[0] == "@":
        return _select(element, parse_path(text))
    if text[0] in "'\"":
        return text[1:-1]
    constants = {"true": True, "false": False, "null": None}
    if text in constants:
        return constants[text]
    return float(text)


def _format_operand(operand_value: object) -> str:
    """Format a value as Go's %v does, but with quotes around a string."""
    if isinstance(operand_value, str):
        return f"'{operand_value}'"
    return format_v(operand_value)
