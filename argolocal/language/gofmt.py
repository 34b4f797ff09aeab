"""Format and parse durations, times, numbers and JSON exactly as Go does, because Argo is written
in Go.

The behaviour follows Go's time.ParseDuration, strconv, fmt, encoding/json; Argo's
to_argo_string.go, item.go and ParseStringToDuration.
"""

import json
import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from argolocal.common.json_text import to_json

# maximum field width in a number format; Go ignores the format from a larger width to its end
MAX_WIDTH = 1_000_000
SECONDS_OF_UNIT = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
DURATION_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
VERB_PATTERN = re.compile(r"%([-+ 0]*)(\d*)(.?)", re.S)
# verb of Go's Printf → type of Python's format specification
FORMAT_OF_VERB = {"d": "d", "v": "d", "x": "x", "X": "X", "o": "o", "b": "b"}
JSON_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|\s+')
JSON_DECODER = json.JSONDecoder()
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ESCAPED_CHARACTERS = dict(zip("ntrabfv\\", "\n\t\r\a\b\f\v\\", strict=True))
QUOTE_ESCAPES = {char: f"\\{letter}" for letter, char in ESCAPED_CHARACTERS.items()} | {'"': '\\"'}
# token of Go's reference time → directive of strftime
DATE_TOKENS = {
    **{
        "January": "%B",
        "Monday": "%A",
        "Jan": "%b",
        "Mon": "%a",
        "MST": "%Z",
        "PM": "%p",
        "_2": "%e",
        "15": "%H",
    },
    **{"002": "%j", "01": "%m", "02": "%d", "03": "%I", "04": "%M", "05": "%S", "06": "%y"},
    **{"1": "%-m", "2": "%-d", "3": "%-I", "4": "%-M", "5": "%-S"},
}
HTML_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


# a text that Go's strconv.Atoi accepts
INTEGER = re.compile(r"[+-]?\d+")


def parse_seconds(text: str) -> float:
    """Parse a Go duration ("1m30s") or, as Argo allows, an integer number of seconds. Raises
    ValueError."""
    if INTEGER.fullmatch(text.strip()):
        return float(text)
    return parse_duration(text)


def parse_duration(text: str) -> float:
    """Parse a duration as Go's time.ParseDuration does, and return it in seconds. Every number in a
    duration except 0 needs a unit. Raises ValueError."""
    text = text.strip()
    if INTEGER.fullmatch(text):
        if int(text):
            raise ValueError(f'time: missing unit in duration "{text}"')
        return 0.0

    unsigned_text = text.lstrip("+-") if text[:1] in "+-" else text
    duration_parts = DURATION_PART.findall(unsigned_text)
    if (
        not duration_parts
        or "".join(number_text + unit_text for number_text, unit_text in duration_parts)
        != unsigned_text
    ):
        raise ValueError(f'unable to parse {text} as a duration: time: invalid duration "{text}"')

    total_seconds = sum(float(number) * SECONDS_OF_UNIT[unit] for number, unit in duration_parts)
    if text.startswith("-"):
        return -total_seconds

    return total_seconds


def format_timestamp(unix_seconds: float) -> str:
    """Format a unix time as Kubernetes does: 2030-01-02T03:04:05Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_seconds))


def format_date(date_layout: str, moment: datetime) -> str:
    """Format a time as Go's `time.Format` does: each part of the reference time Mon Jan 2 15:04:05
    MST 2006 in the layout stands for the same part of `moment`."""
    token_values = {
        "2006": f"{moment.year:04}",
        "-0700": moment.strftime("%z"),
        "pm": moment.strftime("%p").lower(),
    }

    token_values["-07:00"] = f"{token_values['-0700'][:3]}:{token_values['-0700'][3:5]}"
    token_values["Z07:00"] = "Z" if token_values["-0700"] == "+0000" else token_values["-07:00"]

    def format_token(match: re.Match[str]) -> str:
        token = match[0]
        if token[0] in ".,":
            return token[0] + f"{moment.microsecond:06}000"[: len(token) - 1]
        if token in token_values:
            return token_values[token]
        return moment.strftime(DATE_TOKENS[token])

    return re.sub(
        "|".join([*map(re.escape, [*token_values, *DATE_TOKENS]), r"(?<=05)[.,]0+"]),
        format_token,
        date_layout,
    )


def humanize(seconds: float) -> str:
    """Format seconds as Argo's humanize.Duration does: "10 seconds", "2 minutes 5 seconds"."""
    remaining_seconds = int(seconds)
    duration_words = []
    for unit_name, unit_seconds in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        unit_count, remaining_seconds = divmod(remaining_seconds, unit_seconds)
        if unit_count:
            duration_words.append(f"{unit_count} {unit_name}" + ("s" if unit_count != 1 else ""))
    return " ".join(duration_words[:2]) or "0 seconds"


