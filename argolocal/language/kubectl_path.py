r"""Render templates of kubectl's `-o jsonpath=`. Each {...} in a template is replaced by the values
at a path.

    render_template({"data": {"a.b": "1"}}, "{.data.a\.b}/{.kind}")     # 1/

A missing key of a path is rendered as "". The values of a map are rendered in the map's order,
while kubectl may use any order. Source: k8s.io/client-go/util/jsonpath, as kubectl get uses it
(allow-missing-template-keys).
"""

import re
from collections.abc import Iterator
from typing import Any

from argolocal.language import gofmt

FIELD_PATTERN = r"(?:\\.|[^\\\s.,\[\]$@{}])*"
QUOTED_PATTERN = r"'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\""
TOKEN = re.compile(
    rf"(?P<skip>[ @$])|\[\?\((?P<filter>(?:[^)'\"\n]|{QUOTED_PATTERN})*)\)\]"
    rf"|\[(?P<array>[^\]\n]*)\]|(?P<quoted>{QUOTED_PATTERN})"
    rf"|(?P<recursive>\.\.)|\.(?P<field>{FIELD_PATTERN})|(?P<number>[+-]?[\d.]+)|(?P<word>\w[^\s.,\[\]$@{{}}]*)"
)
COMPARISON = re.compile(r"([^!<>=]+)([!<>=]+)(.+)", re.DOTALL)
SLICE = re.compile(r"(-?\d*)(:-?\d*)?(:-?\d*)?")
KEY = re.compile(r"'([^']*)'")
ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)")
# kind, arguments
Node = tuple[str, Any]
# value for which the body of a range without elements is rendered
NO_VALUE = object()


class KubectlPathError(ValueError):
    """The path is invalid or does not match the object. The message of a KubectlPathError equals
    kubectl's."""


def render_template(value: object, template: str) -> str:
    """Return the text that kubectl prints for `value`. Raises KubectlPathError."""
    return "".join(_render(value, parse(template)))


def parse(template: str) -> list[Node]:
    """Parse a template into nodes. Raises KubectlPathError."""
    open_ranges: list[list[Node]] = [[]]
    position = 0
    open_keywords = list[str]()

    while position < len(template):
        start = template.find("{", position)
        start = len(template) if start < 0 else start
        if start > position:
            open_ranges[-1].append(("plain", template[position:start]))
        if start == len(template):
            break

        nodes, position = _parse_action(template, start + 1)
        open_keywords += [
            node_argument for node_kind, node_argument in nodes if node_kind == "word"
        ]

        if nodes[:1] == [("word", "range")]:
            range_body: list[Node] = []
            open_ranges[-1].append(("range", (nodes[1:], range_body)))
            open_ranges.append(range_body)
            open_keywords.remove("range")
        elif nodes == [("word", "end")]:
            open_ranges.pop()
            open_keywords.remove("end")
            if not open_ranges:
                raise KubectlPathError("not in range, nothing to end")
        else:
            open_ranges[-1].append(("action", nodes))

    # Without {end}, kubectl renders the remaining template once per element, and then once more
    # after the range.
    while len(open_ranges) > 1:
        unclosed_body = open_ranges.pop()
        open_ranges[-1] += unclosed_body

    if open_keywords:
        raise KubectlPathError(f"unrecognized identifier {open_keywords[0]}")

    return open_ranges[0]


def _parse_action(text: str, position: int) -> tuple[list[Node], int]:
    """Parse the nodes from `position` to the closing brace. Return the nodes and the position after
    the closing brace."""
    nodes: list[Node] = []

    while text[position : position + 1] != "}":
        if position >= len(text) or text[position] in "\r\n":
            raise KubectlPathError("unclosed action")

        token = TOKEN.match(text, position)
        if not token:
            raise KubectlPathError(
                f"unrecognized character in action: U+{ord(text[position]):04X} '{text[position]}'"
            )

        position = token.end()
        nodes += NODE_PARSERS[str(token.lastgroup)](token[str(token.lastgroup)])
        if nodes[-2:] == [("recursive", None)] * 2:
            raise KubectlPathError("invalid multiple recursive descent")

        if token.lastgroup == "recursive" and (
            field := re.compile(rf"(?=\w){FIELD_PATTERN}").match(text, position)
        ):
            nodes += _parse_field(field[0])
            position = field.end()

    return nodes, position + 1


