"""What expressions can call: expr-lang's builtins, its predicates, and the common functions of sprig.

Anything else is refused by name before a run starts (subset.py). Source: expr-lang/expr v1.17 builtin,
Masterminds/sprig.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cmp_to_key
from typing import Any, TypeGuard

from pipelines.local import json_path
from pipelines.local.golang import date, dumps, verb

Numeric = int | float


class ExprError(Exception):
    """The expression cannot be parsed or evaluated."""


def is_number(value: Any) -> TypeGuard[Numeric]:
    """Whether Go would call it a number (a bool is none)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def equal(left: Any, right: Any) -> bool:
    """expr's ==: numbers by value, everything else by type and value."""
    if is_number(left) and is_number(right):
        return left == right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and left == right


def compare(left: Any, right: Any) -> int:
    """-1, 0 or 1 for two numbers or two strings. Raises ExprError."""
    if (is_number(left) and is_number(right)) or (isinstance(left, str) and isinstance(right, str)):
        return (left > right) - (left < right)  # pyright: ignore[reportOperatorIssue]
    raise ExprError(f"cannot compare {left!r} and {right!r}")


def to_int(value: Any) -> int:
    if is_number(value):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    raise ExprError(f"invalid argument for int: {verb(value)!r}")


def to_float(value: Any) -> float:
    if is_number(value):
        return float(value)
    try:
        if isinstance(value, str) and value == value.strip():
            return float(value)
    except ValueError:
        pass  # raised below, with the value
    raise ExprError(f"invalid argument for float: {verb(value)!r}")


def jsonpath(text: str, path: str) -> Any:
    """What `path` selects of JSON (json_path.py). Raises ExprError."""
    try:
        return json_path.found(json.loads(text), path)
    except ValueError as error:
        raise ExprError(str(error)) from None


def _sorted(values: list[Any], order: str = "asc") -> list[Any]:
    return sorted(values, key=cmp_to_key(compare), reverse=order == "desc")


def _flat(values: list[Any]) -> list[Any]:
    return [inner for each in values for inner in (_flat(each) if isinstance(each, list) else [each])]


def _unique(values: list[Any]) -> list[Any]:
    return [each for i, each in enumerate(values) if not any(equal(each, before) for before in values[:i])]


def _numbers(*values: Any) -> list[Numeric]:
    flat = _flat(list(values))
    if not all(map(is_number, flat)):
        raise ExprError(f"expected numbers, not {flat!r}")
    return flat


def _median(*values: Any) -> float:
    ordered, half = sorted(_numbers(*values)), len(_flat(list(values))) // 2
    return (ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2) if ordered else 0.0


def _length(value: Any) -> int:
    if not isinstance(value, (str, list, Mapping)):
        raise ExprError(f"invalid argument for len: {value!r}")
    return len(value)


def _round(value: Numeric) -> float:
    return float(math.floor(abs(value) + 0.5)) * (1 if value >= 0 else -1)