def format_f(number: float) -> str:
    """Format a float as Go's strconv does in format 'f' with the fewest digits. With this format,
    1e-05 becomes 0.00001, and 1.0 becomes 1."""
    if not math.isfinite(number):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(number, "NaN")
    return f"{Decimal(repr(number)):f}".removesuffix(".0")


def format_g(number: float, lower_bound: float = 1e-4, upper_bound: float = 1e6) -> str:
    """Format a float as Go's `%v` does. Values below `lower_bound`, and values from `upper_bound`
    upwards, get an exponent."""
    if number and math.isfinite(number) and not lower_bound <= abs(number) < upper_bound:
        mantissa, _, exponent = f"{Decimal(repr(number)).normalize():e}".partition("e")
        return f"{mantissa}e{exponent[0]}{exponent[1:]:0>2}"
    return format_f(number)


def int64(number: float) -> int:
    """Convert a number to int64. An int that is too large wraps around ,and a float out of range
    becomes the smallest int64."""
    if isinstance(number, float):
        if abs(number) < 2**63:
            return int(number)
        return -(2**63)
    return (number + 2**63) % 2**64 - 2**63


def power(base: float, exponent: float) -> float:
    """Apply Go's `math.Pow`, which returns infinity or NaN where Python raises an exception."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        if base < 0 and exponent % 2 == 1:
            return -math.inf
        return math.inf
    except ValueError:
        if base:
            return math.nan
        return math.inf


def divide(dividend: float, divisor: float) -> float:
    """Divide as Go does: a division by zero returns infinity or NaN."""
    if divisor:
        return dividend / divisor
    if dividend:
        return math.copysign(math.inf, dividend)
    return math.nan


def to_argo_string(value: object) -> str:
    """Convert a parameter's value of any YAML type to a string, as Argo does."""
    if isinstance(value, bool):
        if value:
            return "true"
        return "false"
    if isinstance(value, (int, float)):
        if isinstance(value, float) or abs(value) > 2**53:
            return format_f(float(value))
        return str(value)
    if isinstance(value, str):
        return value
    return ""


class Nil(list[Any]):
    """A nil slice of Go: an empty list that JSON represents as null."""


class AnyKeyMap(dict[Any, Any]):
    """A Go map whose keys have any type. Go cannot write a map with keys of any type as JSON.
    `value_type` is the Go type of the map's values."""

    def __init__(self, value_type: str, pairs: Iterable[tuple[Any, Any]] = ()) -> None:
        super().__init__(pairs)
        self.value_type = value_type


def dumps(value: object, indentation: str | None = None) -> str:
    """Format a value as JSON, as Go's encoding/json does: keys are sorted, and `<>&` are escaped.

    Without an indentation (None), the JSON is one line without spaces. With an indentation, each
    member has its own line, which starts with `indentation` and two spaces per level. Raises
    ValueError for NaN and Inf.
    """
    inner_indentation, key_separator = (
        (None, ":") if indentation is None else (indentation + "  ", ": ")
    )
    if isinstance(value, AnyKeyMap):
        raise ValueError(f"json: unsupported type: map[interface {{}}]{value.value_type}")

    if isinstance(value, dict):
        return _join_rows(
            "{}",
            [
                dumps(str(key)) + key_separator + dumps(value[key], inner_indentation)
                for key in sorted(value)
            ],
            indentation,
        )

    if isinstance(value, Nil):
        return "null"
    if isinstance(value, (list, tuple)):
        return _join_rows("[]", [dumps(member, inner_indentation) for member in value], indentation)

    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"json: unsupported value: {format_f(value)}")
        return format_g(value, 1e-6, 1e21).replace("e-0", "e-")

    return to_json(value, ensure_ascii=False).translate(HTML_ESCAPES)


def _join_rows(brackets: str, json_rows: list[str], indentation: str | None) -> str:
    """Return the JSON of a list or object. `json_rows`: the JSON texts of the members of the list
    or object."""
    if indentation is None or not json_rows:
        return brackets[0] + ",".join(json_rows) + brackets[1]
    separator = f"\n{indentation}  "
    return f"{brackets[0]}{separator}{f',{separator}'.join(json_rows)}\n{indentation}{brackets[1]}"


def dump_structs(values: Iterable[Mapping[str, Any]], field_names: Iterable[str]) -> str:
    """Format dicts as Go formats a list of structs in JSON. `field_names`: the fields of the
    struct, in the order of their declaration."""
    json_rows = (
        ",".join(f"{dumps(key)}:{dumps(value[key])}" for key in field_names if key in value)
        for value in values
    )
    return "[" + ",".join(f"{{{json_row}}}" for json_row in json_rows) + "]"


