"""Go's formatting and parsing that Argo exposes: durations, times, numbers, JSON, and `%v`.

Sources: Go's time.ParseDuration, strconv, fmt, encoding/json; Argo's anystring.go, item.go and ParseStringToDuration.
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

WIDEST = 1_000_000  # Go reads no further digit of a width beyond it, nor anything behind that
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
VERB, VERBS = re.compile(r"%([-+ 0]*)(\d*)(.?)", re.S), {"d": "d", "v": "d", "x": "x", "X": "X", "o": "o", "b": "b"}
TOKENS, DECODER = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|\s+'), json.JSONDecoder()
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge
}  # fmt: skip
UNQUOTED = dict(zip("ntrabfv\\", "\n\t\r\a\b\f\v\\", strict=True))
QUOTES = {char: f"\\{letter}" for letter, char in UNQUOTED.items()} | {'"': '\\"'}
DATE = {  # part of Go's reference time → that of strftime
    **{"January": "%B", "Monday": "%A", "Jan": "%b", "Mon": "%a", "MST": "%Z", "PM": "%p", "_2": "%e", "15": "%H"},
    **{"002": "%j", "01": "%m", "02": "%d", "03": "%I", "04": "%M", "05": "%S", "06": "%y"},
    **{"1": "%-m", "2": "%-d", "3": "%-I", "4": "%-M", "5": "%-S"},
}
ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


WHOLE = re.compile(r"[+-]?\d+")  # what strconv.Atoi reads


def seconds(text: str) -> float:
    """A Go duration ("1m30s") or, as Argo allows, a bare whole number of seconds. Raises ValueError."""
    return float(text) if WHOLE.fullmatch(text.strip()) else duration(text)


def duration(text: str) -> float:
    """Seconds of what Go's time.ParseDuration takes: without a unit only 0. Raises ValueError."""
    text = text.strip()
    if WHOLE.fullmatch(text):
        if int(text):
            raise ValueError(f'time: missing unit in duration "{text}"')
        return 0.0
    body = text.lstrip("+-") if text[:1] in "+-" else text
    parts = PART.findall(body)
    if not parts or "".join(a + b for a, b in parts) != body:
        raise ValueError(f'unable to parse {text} as a duration: time: invalid duration "{text}"')
    total = sum(float(number) * UNITS[unit] for number, unit in parts)
    return -total if text.startswith("-") else total


def timestamp(now: float) -> str:
    """Seconds since the epoch in Kubernetes' format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))


def date(layout: str, moment: datetime) -> str:
    """`time.Format`: the parts of Go's reference time, Mon Jan 2 15:04:05 MST 2006, replaced by those of `moment`."""
    parts = {"2006": f"{moment.year:04}", "-0700": moment.strftime("%z"), "pm": moment.strftime("%p").lower()}
    parts["-07:00"] = f"{parts['-0700'][:3]}:{parts['-0700'][3:5]}"
    parts["Z07:00"] = "Z" if parts["-0700"] == "+0000" else parts["-07:00"]

    def written(match: re.Match[str]) -> str:
        part = match[0]
        if part[0] in ".,":
            return part[0] + f"{moment.microsecond:06}000"[: len(part) - 1]
        return parts[part] if part in parts else moment.strftime(DATE[part])

    return re.sub("|".join([*map(re.escape, [*parts, *DATE]), r"(?<=05)[.,]0+"]), written, layout)


def humane(wait: float) -> str:
    """The words of Argo's humanize.Duration: "10 seconds", "2 minutes 5 seconds"."""
    rest, words = int(wait), []
    for name, size in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count, rest = divmod(rest, size)
        if count:
            words.append(f"{count} {name}" + ("s" if count != 1 else ""))
    return " ".join(words[:2]) or "0 seconds"


def plain(number: float) -> str:
    """A float as strconv 'f' with the fewest digits: 1e-05 → 0.00001, 1.0 → 1."""
    if not math.isfinite(number):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(number, "NaN")
    return f"{Decimal(repr(number)):f}".removesuffix(".0")


def general(number: float, small: float = 1e-4, big: float = 1e6) -> str:
    """A float as `%v` prints it: with an exponent from `big` and below `small`."""
    if number and math.isfinite(number) and not small <= abs(number) < big:
        digits, _, exponent = f"{Decimal(repr(number)).normalize():e}".partition("e")
        return f"{digits}e{exponent[0]}{exponent[1:]:0>2}"
    return plain(number)


def int64(number: float) -> int:
    """Integers wrap around on overflow; a float out of range becomes the minimum."""
    if isinstance(number, float):
        return int(number) if abs(number) < 2**63 else -(2**63)
    return (number + 2**63) % 2**64 - 2**63


def power(left: float, right: float) -> float:
    """`math.Pow`: infinite or NaN where Python raises an error."""
    try:
        return math.pow(left, right)
    except OverflowError:
        return -math.inf if left < 0 and right % 2 == 1 else math.inf
    except ValueError:
        return math.nan if left else math.inf


def divided(left: float, right: float) -> float:
    """Division by zero is infinite or NaN."""
    return left / right if right else math.copysign(math.inf, left) if left else math.nan


def anystring(value: Any) -> str:
    """A parameter's value, which Argo reads as a string whatever its YAML type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return plain(float(value)) if isinstance(value, float) or abs(value) > 2**53 else str(value)
    return value if isinstance(value, str) else ""


class Nil(list[Any]):
    """Go's nil slice: empty, and null in JSON."""


