"""Parse expr-lang 1.17 as used in `{{=...}}`, `depends`, and retry and hook expressions.

    expression := binary ( "?" expression ":" expression )?
                | "let" name "=" expression ";" expression
    binary     := unary ( operator unary )*
                  operators, loosest first: |  or ||  and &&
                  == != < > <= >= in matches contains startsWith endsWith (and "not in" ...)
                  ..  + -  * / %  ** ^  ??
    unary      := ( not ! - + ) unary | postfix
    postfix    := primary ( .name ?.name [index] [from:to] (arguments) )*
    primary    := number | 'text' | "text" | `text` | true | false | nil | name
                | [list] | {map} | (...) | # | .name

A predicate is `{# > 2}` or an expression with `#`. functions.py defines the functions.
Source: expr-lang/expr v1.17 (parser/parser.go, parser/operator), Argo's util/expr.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from argolocal.language.functions import PREDICATES, ExprError
from argolocal.language.gofmt import ESCAPED_CHARACTERS

TOKEN = re.compile(
    r"""(?:\s|//[^\n]*|/\*.*?\*/)+|(?P<number>0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|(?:\d[\d_]*)?\.\d[\d_]*(?:[eE][+-]?\d+)?|\d[\d_]*(?:[eE][+-]?\d+)?)
    |(?P<text>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`[^`]*`)|(?P<name>[A-Za-z_$][\w$]*)
    |(?P<symbol>\?\?|\?\.|\*\*|\.\.|==|!=|<=|>=|&&|\|\||[-+*/%^<>!?:.,()\[\]{}|\#=;])""",
    re.X | re.S,
)
BINARY_PRECEDENCE = (
    {
        "|": 0,
        "||": 10,
        "or": 10,
        "&&": 15,
        "and": 15,
        "..": 25,
        "+": 30,
        "-": 30,
        "*": 60,
        "/": 60,
        "%": 60,
    }
    | dict.fromkeys(
        ("==", "!=", "<", ">", "<=", ">=", "in", "matches", "contains", "startsWith", "endsWith"),
        20,
    )
    | {"**": 100, "^": 100, "??": 500}
)
# maximum number of digits of a number; a float has at most 309 before its decimal point
MAX_DIGITS = 400
# operators that can be chained: a < b < c means a < b && b < c
ORDER_OPERATORS = ("<", ">", "<=", ">=")
NEGATABLE_OPERATORS = ("in", "matches", "contains", "startsWith", "endsWith")
UNARY_PRECEDENCE = {"not": 50, "!": 50, "-": 90, "+": 90}
ESCAPES = ESCAPED_CHARACTERS | {"'": "'", '"': '"'}
Node = tuple[Any, ...]


@contextmanager
def _limit_nesting(source: str) -> Iterator[None]:
    """Raise ExprError if an expression is nested too deeply."""
    try:
        yield
    except RecursionError:
        raise ExprError(
            f"the expression is nested hundreds of levels deep: {source[:60]!r}..."
        ) from None


@lru_cache(4096)
def parse(source: str) -> Node:
    """Return the syntax tree of an expression. Raises ExprError."""
    tokens = []

    position = 0
    while position < len(source):
        match = TOKEN.match(source, position)
        if not match:
            raise ExprError(f"unexpected character {source[position]!r} in {source!r}")

        position = match.end()
        kind = match.lastgroup
        tokens += [(kind, match[kind])] if kind else []

    parser = _Parser(tokens, source)
    with _limit_nesting(source):
        tree = parser.expression(0)

    if parser.position < len(tokens):
        raise ExprError(f"unexpected token {parser.value!r} in {source!r}")

    return tree


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]], source: str) -> None:
        self.tokens = tokens
        self.source = source
        self.position = 0
        self.depth = 0

    @property
    def kind(self) -> str:
        if self.position < len(self.tokens):
            return self.tokens[self.position][0]
        return "end"

    @property
    def value(self) -> str:
        if self.position < len(self.tokens):
            return self.tokens[self.position][1]
        return "the end"

    def accept(self, *symbols: str) -> str | None:
        if self.kind in ("symbol", "name") and self.value in symbols:
            self.position += 1
            return self.tokens[self.position - 1][1]
        return None

    def expect(self, symbol: str) -> None:
        if not self.accept(symbol):
            raise ExprError(f"expected {symbol!r} but found {self.value!r} in {self.source!r}")

    def name(self) -> str:
        if self.kind != "name":
            raise ExprError(f"expected a name but found {self.value!r} in {self.source!r}")
        self.position += 1
        return self.tokens[self.position - 1][1]

    def expression(self, min_precedence: int) -> Node:
        if min_precedence == 0 and self.accept("let"):
            name = self.name()
            self.expect("=")
            value = self.expression(0)
            self.expect(";")

            return "let", name, value, self.expression(0)

        lhs = self.unary()
        previous_operator = ""

        while self.kind in ("symbol", "name"):
            start = self.position
            is_negated = bool(self.accept("not"))
            operator = self.value

            precedence = BINARY_PRECEDENCE.get(operator, -1)
            if (
                precedence < min_precedence
                or self.kind not in ("symbol", "name")
                or (is_negated and operator not in NEGATABLE_OPERATORS)
            ):
                self.position = start
                break

            self.position += 1
            if previous_operator == "??" and operator != "??":
                raise ExprError(
                    f"?? and {operator} cannot be mixed without parentheses in {self.source!r}"
                )

            if operator == "|":
                lhs = self.call(self.name(), [lhs])
            elif operator in ORDER_OPERATORS:
                lhs = self.comparison_chain(lhs, operator, precedence + 1)
            else:
                rhs = self.expression(precedence if operator in ("**", "^") else precedence + 1)
                lhs = ("binary", operator, lhs, rhs)

            lhs = ("unary", "not", lhs) if is_negated else lhs
            previous_operator = operator

        if min_precedence == 0:
            return self.conditional(lhs)

        return lhs

    def comparison_chain(self, lhs: Node, operator: str, min_precedence: int) -> Node:
        rhs = self.expression(min_precedence)
        node: Node = ("binary", operator, lhs, rhs)
        while next_operator := self.accept(*ORDER_OPERATORS):
            lhs = rhs
            rhs = self.expression(min_precedence)
            node = ("binary", "&&", node, ("binary", next_operator, lhs, rhs))
        return node

    def conditional(self, test: Node) -> Node:
        while self.accept("?"):
            if self.accept(":"):  # a ?: b means a ? a : b
                test = ("if", test, test, self.expression(0))
                continue
            then_node = self.expression(0)
            self.expect(":")
            test = ("if", test, then_node, self.expression(0))
        return test

    def unary(self) -> Node:
        if self.kind in ("symbol", "name") and self.value in UNARY_PRECEDENCE:
            operator = self.value
            self.position += 1
            return "unary", operator, self.expression(UNARY_PRECEDENCE[operator])
        return self.postfix(self.primary())

    def primary(self) -> Node:
        kind = self.kind
        value = self.value
        self.position += 1

        if kind == "number":
            return "const", _number(value)
        if kind == "text":
            return "const", _unquote(value)

        if kind == "name":
            if value in ("true", "false", "nil"):
                return "const", {"true": True, "false": False, "nil": None}[value]
            if self.value == "(" and self.kind == "symbol":
                return self.call(value, [])
            return ("name", value)

        if value == "(":
            inner = self.expression(0)
            self.expect(")")
            return inner

        if value == "[":
            return "list", *self.items("]")
        if value == "{":
            return "map", *self.pairs()

        if self.depth and value == "#":
            has_name = self.kind == "name" and self.value in ("acc", "index")
            return "pointer", self.name() if has_name else ""

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
                self.position += 1
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
        nodes: list[Node] = []
        while not self.accept(end):
            if nodes:
                self.expect(",")
                if self.accept(end):
                    break
            nodes.append(self.expression(0))
        return nodes

    def pairs(self) -> list[tuple[Node, Node]]:
        entries: list[tuple[Node, Node]] = []
        while not self.accept("}"):
            if entries:
                self.expect(",")
            if self.kind == "name":
                key = ("const", self.name())
            else:
                key = self.primary()
            self.expect(":")
            entries.append((key, self.expression(0)))
        return entries

    def call(self, name: str, first_arguments: list[Node]) -> Node:
        if self.kind == "symbol":
            self.expect("(")
        if name not in PREDICATES:
            return "call", name, [*first_arguments, *self.items(")")]

        arguments = list(first_arguments)
        while not self.accept(")"):
            if len(arguments) > len(first_arguments):
                self.expect(",")

            if not arguments or (name == "reduce" and len(arguments) == 2):
                arguments.append(self.expression(0))
                continue

            self.depth += 1
            has_brace = self.accept("{")
            arguments.append(self.expression(0))

            if has_brace:
                self.expect("}")

            self.depth -= 1

        return "predicate", name, arguments


def _number(text: str) -> int | float:
    text = text.replace("_", "").lower()
    if len(text) > MAX_DIGITS:
        raise ExprError(
            f"the number {text[:20]}... has {len(text):,} digits: at most {MAX_DIGITS} are allowed"
        )
    if text.startswith(("0x", "0b", "0o")):
        return int(text, 0)
    if any(char in text for char in ".e"):
        return float(text)
    return int(text)


def _unquote(text: str) -> str:
    if text[0] == "`":
        return text[1:-1]

    def escape(match: re.Match[str]) -> str:
        code = match[1]
        if len(code) > 1:
            return chr(int(code, 8) if code.isdecimal() else int(code[1:], 16))
        if code not in ESCAPES:
            raise ExprError(
                f"invalid char escape \\{code} in {text}: write a literal backslash as \\\\"
            )
        return ESCAPES[code]

    codes = r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3][0-7]{2}|.)"
    return re.sub(codes, escape, text[1:-1], flags=re.S)


