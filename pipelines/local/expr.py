"""The language of `{{=...}}`, `depends`, and retry and hook expressions: the subset of expr-lang 1.17 that Argo's users write.

    expression := binary ( "?" expression ":" expression )?  |  "let" name "=" expression ";" expression
    binary     := unary ( operator unary )*        operators, loosest first: |  or ||  and &&  == != < > <= >= in matches
                  contains startsWith endsWith (and "not in" ...)  ..  + -  * / %  ** ^  ??
    unary      := ( not ! - + ) unary | postfix     postfix := primary ( .name ?.name [index] [from:to] (arguments) )*
    primary    := number | 'text' | "text" | `text` | true | false | nil | name | [list] | {map} | (expression) | # | .name
A predicate is `{# > 2}` or a bare expression with `#`. Functions: see functions.py.
Source: expr-lang/expr v1.17 (parser/parser.go, parser/operator), Argo's util/expr.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from pipelines.local.functions import BUILTINS, PREDICATES, ExprError, Numeric, compare, equal, is_number

TOKEN = re.compile(
    r"""\s*(?:(?P<number>0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|(?:\d[\d_]*)?\.\d[\d_]*(?:[eE][+-]?\d+)?|\d[\d_]*(?:[eE][+-]?\d+)?)
    |(?P<text>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`[^`]*`)|(?P<name>[A-Za-z_$][\w$]*)
    |(?P<symbol>\?\?|\?\.|\*\*|\.\.|==|!=|<=|>=|&&|\|\||[-+*/%^<>!?:.,()\[\]{}|\#=;]))""",
    re.X | re.S,
)
BINARY = (
    {"|": 0, "||": 10, "or": 10, "&&": 15, "and": 15, "..": 25, "+": 30, "-": 30, "*": 60, "/": 60, "%": 60}
    | dict.fromkeys(("==", "!=", "<", ">", "<=", ">=", "in", "matches", "contains", "startsWith", "endsWith"), 20)
    | {"**": 100, "^": 100, "??": 500}
)
NEGATABLE = ("in", "matches", "contains", "startsWith", "endsWith")
UNARY = {"not": 50, "!": 50, "-": 90, "+": 90}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
Node = tuple[Any, ...]


@lru_cache(4096)
def parse(source: str) -> Node:
    """The syntax tree. Raises ExprError."""
    tokens, at = [], 0
    while source[at:].strip():
        found = TOKEN.match(source, at)
        if not found:
            raise ExprError(f"unexpected character {source[at:].strip()[0]!r} in {source!r}")
        kind = found.lastgroup or ""
        tokens.append((kind, found[kind]))
        at = found.end()
    parser = _Parser(tokens, source)
    tree = parser.expression(0)
    if parser.at < len(tokens):
        raise ExprError(f"unexpected token {parser.value!r} in {source!r}")
    return tree


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]], source: str) -> None:
        self.tokens, self.source, self.at, self.depth = tokens, source, 0, 0

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else "end"

    @property
    def value(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else "the end"

    def accept(self, *symbols: str) -> str | None:
        if self.kind in ("symbol", "name") and self.value in symbols:
            self.at += 1
            return self.tokens[self.at - 1][1]
        return None

    def expect(self, symbol: str) -> None:
        if not self.accept(symbol):
            raise ExprError(f"expected {symbol!r} but found {self.value!r} in {self.source!r}")

    def name(self) -> str:
        if self.kind != "name":
            raise ExprError(f"expected a name but found {self.value!r} in {self.source!r}")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def expression(self, floor: int) -> Node:
        if floor == 0 and self.accept("let"):
            name = self.name()
            self.expect("=")
            value = self.expression(0)
            self.expect(";")
            return "let", name, value, self.expression(0)
        left, before = self.unary(), ""
        while self.kind in ("symbol", "name"):
            start = self.at
            negated = bool(self.accept("not"))
            operator = self.value
            level = BINARY.get(operator, -1)
            if level < floor or self.kind not in ("symbol", "name") or (negated and operator not in NEGATABLE):
                self.at = start
                break
            self.at += 1
            if before == "??" and operator != "??":
                raise ExprError(f"?? and {operator} cannot be mixed without parentheses in {self.source!r}")
            if operator == "|":
                left = self.call(self.name(), [left])
            else:
                right = self.expression(level if operator in ("**", "^") else level + 1)
                left = ("binary", operator, left, right)
            left = ("unary", "not", left) if negated else left
            before = operator
        return self.conditional(left) if floor == 0 else left

    def conditional(self, test: Node) -> Node:
        while self.accept("?"):
            if self.accept(":"):  # a ?: b
                test = ("if", test, test, self.expression(0))
                continue
            yes = self.expression(0)
            self.expect(":")
            test = ("if", test, yes, self.expression(0))
        return test

    def unary(self) -> Node:
        if self.kind in ("symbol", "name") and self.value in UNARY:
            operator = self.value
            self.at += 1
            return "unary", operator, self.expression(UNARY[operator])
        return self.postfix(self.primary())

    def primary(self) -> Node:
        kind, value = self.kind, self.value
        self.at += 1
        if kind == "number":
            return "const", _number(value)
        if kind == "text":
            return "const", _unquoted(value)
        if kind == "name":
            if value in ("true", "false", "nil"):
                return "const", {"true": True, "false": False, "nil": None}[value]
            return self.call(value, []) if self.value == "(" and self.kind == "symbol" else ("name", value)
        if value == "(":
            inner = self.expression(0)
            self.expect(")")
            return inner
        if value == "[":
            return "list", *self.items("]")
        if value == "{":
            return "map", *self.pairs()
        if self.depth and value == "#":
            return "pointer", self.name() if self.kind == "name" and self.value in ("acc", "index") else ""
        if self.depth and value == ".":
            return "member", ("pointer", ""), ("const", self.name()), False
        raise ExprError(f"unexpected token {value!r} in {self.source!r}")

    def postfix(self, node: Node) -> Node:
        while symbol := self.accept(".", "?.", "["):
            optional = symbol == "?."
            if symbol == "[" or (optional and self.accept("[")):
                node = self.index(node, optional)
            else:
                node = ("member", node, ("const", self.name()), optional)
            if self.value == "(" and self.kind == "symbol":
                self.at += 1
                node = ("method", node, self.items(")"))
        return node

    def index(self, node: Node, optional: bool) -> Node:
        start = None if self.value == ":" else self.expression(0)
        if not self.accept(":"):
            self.expect("]")
            assert start
            return "member", node, start, optional
        end = None if self.value == "]" else self.expression(0)
        self.expect("]")
        return "slice", node, start, end

    def items(self, end: str) -> list[Node]:
        found: list[Node] = []
        while not self.accept(end):
            if found:
                self.expect(",")
                if self.accept(end):
                    break
            found.append(self.expression(0))
        return found

    def pairs(self) -> list[tuple[Node, Node]]:
        found: list[tuple[Node, Node]] = []
        while not self.accept("}"):
            if found:
                self.expect(",")
            key = ("const", self.name()) if self.kind == "name" else self.primary()
            self.expect(":")
            found.append((key, self.expression(0)))
        return found

    def call(self, name: str, first: list[Node]) -> Node:
        if self.kind == "symbol":
            self.expect("(")
        if name not in PREDICATES:
            return "call", name, [*first, *self.items(")")]
        arguments = list(first)
        while not self.accept(")"):
            if arguments:
                self.expect(",")
            if not arguments or (name == "reduce" and len(arguments) == 2):
                arguments.append(self.expression(0))
                continue
            self.depth += 1
            braced = self.accept("{")
            arguments.append(self.expression(0))
            if braced:
                self.expect("}")
            self.depth -= 1
        return "predicate", name, arguments


def _number(text: str) -> int | float:
    text = text.replace("_", "").lower()
    if text.startswith(("0x", "0b", "0o")):
        return int(text, 0)
    return float(text) if any(char in text for char in ".e") else int(text)


def _unquoted(text: str) -> str:
    if text[0] == "`":
        return text[1:-1]

    def escape(found: re.Match[str]) -> str:
        code = found[1]
        return chr(int(code[1:], 16)) if code[0] in "xuU" and len(code) > 1 else ESCAPES.get(code, code)

    return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", escape, text[1:-1], flags=re.S)


def evaluate(source: str, scope: Mapping[str, Any]) -> Any:
    """The value of `source` in `scope` (nested plain data, functions as callables). Raises ExprError."""
    try:
        return _eval(parse(source), scope, ())
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, RecursionError, OverflowError) as error:
        raise ExprError(f"{error} in {source!r}") from error