def _parse_inner(text: str) -> list[Node]:
    """Parse a path inside a filter or brackets. Raises KubectlPathError."""
    nodes, end_position = _parse_action(text + "}", 0)
    if end_position != len(text) + 1:
        raise KubectlPathError(f"unexpected }} in {text!r}")
    return nodes


def _parse_field(text: str) -> list[Node]:
    if text == "*":
        return [("all", None)]
    return [("field", text.replace("\\", ""))]


def _parse_number(text: str) -> list[Node]:
    try:
        return [("constant", int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text))]
    except ValueError:
        raise KubectlPathError(f"cannot parse number {text}") from None


def _parse_word(text: str) -> list[Node]:
    if text in ("true", "false"):
        return [("constant", text == "true")]
    return [("word", text)]


def _parse_quoted(quoted_text: str) -> list[Node]:
    characters_by_escape = gofmt.ESCAPED_CHARACTERS | {quoted_text[0]: quoted_text[0]}

    def unescape(match: re.Match[str]) -> str:
        if match[1][1:]:
            return chr(int(match[1][1:], 16))
        return characters_by_escape[match[1]]

    try:
        return [("quoted", ESCAPED.sub(unescape, quoted_text[1:-1]))]
    except KeyError:
        raise KubectlPathError(f"unquote string {quoted_text} error invalid syntax") from None


def _parse_filter(text: str) -> list[Node]:
    comparison_match = COMPARISON.fullmatch(text)
    if not comparison_match:
        return [("filter", (_parse_inner(text), "exists", []))]
    if comparison_match[2] not in gofmt.COMPARISONS:
        raise KubectlPathError(f"unrecognized filter operator {comparison_match[2]}")
    return [
        (
            "filter",
            (
                _parse_inner(comparison_match[1]),
                comparison_match[2],
                _parse_inner(comparison_match[3]),
            ),
        )
    ]


def _parse_array(text: str) -> list[Node]:
    if "," in text:
        return [("union", [_parse_array(index_text.strip(" ")) for index_text in text.split(",")])]

    key = KEY.fullmatch(text)
    if key:
        return _parse_inner(f".{key[1]}")

    slice_match = SLICE.fullmatch(":" if text == "*" else text)
    if not slice_match:
        raise KubectlPathError(f"invalid array index {text}")

    try:
        start_index, end_index, step = (
            int(index_text.strip(":")) if index_text and index_text.strip(":") else None
            for index_text in slice_match.groups()
        )
    except ValueError:
        raise KubectlPathError(f"array index {text} is not a number") from None

    is_single = slice_match[2] is None
    return [
        (
            "array",
            (start_index, (start_index or 0) + 1 if is_single else end_index, step, is_single),
        )
    ]


NODE_PARSERS: dict[str, Any] = {
    "skip": lambda _: [],
    "recursive": lambda _: [("recursive", None)],
    "field": _parse_field,
    "number": _parse_number,
    "word": _parse_word,
    "quoted": _parse_quoted,
    "filter": _parse_filter,
    "array": _parse_array,
}


def _render(value: object, template_nodes: list[Node]) -> Iterator[str]:
    for node_kind, node_argument in template_nodes:
        if node_kind == "plain":
            yield node_argument
        elif node_kind == "action":
            yield " ".join(
                _format_value(selected_value)
                for selected_value in _select_values([value], node_argument)
            )
        else:
            range_nodes, range_body = node_argument
            range_values = _select_values([value], range_nodes)
            for range_value in range_values:
                yield from _render(range_value, range_body)

            if not range_values:
                # render the body once, so that errors in the body are reported
                list(_render(NO_VALUE, range_body))


def _select_values(values: list[Any], nodes: list[Node]) -> list[Any]:
    for node_kind, node_argument in nodes:
        values = _select_by_node(values, node_kind, node_argument)
    return values