@lru_cache(4096)
def identifiers(source: str) -> tuple[str, ...]:
    """Return the dotted names that must exist when `source` is evaluated: the names that it reads
    without a `??` or `?.`. Raises ExprError."""
    names: dict[str, None] = {}
    with _limit_nesting(source):
        _collect(parse(source), names, False)
    return tuple(names)


def find_calls(source: str) -> list[tuple[str, list[Any]]]:
    """Return the name (such as `sprig.upper`) and the arguments of each call in `source`. None
    stands for an argument that is not a constant."""
    results: list[tuple[str, list[Any]]] = []

    def visit(node: object) -> None:
        if isinstance(node, tuple) and node and node[0] in ("call", "predicate"):
            results.append(
                (node[1], [child[1] if child[0] == "const" else None for child in node[2]])
            )
        elif isinstance(node, tuple) and node and node[0] == "method":
            results.append((_path(node[1]) or "", []))
        if isinstance(node, (tuple, list)):
            for child in node:
                visit(child)

    with _limit_nesting(source):
        visit(parse(source))

    return results


def _path(node: Node) -> str | None:
    if node[0] == "name":
        return node[1]

    if (
        node[0] == "member"
        and not node[3]
        and node[2][0] == "const"
        and isinstance(node[2][1], str)
    ):
        base = _path(node[1])
        if base:
            return f"{base}.{node[2][1]}"

    return None


def _collect(node: object, names: dict[str, None], is_guarded: bool) -> None:
    if not isinstance(node, (tuple, list)):
        return

    if isinstance(node, tuple) and node and isinstance(node[0], str):
        kind = node[0]
    else:
        kind = ""

    if kind == "const":
        return

    if kind == "binary":
        _collect(node[2], names, is_guarded or node[1] == "??")
        _collect(node[3], names, is_guarded)
        return

    # yield the names in inner expressions first, because Argo reports the first missing name
    for child in node:
        _collect(child, names, is_guarded or (kind == "member" and node[3]))

    if isinstance(node, tuple) and (
        kind == "name" or (kind == "member" and not is_guarded and _path(node))
    ):
        names[_path(node) or ""] = None