def truth(source: str, scope: Mapping[str, Any]) -> bool:
    """`evaluate`, which must give a bool. Raises ExprError."""
    value = evaluate(source, scope)
    if not isinstance(value, bool):
        raise ExprError(f"unable to cast expression result '{value}' to bool")
    return value


def _eval(node: Node, scope: Mapping[str, Any], at: tuple[Any, ...]) -> Any:
    """`at` is (element, index, accumulator) inside a predicate."""
    kind = node[0]
    if kind == "const":
        return node[1]
    if kind == "name":
        if node[1] not in scope:
            raise ExprError(f"unknown name {node[1]}")
        return scope[node[1]]
    if kind == "member":
        return _member(_eval(node[1], scope, at), _eval(node[2], scope, at), node[3])
    if kind == "binary":
        return _binary(node, scope, at)
    if kind == "unary":
        return _unary(node[1], _eval(node[2], scope, at))
    if kind == "if":
        return _eval(node[2] if _bool(_eval(node[1], scope, at)) else node[3], scope, at)
    if kind == "call":
        function = scope.get(node[1]) if callable(scope.get(node[1])) else BUILTINS.get(node[1])
        if function is None:
            raise ExprError(f"unknown name {node[1]}")
        return function(*(_eval(each, scope, at) for each in node[2]))
    if kind == "method":
        function = _eval(node[1], scope, at)
        if not callable(function):
            raise ExprError("this value is no function")
        return function(*(_eval(each, scope, at) for each in node[2]))
    if kind == "predicate":
        return _predicate(node, scope, at)
    if kind == "pointer":
        return at[{"": 0, "index": 1, "acc": 2}[node[1]]]
    if kind == "list":
        return [_eval(each, scope, at) for each in node[1:]]
    if kind == "map":
        return {str(_eval(key, scope, at)): _eval(value, scope, at) for key, value in node[1:]}
    if kind == "let":
        return _eval(node[3], {**scope, node[1]: _eval(node[2], scope, at)}, at)
    value, start, end = (None if each is None else _eval(each, scope, at) for each in node[1:4])
    return value[start:end]


