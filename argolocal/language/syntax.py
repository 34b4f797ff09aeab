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

An argument of a function such as `filter` may be a predicate, that is `{# > 2}` or an expression
with `#`. The functions are defined in functions.py. Source: expr-lang/expr v1.17 (parser/parser.go,
parser/operator), Argo's util/expr.
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
def _limit_nesting(expression: str) -> Iterator[None]:
    """Convert a RecursionError, which a deeply nested expression causes, to an ExprError."""
    try:
        yield
    except RecursionError:
        raise ExprError(
            f"the expression is nested hundreds of levels deep: {expression[:60]!r}..."
        ) from None


@lru_cache(4096)
def parse(expression: str) -> Node:
    """Return the syntax tree of an expression. Raises ExprError."""
    tokens = []

    position = 0
    while position < len(expression):
        match = TOKEN.match(expression, position)
        if not match:
            raise ExprError(f"unexpected character {expression[position]!r} in {expression!r}")

        position = match.end()
        token_kind = match.lastgroup
        tokens += [(token_kind, match[token_kind])] if token_kind else []

    parser = _Parser(tokens, expression)
    with _limit_nesting(expression):
        syntax_tree = parser.parse_expression(0)

    if parser.position < len(tokens):
        raise ExprError(f"unexpected token {parser.token_text!r} in {expression!r}")

    return syntax_tree