def format_v(value: object) -> str:
    """Format a value as Go's `%v` does."""
    if value is None:
        return "<nil>"

    if isinstance(value, bool):
        if value:
            return "true"
        return "false"

    if isinstance(value, float):
        return format_g(value)
    if isinstance(value, list):
        return "[" + " ".join(format_v(element) for element in value) + "]"
    if isinstance(value, dict):
        return "map[" + " ".join(f"{key}:{format_v(value[key])}" for key in sorted(value)) + "]"

    return str(value)


def quote_text(text: str) -> str:
    """Format a string as Go's `%q` does."""

    def escape(character: str) -> str:
        if character in QUOTE_ESCAPES or character.isprintable():
            return QUOTE_ESCAPES.get(character, character)
        code_point = ord(character)
        if code_point < 0x80:
            return f"\\x{code_point:02x}"
        if code_point < 0x10000:
            return f"\\u{code_point:04x}"
        return f"\\U{code_point:08x}"

    return f'"{"".join(map(escape, text))}"'


def sprintf(format_text: str, number: int) -> str:
    """Format one integer as Go's `fmt.Sprintf` does. Raises ValueError for an unsupported verb,
    flag or precision."""
    verb_count = 0

    def format_verb(match: re.Match[str]) -> str:
        nonlocal verb_count
        flags, width, verb = match.groups()
        if verb == "%":
            return "%"

        if verb not in FORMAT_OF_VERB:
            raise ValueError(
                f'the format "{format_text}": {match[0]} is not supported; use one of'
                f" %{' %'.join(FORMAT_OF_VERB)}"
            )

        verb_count += 1
        is_left_aligned = "-" in flags
        sign_flag = "+" if "+" in flags else " " if " " in flags else ""
        zero_flag = "0" if "0" in flags and not is_left_aligned else ""
        text = format(
            number,
            ("<" if is_left_aligned else "") + sign_flag + zero_flag + width + FORMAT_OF_VERB[verb],
        )

        if verb_count == 1:
            return text

        return f"%!{verb}(MISSING)"

    cut_position = next(
        (
            match.start()
            for match in VERB_PATTERN.finditer(format_text)
            if int(match[2][:-1][:8] or 0) > MAX_WIDTH
        ),
        None,
    )

    text = VERB_PATTERN.sub(format_verb, format_text[:cut_position]) + (
        "" if cut_position is None else "%!(NOVERB)"
    )
    if verb_count:
        return text

    return f"{text}%!(EXTRA int={number})"


def compact_json(text: str) -> str:
    """Return a JSON text without the white space between its tokens. Numbers such as 1.50 and
    escapes such as \\u00fc are not changed. Raises ValueError."""
    parse_json(text)
    return JSON_TOKENS.sub(lambda match: match[0].strip(), text).translate(HTML_ESCAPES)


def list_members(text: str) -> list[str]:
    """Return the members of a compact JSON list as JSON texts. For a JSON object, return its keys
    and values alternately; for null, return []."""
    members = []
    start_index = 1
    while start_index < len(text) - 1 and text != "null":
        _, end_index = JSON_DECODER.raw_decode(text, start_index)
        members.append(text[start_index:end_index])
        start_index = end_index + 1
    return members


def format_loop_item(item_json: str) -> str:
    """Convert a loop item (compact JSON) to the text that Argo uses in names and tags. A string is
    not quoted in this text."""
    item_json = item_json[1:-1] if item_json.startswith('"') else item_json
    return item_json.replace("\\u003c", "<").replace("\\u003e", ">").replace("\\u0026", "&")


def parse_json(text: str, convert_int: Callable[[str], Any] = int) -> Any:
    """Parse JSON. `convert_int`: function that converts the text of an integer. Raises ValueError
    with Go's error message."""
    try:
        return json.loads(text, parse_int=convert_int, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("exceeded max depth") from None
    except json.JSONDecodeError as error:
        position = error.pos
        literal = next(
            (
                literal
                for literal in ("null", "true", "false")
                if text[position : position + 1] == literal[0]
            ),
            "",
        )

        mismatch_index = next(
            (
                character_index
                for character_index, literal_character in enumerate(literal)
                if text[position + character_index : position + character_index + 1]
                != literal_character
            ),
            0,
        )
        if mismatch_index:
            position += mismatch_index
            error_context = f"in literal {literal} (expecting '{literal[mismatch_index]}')"
        elif error.msg == "Extra data":
            error_context = "after top-level value"
        else:
            error_context = "looking for beginning of value"

        if position >= len(text):
            raise ValueError("unexpected end of JSON input") from None

        raise ValueError(f"invalid character '{text[position]}' {error_context}") from None


def _reject_constant(constant: str) -> None:
    """Raise ValueError for NaN and Infinity, which Python's JSON parser accepts."""
    if constant[0] == "-":
        error_context = "in numeric literal"
    else:
        error_context = "looking for beginning of value"
    raise ValueError(f"invalid character '{constant.lstrip('-')[0]}' {error_context}")
