"""Evaluate `when` conditions, whose tags are already replaced, exactly as Argo's library govaluate
does.

    operators, loosest first:
        ? : ??   ||   &&   == != > >= < <= =~ !~ in   & | ^   >> <<   + -   * / %   **
    value := number | 'text' | "text" | word | [word] | true | false
           | ( - ! ~ ) value | "(" value ("," value)* ")"

A word without quotes is a string. The longest sequence of symbols is read as one operator, so `1
==-1` contains the unknown operator "==-". For example, `1e-3` is not a number, `a-1` is a
subtraction, `True` is a word, and strings are compared alphabetically ('10' < '9'). Source:
Knetic/govaluate (parsing.go, lexerState.go, evaluationStage.go), Argo's steps.go shouldExecute."""

import math
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from argolocal.errors import NodeError
from argolocal.language import regexp
from argolocal.language.gofmt import divide, format_v

SYMBOLS = {
    "MODIFIER": {"+", "-", "*", "/", "%", "**", "&", "|", "^", ">>", "<<"},
    "LOGICALOP": {"&&", "||"},
    "COMPARATOR": {"==", "!=", ">", ">=", "<", "<=", "=~", "!~", "in"},
    "TERNARY": {"?", ":", "??"},
}
OPERAND_TOKENS = {"NUMERIC", "BOOLEAN", "VARIABLE", "ACCESSOR", "STRING", "TIME", "CLAUSE"}
AFTER_OPERAND = {"MODIFIER", "COMPARATOR", "LOGICALOP", "CLAUSE_CLOSE", "TERNARY", "SEPARATOR"}
NEXT_TOKENS: dict[str, set[str]] = {
    "UNKNOWN": OPERAND_TOKENS | {"PREFIX"},
    "CLAUSE": OPERAND_TOKENS | {"PREFIX", "CLAUSE_CLOSE"},
    "CLAUSE_CLOSE": AFTER_OPERAND | OPERAND_TOKENS - {"ACCESSOR"},
    "MODIFIER": (OPERAND_TOKENS - {"TIME"}) | {"PREFIX", "CLAUSE_CLOSE"},
    "COMPARATOR": OPERAND_TOKENS | {"PREFIX", "CLAUSE_CLOSE"},
    "LOGICALOP": OPERAND_TOKENS | {"PREFIX", "CLAUSE_CLOSE"},
    "PREFIX": (OPERAND_TOKENS - {"STRING", "TIME"}) | {"CLAUSE_CLOSE"},
    "TERNARY": OPERAND_TOKENS | {"PREFIX", "SEPARATOR"},
    "SEPARATOR": OPERAND_TOKENS | {"PREFIX"},
    "TIME": AFTER_OPERAND - {"TERNARY"},
    "ACCESSOR": AFTER_OPERAND | {"CLAUSE"},
} | dict.fromkeys(("NUMERIC", "BOOLEAN", "STRING", "VARIABLE"), AFTER_OPERAND)
END_TOKENS = {"CLAUSE_CLOSE", "NUMERIC", "BOOLEAN", "STRING", "TIME", "VARIABLE", "ACCESSOR"}
PRECEDENCE_LEVELS = [
    {"?", ":", "??"},
    {"||"},
    {"&&"},
    SYMBOLS["COMPARATOR"],
    {"&", "|", "^"},
    {">>", "<<"},
]
PRECEDENCE_LEVELS += [{"+", "-"}, {"*", "/", "%"}, {"**"}]
ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?)?")
UINT64 = (1 << 64) - 1
Token = tuple[str, Any]


class WhenError(NodeError):
    """The condition cannot be parsed or evaluated. The message equals Argo's."""


