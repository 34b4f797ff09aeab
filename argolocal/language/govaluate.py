"""Evaluate `when` conditions, whose tags are already replaced, exactly as Argo's library govaluate
does.

    operators, loosest first:
        ? : ??   ||   &&   == != > >= < <= =~ !~ in   & | ^   >> <<   + -   * / %   **
    value := number | 'text' | "text" | word | [word] | true | false
           | ( - ! ~ ) value | "(" value ("," value)* ")"

A word without quotes is a string. The longest sequence of symbols is read as one operator, so `1
==-1` contains the unknown operator "==-". Argo's reading of words and operators has surprising
consequences: `1e-3` is not a number, `a-1` is a subtraction, `True` is a string, and '10' is less
than '9'. The behaviour follows Knetic/govaluate (parsing.go, lexerState.go, evaluationStage.go),
Argo's steps.go shouldExecute."""

import math
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from argolocal.errors import NodeError
from argolocal.language import regexp
from argolocal.language.gofmt import divide, format_v

SYMBOLS_BY_KIND = {
    "MODIFIER": {"+", "-", "*", "/", "%", "**", "&", "|", "^", ">>", "<<"},
    "LOGICALOP": {"&&", "||"},
    "COMPARATOR": {"==", "!=", ">", ">=", "<", "<=", "=~", "!~", "in"},
    "TERNARY": {"?", ":", "??"},
}
OPERAND_TOKENS = {"NUMERIC", "BOOLEAN", "VARIABLE", "ACCESSOR", "STRING", "TIME", "CLAUSE"}
TOKENS_AFTER_OPERAND = {
    "MODIFIER",
    "COMPARATOR",
    "LOGICALOP",
    "CLAUSE_CLOSE",
    "TERNARY",
    "SEPARATOR",
}
# kind of a token → kinds of the tokens that may follow; UNKNOWN stands for the start of the
# condition
NEXT_TOKENS: dict[str, set[str]] = {
    "UNKNOWN": OPERAND_TOKENS | {"PREFIX"},
    "CLAUSE": OPERAND_TOKENS | {"PREFIX", "CLAUSE_CLOSE"},
    "CLAUSE_CLOSE": TOKENS_AFTER_OPERAND | OPERAND_TOKENS - {"ACCESSOR"},
    "MODIFIER": (OPERAND_TOKENS - {"TIME"}) | {"PREFIX", "CLAUSE_CLOSE"},
    "COMPARATOR": OPERAND_TOKENS | {"PREFIX", "CLAUSE_CLOSE"},
    "LOGICALOP": OPERAND_TOKENS | {"PREFIX", "CLAUSE_CLOSE"},
    "PREFIX": (OPERAND_TOKENS - {"STRING", "TIME"}) | {"CLAUSE_CLOSE"},
    "TERNARY": OPERAND_TOKENS | {"PREFIX", "SEPARATOR"},
    "SEPARATOR": OPERAND_TOKENS | {"PREFIX"},
    "TIME": TOKENS_AFTER_OPERAND - {"TERNARY"},
    "ACCESSOR": TOKENS_AFTER_OPERAND | {"CLAUSE"},
} | dict.fromkeys(("NUMERIC", "BOOLEAN", "STRING", "VARIABLE"), TOKENS_AFTER_OPERAND)
# kinds of tokens that may end a condition
END_TOKENS = {"CLAUSE_CLOSE", "NUMERIC", "BOOLEAN", "STRING", "TIME", "VARIABLE", "ACCESSOR"}
# operators by precedence, loosest first
PRECEDENCE_LEVELS = [
    {"?", ":", "??"},
    {"||"},
    {"&&"},
    SYMBOLS_BY_KIND["COMPARATOR"],
    {"&", "|", "^"},
    {">>", "<<"},
]
PRECEDENCE_LEVELS += [{"+", "-"}, {"*", "/", "%"}, {"**"}]
ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?)?")
MAX_UINT64 = (1 << 64) - 1
Token = tuple[str, Any]


