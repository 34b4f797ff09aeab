"""The language of `when`: govaluate after substitution, with all its traps.

    operators, loosest first:  ? : ??   ||   &&   == != > >= < <= =~ !~ in   & | ^   >> <<   + -   * / %   **
    value := number | 'text' | "text" | word | [word] | true | false | ( - ! ~ ) value | "(" value ("," value)* ")"
A bare word is its own text. Symbols are read greedily (`1 ==-1` is the unknown symbol "==-"), `1e-3` is not a number,
`a-1` is a subtraction, `True` is a word, and two texts compare letter by letter.
Source: Knetic/govaluate (parsing.go, lexerState.go, evaluationStage.go), Argo's steps.go shouldExecute.
"""

import math
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from argolocal.errors import NodeError
from argolocal.language import regexp
from argolocal.language.gofmt import divided, verb

SYMBOLS = {
    "MODIFIER": {"+", "-", "*", "/", "%", "**", "&", "|", "^", ">>", "<<"},
    "LOGICALOP": {"&&", "||"},
    "COMPARATOR": {"==", "!=", ">", ">=", "<", "<=", "=~", "!~", "in"},
    "TERNARY": {"?", ":", "??"},
}
OPERAND = {"NUMERIC", "BOOLEAN", "VARIABLE", "ACCESSOR", "STRING", "TIME", "CLAUSE"}
AFTER_OPERAND = {"MODIFIER", "COMPARATOR", "LOGICALOP", "CLAUSE_CLOSE", "TERNARY", "SEPARATOR"}
NEXT: dict[str, set[str]] = {
    "UNKNOWN": OPERAND | {"PREFIX"},
    "CLAUSE": OPERAND | {"PREFIX", "CLAUSE_CLOSE"},
    "CLAUSE_CLOSE": AFTER_OPERAND | OPERAND - {"ACCESSOR"},
    "MODIFIER": (OPERAND - {"TIME"}) | {"PREFIX", "CLAUSE_CLOSE"},
    "COMPARATOR": OPERAND | {"PREFIX", "CLAUSE_CLOSE"},
    "LOGICALOP": OPERAND | {"PREFIX", "CLAUSE_CLOSE"},
    "PREFIX": (OPERAND - {"STRING", "TIME"}) | {"CLAUSE_CLOSE"},
    "TERNARY": OPERAND | {"PREFIX", "SEPARATOR"},
    "SEPARATOR": OPERAND | {"PREFIX"},
    "TIME": AFTER_OPERAND - {"TERNARY"},
    "ACCESSOR": AFTER_OPERAND | {"CLAUSE"},
} | dict.fromkeys(("NUMERIC", "BOOLEAN", "STRING", "VARIABLE"), AFTER_OPERAND)
ENDS = {"CLAUSE_CLOSE", "NUMERIC", "BOOLEAN", "STRING", "TIME", "VARIABLE", "ACCESSOR"}
LEVELS = [{"?", ":", "??"}, {"||"}, {"&&"}, SYMBOLS["COMPARATOR"], {"&", "|", "^"}, {">>", "<<"}]
LEVELS += [{"+", "-"}, {"*", "/", "%"}, {"**"}]
DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?)?")
UINT64 = (1 << 64) - 1
Token = tuple[str, Any]


class WhenError(NodeError):
    """The condition cannot be parsed or evaluated; the message is Argo's."""