TYPES = {str: "string", bool: "bool", int: "int", float: "float", list: "array", dict: "map", type(None): "nil"}
BUILTINS: dict[str, Callable[..., Any]] = {
    "len": _length,
    "type": lambda v: TYPES.get(type(v), "unknown"),
    "abs": abs,
    "ceil": lambda v: float(math.ceil(v)),
    "floor": lambda v: float(math.floor(v)),
    "round": _round,
    "int": to_int,
    "float": to_float,
    "string": verb,
    "trim": lambda s, cut=None: s.strip(cut),
    "trimPrefix": lambda s, cut=" ": s.removeprefix(cut),
    "trimSuffix": lambda s, cut=" ": s.removesuffix(cut),
    "upper": str.upper,
    "lower": str.lower,
    "split": lambda s, sep, n=-1: s.split(sep, n - 1 if n > 0 else -1) if sep else list(s),
    "splitAfter": lambda s, sep: re.findall(f".*?{re.escape(sep)}|.+$", s, re.S),
    "replace": lambda s, old, new, n=-1: s.replace(old, new, n),
    "repeat": lambda s, n: s * n,
    "join": lambda values, sep="": sep.join(values),
    "indexOf": lambda s, part: s.find(part),
    "lastIndexOf": lambda s, part: s.rfind(part),
    "hasPrefix": str.startswith,
    "hasSuffix": str.endswith,
    "max": lambda *v: max(_numbers(*v)),
    "min": lambda *v: min(_numbers(*v)),
    "mean": lambda *v: sum(_numbers(*v)) / max(1, len(_numbers(*v))),
    "median": _median,
    "toJSON": lambda v: json.dumps(json.loads(dumps(v)), indent=2, ensure_ascii=False),
    "fromJSON": json.loads,
    "toBase64": lambda s: base64.b64encode(s.encode()).decode(),
    "fromBase64": lambda s: base64.b64decode(s).decode(),
    "first": lambda v: v[0] if v else None,
    "last": lambda v: v[-1] if v else None,
    "get": lambda v, key: v.get(key) if isinstance(v, Mapping) else v[key] if -len(v) <= key < len(v) else None,
    "take": lambda v, n: v[:n],
    "keys": lambda v: sorted(v),
    "values": lambda v: [v[key] for key in sorted(v)],
    "toPairs": lambda v: [[key, v[key]] for key in sorted(v)],
    "fromPairs": dict,
    "reverse": lambda v: v[::-1],
    "uniq": _unique,
    "concat": lambda *v: [each for part in v for each in part],
    "flatten": _flat,
    "sort": _sorted,
}


def _find(elements: list[Any], test: Callable[[Any, int], Any], last: bool = False) -> tuple[int, Any]:
    order = range(len(elements) - 1, -1, -1) if last else range(len(elements))
    return next(((i, elements[i]) for i in order if test(elements[i], i) is True), (-1, None))


