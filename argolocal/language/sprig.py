"""Functions that Argo adds to expressions: the common ones of sprig, and its own.

Source: Masterminds/sprig v3.3, spf13/cast v1.10, Argo's util/expr/env.
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
    boolean,
    concat,
    cut,
    is_number,
    jsonpath,
    listed,
    remainder,
    series,
    split,
    to_float,
    to_int,
)
from argolocal.language.gofmt import Nil, date, dumps, int64, quoted, verb


def _empty(value: Any) -> bool:
    return value is None or value is False or (is_number(value) and value == 0) or value in ("", [], {})


def _cast(value: Any) -> int:
    """sprig's toInt64: unparsable is 0, a leading zero means octal, and decimals are dropped."""
    if isinstance(value, float):
        return int64(value)
    text = verb(value) if not isinstance(value, bool) else str(int(value))
    if decimal := re.fullmatch(r"([-+]?\d*)\.\d*", text):
        text = decimal[1] if decimal[1][-1:].isdigit() else "0"
    try:
        number = int(re.sub(r"^([+-]?)0(?=[\d_])", r"\g<1>0o", text), 0) if text == text.strip() else 0
    except ValueError:
        return 0
    return number if int64(number) == number else 0


def _float(value: Any) -> float:
    """sprig's toFloat64."""
    try:
        return float(value) if value == str(value).strip() or not isinstance(value, str) else 0.0
    except (TypeError, ValueError):
        return 0.0


