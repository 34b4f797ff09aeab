"""JSONPath as Argo's `jsonpath(text, path)` reads it: names, indexes, slices, wildcards and filters.

    found(json.loads(text), "$.people[?(@.age > 42 && @.name == 'Mo')].name")

What follows a wildcard, slice or filter is of each element that has it (an index is of what a slice or filter gives).
A filter that cannot be evaluated for an element leaves it out. Not understood, and refused: scripts, unions, `..`,
arithmetic, `!`, `in` and `=~` in filters. Source: evilmonkeyinc/jsonpath v0.8.1 (token, script/standard).
"""

import re
from typing import Any

from argolocal.language.gofmt import COMPARE, verb


class PathError(ValueError):
    """There is no value at the path."""


NAMED = r"\['(?:[^'\\]+)'\]|\[\"(?:[^\"\\]+)\"\]"
TOKEN = re.compile(
    rf"(?P<all>\.\*|\[\*\])|(?P<name>\.[\w-]+|{NAMED})|\[(?P<index>-?\d+)\]|\[(?P<slice>-?\d*:-?\d*(?::-?\d*)?)\]"
    r"|\[\?\((?P<filter>(?:'[^']*'|\"[^\"]*\"|\[(?:'[^']*'|\"[^\"]*\")\]|[^'\"\[\]])+)\)\]"
)
TEXT = r"'[^']*'|\"[^\"]*\""
OPERAND = rf"@(?:\.\w+|{NAMED})*|{TEXT}|-?\d+(?:\.\d+)?|true|false|null"
ATOM = re.compile(rf"\s*({OPERAND})\s*(?:([=!<>]=|[<>])\s*({OPERAND})\s*)?")
Token = tuple[str, str]  # its kind, its text


def found(value: Any, path: str) -> Any:
    """What `path` selects of plain data. Raises PathError, or ValueError if the path is refused."""
    return _applied(value, tokens(path))


def tokens(path: str) -> list[Token]:
    """The parts of a path. Raises ValueError."""
    out: list[Token] = []
    at = 1 if path[:1] in ("$", "@") else 0
    while at < len(path) or not at:
        token = TOKEN.match(path, at) if at else None
        if not token:
            raise ValueError(
                f"jsonpath {path!r} is not understood at {path[at:]!r}: after $ come .name, ['name'], [0], [1:3], [*] "
                "and [?(@.name == 'x')], with &&, || and comparisons"
            )
        (kind, text), at = next((k, v) for k, v in token.groupdict().items() if v is not None), token.end()
        if kind == "name":
            text = text[1:] if text[0] == "." else text[2:-2]
        if kind == "filter":
            _choices(text)
        out.append((kind, text))
    return out


def _applied(value: Any, parts: list[Token]) -> Any:
    if not parts:
        return value
    (kind, text), rest = parts[0], parts[1:]
    if kind == "name":
        return _applied(_named(value, text), rest)
    if kind == "index":
        if not isinstance(value, list) or not -len(value) <= int(text) < len(value):
            raise PathError(f"index: invalid token out of range: [{text}]")
        return _applied(value[int(text)], rest)
    if not isinstance(value, list) and not (kind != "slice" and isinstance(value, dict)):
        raise PathError(f"{kind}: invalid token target")
    elements = [value[key] for key in sorted(value)] if isinstance(value, dict) else value
    if kind == "slice":
        elements = _slice(elements, text)
    elif kind == "filter":
        choices = _choices(text)
        elements = [element for element in elements if _chosen(element, choices)]
    if not rest:
        return elements
    if rest[0][0] == "index" and kind != "all":
        return _applied(elements, rest)
    results: list[Any] = []
    for element in elements:
        try:
            results.append(_applied(element, rest))
        except PathError:
            continue
    return [element for element in results if element is not None]


def _named(value: Any, name: str) -> Any:
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
    return elements[start:end][::step]  # what lies between, backwards


def _choices(text: str) -> list[list[tuple[str, str, str]]]:
    """Comparisons, of which all of one list must hold. Raises ValueError."""
    outside = re.sub(TEXT, lambda text: "_" * len(text[0]), text)
    out: list[list[tuple[str, str, str]]] = [[]]
    at = 0
    for end in [*(match.start() for match in re.finditer(r"&&|\|\|", outside)), len(text)]:
        atom = ATOM.fullmatch(text, at, end)
        if not atom or re.search(r"\.\w*in", re.sub(NAMED, "", atom[1])):  # its `in` would be taken for the operator
            raise ValueError(
                f"jsonpath: the filter ({text}) is not understood at {text[at:end]!r}: comparisons of @.name or "
                "@['name'] with 'text', numbers, true, false and null are, and && and || between them"
            )
        out[-1].append((atom[1], atom[2] or "", atom[3] or ""))
        out += [[]] if text[end : end + 2] == "||" else []
        at = end + 2
    return out


def _chosen(element: Any, choices: list[list[tuple[str, str, str]]]) -> bool:
    alone = len(choices) == len(choices[0]) == 1
    try:
        held = [[_holds(element, *atom, alone) for atom in every] for every in choices]
    except (PathError, ValueError):
        return False
    return any(map(all, held))


def _holds(element: Any, left: str, compare: str, right: str, alone: bool) -> bool:
    first = _operand(element, left)
    if not compare:
        return bool(first) if alone else _truth(first)
    second = _operand(element, right)
    if all(isinstance(operand, (int, float)) and not isinstance(operand, bool) for operand in (first, second)):
        return COMPARE[compare](first, second)
    if compare not in ("==", "!="):
        raise PathError("expected a number")
    return COMPARE[compare](_text(first), _text(second))


def _truth(value: Any) -> bool:
    if value in (None, True, False):  # 1 and 0 are among these
        return bool(value)
    raise PathError("expected a boolean")


def _operand(element: Any, text: str) -> Any:
    if text[0] == "@":
        return _applied(element, tokens(text))
    if text[0] in "'\"":
        return text[1:-1]
    constants = {"true": True, "false": False, "null": None}
    return constants[text] if text in constants else float(text)


def _text(value: Any) -> str:
    """As Go's %v prints it, strings quoted."""
    return f"'{value}'" if isinstance(value, str) else verb(value)