class _Parser:
    """A recursive-descent parser. The methods `parse_...` read a part of the grammar from the
    current position, and return its syntax tree."""

    def __init__(self, tokens: list[tuple[str, str]], expression_text: str) -> None:
        self.tokens = tokens
        self.expression_text = expression_text
        self.position = 0
        self.predicate_depth = 0

    @property
    def token_kind(self) -> str:
        if self.position < len(self.tokens):
            return self.tokens[self.position][0]
        return "end"

    @property
    def token_text(self) -> str:
        if self.position < len(self.tokens):
            return self.tokens[self.position][1]
        return "the end"

    def accept(self, *symbols: str) -> str | None:
        if self.token_kind in ("symbol", "name") and self.token_text in symbols:
            self.position += 1
            return self.tokens[self.position - 1][1]
        return None

    def expect(self, symbol: str) -> None:
        if not self.accept(symbol):
            raise ExprError(
                f"expected {symbol!r} but found {self.token_text!r} in {self.expression_text!r}"
            )

    def parse_name(self) -> str:
        if self.token_kind != "name":
            raise ExprError(
                f"expected a name but found {self.token_text!r} in {self.expression_text!r}"
            )
        self.position += 1
        return self.tokens[self.position - 1][1]

    def parse_expression(self, min_precedence: int) -> Node:
        if min_precedence == 0 and self.accept("let"):
            name = self.parse_name()
            self.expect("=")
            value = self.parse_expression(0)
            self.expect(";")

            return "let", name, value, self.parse_expression(0)

        left_operand = self.parse_unary()
        previous_operator = ""

        while self.token_kind in ("symbol", "name"):
            start_position = self.position
            is_negated = bool(self.accept("not"))
            operator = self.token_text

            precedence = BINARY_PRECEDENCE.get(operator, -1)
            if (
                precedence < min_precedence
                or self.token_kind not in ("symbol", "name")
                or (is_negated and operator not in NEGATABLE_OPERATORS)
            ):
                self.position = start_position
                break

            self.position += 1
            if previous_operator == "??" and operator != "??":
                raise ExprError(
                    f"?? and {operator} cannot be mixed without parentheses in"
                    f" {self.expression_text!r}"
                )

            if operator == "|":
                left_operand = self.parse_call(self.parse_name(), [left_operand])
            elif operator in ORDER_OPERATORS:
                left_operand = self.parse_comparison_chain(left_operand, operator, precedence + 1)
            else:
                right_operand = self.parse_expression(
                    precedence if operator in ("**", "^") else precedence + 1
                )
                left_operand = ("binary", operator, left_operand, right_operand)

            left_operand = ("unary", "not", left_operand) if is_negated else left_operand
            previous_operator = operator

        if min_precedence == 0:
            return self.parse_conditional(left_operand)

        return left_operand

    def parse_comparison_chain(
        self, left_operand: Node, operator: str, min_precedence: int
    ) -> Node:
        right_operand = self.parse_expression(min_precedence)
        node: Node = ("binary", operator, left_operand, right_operand)
        while next_operator := self.accept(*ORDER_OPERATORS):
            left_operand = right_operand
            right_operand = self.parse_expression(min_precedence)
            node = ("binary", "&&", node, ("binary", next_operator, left_operand, right_operand))
        return node

    def parse_conditional(self, condition: Node) -> Node:
        while self.accept("?"):
            if self.accept(":"):  # the expression a ?: b means a ? a : b
                condition = ("if", condition, condition, self.parse_expression(0))
                continue
            then_node = self.parse_expression(0)
            self.expect(":")
            condition = ("if", condition, then_node, self.parse_expression(0))
        return condition

    def parse_unary(self) -> Node:
        if self.token_kind in ("symbol", "name") and self.token_text in UNARY_PRECEDENCE:
            operator = self.token_text
            self.position += 1
            return "unary", operator, self.parse_expression(UNARY_PRECEDENCE[operator])
        return self.parse_postfix(self.parse_primary())

    def parse_primary(self) -> Node:
        token_kind = self.token_kind
        token_text = self.token_text
        self.position += 1

        if token_kind == "number":
            return "const", _parse_number(token_text)
        if token_kind == "text":
            return "const", _unquote(token_text)

        if token_kind == "name":
            if token_text in ("true", "false", "nil"):
                return "const", {"true": True, "false": False, "nil": None}[token_text]
            if self.token_text == "(" and self.token_kind == "symbol":
                return self.parse_call(token_text, [])
            return ("name", token_text)

        if token_text == "(":
            inner_node = self.parse_expression(0)
            self.expect(")")
            return inner_node

        if token_text == "[":
            return "list", *self.parse_items("]")
        if token_text == "{":
            return "map", *self.parse_pairs()

        if self.predicate_depth and token_text == "#":
            has_name = self.token_kind == "name" and self.token_text in ("acc", "index")
            return "pointer", self.parse_name() if has_name else ""

        if self.predicate_depth and token_text == ".":
            return "member", ("pointer", ""), ("const", self.parse_name()), False

        raise ExprError(f"unexpected token {token_text!r} in {self.expression_text!r}")

    def parse_postfix(self, node: Node) -> Node:
        while symbol := self.accept(".", "?.", "["):
            is_optional = symbol == "?."
            if symbol == "[" or (is_optional and self.accept("[")):
                node = self.parse_index(node, is_optional)
            else:
                node = ("member", node, ("const", self.parse_name()), is_optional)
            if self.token_text == "(" and self.token_kind == "symbol":
                self.position += 1
                node = ("method", node, self.parse_items(")"))
        return node

    def parse_index(self, node: Node, is_optional: bool) -> Node:
        start_node = None if self.token_text == ":" else self.parse_expression(0)
        if not self.accept(":"):
            self.expect("]")
            assert start_node
            return "member", node, start_node, is_optional
        end_node = None if self.token_text == "]" else self.parse_expression(0)
        self.expect("]")
        return "slice", node, start_node, end_node

    def parse_items(self, end_symbol: str) -> list[Node]:
        nodes: list[Node] = []
        while not self.accept(end_symbol):
            if nodes:
                self.expect(",")
                if self.accept(end_symbol):
                    break
            nodes.append(self.parse_expression(0))
        return nodes

    def parse_pairs(self) -> list[tuple[Node, Node]]:
        key_value_nodes: list[tuple[Node, Node]] = []
        while not self.accept("}"):
            if key_value_nodes:
                self.expect(",")
            if self.token_kind == "name":
                key = ("const", self.parse_name())
            else:
                key = self.parse_primary()
            self.expect(":")
            key_value_nodes.append((key, self.parse_expression(0)))
        return key_value_nodes

    def parse_call(self, name: str, first_arguments: list[Node]) -> Node:
        if self.token_kind == "symbol":
            self.expect("(")
        if name not in PREDICATES:
            return "call", name, [*first_arguments, *self.parse_items(")")]

        arguments = list(first_arguments)
        while not self.accept(")"):
            if len(arguments) > len(first_arguments):
                self.expect(",")

            if not arguments or (name == "reduce" and len(arguments) == 2):
                arguments.append(self.parse_expression(0))
                continue

            self.predicate_depth += 1
            has_brace = self.accept("{")
            arguments.append(self.parse_expression(0))

            if has_brace:
                self.expect("}")

            self.predicate_depth -= 1

        return "predicate", name, arguments