def _div(left: Any, right: Any) -> int:
    left, right = _cast(left), _cast(right)
    return int64((left - remainder(left, right)) // right)


def _decimals(apply: Callable[[Decimal, Decimal], Decimal]) -> Callable[..., float]:
    return lambda *v: float(round(reduce(apply, (Decimal(repr(_float(value))) for value in v)), 16)) + 0.0  # no -0


def _rounded(value: Any, places: int) -> float:
    """Round half up; negative numbers always down."""
    shifted = _float(value) * 10**places
    return (math.ceil if math.fmod(shifted, 1) >= 0.5 else math.floor)(shifted) / 10**places


def _dig(*path: Any) -> Any:
    """dig(key, ..., default, dict)"""
    *keys, default, value = path
    if not keys:
        raise ExprError("dig needs at least three arguments")
    for key in keys:
        if not isinstance(value, dict):
            raise ExprError(f"expected a map but found {value!r}")
        if key not in value:
            return default
        value = value[key]
    return value


def _seq(*numbers: int) -> str:
    """seq(last), seq(first, last), seq(first, step, last)"""
    if not 1 <= len(numbers) <= 3:
        return ""
    first, last = (numbers[0] if numbers[1:] else 1), numbers[-1]
    unit = 1 if first <= last else -1
    return " ".join(map(str, series(first, last + unit, numbers[1] if numbers[2:] else unit)))


def _same(left: Any, right: Any) -> bool:
    """Go's DeepEqual: 1 is not 1.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return left == right


def _among(item: Any, values: Any) -> bool:
    return any(_same(item, value) for value in values)


def _slice(values: list[Any], first: Any = 0, last: Any = None, *_: Any) -> list[Any] | None:
    start, end = _cast(first), len(values) if last is None else _cast(last)
    if values and not 0 <= start <= end <= len(values):
        raise ExprError("slice index out of bounds")
    return values[start:end] if values else None


def _substr(start: int, end: int, text: str) -> str:
    size = len(text.encode())
    if start >= 0 and not 0 <= end <= size:
        end = size
    if not max(start, 0) <= end <= size:
        raise ExprError(f"slice bounds out of range [{start}:{end}]")
    return cut(text, max(start, 0), end)


def _indent(spaces: int, text: str) -> str:
    pad = BUILTINS["repeat"](" ", spaces)
    return pad + text.replace("\n", "\n" + pad)


def _nospace(text: str) -> str:
    """Of its bytes, of which each is a letter then; where there is none to leave out, they stay what they are."""
    letters = text.encode().decode("latin-1")
    kept = re.sub(r"[\t-\r \x85\xa0]", "", letters)
    return kept if kept != letters else text


def _clean(path: str) -> str:
    return posixpath.normpath(re.sub("/+", "/", path))


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [verb(value) for value in values if value is not None]


def _parts(parts: list[str]) -> dict[str, str]:
    return {f"_{index}": part for index, part in enumerate(parts)}


def _matches(pattern: str, text: str) -> bool:
    try:
        return regexp.matches(pattern, text)
    except ValueError:
        return False


def _tried(function: Callable[[str], Any], failed: Callable[[Exception], Any]) -> Callable[[str], Any]:
    def call(text: str) -> Any:
        try:
            return function(text)
        except (ExprError, ValueError) as error:
            return failed(error)

    return call


def _filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A nil string is empty."""
    return lambda *values: function(*("" if value is None else value for value in values))


def _date(layout: str, moment: Any) -> str:
    """sprig's date: of unix seconds, in this machine's zone; anything else, a text too, is now."""
    known = is_number(moment) and isinstance(moment, int)
    return date(layout, (datetime.fromtimestamp(moment) if known else datetime.now()).astimezone())


SPRIG: dict[str, Callable[..., Any]] = {
    "upper": BUILTINS["upper"],
    "lower": BUILTINS["lower"],
    "title": lambda s: re.sub(r"(?<!\w)\w", lambda letter: letter[0].title(), s),
    "trim": str.strip,
    "trimAll": lambda cut, s: s.strip(cut),
    "trimPrefix": lambda cut, s: s.removeprefix(cut),
    "trimSuffix": lambda cut, s: s.removesuffix(cut),
    "trunc": lambda n, s: cut(s, None, n) if n >= 0 else cut(s, n, None),
    "substr": _substr,
    "replace": lambda old, new, s: s.replace(old, new),
    "repeat": lambda n, s: BUILTINS["repeat"](s, n),
    "nospace": _nospace,
    "contains": lambda part, s: part in s,
    "hasPrefix": lambda part, s: s.startswith(part),
    "hasSuffix": lambda part, s: s.endswith(part),
    "quote": lambda *v: " ".join(quoted(verb(value)) for value in v if value is not None),
    "squote": lambda *v: " ".join(f"'{verb(value)}'" for value in v if value is not None),
    "indent": _indent,
    "splitList": lambda sep, s: split(s, sep),
    "join": lambda sep, v: sep.join(_texts(v)),
    "list": lambda *v: list(v),
    "first": lambda v: next(iter(listed(v)), None),
    "last": lambda v: next(reversed(listed(v)), None),
    "uniq": lambda v: [value for i, value in enumerate(listed(v)) if not _among(value, v[:i])],
    "reverse": lambda v: listed(v)[::-1],
    "has": lambda item, v: v is not None and _among(item, listed(v)),
    "default": lambda other, *v: other if not v or _empty(v[0]) else v[0],
    "empty": _empty,
    "coalesce": lambda *v: next((value for value in v if not _empty(value)), None),
    "ternary": lambda yes, no, test: yes if test is not None and boolean(test) else no,
    "add": lambda *v: int64(sum(map(_cast, v))),
    "add1": lambda v: int64(_cast(v) + 1),
    "sub": lambda a, b: int64(_cast(a) - _cast(b)),
    "mul": lambda a, *v: int64(math.prod(map(_cast, (a, *v)))),
    "div": _div,
    "mod": lambda a, b: remainder(_cast(a), _cast(b)),
    "max": lambda *v: max(map(_cast, v)),
    "min": lambda *v: min(map(_cast, v)),
    "atoi": lambda s: max(-(2**63), min(int(s), 2**63 - 1)) if re.fullmatch(r"[+-]?\d+", s) else 0,
    "int": _cast,
    "int64": _cast,
    "float64": _float,
    "date": _date,
    "toString": verb,
    "toJson": dumps,
    "toPrettyJson": BUILTINS["toJSON"],
    "fromJson": _tried(BUILTINS["fromJSON"], lambda error: None),
    "b64enc": BUILTINS["toBase64"],
    "b64dec": _tried(BUILTINS["fromBase64"], str),
    "b32enc": lambda s: base64.b32encode(s.encode()).decode(),
    "sha1sum": lambda s: hashlib.sha1(s.encode(), usedforsecurity=False).hexdigest(),
    "sha256sum": lambda s: hashlib.sha256(s.encode()).hexdigest(),
    "sha512sum": lambda s: hashlib.sha512(s.encode()).hexdigest(),
    "adler32sum": lambda s: str(zlib.adler32(s.encode())),
    "regexMatch": _matches,
    "regexFind": lambda pattern, s: (regexp.find_all(pattern, s, 1) or [""])[0],
    "regexFindAll": lambda pattern, s, n: regexp.find_all(pattern, s, n) or Nil(),
    "regexReplaceAll": regexp.replace_all,
    "regexReplaceAllLiteral": lambda pattern, s, new: regexp.replace_all(pattern, s, new.replace("$", "$$")),
    "regexSplit": lambda pattern, s, n: regexp.split(pattern, s, n) if n else Nil(),
    "regexQuoteMeta": lambda s: re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", s),
    "cat": lambda *v: " ".join(verb(value) for value in v if value is not None),
    "nindent": lambda n, s: "\n" + _indent(n, s),
    "plural": lambda singular, many, count: singular if count == 1 else many,
    "split": lambda sep, s: _parts(split(s, sep)),
    "splitn": lambda sep, n, s: _parts(split(s, sep, n)),
    "toStrings": _texts,
    "sortAlpha": lambda v: sorted(_texts(v)),
    "until": lambda n: series(0, n, 1 if n >= 0 else -1),
    "untilStep": series,
    "seq": _seq,
    "ceil": lambda v: float(math.ceil(_float(v))),
    "floor": lambda v: float(math.floor(_float(v))),
    "round": _rounded,
    "add1f": lambda v: _decimals(operator.add)(v, 1),
    "addf": lambda *v: _decimals(operator.add)(0, *v),
    "subf": _decimals(operator.sub),
    "mulf": _decimals(operator.mul),
    "divf": _decimals(operator.truediv),
    "maxf": lambda *v: max(map(_float, v)),
    "minf": lambda *v: min(map(_float, v)),
    "tuple": lambda *v: list(v),
    "append": lambda v, value: [*listed(v), value],
    "prepend": lambda v, value: [value, *listed(v)],
    "concat": concat,
    "rest": lambda v: listed(v)[1:] if v != [] else Nil(),
    "initial": lambda v: listed(v)[:-1] if v != [] else Nil(),
    "slice": lambda v, *ends: _slice(listed(v), *ends),
    "without": lambda v, *others: [value for value in listed(v) if not _among(value, others)],
    "compact": lambda v: [value for value in listed(v) if not _empty(value)],
    "chunk": lambda n, v: [v[i : i + n] for i in range(0, len(listed(v)), n)],
    "all": lambda *v: not any(map(_empty, v)),
    "any": lambda *v: not all(map(_empty, v)),
    "dict": lambda *v: {verb(key): value for key, value in zip(v[::2], [*v[1::2], ""], strict=False)},
    "get": lambda d, key: d.get(key, ""),
    "hasKey": lambda d, key: key in d,
    "keys": lambda *d: sorted(key for mapping in d for key in mapping),
    "values": BUILTINS["values"],
    "pluck": lambda key, *d: [mapping[key] for mapping in d if key in mapping],
    "pick": lambda d, *keys: {key: d[key] for key in keys if key in d},
    "omit": lambda d, *keys: {key: d[key] for key in d if key not in keys},
    "dig": _dig,
    "base": lambda s: posixpath.basename(s.rstrip("/")) or s[:1] or ".",
    "dir": lambda s: _clean(s[: s.rfind("/") + 1]),
    "clean": _clean,
    "ext": lambda s: re.sub(r"^.*?(\.[^./]*)?$", r"\1", s, flags=re.S),
    "isAbs": lambda s: s.startswith("/"),
    "randAlphaNum": lambda n: "".join(secrets.choice(ascii_letters + digits) for _ in range(n)),
}
TEXTS = (
    "upper lower title trim trimAll trimPrefix trimSuffix trunc substr replace repeat nospace contains hasPrefix"
    " hasSuffix indent nindent splitList split splitn atoi b64enc b64dec b32enc sha1sum sha256sum sha512sum adler32sum"
    " regexMatch regexFind regexFindAll regexReplaceAll regexReplaceAllLiteral regexSplit regexQuoteMeta"
    " base dir clean ext isAbs"
)
SPRIG |= {name: _filled(SPRIG[name]) for name in TEXTS.split()}
ARGO: dict[str, Any] = {"asInt": to_int, "asFloat": to_float, "jsonpath": jsonpath, "toJson": dumps, "sprig": SPRIG}