class WhenError(NodeError):
    """A condition cannot be parsed or evaluated. The message of a WhenError equals Argo's."""


def should_execute(condition: str) -> bool:
    """Return True if a step with this condition (its `when`) must run. The tags of the condition
    are already replaced. Raises WhenError."""
    if not condition:
        return True

    try:
        tokens = _tokenize(condition)
        _check_order(tokens)
    except WhenError as error:
        if "Invalid token" in str(error):
            hint = ' (hint: try wrapping the affected expression in quotes ("))'
        else:
            hint = ""

        raise WhenError(f"Invalid 'when' expression '{condition}': {error}{hint}") from None

    try:
        condition_value = _Evaluator(tokens).evaluate()
    except (WhenError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise WhenError(f"Failed to evaluate 'when' expresion '{condition}': {error}") from None

    if not isinstance(condition_value, bool):
        raise WhenError(
            f"Expected boolean evaluation for '{condition}'. Got {format_v(condition_value)}"
        )

    return condition_value


def _tokenize(text: str) -> list[Token]:
    """Return the tokens (kind, value) of a condition. Raises WhenError."""
    tokens: list[Token] = []
    position = 0
    previous_kind = "UNKNOWN"

    while position < len(text):
        if text[position].isspace():
            position += 1
            continue

        token, position = _read_token(text, position, previous_kind)
        tokens.append(token)
        previous_kind = token[0]

    if sum({"CLAUSE": 1, "CLAUSE_CLOSE": -1}.get(token_kind, 0) for token_kind, _ in tokens):
        raise WhenError("Unbalanced parenthesis")

    return tokens


def _read_token(text: str, position: int, previous_kind: str) -> tuple[Token, int]:
    """Return the token at a position and the position after it. Raises WhenError."""
    character = text[position]
    if character.isdigit() or character == ".":
        match = re.compile(r"0x([0-9a-fA-F]+)").match(text, position)
        if match:
            number = int(match[1], 16)
            if number > MAX_UINT64:
                raise WhenError(f"Unable to parse hex value '{match[1]}' to uint64\n")
            return ("NUMERIC", float(number)), match.end()

        digits, position = _read_span(
            text, position, lambda next_character: next_character.isdigit() or next_character == "."
        )
        try:
            return ("NUMERIC", float(digits)), position
        except ValueError:
            raise WhenError(f"Unable to parse numeric value '{digits}' to float64\n") from None

    if character == ",":
        return ("SEPARATOR", ","), position + 1

    if character == "[":
        name, end_index = _read_span(
            text, position + 1, lambda next_character: next_character != "]", allows_spaces=True
        )
        if end_index >= len(text):
            raise WhenError("Unclosed parameter bracket")
        return ("VARIABLE", name), end_index + 1

    if character.isalpha():
        word, position = _read_span(
            text,
            position,
            lambda next_character: next_character.isalnum() or next_character in "_.",
        )
        return _make_word_token(word), position

    if character in "'\"":
        value, end_index = _read_span(
            text,
            position + 1,
            lambda next_character: next_character not in "'\"",
            allows_spaces=True,
        )
        if end_index >= len(text):
            raise WhenError("Unclosed string literal")
        return _make_text_token(value), end_index + 1

    if character in "()":
        return ("CLAUSE" if character == "(" else "CLAUSE_CLOSE", character), position + 1

    symbol, position = _read_span(
        text,
        position,
        lambda next_character: not (next_character.isalnum() or next_character in "()[]'\""),
    )
    if "PREFIX" in NEXT_TOKENS[previous_kind] and symbol in ("-", "!", "~"):
        return ("PREFIX", symbol), position

    for token_kind, symbols in SYMBOLS_BY_KIND.items():
        if symbol in symbols:
            return (token_kind, symbol), position

    raise WhenError(f"Invalid token: '{symbol}'")


def _read_span(
    text: str, position: int, is_accepted: Callable[[str], bool], allows_spaces: bool = False
) -> tuple[str, int]:
    """Return the longest text from `position` whose characters are accepted, and the position after
    that text. A character after a backslash is always accepted."""
    characters: list[str] = []
    while position < len(text):
        if text[position] == "\\":
            characters.append(text[position + 1 : position + 2])
            position += 2
            continue
        if (text[position].isspace() and not allows_spaces) or not is_accepted(text[position]):
            break
        characters.append(text[position])
        position += 1
    return "".join(characters), position


def _make_word_token(word: str) -> Token:
    if word in ("true", "false"):
        return "BOOLEAN", word == "true"
    if word in ("in", "IN"):
        return "COMPARATOR", "in"
    if "." not in word:
        return "VARIABLE", word
    if word.endswith("."):
        raise WhenError(f"Hanging accessor on token '{word}'")
    for field_name in word.split(".")[1:]:
        if field_name[:1].upper() != field_name[:1]:
            raise WhenError(f"Unable to access unexported field '{field_name}' in token '{word}'")
    return "ACCESSOR", word.split(".")


def _make_text_token(value: str) -> Token:
    if not ISO_DATE.fullmatch(value):
        return "STRING", value
    try:
        return "TIME", datetime.fromisoformat(value).timestamp()
    except ValueError:
        return "STRING", value


def _check_order(tokens: list[Token]) -> None:
    """Raise WhenError if a token must not follow the previous token, or must not be the last
    token."""
    previous_kind = "UNKNOWN"
    last_value = None

    for token_kind, value in tokens:
        if token_kind not in NEXT_TOKENS[previous_kind]:
            if previous_kind == "VARIABLE" and token_kind == "CLAUSE":
                raise WhenError(f"Undefined function {last_value}")

            last_text = "<nil>" if last_value is None else format_v(last_value)
            raise WhenError(
                f"Cannot transition token types from {previous_kind} [{last_text}] to {token_kind}"
                f" [{format_v(value)}]"
            )

        previous_kind = token_kind
        last_value = value

    if previous_kind not in END_TOKENS:
        raise WhenError("Unexpected end of expression")


class _Evaluator:
    """Evaluates tokens, whose order is valid, by precedence climbing. `is_short_circuited`: the
    value is not used, because of a previous operand of && or ||, so type errors are ignored."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.position = 0

    def evaluate(self) -> Any:
        value = self.evaluate_list(False)
        if self.position < len(self.tokens):
            raise WhenError(f"unexpected {format_v(self.tokens[self.position][1])}")
        return value

    def evaluate_list(self, is_short_circuited: bool) -> Any:
        values = [self.evaluate_binary(0, is_short_circuited)]
        while self.peek() == ("SEPARATOR", ","):
            self.position += 1
            values.append(self.evaluate_binary(0, is_short_circuited))
        if len(values) == 1:
            return values[0]
        return values

    def peek(self) -> Token:
        if self.position < len(self.tokens):
            return self.tokens[self.position]
        return ("END", None)

    def evaluate_binary(self, precedence_index: int, is_short_circuited: bool) -> Any:
        if precedence_index == len(PRECEDENCE_LEVELS):
            return self.evaluate_operand(is_short_circuited)

        left_operand = self.evaluate_binary(precedence_index + 1, is_short_circuited)
        while (
            self.peek()[0] in SYMBOLS_BY_KIND
            and self.peek()[1] in PRECEDENCE_LEVELS[precedence_index]
        ):
            symbol = self.peek()[1]
            self.position += 1

            short_circuits = {
                "&&": left_operand is False,
                "||": left_operand is True,
                "?": left_operand is False,
                ":": left_operand is not None,
                "??": left_operand is not None,
            }

            right_operand = self.evaluate_binary(
                precedence_index + 1, is_short_circuited or short_circuits.get(symbol, False)
            )

            if not is_short_circuited:
                left_operand = _apply_operator(
                    symbol, left_operand, right_operand, short_circuits.get(symbol, False)
                )

        return left_operand

    def evaluate_operand(self, is_short_circuited: bool) -> Any:
        token_kind, token_value = self.peek()
        self.position += 1

        if token_kind == "CLAUSE":
            if self.peek()[0] == "CLAUSE_CLOSE":
                inner_value = None
            else:
                inner_value = self.evaluate_list(is_short_circuited)

            self.position += 1
            return inner_value

        if token_kind == "PREFIX":
            operand = self.evaluate_operand(is_short_circuited)
            expected_type = bool if token_value == "!" else float
            if is_short_circuited:
                return None

            if not isinstance(operand, expected_type):
                raise WhenError(
                    f"Value '{format_v(operand)}' cannot be used with the prefix '{token_value}'"
                )

            if token_value == "!":
                return not operand
            if token_value == "-":
                return -operand

            return float(~int(operand))

        if token_kind == "ACCESSOR":
            raise WhenError(f"No parameter '{token_value[0]}' found.")
        if token_kind in ("MODIFIER", "COMPARATOR", "LOGICALOP", "TERNARY", "CLAUSE_CLOSE", "END"):
            raise WhenError("Unexpected end of expression")

        return token_value


def _apply_operator(
    symbol: str, left_operand: Any, right_operand: Any, short_circuits: bool
) -> Any:
    if symbol in ("&&", "||"):
        if short_circuits:
            return left_operand
        _require_type(bool, symbol, "logical operator", "bool", left_operand, right_operand)
        return right_operand

    if symbol == "?":
        _require_type(bool, symbol, "ternary operator", "bool", left_operand)
        if left_operand:
            return right_operand
        return None

    if symbol in (":", "??"):
        if short_circuits:
            return left_operand
        return right_operand

    if symbol in ("==", "!="):
        return (type(left_operand) is type(right_operand) and left_operand == right_operand) == (
            symbol == "=="
        )

    if symbol in ("=~", "!~"):
        _require_type(str, symbol, "comparator", "string", left_operand, right_operand)
        return regexp.has_match(right_operand, left_operand) == (symbol == "=~")

    if symbol == "in":
        if not isinstance(right_operand, list):
            raise WhenError(
                f"Value '{format_v(right_operand)}' cannot be used with the comparator 'in', it is"
                " not an array"
            )

        return any(
            type(left_operand) is type(member) and left_operand == member
            for member in right_operand
        )

    if symbol in SYMBOLS_BY_KIND["COMPARATOR"]:
        if not (
            type(left_operand) is type(right_operand) and isinstance(left_operand, (float, str))
        ):
            problem = f"cannot be used with the comparator '{symbol}', it is not a number"
            raise WhenError(f"Value '{format_v(left_operand)}' {problem}")

        return {
            ">": left_operand > right_operand,
            ">=": left_operand >= right_operand,
            "<": left_operand < right_operand,
            "<=": left_operand <= right_operand,
        }[symbol]  # type: ignore[operator]

    if symbol == "+" and (isinstance(left_operand, str) or isinstance(right_operand, str)):
        return format_v(left_operand) + format_v(right_operand)

    _require_type(float, symbol, "modifier", "number", left_operand, right_operand)
    return MODIFIERS[symbol](left_operand, right_operand)


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
    "<<": lambda a, b: float(int(a) << min(int(b), 64) & MAX_UINT64),
    ">>": lambda a, b: float(int(a) >> int(b)),
}


def _require_type(
    expected_type: type, symbol: str, operand_role: str, type_name: str, *values: object
) -> None:
    for value in values:
        if not isinstance(value, expected_type):
            raise WhenError(
                f"Value '{format_v(value)}' cannot be used with the {operand_role} '{symbol}', it"
                f" is not a {type_name}"
            )
