r"""Render templates of kubectl's `-o jsonpath=`. Each {...} is replaced by the values at a path.

    render({"data": {"a.b": "1"}}, "{.data.a\.b}/{.kind}")     # 1/

A missing key renders as "". The values of a map are rendered in the map's order, while kubectl may
use any order.
Source: k8s.io/client-go/util/jsonpath, as kubectl get uses it (allow-missing-template-keys).
"""

import re
from collections.abc import Iterator
from typing import Any

from argolocal.language import gofmt

FIELD = r"(?:\\.|[^\\\s.,\[\]$@{}])*"
QUOTED = r"'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\""
TOKEN = re.compile(
    rf"(?P<skip>[ @$])|\[\?\((?P<filter>(?:[^)'\"\n]|{QUOTED})*)\)\]"
    rf"|\[(?P<array>[^\]\n]*)\]|(?P<quoted>{QUOTED})"
    rf"|(?P<recursive>\.\.)|\.(?P<field>{FIELD})|(?P<number>[+-]?[\d.]+)|(?P<word>\w[^\s.,\[\]$@{{}}]*)"
)
COMPARISON = re.compile(r"([^!<>=]+)([!<>=]+)(.+)", re.DOTALL)
SLICE = re.compile(r"(-?\d*)(:-?\d*)?(:-?\d*)?")
KEY = re.compile(r"'([^']*)'")
ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)")
Node = tuple[str, Any]  # kind, arguments
NOTHING = object()


class KubectlPathError(ValueError):
    """The path is invalid or does not match the object. The message equals kubectl's."""


def render(value: object, template: str) -> str:
    """Return the text that kubectl prints for `value`. Raises KubectlPathError."""
    return "".join(_render(value, parse(template)))


def parse(template: str) -> list[Node]:
    """Parse a template into nodes. Raises KubectlPathError."""
    open_ranges: list[list[Node]] = [[]]
    position = 0
    words = list[str]()

    while position < len(template):
        start = template.find("{", position)
        start = len(template) if start < 0 else start
        if start > position:
            open_ranges[-1].append(("plain", template[position:start]))
        if start == len(template):
            break

        nodes, position = _action(template, start + 1)
        words += [inner for kind, inner in nodes if kind == "word"]

        if nodes[:1] == [("word", "range")]:
            body: list[Node] = []
            open_ranges[-1].append(("range", (nodes[1:], body)))
            open_ranges.append(body)
            words.remove("range")
        elif nodes == [("word", "end")]:
            open_ranges.pop()
            words.remove("end")
            if not open_ranges:
                raise KubectlPathError("not in range, nothing to end")
        else:
            open_ranges[-1].append(("action", nodes))

    # without {end}, kubectl repeats the rest of the template for each element, then prints it once
    # more
    while len(open_ranges) > 1:
        unclosed_body = open_ranges.pop()
        open_ranges[-1] += unclosed_body

    if words:
        raise KubectlPathError(f"unrecognized identifier {words[0]}")

    return open_ranges[0]


def _action(text: str, position: int) -> tuple[list[Node], int]:
    """Parse the nodes from `position` to the closing brace. Return the nodes and the position after
    the brace."""
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
        nodes += NODES[str(token.lastgroup)](token[str(token.lastgroup)])
        if nodes[-2:] == [("recursive", None)] * 2:
            raise KubectlPathError("invalid multiple recursive descent")

        if token.lastgroup == "recursive" and (
            field := re.compile(rf"(?=\w){FIELD}").match(text, position)
        ):
            nodes += _field(field[0])
            position = field.end()

    return nodes, position + 1


def _parse_inner(text: str) -> list[Node]:
    nodes, end = _action(text + "}", 0)
    if end != len(text) + 1:
        raise KubectlPathError(f"unexpected }} in {text!r}")
    return nodes


def _field(text: str) -> list[Node]:
    if text == "*":
        return [("all", None)]
    return [("field", text.replace("\\", ""))]


def _number(text: str) -> list[Node]:
    try:
        return [("constant", int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text))]
    except ValueError:
        raise KubectlPathError(f"cannot parse number {text}") from None


def _word(text: str) -> list[Node]:
    if text in ("true", "false"):
        return [("constant", text == "true")]
    return [("word", text)]


def _quoted(quoted_text: str) -> list[Node]:
    escapes = gofmt.ESCAPED_CHARACTERS | {quoted_text[0]: quoted_text[0]}

    def char(match: re.Match[str]) -> str:
        if match[1][1:]:
            return chr(int(match[1][1:], 16))
        return escapes[match[1]]

    try:
        return [("quoted", ESCAPED.sub(char, quoted_text[1:-1]))]
    except KeyError:
        raise KubectlPathError(f"unquote string {quoted_text} error invalid syntax") from None


def _filter(text: str) -> list[Node]:
    comparison = COMPARISON.fullmatch(text)
    if not comparison:
        return [("filter", (_parse_inner(text), "exists", []))]
    if comparison[2] not in gofmt.COMPARISONS:
        raise KubectlPathError(f"unrecognized filter operator {comparison[2]}")
    return [("filter", (_parse_inner(comparison[1]), comparison[2], _parse_inner(comparison[3])))]