def _member(value: Any, key: Any, optional: bool) -> Any:
    if value is None:
        if optional:
            return None
        raise ExprError(f"cannot fetch {key} from <nil>")
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, list) and is_number(key):
        if not -len(value) <= int(key) < len(value):
            raise ExprError(f"index out of range: {key} (array length is {len(value)})")
        return value[int(key)]
    raise ExprError(f"cannot fetch {key} from {type(value).__name__}")


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ExprError(f"expected a bool but found {value!r}")
    return value


def _unary(operator: str, value: Any) -> Any:
    if operator in ("not", "!"):
        return not _bool(value)
    if not is_number(value):
        raise ExprError(f"operator {operator} is not defined on {value!r}")
    return -value if operator == "-" else value


def _binary(node: Node, scope: Mapping[str, Any], at: tuple[Any, ...]) -> Any:
    _, operator, left_node, right_node = node
    if operator == "??":
        try:
            left = _eval(left_node, scope, at)
        except ExprError as error:
            if not str(error).startswith("cannot fetch"):
                raise
            left = None
        return _eval(right_node, scope, at) if left is None else left
    left = _eval(left_node, scope, at)
    if operator in ("||", "or", "&&", "and"):
        stops = operator in ("||", "or")
        return stops if _bool(left) is stops else _bool(_eval(right_node, scope, at))
    return OPERATORS[operator](left, _eval(right_node, scope, at))