def _select_by_node(values: list[Any], node_kind: str, node_argument: Any) -> list[Any]:
    if node_kind == "quoted":
        return [node_argument]
    if node_kind == "constant":
        return [node_argument for _ in values]
    if node_kind == "union":
        return [
            selected_value
            for nodes in node_argument
            for selected_value in _select_values(values, nodes)
        ]
    if node_kind == "field":
        return [
            selected_value[node_argument]
            for selected_value in values
            if isinstance(selected_value, dict) and node_argument in selected_value
        ]
    if node_kind == "filter":
        return [
            selected_value
            for value in values
            for selected_value in _select_elements(value, *node_argument)
        ]

    non_null_values = [selected_value for selected_value in values if selected_value is not None]
    if node_kind == "all":
        return [
            selected_value for value in non_null_values for selected_value in _list_children(value)
        ]
    if node_kind == "recursive":
        return [
            selected_value
            for value in non_null_values
            for selected_value in _list_descendants(value)
        ]

    return [
        selected_value
        for value in non_null_values
        for selected_value in _slice_list(value, *node_argument)
    ]


def _list_children(value: object) -> list[Any]:
    if isinstance(value, (dict, list)):
        return [*(value.values() if isinstance(value, dict) else value)]
    if isinstance(value, str):
        return [*value.encode()]
    return []


def _list_descendants(value: object) -> list[Any]:
    """Return the value and all its descendants that have children; [] for a value without
    children."""
    children = _list_children(value)
    descendants = [
        node for child in children if child is not None for node in _list_descendants(child)
    ]
    if children:
        return [value, *descendants]
    return []


def _slice_list(
    value: object, start_index: int | None, end_index: int | None, step: int | None, is_single: bool
) -> list[Any]:
    if not isinstance(value, list):
        raise KubectlPathError(f"{_go_type_name(value)} is not array or slice")

    list_length = len(value)
    first_index = start_index or 0
    first_index += list_length if first_index < 0 else 0
    last_index = list_length if end_index is None else end_index
    last_index += list_length if last_index < 0 or (last_index == 0 and is_single) else 0

    if first_index == last_index:
        return []
    if not 0 <= first_index < list_length:
        raise KubectlPathError(
            f"array index out of bounds: index {first_index}, length {list_length}"
        )
    if not 0 <= last_index <= list_length:
        raise KubectlPathError(
            f"array index out of bounds: index {last_index - 1}, length {list_length}"
        )

    if first_index > last_index:
        raise KubectlPathError(
            f"starting index {first_index} is greater than ending index {last_index}"
        )

    if step is not None and step <= 0:
        raise KubectlPathError("step must be > 0")

    return value[first_index:last_index:step]


def _select_elements(
    value: object, left_operand: list[Node], operator: str, right_operand: list[Node]
) -> Iterator[Any]:
    if not isinstance(value, list):
        raise KubectlPathError(
            f"{gofmt.format_v(value)} is not array or slice and cannot be filtered"
        )

    for element in value:
        if operator == "exists":
            try:
                operands = _select_values([element], left_operand)
            except KubectlPathError:
                continue

            if operands:
                yield element

            continue

        compared_values = [_select_values([element], left_operand)]
        compared_values += [_select_values([element], right_operand)] if compared_values[0] else []
        if any(len(operand_values) > 1 for operand_values in compared_values):
            raise KubectlPathError("can only compare one element at a time")

        if all(compared_values) and _compare(
            compared_values[0][0], operator, compared_values[1][0]
        ):
            yield element


def _compare(left_operand: object, operator: str, right_operand: object) -> bool:
    operand_types = {type(left_operand), type(right_operand)}
    if operand_types - {bool, int, float, str} or (operand_types == {bool} and operator[0] in "<>"):
        raise KubectlPathError("invalid type for comparison")
    if len(operand_types) > 1:
        raise KubectlPathError("incompatible types for comparison")
    return gofmt.COMPARISONS[operator](left_operand, right_operand)


def _go_type_name(value: object) -> str:
    go_type_names = {
        dict: "map[string]interface {}",
        str: "string",
        bool: "bool",
        int: "int64",
        float: "float64",
    }
    return go_type_names.get(type(value), "nothing")


def _format_value(value: object) -> str:
    if isinstance(value, (dict, list)):
        return gofmt.dumps(value)
    if value is None:
        return "null"
    return gofmt.format_v(value)