def _array(text: str) -> list[Node]:
    if "," in text:
        return [("union", [_array(index.strip(" ")) for index in text.split(",")])]

    key = KEY.fullmatch(text)
    if key:
        return _parse_inner(f".{key[1]}")

    parts = SLICE.fullmatch(":" if text == "*" else text)
    if not parts:
        raise KubectlPathError(f"invalid array index {text}")

    try:
        start, end, step = (
            int(index.strip(":")) if index and index.strip(":") else None
            for index in parts.groups()
        )
    except ValueError:
        raise KubectlPathError(f"array index {text} is not a number") from None

    is_single = parts[2] is None
    return [("array", (start, (start or 0) + 1 if is_single else end, step, is_single))]


NODES: dict[str, Any] = {
    "skip": lambda _: [],
    "recursive": lambda _: [("recursive", None)],
    "field": _field,
    "number": _number,
    "word": _word,
    "quoted": _quoted,
    "filter": _filter,
    "array": _array,
}


def _render(value: object, template_nodes: list[Node]) -> Iterator[str]:
    for kind, inner in template_nodes:
        if kind == "plain":
            yield inner
        elif kind == "action":
            yield " ".join(_format(result) for result in _walk([value], inner))
        else:
            nodes, body = inner
            items = _walk([value], nodes)
            for item in items:
                yield from _render(item, body)

            if not items:
                # a range without items still reports errors in its body
                list(_render(NOTHING, body))


def _walk(values: list[Any], nodes: list[Node]) -> list[Any]:
    for kind, inner in nodes:
        values = _step(values, kind, inner)
    return values


def _step(values: list[Any], kind: str, inner: Any) -> list[Any]:
    if kind == "quoted":
        return [inner]
    if kind == "constant":
        return [inner for _ in values]
    if kind == "union":
        return [item for nodes in inner for item in _walk(values, nodes)]
    if kind == "field":
        return [item[inner] for item in values if isinstance(item, dict) and inner in item]
    if kind == "filter":
        return [item for value in values for item in _select_elements(value, *inner)]

    non_null = [item for item in values if item is not None]
    if kind == "all":
        return [item for value in non_null for item in _children(value)]
    if kind == "recursive":
        return [item for value in non_null for item in _descendants(value)]

    return [item for value in non_null for item in _slice(value, *inner)]


def _children(value: object) -> list[Any]:
    if isinstance(value, (dict, list)):
        return [*(value.values() if isinstance(value, dict) else value)]
    if isinstance(value, str):
        return [*value.encode()]
    return []


def _descendants(value: object) -> list[Any]:
    children = _children(value)
    descendants = [node for child in children if child is not None for node in _descendants(child)]
    if children:
        return [value, *descendants]
    return []


def _slice(
    value: object, start: int | None, end: int | None, step: int | None, is_single: bool
) -> list[Any]:
    if not isinstance(value, list):
        raise KubectlPathError(f"{_type(value)} is not array or slice")

    size = len(value)
    first_index = start or 0
    first_index += size if first_index < 0 else 0
    last_index = size if end is None else end
    last_index += size if last_index < 0 or (last_index == 0 and is_single) else 0

    if first_index == last_index:
        return []
    if not 0 <= first_index < size:
        raise KubectlPathError(f"array index out of bounds: index {first_index}, length {size}")
    if not 0 <= last_index <= size:
        raise KubectlPathError(f"array index out of bounds: index {last_index - 1}, length {size}")

    if first_index > last_index:
        raise KubectlPathError(
            f"starting index {first_index} is greater than ending index {last_index}"
        )

    if step is not None and step <= 0:
        raise KubectlPathError("step must be > 0")

    return value[first_index:last_index:step]


def _select_elements(
    value: object, lhs: list[Node], operator: str, rhs: list[Node]
) -> Iterator[Any]:
    if not isinstance(value, list):
        raise KubectlPathError(
            f"{gofmt.format_v(value)} is not array or slice and cannot be filtered"
        )

    for element in value:
        if operator == "exists":
            try:
                operands = _walk([element], lhs)
            except KubectlPathError:
                continue

            if operands:
                yield element

            continue

        compared_values = [_walk([element], lhs)]
        compared_values += [_walk([element], rhs)] if compared_values[0] else []
        if any(len(side) > 1 for side in compared_values):
            raise KubectlPathError("can only compare one element at a time")

        if all(compared_values) and _is_true(
            compared_values[0][0], operator, compared_values[1][0]
        ):
            yield element


def _is_true(lhs: object, operator: str, rhs: object) -> bool:
    types = {type(lhs), type(rhs)}
    if types - {bool, int, float, str} or (types == {bool} and operator[0] in "<>"):
        raise KubectlPathError("invalid type for comparison")
    if len(types) > 1:
        raise KubectlPathError("incompatible types for comparison")
    return gofmt.COMPARISONS[operator](lhs, rhs)


def _type(value: object) -> str:
    names = {
        dict: "map[string]interface {}",
        str: "string",
        bool: "bool",
        int: "int64",
        float: "float64",
    }
    return names.get(type(value), "nothing")


def _format(value: object) -> str:
    if isinstance(value, (dict, list)):
        return gofmt.dumps(value)
    if value is None:
        return "null"
    return gofmt.format_v(value)