def should_execute(when: str) -> bool:
    """Whether the step of a substituted `when` runs. Raises WhenError."""
    if not when:
        return True
    try:
        tokens = _tokens(when)
        _check(tokens)
    except WhenError as error:
        hint = ' (hint: try wrapping the affected expression in quotes ("))' if "Invalid token" in str(error) else ""
        raise WhenError(f"Invalid 'when' expression '{when}': {error}{hint}") from None
    try:
        result = _Evaluator(tokens).run()
    except (WhenError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise WhenError(f"Failed to evaluate 'when' expresion '{when}': {error}") from None
    if not isinstance(result, bool):
        raise WhenError(f"Expected boolean evaluation for '{when}'. Got {verb(result)}")
    return result


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    at, state = 0, "UNKNOWN"
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        token, at = _read(text, at, state)
        tokens.append(token)
        state = token[0]
    if sum({"CLAUSE": 1, "CLAUSE_CLOSE": -1}.get(kind, 0) for kind, _ in tokens):
        raise WhenError("Unbalanced parenthesis")
    return tokens


def _read(text: str, at: int, state: str) -> tuple[Token, int]:
    char = text[at]
    if char.isdigit() or char == ".":
        if match := re.compile(r"0x([0-9a-fA-F]+)").match(text, at):
            if (number := int(match[1], 16)) > UINT64:
                raise WhenError(f"Unable to parse hex value '{match[1]}' to uint64\n")
            return ("NUMERIC", float(number)), match.end()
        digits, at = _span(text, at, lambda c: c.isdigit() or c == ".")
        try:
            return ("NUMERIC", float(digits)), at
        except ValueError:
            raise WhenError(f"Unable to parse numeric value '{digits}' to float64\n") from None
    if char == ",":
        return ("SEPARATOR", ","), at + 1
    if char == "[":
        name, end = _span(text, at + 1, lambda c: c != "]", spaces=True)
        if end >= len(text):
            raise WhenError("Unclosed parameter bracket")
        return ("VARIABLE", name), end + 1
    if char.isalpha():
        word, at = _span(text, at, lambda c: c.isalnum() or c in "_.")
        return _word(word), at
    if char in "'\"":
        value, end = _span(text, at + 1, lambda c: c not in "'\"", spaces=True)
        if end >= len(text):
            raise WhenError("Unclosed string literal")
        return _text(value), end + 1
    if char in "()":
        return ("CLAUSE" if char == "(" else "CLAUSE_CLOSE", char), at + 1
    symbol, at = _span(text, at, lambda c: not (c.isalnum() or c in "()[]'\""))
    if "PREFIX" in NEXT[state] and symbol in ("-", "!", "~"):
        return ("PREFIX", symbol), at
    for kind, symbols in SYMBOLS.items():
        if symbol in symbols:
            return (kind, symbol), at
    raise WhenError(f"Invalid token: '{symbol}'")


def _span(text: str, at: int, accept: Callable[[str], bool], spaces: bool = False) -> tuple[str, int]:
    out: list[str] = []
    while at < len(text):
        if text[at] == "\\":
            out.append(text[at + 1 : at + 2])
            at += 2
            continue
        if (text[at].isspace() and not spaces) or not accept(text[at]):
            break
        out.append(text[at])
        at += 1
    return "".join(out), at


def _word(word: str) -> Token:
    if word in ("true", "false"):
        return "BOOLEAN", word == "true"
    if word in ("in", "IN"):
        return "COMPARATOR", "in"
    if "." not in word:
        return "VARIABLE", word
    if word.endswith("."):
        raise WhenError(f"Hanging accessor on token '{word}'")
    for part in word.split(".")[1:]:
        if part[:1].upper() != part[:1]:
            raise WhenError(f"Unable to access unexported field '{part}' in token '{word}'")
    return "ACCESSOR", word.split(".")


def _text(value: str) -> Token:
    if not DATE.fullmatch(value):
        return "STRING", value
    try:
        return "TIME", datetime.fromisoformat(value).timestamp()
    except ValueError:
        return "STRING", value


def _check(tokens: list[Token]) -> None:
    state, last = "UNKNOWN", None
    for kind, value in tokens:
        if kind not in NEXT[state]:
            if state == "VARIABLE" and kind == "CLAUSE":
                raise WhenError(f"Undefined function {last}")
            was = "<nil>" if last is None else verb(last)
            raise WhenError(f"Cannot transition token types from {state} [{was}] to {kind} [{verb(value)}]")
        state, last = kind, value
    if state not in ENDS:
        raise WhenError("Unexpected end of expression")


class _Evaluator:
    """Precedence climbing over checked tokens, evaluating directly (`skip`: a branch that && or || short-circuits)."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at = tokens, 0

    def run(self) -> Any:
        value = self.separated(False)
        if self.at < len(self.tokens):
            raise WhenError(f"unexpected {verb(self.tokens[self.at][1])}")
        return value

    def separated(self, skip: bool) -> Any:
        values = [self.level(0, skip)]
        while self.peek() == ("SEPARATOR", ","):
            self.at += 1
            values.append(self.level(0, skip))
        return values[0] if len(values) == 1 else values

    def peek(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("END", None)

    def level(self, index: int, skip: bool) -> Any:
        if index == len(LEVELS):
            return self.value(skip)
        left = self.level(index + 1, skip)
        while self.peek()[0] in SYMBOLS and self.peek()[1] in LEVELS[index]:
            symbol = self.peek()[1]
            self.at += 1
            short = {"&&": left is False, "||": left is True, "?": left is False, ":": left is not None}
            short["??"] = left is not None
            right = self.level(index + 1, skip or short.get(symbol, False))
            if not skip:
                left = _apply(symbol, left, right, short.get(symbol, False))
        return left

    def value(self, skip: bool) -> Any:
        kind, value = self.peek()
        self.at += 1
        if kind == "CLAUSE":
            inner = None if self.peek()[0] == "CLAUSE_CLOSE" else self.separated(skip)
            self.at += 1
            return inner
        if kind == "PREFIX":
            operand = self.value(skip)
            wanted = bool if value == "!" else float
            if skip:
                return None
            if not isinstance(operand, wanted):
                raise WhenError(f"Value '{verb(operand)}' cannot be used with the prefix '{value}'")
            return not operand if value == "!" else -operand if value == "-" else float(~int(operand))
        if kind == "ACCESSOR":
            raise WhenError(f"No parameter '{value[0]}' found.")
        if kind in ("MODIFIER", "COMPARATOR", "LOGICALOP", "TERNARY", "CLAUSE_CLOSE", "END"):
            raise WhenError("Unexpected end of expression")
        return value


def _apply(symbol: str, left: Any, right: Any, short: bool) -> Any:
    if symbol in ("&&", "||"):
        if not short:
            _need(bool, symbol, "logical operator", "bool", left, right)
        return left if short else right
    if symbol == "?":
        _need(bool, symbol, "ternary operator", "bool", left)
        return right if left else None
    if symbol in (":", "??"):
        return left if short else right
    if symbol in ("==", "!="):
        return (type(left) is type(right) and left == right) == (symbol == "==")
    if symbol in ("=~", "!~"):
        _need(str, symbol, "comparator", "string", left, right)
        return regexp.matches(right, left) == (symbol == "=~")
    if symbol == "in":
        if not isinstance(right, list):
            raise WhenError(f"Value '{verb(right)}' cannot be used with the comparator 'in', it is not an array")
        return any(type(left) is type(member) and left == member for member in right)
    if symbol in SYMBOLS["COMPARATOR"]:
        if not (type(left) is type(right) and isinstance(left, (float, str))):
            raise WhenError(f"Value '{verb(left)}' cannot be used with the comparator '{symbol}', it is not a number")
        return {">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[symbol]  # type: ignore[operator]
    if symbol == "+" and (isinstance(left, str) or isinstance(right, str)):
        return verb(left) + verb(right)
    _need(float, symbol, "modifier", "number", left, right)
    return MODIFIERS[symbol](left, right)


MODIFIERS: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": divided,
    "%": lambda a, b: math.fmod(a, b) if b else math.nan,
    "**": lambda a, b: a**b,
    "&": lambda a, b: float(int(a) & int(b)),
    "|": lambda a, b: float(int(a) | int(b)),
    "^": lambda a, b: float(int(a) ^ int(b)),
    "<<": lambda a, b: float(int(a) << min(int(b), 64) & UINT64),
    ">>": lambda a, b: float(int(a) >> int(b)),
}


def _need(wanted: type, symbol: str, what: str, name: str, *values: Any) -> None:
    for value in values:
        if not isinstance(value, wanted):
            raise WhenError(f"Value '{verb(value)}' cannot be used with the {what} '{symbol}', it is not a {name}")