def _parse_number(text: str) -> int | float:
    text = text.replace("_", "").lower()
    if len(text) > MAX_DIGITS:
        raise ExprError(
            f"the number {text[:20]}... has {len(text):,} digits: at most {MAX_DIGITS} are allowed"
        )
    if text.startswith(("0x", "0b", "0o")):
        return int(text, 0)
    if any(character in text for character in ".e"):
        return float(text)
    return int(text)


def _unquote(text: str) -> str:
    if text[0] == "`":
        return text[1:-1]

    def escape(match: re.Match[str]) -> str:
        escape_code = match[1]
        if len(escape_code) > 1:
            return chr(int(escape_code, 8) if escape_code.isdecimal() else int(escape_code[1:], 16))
        if escape_code not in ESCAPES:
            raise ExprError(
                f"invalid char escape \\{escape_code} in {text}: write a literal backslash as \\\\"
            )
        return ESCAPES[escape_code]

    escape_pattern = r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3][0-7]{2}|.)"
    return re.sub(escape_pattern, escape, text[1:-1], flags=re.S)


@lru_cache(4096)
def find_identifiers(expression: str) -> tuple[str, ...]:
    """Return the dotted names that `expression` reads and that must exist: names before `??` or
    `?.` may be missing. Raises ExprError."""
    identifier_names: dict[str, None] = {}
    with _limit_nesting(expression):
        _collect_names(parse(expression), identifier_names, False)
    return tuple(identifier_names)


def find_calls(expression: str) -> list[tuple[str, list[Any]]]:
    """Return (name, arguments) of each call in `expression`; the name may be dotted, such as
    `sprig.upper`. An argument that is not a constant is None. Calls of methods have [] as their
    arguments."""
    found_calls: list[tuple[str, list[Any]]] = []

    def visit(node: object) -> None:
        if isinstance(node, tuple) and node and node[0] in ("call", "predicate"):
            found_calls.append(
                (node[1], [child[1] if child[0] == "const" else None for child in node[2]])
            )
        elif isinstance(node, tuple) and node and node[0] == "method":
            found_calls.append((_join_dotted_name(node[1]) or "", []))
        if isinstance(node, (tuple, list)):
            for child in node:
                visit(child)

    with _limit_nesting(expression):
        visit(parse(expression))

    return found_calls


def _join_dotted_name(node: Node) -> str | None:
    """Return the dotted name that a syntax node represents, or None for any other expression."""
    if node[0] == "name":
        return node[1]

    if (
        node[0] == "member"
        and not node[3]
        and node[2][0] == "const"
        and isinstance(node[2][1], str)
    ):
        base_name = _join_dotted_name(node[1])
        if base_name:
            return f"{base_name}.{node[2][1]}"

    return None


def _collect_names(node: object, names: dict[str, None], is_guarded: bool) -> None:
    if not isinstance(node, (tuple, list)):
        return

    if isinstance(node, tuple) and node and isinstance(node[0], str):
        node_kind = node[0]
    else:
        node_kind = ""

    if node_kind == "const":
        return

    if node_kind == "binary":
        _collect_names(node[2], names, is_guarded or node[1] == "??")
        _collect_names(node[3], names, is_guarded)
        return

    # collect the names in inner expressions first, because Argo reports the first missing name
    for child in node:
        _collect_names(child, names, is_guarded or (node_kind == "member" and node[3]))

    if isinstance(node, tuple) and (
        node_kind == "name"
        or (node_kind == "member" and not is_guarded and _join_dotted_name(node))
    ):
        names[_join_dotted_name(node) or ""] = None