def should_execute(when: str) -> bool:
    """Return True if a step with the condition `when` must run. The tags in `when` are already
    replaced. Raises WhenError."""
    if not when:
        return True

    try:
        tokens = _tokenize(when)
        _check_order(tokens)
    except WhenError as error:
        if "Invalid token" in str(error):
            hint = ' (hint: try wrapping the affected expression in quotes ("))'
        else:
            hint = ""

        raise WhenError(f"Invalid 'when' expression '{when}': {error}{hint}") from None

    try:
        result = _Evaluator(tokens).run()
    except (WhenError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise WhenError(f"Failed to evaluate 'when' expresion '{when}': {error}") from None

    if not isinstance(result, bool):
        raise WhenError(f"Expected boolean evaluation for '{when}'. Got {format_v(result)}")

    return result


def _tokenize(text: str) -> list[Token]:
    tokens: list[Token] = []
    position = 0
    state = "UNKNOWN"

    while position < len(text):
        if text[position].isspace():
            position += 1
            continue

        token, position = _read_token(text, position, state)
        tokens.append(token)
        state = token[0]

    if sum({"CLAUSE": 1, "CLAUSE_CLOSE": -1}.get(kind, 0) for kind, _ in tokens):
        raise WhenError("Unbalanced parenthesis")

    return tokens


def _read_token(text: str, position: int, state: str) -> tuple[Token, int]:
    char = text[position]
    if char.isdigit() or char == ".":
        match = re.compile(r"0x([0-9a-fA-F]+)").match(text, position)
        if match:
            number = int(match[1], 16)
            if number > UINT64:
                raise WhenError(f"Unable to parse hex value '{match[1]}' to uint64\n")
            return ("NUMERIC", float(number)), match.end()

        digits, position = _read_span(text, position, lambda c: c.isdigit() or c == ".")
        try:
            return ("NUMERIC", float(digits)), position
        except ValueError:
            raise WhenError(f"Unable to parse numeric value '{digits}' to float64\n") from None

    if char == ",":
        return ("SEPARATOR", ","), position + 1

    if char == "[":
        name, end = _read_span(text, position + 1, lambda c: c != "]", allows_spaces=True)
        if end >= len(text):
            raise WhenError("Unclosed parameter bracket")
        return ("VARIABLE", name), end + 1

    if char.isalpha():
        word, position = _read_span(text, position, lambda c: c.isalnum() or c in "_.")
        return _word_token(word), position

    if char in "'\"":
        value, end = _read_span(text, position + 1, lambda c: c not in "'\"", allows_spaces=True)
        if end >= len(text):
            raise WhenError("Unclosed string literal")
        return _text_token(value), end + 1

    if char in "()":
        return ("CLAUSE" if char == "(" else "CLAUSE_CLOSE", char), position + 1

    symbol, position = _read_span(text, position, lambda c: not (c.isalnum() or c in "()[]'\""))
    if "PREFIX" in NEXT_TOKENS[state] and symbol in ("-", "!", "~"):
        return ("PREFIX", symbol), position

    for kind, symbols in SYMBOLS.items():
        if symbol in symbols:
            return (kind, symbol), position

    raise WhenError(f"Invalid token: '{symbol}'")


def _read_span(
    text: str, position: int, accept: Callable[[str], bool], allows_spaces: bool = False
) -> tuple[str, int]:
    characters: list[str] = []
    while position < len(text):
        if text[position] == "\\":
            characters.append(text[position + 1 : position + 2])
            position += 2
            continue
        if (text[position].isspace() and not allows_spaces) or not accept(text[position]):
            break
        characters.append(text[position])
        position += 1
    return "".join(characters), position


def _word_token(word: str) -> Token:
    if word in ("true", "false"):
        return "BOOLEAN", word == "true"
    if word in ("in", "IN"):
        return "COMPARATOR", "in"
    if "." not in word:
        return "VARIABLE", word
    if word.endswith("."):
        raise WhenError(f"Hanging accessor on token '{word}'")
    for field in word.split(".")[1:]:
        if field[:1].upper() != field[:1]:
            raise WhenError(f"Unable to access unexported field '{field}' in token '{word}'")
    return "ACCESSOR", word.split(".")


def _text_token(value: str) -> Token:
    if not ISO_DATE.fullmatch(value):
        return "STRING", value
    try:
        return "TIME", datetime.fromisoformat(value).timestamp()
    except ValueError:
        return "STRING", value


def _check_order(tokens: list[Token]) -> None:
    state = "UNKNOWN"
    last_value = None

    for kind, value in tokens:
        if kind not in NEXT_TOKENS[state]:
            if state == "VARIABLE" and kind == "CLAUSE":
                raise WhenError(f"Undefined function {last_value}")

            last_text = "<nil>" if last_value is None else format_v(last_value)
            raise WhenError(
                f"Cannot transition token types from {state} [{last_text}] to {kind}"
                f" [{format_v(value)}]"
            )

        state = kind
        last_value = value

    if state not in END_TOKENS:
        raise WhenError("Unexpected end of expression")


class _Evaluator:
    """Evaluates tokens, whose order is valid, by precedence climbing. With `skip`, type errors are
    ignored: && or || has short-circuited, so the value is not used."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.position = 0

    def run(self) -> Any:
        value = self.comma_list(False)
        if self.position < len(self.tokens):
            raise WhenError(f"unexpected {format_v(self.tokens[self.position][1])}")
        return value

    def comma_list(self, skip: bool) -> Any:
        values = [self.binary(0, skip)]
        while self.peek() == ("SEPARATOR", ","):
            self.position += 1
            values.append(self.binary(0, skip))
        if len(values) == 1:
            return values[0]
        return values

    def peek(self) -> Token:
        if self.position < len(self.tokens):
            return self.tokens[self.position]
        return ("END", None)

    def binary(self, index: int, skip: bool) -> Any:
        if index == len(PRECEDENCE_LEVELS):
            return self.operand(skip)

        lhs = self.binary(index + 1, skip)
        while self.peek()[0] in SYMBOLS and self.peek()[1] in PRECEDENCE_LEVELS[index]:
            symbol = self.peek()[1]
            self.position += 1

            short_circuits = {
                "&&": lhs is False,
                "||": lhs is True,
                "?": lhs is False,
                ":": lhs is not None,
                "??": lhs is not None,
            }

            rhs = self.binary(index + 1, skip or short_circuits.get(symbol, False))

            if not skip:
                lhs = _apply(symbol, lhs, rhs, short_circuits.get(symbol, False))

        return lhs

    def operand(self, skip: bool) -> Any:
        kind, value = self.peek()
        self.position += 1

        if kind == "CLAUSE":
            if self.peek()[0] == "CLAUSE_CLOSE":
                inner = None
            else:
                inner = self.comma_list(skip)

            self.position += 1
            return inner

        if kind == "PREFIX":
            operand = self.operand(skip)
            expected_type = bool if value == "!" else float
            if skip:
                return None

            if not isinstance(operand, expected_type):
                raise WhenError(
                    f"Value '{format_v(operand)}' cannot be used with the prefix '{value}'"
                )

            if value == "!":
                return not operand
            if value == "-":
                return -operand

            return float(~int(operand))

        if kind == "ACCESSOR":
            raise WhenError(f"No parameter '{value[0]}' found.")
        if kind in ("MODIFIER", "COMPARATOR", "LOGICALOP", "TERNARY", "CLAUSE_CLOSE", "END"):
            raise WhenError("Unexpected end of expression")

        return value


def _apply(symbol: str, lhs: Any, rhs: Any, short_circuits: bool) -> Any:
    if symbol in ("&&", "||"):
        if short_circuits:
            return lhs
        _require_type(bool, symbol, "logical operator", "bool", lhs, rhs)
        return rhs

    if symbol == "?":
        _require_type(bool, symbol, "ternary operator", "bool", lhs)
        if lhs:
            return rhs
        return None

    if symbol in (":", "??"):
        if short_circuits:
            return lhs
        return rhs

    if symbol in ("==", "!="):
        return (type(lhs) is type(rhs) and lhs == rhs) == (symbol == "==")

    if symbol in ("=~", "!~"):
        _require_type(str, symbol, "comparator", "string", lhs, rhs)
        return regexp.matches(rhs, lhs) == (symbol == "=~")

    if symbol == "in":
        if not isinstance(rhs, list):
            raise WhenError(
                f"Value '{format_v(rhs)}' cannot be used with the comparator 'in', it is not an"
                " array"
            )

        return any(type(lhs) is type(member) and lhs == member for member in rhs)

    if symbol in SYMBOLS["COMPARATOR"]:
        if not (type(lhs) is type(rhs) and isinstance(lhs, (float, str))):
            problem = f"cannot be used with the comparator '{symbol}', it is not a number"
            raise WhenError(f"Value '{format_v(lhs)}' {problem}")

        return {">": lhs > rhs, ">=": lhs >= rhs, "<": lhs < rhs, "<=": lhs <= rhs}[symbol]  # type: ignore[operator]

    if symbol == "+" and (isinstance(lhs, str) or isinstance(rhs, str)):
        return format_v(lhs) + format_v(rhs)

    _require_type(float, symbol, "modifier", "number", lhs, rhs)
    return MODIFIERS[symbol](lhs, rhs)


MODIFIERS: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": divide,
    "%": lambda a, b: math.fmod(a, b) if b else math.nan,
    "**": lambda a, b: a**b,
    "&": lambda a, b: float(int(a) & int(b)),
    "|": lambda a, b: float(int(a) | int(b)),
    "^": lambda a, b: float(int(a) ^ int(b)),
    "<<": lambda a, b: float(int(a) << min(int(b), 64) & UINT64),
    ">>": lambda a, b: float(int(a) >> int(b)),
}


def _require_type(expected_type: type, symbol: str, role: str, name: str, *values: object) -> None:
    for value in values:
        if not isinstance(value, expected_type):
            raise WhenError(
                f"Value '{format_v(value)}' cannot be used with the {role} '{symbol}', it is not a"
                f" {name}"
            )
