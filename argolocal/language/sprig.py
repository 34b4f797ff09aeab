"""The functions that Argo adds to expressions: the common functions of the Go library sprig, and
Argo's own functions.

The behaviour follows Masterminds/sprig v3.3, spf13/cast v1.10, Argo's util/expr/env.
"""

import base64
import hashlib
import math
import operator
import posixpath
import re
import secrets
import zlib
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from functools import reduce
from string import ascii_letters, digits
from typing import Any

from argolocal.language import regexp
from argolocal.language.functions import (
    BUILTINS,
    ExprError,
    concat,
    is_number,
    jsonpath,
    make_range,
    remainder,
    require_bool,
    require_list,
    slice_bytes,
    split,
    to_float,
    to_int,
)
from argolocal.language.gofmt import Nil, dumps, format_date, format_v, int64, quote_text


def _empty(value: object) -> bool:
    return (
        value is None
        or value is False
        or (is_number(value) and value == 0)
        or value in ("", [], {})
    )


def _to_int64(value: object) -> int:
    """Convert a value as sprig's toInt64 does: an invalid number is 0, a leading zero means octal,
    and the fraction is cut off."""
    if isinstance(value, float):
        return int64(value)

    text = format_v(value) if not isinstance(value, bool) else str(int(value))
    decimal_match = re.fullmatch(r"([-+]?\d*)\.\d*", text)
    if decimal_match:
        text = decimal_match[1] if decimal_match[1][-1:].isdigit() else "0"

    try:
        if text == text.strip():
            number = int(re.sub(r"^([+-]?)0(?=[\d_])", r"\g<1>0o", text), 0)
        else:
            number = 0
    except ValueError:
        return 0

    if int64(number) == number:
        return number

    return 0


def _to_float64(value: Any) -> float:
    try:
        if value == str(value).strip() or not isinstance(value, str):
            return float(value)
        return 0.0
    except (TypeError, ValueError):
        return 0.0