class Keyed(dict[Any, Any]):
    """A map with keys of any type, which Go cannot write as JSON; `of` is the type of its values."""

    def __init__(self, of: str, pairs: Iterable[tuple[Any, Any]] = ()) -> None:
        super().__init__(pairs)
        self.of = of


def dumps(value: Any, margin: str | None = None) -> str:
    """JSON as encoding/json writes it: sorted keys, `<>&` escaped, no spaces, or indented within `margin`.

    Raises ValueError for NaN and Inf.
    """
    inner, colon = (None, ":") if margin is None else (margin + "  ", ": ")
    if isinstance(value, Keyed):
        raise ValueError(f"json: unsupported type: map[interface {{}}]{value.of}")
    if isinstance(value, dict):
        return _within("{}", [dumps(str(key)) + colon + dumps(value[key], inner) for key in sorted(value)], margin)
    if isinstance(value, Nil):
        return "null"
    if isinstance(value, (list, tuple)):
        return _within("[]", [dumps(member, inner) for member in value], margin)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"json: unsupported value: {plain(value)}")
        return general(value, 1e-6, 1e21).replace("e-0", "e-")
    return json.dumps(value, ensure_ascii=False).translate(ESCAPES)


def _within(ends: str, rows: list[str], margin: str | None) -> str:
    if margin is None or not rows:
        return ends[0] + ",".join(rows) + ends[1]
    gap = f"\n{margin}  "
    return f"{ends[0]}{gap}{f',{gap}'.join(rows)}\n{margin}{ends[1]}"


def structs(values: Iterable[Mapping[str, Any]], fields: Iterable[str]) -> str:
    """JSON of Go structs: fields in declaration order."""
    rows = (",".join(f"{dumps(key)}:{dumps(value[key])}" for key in fields if key in value) for value in values)
    return "[" + ",".join(f"{{{row}}}" for row in rows) + "]"


def verb(value: Any) -> str:
    """`%v` of a plain value."""
    if value is None:
        return "<nil>"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return general(value)
    if isinstance(value, list):
        return "[" + " ".join(verb(item) for item in value) + "]"
    if isinstance(value, dict):
        return "map[" + " ".join(f"{key}:{verb(value[key])}" for key in sorted(value)) + "]"
    return str(value)


def quoted(text: str) -> str:
    """`%q`."""

    def written(char: str) -> str:
        if char in QUOTES or char.isprintable():
            return QUOTES.get(char, char)
        code = ord(char)
        return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return f'"{"".join(map(written, text))}"'


def sprintf(form: str, number: int) -> str:
    """`fmt.Sprintf` of one whole number. Raises ValueError for an unsupported verb, flag or precision."""
    used = 0

    def written(match: re.Match[str]) -> str:
        nonlocal used
        flags, width, letter = match.groups()
        if letter == "%":
            return "%"
        if letter not in VERBS:
            raise ValueError(f'the format "{form}": {match[0]} is not known here; use one of %{" %".join(VERBS)}')
        used += 1
        left = "-" in flags
        sign = "+" if "+" in flags else " " if " " in flags else ""
        zeros = "0" if "0" in flags and not left else ""
        text = format(number, ("<" if left else "") + sign + zeros + width + VERBS[letter])
        return text if used == 1 else f"%!{letter}(MISSING)"

    cut = next((match.start() for match in VERB.finditer(form) if int(match[2][:-1][:8] or 0) > WIDEST), None)
    text = VERB.sub(written, form[:cut]) + ("" if cut is None else "%!(NOVERB)")
    return text if used else f"{text}%!(EXTRA int={number})"


def compact(text: str) -> str:
    """JSON without spaces, otherwise verbatim: 1.50 stays, and so does \\u00fc. Raises ValueError."""
    parsed(text)
    return TOKENS.sub(lambda match: match[0].strip(), text).translate(ESCAPES)


def parts(text: str) -> list[str]:
    """The members of a compact JSON list, verbatim; for an object its keys and values in turn; none for null."""
    members, at = [], 1
    while at < len(text) - 1 and text != "null":
        _, end = DECODER.raw_decode(text, at)
        members.append(text[at:end])
        at = end + 1
    return members


def item(text: str) -> str:
    """A loop item (compact JSON) as Argo writes it into names and tags: strings without quotes, verbatim."""
    text = text[1:-1] if text.startswith('"') else text
    return text.replace("\\u003c", "<").replace("\\u003e", ">").replace("\\u0026", "&")


def parsed(text: str, whole: Callable[[str], Any] = int) -> Any:
    """JSON as Go reads it; `whole` converts the text of whole numbers. Raises ValueError."""
    try:
        return json.loads(text, parse_int=whole, parse_constant=_unknown)
    except RecursionError:
        raise ValueError("exceeded max depth") from None
    except json.JSONDecodeError as error:
        at = error.pos
        word = next((word for word in ("null", "true", "false") if text[at : at + 1] == word[0]), "")
        if mismatch := next((i for i, c in enumerate(word) if text[at + i : at + i + 1] != c), 0):
            at, where = at + mismatch, f"in literal {word} (expecting '{word[mismatch]}')"
        else:
            where = "after top-level value" if error.msg == "Extra data" else "looking for beginning of value"
        if at >= len(text):
            raise ValueError("unexpected end of JSON input") from None
        raise ValueError(f"invalid character '{text[at]}' {where}") from None


def _unknown(word: str) -> None:
    """Refuse NaN and Infinity, which Python accepts."""
    where = "in numeric literal" if word[0] == "-" else "looking for beginning of value"
    raise ValueError(f"invalid character '{word.lstrip('-')[0]}' {where}")
