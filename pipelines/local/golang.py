"""What Go prints and reads where Argo lets it show: durations, times, numbers, JSON, and `%v`.

Sources: Go's time.ParseDuration, strconv, encoding/json; Argo's anystring.go, item.go and ParseStringToDuration.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")


def seconds(text: str) -> float:
    """A Go duration ("1m30s") or, as Argo allows, a bare whole number of seconds. Raises ValueError."""
    text = text.strip()
    if re.fullmatch(r"[+-]?\d+", text):
        return float(text)
    body = text.lstrip("+-") if text[:1] in "+-" else text
    parts = PART.findall(body)
    if not parts or "".join(a + b for a, b in parts) != body:
        raise ValueError(f'unable to parse {text} as a duration: time: invalid duration "{text}"')
    total = sum(float(number) * UNITS[unit] for number, unit in parts)
    return -total if text.startswith("-") else total


def timestamp() -> str:
    """Now, as Kubernetes writes a time."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def date(layout: str, moment: datetime) -> str:
    """`time.Format`: the parts of Go's reference time, Mon Jan 2 15:04:05 MST 2006, replaced by those of `moment`."""
    offset = moment.strftime("%z")
    parts = {
        "2006": f"{moment.year:04}",
        "January": moment.strftime("%B"),
        "Monday": moment.strftime("%A"),
        "-07:00": f"{offset[:3]}:{offset[3:5]}",
        "Z07:00": "Z" if offset == "+0000" else f"{offset[:3]}:{offset[3:5]}",
        "-0700": offset,
        "Jan": moment.strftime("%b"),
        "Mon": moment.strftime("%a"),
        "MST": moment.tzname() or "UTC",
        "002": f"{moment.timetuple().tm_yday:03}",
        "01": f"{moment.month:02}",
        "02": f"{moment.day:02}",
        "03": f"{(moment.hour + 11) % 12 + 1:02}",
        "04": f"{moment.minute:02}",
        "05": f"{moment.second:02}",
        "06": f"{moment.year % 100:02}",
        "15": f"{moment.hour:02}",
        "_2": f"{moment.day:2}",
        "PM": moment.strftime("%p"),
        "pm": moment.strftime("%p").lower(),
        "1": str(moment.month),
        "2": str(moment.day),
        "3": str((moment.hour + 11) % 12 + 1),
        "4": str(moment.minute),
        "5": str(moment.second),
    }

    def written(found: re.Match[str]) -> str:
        digits = f"{moment.microsecond:06}000"
        return parts[found[0]] if found[0] in parts else found[0][0] + digits[: len(found[0]) - 1]

    return re.sub("|".join([*map(re.escape, parts), r"(?<=05)[.,]0+"]), written, layout)


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
    if math.isnan(number) or math.isinf(number):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(number, "NaN")
    text = repr(number)
    if "e" in text:
        digits, exponent = text.split("e")
        places = max(0, len(digits.partition(".")[2]) - int(exponent))
        text = f"{number:.{places}f}"
    return text.removesuffix(".0")


def general(number: float, small: float = 1e-4, big: float = 1e21) -> str:
    """A float as `%v` prints it (with small=1e-6, as encoding/json): an exponent only for the very small and big."""
    if number and not math.isinf(number) and not math.isnan(number) and not small <= abs(number) < big:
        digits, _, exponent = f"{number!r}".partition("e")
        if not exponent:
            digits, _, exponent = f"{number:.17e}".partition("e")
            digits = repr(float(digits))
        shift = int(exponent)
        return f"{digits.removesuffix('.0')}e{'-' if shift < 0 else '+'}{abs(shift):02d}"
    return plain(number)


def anystring(value: Any) -> str:
    """A parameter's value, which Argo reads as a string whatever its YAML type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return plain(float(value)) if isinstance(value, float) or abs(value) > 2**53 else str(value)
    return value if isinstance(value, str) else ""


def dumps(value: Any) -> str:
    """JSON as encoding/json writes it: sorted keys, no spaces, `<>&` escaped."""
    text = json.dumps(_numbers(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for char, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(char, escape)
    return text


def structs(values: Iterable[Mapping[str, Any]], fields: Iterable[str]) -> str:
    """JSON of Go structs: their fields in the order in which they are declared."""
    rows = (",".join(f"{dumps(key)}:{dumps(each[key])}" for key in fields if key in each) for each in values)
    return "[" + ",".join(f"{{{row}}}" for row in rows) + "]"


def _numbers(value: Any) -> Any:
    if isinstance(value, float):
        if math.isnan(value) or math.isinf(value):
            raise ValueError(f"json: unsupported value: {plain(value)}")
        return int(value) if value.is_integer() and abs(value) < 1e21 else value
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else value


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


class Literal(float):
    """A number that keeps its spelling."""

    def __init__(self, text: str) -> None:
        self.text = text


def item(value: Any) -> str:
    """A loop item as Argo writes it into names and tags: strings bare, the rest as JSON, spelt as it was."""
    text = _spelt(value)
    text = text[1:-1] if text.startswith('"') else text
    return text.replace("\\u003c", "<").replace("\\u003e", ">").replace("\\u0026", "&")


def _spelt(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{dumps(key)}:{_spelt(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_spelt, value)) + "]"
    return value.text if isinstance(value, Literal) else dumps(value)


def parsed(text: str, number: Callable[[str], Any] = float) -> Any:
    """JSON as Go reads it; `number` makes of the text of those with a point or an exponent. Raises ValueError."""
    try:
        return json.loads(text, parse_float=number)
    except json.JSONDecodeError as error:
        at = error.pos
        word = next((word for word in ("null", "true", "false") if text[at : at + 1] == word[0]), "")
        if wrong := next((i for i, c in enumerate(word) if text[at + i : at + i + 1] != c), 0):
            at, where = at + wrong, f"in literal {word} (expecting '{word[wrong]}')"
        else:
            where = "after top-level value" if error.msg == "Extra data" else "looking for beginning of value"
        if at >= len(text):
            raise ValueError("unexpected end of JSON input") from None
        raise ValueError(f"invalid character '{text[at]}' {where}") from None