def _group(elements: list[Any], test: Callable[[Any, int], Any]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for i, element in enumerate(elements):
        groups.setdefault(verb(test(element, i)), []).append(element)
    return groups


def _reduce(elements: list[Any], test: Callable[..., Any], *start: Any) -> Any:
    rest = list(enumerate(elements))
    accumulator = start[0] if start else rest.pop(0)[1]
    for i, element in rest:
        accumulator = test(element, i, accumulator)
    return accumulator


def _sort_by(elements: list[Any], test: Callable[[Any, int], Any]) -> list[Any]:
    keyed = [(test(element, i), element) for i, element in enumerate(elements)]
    return [each for _, each in sorted(keyed, key=cmp_to_key(lambda a, b: compare(a[0], b[0])))]


PREDICATES: dict[str, Callable[..., Any]] = {
    "all": lambda e, t: all(t(x, i) is True for i, x in enumerate(e)),
    "any": lambda e, t: any(t(x, i) is True for i, x in enumerate(e)),
    "none": lambda e, t: not any(t(x, i) is True for i, x in enumerate(e)),
    "one": lambda e, t: sum(t(x, i) is True for i, x in enumerate(e)) == 1,
    "filter": lambda e, t: [x for i, x in enumerate(e) if t(x, i) is True],
    "map": lambda e, t: [t(x, i) for i, x in enumerate(e)],
    "count": lambda e, t: sum(t(x, i) is True for i, x in enumerate(e)),
    "sum": lambda e, t: sum(_numbers(*(t(x, i) for i, x in enumerate(e)))),
    "find": lambda e, t: _find(e, t)[1],
    "findIndex": lambda e, t: _find(e, t)[0],
    "findLast": lambda e, t: _find(e, t, True)[1],
    "findLastIndex": lambda e, t: _find(e, t, True)[0],
    "groupBy": _group,
    "sortBy": _sort_by,
    "reduce": _reduce,
}


def _empty(value: Any) -> bool:
    return value is None or value is False or (is_number(value) and value == 0) or value in ("", [], {})


def _cast(value: Any) -> int:
    """sprig's toInt64: what cannot be read is 0."""
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return 0


def _date(layout: str, moment: Any) -> str:
    """sprig's date: of unix seconds, in this machine's zone; anything else, a text too, is now."""
    known = is_number(moment) and isinstance(moment, int)
    return date(layout, (datetime.fromtimestamp(moment) if known else datetime.now()).astimezone())


SPRIG: dict[str, Callable[..., Any]] = {
    "upper": str.upper,
    "lower": str.lower,
    "title": str.title,
    "trim": str.strip,
    "trimAll": lambda cut, s: s.strip(cut),
    "trimPrefix": lambda cut, s: s.removeprefix(cut),
    "trimSuffix": lambda cut, s: s.removesuffix(cut),
    "trunc": lambda n, s: s[:n] if n >= 0 else s[n:],
    "substr": lambda a, b, s: s[max(a, 0) : None if b < 0 or b > len(s) else b],
    "replace": lambda old, new, s: s.replace(old, new),
    "repeat": lambda n, s: s * n,
    "nospace": lambda s: re.sub(r"\s", "", s),
    "contains": lambda part, s: part in s,
    "hasPrefix": lambda part, s: s.startswith(part),
    "hasSuffix": lambda part, s: s.endswith(part),
    "quote": lambda *v: " ".join(json.dumps(verb(each), ensure_ascii=False) for each in v if each is not None),
    "squote": lambda *v: " ".join(f"'{verb(each)}'" for each in v if each is not None),
    "indent": lambda n, s: " " * n + s.replace("\n", "\n" + " " * n),
    "splitList": lambda sep, s: s.split(sep),
    "join": lambda sep, v: sep.join(verb(each) for each in v),
    "list": lambda *v: list(v),
    "first": lambda v: v[0] if v else None,
    "last": lambda v: v[-1] if v else None,
    "uniq": _unique,
    "reverse": lambda v: v[::-1],
    "has": lambda item, v: any(equal(item, each) for each in v),
    "default": lambda other, *v: other if not v or _empty(v[0]) else v[0],
    "empty": _empty,
    "coalesce": lambda *v: next((each for each in v if not _empty(each)), None),
    "ternary": lambda yes, no, test: yes if test else no,
    "add": lambda *v: sum(map(_cast, v)),
    "add1": lambda v: _cast(v) + 1,
    "sub": lambda a, b: _cast(a) - _cast(b),
    "mul": lambda *v: math.prod(map(_cast, v)),
    "div": lambda a, b: int(_cast(a) / _cast(b)),
    "mod": lambda a, b: int(math.fmod(_cast(a), _cast(b))),
    "max": lambda *v: max(map(_cast, v)),
    "min": lambda *v: min(map(_cast, v)),
    "atoi": lambda s: int(s) if re.fullmatch(r"[+-]?\d+", s) else 0,
    "int": _cast,
    "int64": _cast,
    "float64": lambda v: float(v) if re.fullmatch(r"[+-]?[\d.]+([eE][+-]?\d+)?", verb(v)) else 0.0,
    "date": _date,
    "toString": verb,
    "toJson": dumps,
    "fromJson": json.loads,
    "b64enc": BUILTINS["toBase64"],
    "b64dec": BUILTINS["fromBase64"],
    "sha1sum": lambda s: hashlib.sha1(s.encode()).hexdigest(),
    "sha256sum": lambda s: hashlib.sha256(s.encode()).hexdigest(),
    "regexMatch": lambda pattern, s: bool(re.search(pattern, s)),
    "regexReplaceAll": lambda pattern, s, new: re.sub(pattern, re.sub(r"\$\{?(\w+)\}?", r"\\g<\1>", new), s),
}
ARGO: dict[str, Any] = {"asInt": to_int, "asFloat": to_float, "jsonpath": jsonpath, "toJson": dumps, "sprig": SPRIG}