def _div(left_operand: object, right_operand: object) -> int:
    left_operand = _to_int64(left_operand)
    right_operand = _to_int64(right_operand)
    return int64((left_operand - remainder(left_operand, right_operand)) // right_operand)


def _make_decimal_function(apply: Callable[[Decimal, Decimal], Decimal]) -> Callable[..., float]:
    """Return a function that applies `apply` to the first two arguments, then to the result and the
    next argument, and so on."""
    # the addition of 0.0 converts -0.0 to 0.0
    return lambda *v: (
        float(round(reduce(apply, (Decimal(repr(_to_float64(value))) for value in v)), 16)) + 0.0
    )


def _round(value: object, places: int) -> float:
    """Round half up, and negative numbers always down, as sprig does."""
    shifted_number = _to_float64(value) * 10**places
    return (math.ceil if math.fmod(shifted_number, 1) >= 0.5 else math.floor)(
        shifted_number
    ) / 10**places


def _dig(*dig_arguments: object) -> Any:
    """Apply sprig's dig(key, ..., default, dict): return the value at a path of keys, or the
    default."""
    *keys, default_value, value = dig_arguments
    if not keys:
        raise ExprError("dig needs at least three arguments")
    for key in keys:
        if not isinstance(value, dict):
            raise ExprError(f"expected a map but found {value!r}")
        if key not in value:
            return default_value
        value = value[key]
    return value


def _seq(*numbers: int) -> str:
    """Apply sprig's seq(last), seq(first, last) or seq(first, step, last), which return numbers
    separated by spaces."""
    if not 1 <= len(numbers) <= 3:
        return ""
    first_number = numbers[0] if numbers[1:] else 1
    last_number = numbers[-1]
    default_step = 1 if first_number <= last_number else -1
    return " ".join(
        map(
            str,
            make_range(
                first_number,
                last_number + default_step,
                numbers[1] if numbers[2:] else default_step,
            ),
        )
    )


def _deep_equal(left_operand: Any, right_operand: Any) -> bool:
    """Compare two values as Go's DeepEqual does: 1 and 1.0 are not equal."""
    if type(left_operand) is not type(right_operand):
        return False
    if isinstance(left_operand, list):
        return len(left_operand) == len(right_operand) and all(
            map(_deep_equal, left_operand, right_operand)
        )
    if isinstance(left_operand, dict):
        return left_operand.keys() == right_operand.keys() and all(
            _deep_equal(left_operand[key], right_operand[key]) for key in left_operand
        )
    return left_operand == right_operand


def _is_among(searched_value: Any, candidate_values: Any) -> bool:
    return any(_deep_equal(searched_value, value) for value in candidate_values)


def _slice(
    values: list[Any], first_index: object = 0, last_index: object = None, *_: object
) -> list[Any] | None:
    start_number = _to_int64(first_index)
    end_number = len(values) if last_index is None else _to_int64(last_index)
    if values and not 0 <= start_number <= end_number <= len(values):
        raise ExprError("slice index out of bounds")
    if values:
        return values[start_number:end_number]
    return None


def _substr(start_byte: int, end_byte: int, text: str) -> str:
    byte_count = len(text.encode())
    if start_byte >= 0 and not 0 <= end_byte <= byte_count:
        end_byte = byte_count
    if not max(start_byte, 0) <= end_byte <= byte_count:
        raise ExprError(f"slice bounds out of range [{start_byte}:{end_byte}]")
    return slice_bytes(text, max(start_byte, 0), end_byte)


def _indent(spaces: int, text: str) -> str:
    padding = BUILTINS["repeat"](" ", spaces)
    return padding + text.replace("\n", "\n" + padding)


def _nospace(text: str) -> str:
    """Remove white space. As in sprig, if the text contains white space, each of its UTF-8 bytes
    becomes a separate character."""
    latin1_text = text.encode().decode("latin-1")
    text_without_spaces = re.sub(r"[\t-\r \x85\xa0]", "", latin1_text)
    if text_without_spaces != latin1_text:
        return text_without_spaces
    return text


def _clean_path(path: str) -> str:
    return posixpath.normpath(re.sub("/+", "/", path))


def _format_list(value: object) -> list[str]:
    list_values = value if isinstance(value, list) else [value]
    return [format_v(value) for value in list_values if value is not None]


def _index_pieces(text_pieces: list[str]) -> dict[str, str]:
    return {f"_{index}": piece for index, piece in enumerate(text_pieces)}


def _matches(pattern: str, text: str) -> bool:
    try:
        return regexp.has_match(pattern, text)
    except ValueError:
        return False


def _catch_errors(
    function: Callable[[str], Any], handle_error: Callable[[Exception], Any]
) -> Callable[[str], Any]:
    """Return a function that returns `handle_error(error)` if `function` raises an error."""

    def call(text: str) -> Any:
        try:
            return function(text)
        except (ExprError, ValueError) as error:
            return handle_error(error)

    return call


def _nil_as_empty(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` and passes "" for each argument that is None."""
    return lambda *values: function(*("" if value is None else value for value in values))


def _date(layout: str, unix_seconds: Any) -> str:
    """Apply sprig's `date`, which formats a unix time in the local time zone. If `unix_seconds` is
    not an integer, format the current time."""
    is_timestamp = is_number(unix_seconds) and isinstance(unix_seconds, int)
    return format_date(
        layout,
        (datetime.fromtimestamp(unix_seconds) if is_timestamp else datetime.now()).astimezone(),
    )


SPRIG: dict[str, Callable[..., Any]] = {
    "upper": BUILTINS["upper"],
    "lower": BUILTINS["lower"],
    "title": lambda s: re.sub(r"(?<!\w)\w", lambda letter: letter[0].title(), s),
    "trim": str.strip,
    "trimAll": lambda characters, s: s.strip(characters),
    "trimPrefix": lambda characters, s: s.removeprefix(characters),
    "trimSuffix": lambda characters, s: s.removesuffix(characters),
    "trunc": lambda n, s: slice_bytes(s, None, n) if n >= 0 else slice_bytes(s, n, None),
    "substr": _substr,
    "replace": lambda old, new, s: s.replace(old, new),
    "repeat": lambda n, s: BUILTINS["repeat"](s, n),
    "nospace": _nospace,
    "contains": lambda substring, s: substring in s,
    "hasPrefix": lambda prefix, s: s.startswith(prefix),
    "hasSuffix": lambda suffix, s: s.endswith(suffix),
    "quote": lambda *v: " ".join(quote_text(format_v(value)) for value in v if value is not None),
    "squote": lambda *v: " ".join(f"'{format_v(value)}'" for value in v if value is not None),
    "indent": _indent,
    "splitList": lambda sep, s: split(s, sep),
    "join": lambda sep, v: sep.join(_format_list(v)),
    "list": lambda *v: list(v),
    "first": lambda v: next(iter(require_list(v)), None),
    "last": lambda v: next(reversed(require_list(v)), None),
    "uniq": lambda v: [
        value for i, value in enumerate(require_list(v)) if not _is_among(value, v[:i])
    ],
    "reverse": lambda v: require_list(v)[::-1],
    "has": lambda item, v: v is not None and _is_among(item, require_list(v)),
    "default": lambda other, *v: other if not v or _empty(v[0]) else v[0],
    "empty": _empty,
    "coalesce": lambda *v: next((value for value in v if not _empty(value)), None),
    "ternary": lambda yes, no, test: yes if test is not None and require_bool(test) else no,
    "add": lambda *v: int64(sum(map(_to_int64, v))),
    "add1": lambda v: int64(_to_int64(v) + 1),
    "sub": lambda a, b: int64(_to_int64(a) - _to_int64(b)),
    "mul": lambda a, *v: int64(math.prod(map(_to_int64, (a, *v)))),
    "div": _div,
    "mod": lambda a, b: remainder(_to_int64(a), _to_int64(b)),
    "max": lambda *v: max(map(_to_int64, v)),
    "min": lambda *v: min(map(_to_int64, v)),
    "atoi": lambda s: max(-(2**63), min(int(s), 2**63 - 1)) if re.fullmatch(r"[+-]?\d+", s) else 0,
    "int": _to_int64,
    "int64": _to_int64,
    "float64": _to_float64,
    "date": _date,
    "toString": format_v,
    "toJson": dumps,
    "toPrettyJson": BUILTINS["toJSON"],
    "fromJson": _catch_errors(BUILTINS["fromJSON"], lambda error: None),
    "b64enc": BUILTINS["toBase64"],
    "b64dec": _catch_errors(BUILTINS["fromBase64"], str),
    "b32enc": lambda s: base64.b32encode(s.encode()).decode(),
    "sha1sum": lambda s: hashlib.sha1(s.encode(), usedforsecurity=False).hexdigest(),
    "sha256sum": lambda s: hashlib.sha256(s.encode()).hexdigest(),
    "sha512sum": lambda s: hashlib.sha512(s.encode()).hexdigest(),
    "adler32sum": lambda s: str(zlib.adler32(s.encode())),
    "regexMatch": _matches,
    "regexFind": lambda pattern, s: (regexp.find_all(pattern, s, 1) or [""])[0],
    "regexFindAll": lambda pattern, s, n: regexp.find_all(pattern, s, n) or Nil(),
    "regexReplaceAll": regexp.replace_all,
    "regexReplaceAllLiteral": lambda pattern, s, new: regexp.replace_all(
        pattern, s, new.replace("$", "$$")
    ),
    "regexSplit": lambda pattern, s, n: regexp.split(pattern, s, n) if n else Nil(),
    "regexQuoteMeta": lambda s: re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", s),
    "cat": lambda *v: " ".join(format_v(value) for value in v if value is not None),
    "nindent": lambda n, s: "\n" + _indent(n, s),
    "plural": lambda singular, many, count: singular if count == 1 else many,
    "split": lambda sep, s: _index_pieces(split(s, sep)),
    "splitn": lambda sep, n, s: _index_pieces(split(s, sep, n)),
    "toStrings": _format_list,
    "sortAlpha": lambda v: sorted(_format_list(v)),
    "until": lambda n: make_range(0, n, 1 if n >= 0 else -1),
    "untilStep": make_range,
    "seq": _seq,
    "ceil": lambda v: float(math.ceil(_to_float64(v))),
    "floor": lambda v: float(math.floor(_to_float64(v))),
    "round": _round,
    "add1f": lambda v: _make_decimal_function(operator.add)(v, 1),
    "addf": lambda *v: _make_decimal_function(operator.add)(0, *v),
    "subf": _make_decimal_function(operator.sub),
    "mulf": _make_decimal_function(operator.mul),
    "divf": _make_decimal_function(operator.truediv),
    "maxf": lambda *v: max(map(_to_float64, v)),
    "minf": lambda *v: min(map(_to_float64, v)),
    "tuple": lambda *v: list(v),
    "append": lambda v, value: [*require_list(v), value],
    "prepend": lambda v, value: [value, *require_list(v)],
    "concat": concat,
    "rest": lambda v: require_list(v)[1:] if v != [] else Nil(),
    "initial": lambda v: require_list(v)[:-1] if v != [] else Nil(),
    "slice": lambda v, *ends: _slice(require_list(v), *ends),
    "without": lambda v, *others: [
        value for value in require_list(v) if not _is_among(value, others)
    ],
    "compact": lambda v: [value for value in require_list(v) if not _empty(value)],
    "chunk": lambda n, v: [v[i : i + n] for i in range(0, len(require_list(v)), n)],
    "all": lambda *v: not any(map(_empty, v)),
    "any": lambda *v: not all(map(_empty, v)),
    "dict": lambda *v: {
        format_v(key): value for key, value in zip(v[::2], [*v[1::2], ""], strict=False)
    },
    "get": lambda d, key: d.get(key, ""),
    "hasKey": lambda d, key: key in d,
    "keys": lambda *d: sorted(key for mapping in d for key in mapping),
    "values": BUILTINS["values"],
    "pluck": lambda key, *d: [mapping[key] for mapping in d if key in mapping],
    "pick": lambda d, *keys: {key: d[key] for key in keys if key in d},
    "omit": lambda d, *keys: {key: d[key] for key in d if key not in keys},
    "dig": _dig,
    "base": lambda s: posixpath.basename(s.rstrip("/")) or s[:1] or ".",
    "dir": lambda s: _clean_path(s[: s.rfind("/") + 1]),
    "clean": _clean_path,
    "ext": lambda s: re.sub(r"^.*?(\.[^./]*)?$", r"\1", s, flags=re.S),
    "isAbs": lambda s: s.startswith("/"),
    "randAlphaNum": lambda n: "".join(secrets.choice(ascii_letters + digits) for _ in range(n)),
}
TEXT_FUNCTIONS = (
    "upper lower title trim trimAll trimPrefix trimSuffix trunc substr replace repeat nospace"
    " contains hasPrefix hasSuffix indent nindent splitList split splitn atoi b64enc b64dec b32enc"
    " sha1sum sha256sum sha512sum adler32sum regexMatch regexFind regexFindAll regexReplaceAll"
    " regexReplaceAllLiteral regexSplit regexQuoteMeta base dir clean ext isAbs"
)
SPRIG.update({name: _nil_as_empty(SPRIG[name]) for name in TEXT_FUNCTIONS.split()})
ARGO_FUNCTIONS: dict[str, Any] = {
    "asInt": to_int,
    "asFloat": to_float,
    "jsonpath": jsonpath,
    "toJson": dumps,
    "sprig": SPRIG,
}