def _predicate(node: Node, scope: Mapping[str, Any], at: tuple[Any, ...]) -> Any:
    name, arguments = node[1], node[2]
    elements = _eval(arguments[0], scope, at)
    if not isinstance(elements, list):
        raise ExprError(f"{name} needs a list, not {elements!r}")
    accumulator = [_eval(each, scope, at) for each in arguments[2:3]]

    def test(element: Any, index: int, acc: Any = None) -> Any:
        return _eval(arguments[1], scope, (element, index, acc)) if len(arguments) > 1 else element

    return PREDICATES[name](elements, test, *accumulator)


def _text(operator: str, test: Callable[[str, str], bool]) -> Callable[[Any, Any], bool]:
    def apply(left: Any, right: Any) -> bool:
        if not (isinstance(left, str) and isinstance(right, str)):
            raise ExprError(f"operator {operator} is only defined on strings")
        return test(left, right)

    return apply


def _math(operator: str, apply: Callable[[Numeric, Numeric], Any]) -> Callable[[Any, Any], Any]:
    def checked(left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return left + right
        if not (is_number(left) and is_number(right)):
            raise ExprError(f"invalid operation: {operator} (mismatched types {left!r} and {right!r})")
        return apply(left, right)

    return checked


def _in(left: Any, right: Any) -> bool:
    if isinstance(right, Mapping):
        return left in right
    if isinstance(right, list):
        return any(equal(left, each) for each in right)
    raise ExprError(f"operator in is not defined on {right!r}")


def _divide(left: Numeric, right: Numeric) -> float:
    if right == 0:
        raise ExprError("division by zero")
    return left / right


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": equal,
    "!=": lambda a, b: not equal(a, b),
    "<": lambda a, b: compare(a, b) < 0,
    ">": lambda a, b: compare(a, b) > 0,
    "<=": lambda a, b: compare(a, b) <= 0,
    ">=": lambda a, b: compare(a, b) >= 0,
    "in": _in,
    "matches": _text("matches", lambda a, b: bool(re.search(b, a))),
    "contains": _text("contains", lambda a, b: b in a),
    "startsWith": _text("startsWith", str.startswith),
    "endsWith": _text("endsWith", str.endswith),
    "..": _math("..", lambda a, b: list(range(int(a), int(b) + 1))),
    "+": _math("+", lambda a, b: a + b),
    "-": _math("-", lambda a, b: a - b),
    "*": _math("*", lambda a, b: a * b),
    "/": _math("/", _divide),
    "%": _math("%", lambda a, b: int(abs(a) % abs(b)) * (1 if a >= 0 else -1)),
    "**": _math("**", lambda a, b: float(a) ** b),
    "^": _math("^", lambda a, b: float(a) ** b),
}


@lru_cache(4096)
def identifiers(source: str) -> tuple[str, ...]:
    """The dotted names that `source` reads and that nothing guards (`??`, `?.`). Raises ExprError."""
    names: dict[str, None] = {}
    _collect(parse(source), names, False)
    return tuple(names)


def calls(source: str) -> set[str]:
    """The functions that `source` calls, as written: `len`, `sprig.upper`."""
    found: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, tuple) and node and node[0] in ("call", "predicate"):
            found.add(node[1])
        elif isinstance(node, tuple) and node and node[0] == "method":
            found.add(_path(node[1]) or "")
        if isinstance(node, (tuple, list)):
            for each in node:
                visit(each)

    visit(parse(source))
    return found


def _path(node: Node) -> str | None:
    if node[0] == "name":
        return node[1]
    if node[0] == "member" and not node[3] and node[2][0] == "const" and isinstance(node[2][1], str):
        base = _path(node[1])
        return f"{base}.{node[2][1]}" if base else None
    return None


def _collect(node: Any, names: dict[str, None], guarded: bool) -> None:
    if not isinstance(node, (tuple, list)):
        return
    kind = node[0] if isinstance(node, tuple) and node and isinstance(node[0], str) else ""
    if kind == "name" or (kind == "member" and not guarded and _path(node)):
        names[_path(node) or ""] = None
    if kind == "const":
        return
    if kind == "binary":
        _collect(node[2], names, guarded or node[1] == "??")
        _collect(node[3], names, guarded)
        return
    for each in node:
        _collect(each, names, guarded or (kind == "member" and node[3]))
