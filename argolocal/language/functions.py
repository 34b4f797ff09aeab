"""The builtins and predicates of expr-lang. Argo's own functions are in sprig.py.

preflight.py rejects workflows that call a function that neither module defines. Source:
expr-lang/expr v1.17 builtin, vm.
"""

import base64
import math
import re
import threading
from collections.abc import Callable, Mapping
from functools import cmp_to_key
from typing import Any, TypeGuard

from argolocal.errors import NodeError
from argolocal.language import json_path
from argolocal.language.gofmt import AnyKeyMap, Nil, dumps, format_v, int64, parse_json

Numeric = int | float
# maximum number of elements and bytes that one evaluation may allocate, as in expr-lang
MEMORY_BUDGET = 1_000_000


class ExprError(NodeError):
    """The expression cannot be parsed or evaluated."""


class _Memory(threading.local):
    remaining = MEMORY_BUDGET


MEMORY = _Memory()


def reserve_memory(size: int) -> None:
    """Subtract `size` elements or bytes from the memory budget of this evaluation. Raises ExprError
    if the budget is exceeded."""
    MEMORY.remaining -= size
    if MEMORY.remaining <= 0:
        raise ExprError("memory budget exceeded")


def series(start: int, stop: int, step: int = 1) -> list[int]:
    """Return list(range(start, stop, step)). Raises ExprError if the list would exceed the memory
    budget."""
    numbers = range(start, stop, step) if step else range(0)
    if numbers:
        reserve_memory((numbers[-1] - numbers[0]) // step + 1)
    return list(numbers)


def remainder(lhs: int, rhs: int) -> int:
    """Return lhs % rhs with the sign of `lhs`, as in Go. Raises ZeroDivisionError."""
    return abs(lhs) % abs(rhs) * (1 if lhs >= 0 else -1)


def upper(text: str) -> str:
    """Convert each code point to upper case, as Go does: ß stays ß."""
    return "".join(new if len(new := char.upper()) == 1 else char for char in text)


def lower(text: str) -> str:
    """Convert each code point to lower case, as Go does: İ becomes i."""
    return "".join(char.lower()[0] for char in text)


def is_nil(value: object) -> bool:
    return value is None or isinstance(value, Nil)


def require_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ExprError(f"expected a bool but found {value!r}")
    return value


def require_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ExprError(f"expected a list but found {value!r}")
    return value


def as_indexable(value: object) -> Any:
    """Return a string as bytes, because Go indexes the bytes of a string. Return any other value
    unchanged."""
    if isinstance(value, str):
        return value.encode()
    return value


def is_number(value: object) -> TypeGuard[Numeric]:
    """Return True if the value is a number in Go, where a bool is not a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def equal(lhs: object, rhs: object) -> bool:
    """Apply expr-lang's ==, which compares numbers by value, and other values by type and value."""
    if is_nil(lhs) and is_nil(rhs):
        return True
    if is_number(lhs) and is_number(rhs):
        return lhs == rhs
    if isinstance(lhs, list) and isinstance(rhs, list):
        return len(lhs) == len(rhs) and all(map(equal, lhs, rhs))
    return type(lhs) is type(rhs) and lhs == rhs


def compare(lhs: object, rhs: object) -> int:
    """Return -1, 0 or 1 for two numbers or two strings. Raises ExprError."""
    if (is_number(lhs) and is_number(rhs)) or (isinstance(lhs, str) and isinstance(rhs, str)):
        return (lhs > rhs) - (lhs < rhs)  # pyright: ignore[reportOperatorIssue]
    raise ExprError(f"cannot compare {lhs!r} and {rhs!r}")


def to_int(value: object) -> int:
    if is_number(value):
        return int64(value)
    if (
        isinstance(value, str)
        and re.fullmatch(r"[+-]?\d+", value)
        and int64(int(value)) == int(value)
    ):
        return int(value)
    raise ExprError(f"invalid argument for int: {format_v(value)!r}")


def to_float(value: object) -> float:
    if is_number(value):
        return float(value)
    try:
        if isinstance(value, str) and value == value.strip():
            return float(value)
    except ValueError:
        pass  # the error is reported below
    raise ExprError(f"invalid argument for float: {format_v(value)!r}")


def jsonpath(text: str, path: str) -> Any:
    """Return the values at `path` in a JSON text (json_path.py). Raises ExprError."""
    try:
        return json_path.select(_loads(text), path)
    except ValueError as error:
        raise ExprError(str(error)) from None


def _loads(text: str) -> Any:
    # Go parses a JSON number into a float unless a type is declared
    return parse_json(text, convert_int=float)


def slice_bytes(text: str, start: int | None, end: int | None) -> str:
    """Return text[start:end], where `start` and `end` count bytes, as in Go."""
    return text.encode()[start:end].decode(errors="replace")


def split(text: str, separator: str, max_parts: int = -1) -> list[str]:
    """Apply Go's SplitN. A negative `max_parts` means no limit, and the separator "" splits between
    all characters."""
    if max_parts == 0:
        return Nil()
    if separator:
        return text.split(separator, max(max_parts - 1, -1))
    if max_parts < 0:
        return list(text)
    return [piece for piece in (*text[: max_parts - 1], text[max_parts - 1 :]) if piece]


def _split_after(text: str, separator: str, max_parts: int = -1) -> list[str]:
    parts = split(text, separator, max_parts)
    if parts:
        return [*(piece + separator for piece in parts[:-1]), parts[-1]]
    return parts


def concat(*values: object) -> list[Any]:
    return [element for value in values for element in require_list(value)] or Nil()


def _get(values: Any, key: Any) -> Any:
    if isinstance(values, Mapping):
        return values.get(key)
    elements = as_indexable(values)
    if -len(elements) <= key < len(elements):
        return elements[key]
    return None


def _take(values: object, count: int) -> list[Any]:
    if count < 0:
        raise ExprError("slice index out of bounds")
    return require_list(values)[:count]


def _repeat(text: str, times: int) -> str:
    if times < 0:
        raise ExprError(f"expected positive integer, got {times}")
    reserve_memory(len(text.encode()) * times)
    return text * times


def _byte_index(text: str, index: int) -> int:
    if index > 0:
        return len(text[:index].encode())
    return index


def _unbase64(text: str) -> str:
    text = re.sub(r"[\r\n]", "", text)
    valid_prefix = re.match(r"(?:[\w+/]{4})*(?:[\w+/]{2}==|[\w+/]{3}=)?", text, re.A)
    if valid_prefix and valid_prefix.end() == len(text) and "_" not in text:
        return base64.b64decode(text).decode(errors="replace")
    end = valid_prefix.end() if valid_prefix else 0
    illegal_byte = re.search(r"[^A-Za-z0-9+/=]", text[end:])
    raise ExprError(
        f"illegal base64 data at input byte {end + (illegal_byte.start() if illegal_byte else 0)}"
    )


def _is_descending(order: str) -> bool:
    if order not in ("asc", "desc"):
        raise ExprError(f"invalid order {order}, expected asc or desc")
    return order == "desc"


def _flatten(values: list[Any]) -> list[Any]:
    return [
        inner
        for value in values
        for inner in (_flatten(value) if isinstance(value, list) else [value])
    ]


def _unique(values: list[Any]) -> list[Any]:
    return [
        value
        for i, value in enumerate(values)
        if not any(equal(value, earlier) for earlier in values[:i])
    ]


def _numbers(*values: object) -> list[Numeric]:
    numbers = _flatten(list(values))
    if not all(map(is_number, numbers)):
        raise ExprError(f"expected numbers, not {numbers!r}")
    return numbers


def _median(*values: object) -> float:
    ordered_numbers = sorted(_numbers(*values))
    middle = len(_flatten(list(values))) // 2
    if ordered_numbers:
        if len(ordered_numbers) % 2:
            return ordered_numbers[middle]
        return (ordered_numbers[middle - 1] + ordered_numbers[middle]) / 2
    return 0.0


def _length(value: object) -> int:
    if not isinstance(value, (str, list, Mapping)):
        raise ExprError(f"invalid argument for len: {value!r}")
    return len(value)


TYPES = {str: "string", bool: "bool", int: "int", float: "float", type(None): "nil"}
TYPES.update(dict.fromkeys((list, Nil), "array") | dict.fromkeys((dict, AnyKeyMap), "map"))
BUILTINS: dict[str, Callable[..., Any]] = {
    "len": _length,
    "type": lambda v: TYPES.get(type(v), "unknown"),
    "abs": abs,
    "ceil": lambda v: float(math.ceil(v)),
    "floor": lambda v: float(math.floor(v)),
    "round": lambda v: float(math.floor(abs(v) + 0.5)) * (1 if v >= 0 else -1),
    "int": to_int,
    "float": to_float,
    "string": format_v,
    "trim": lambda s, cut=None: s.strip(cut),
    "trimPrefix": lambda s, cut=" ": s.removeprefix(cut),
    "trimSuffix": lambda s, cut=" ": s.removesuffix(cut),
    "upper": upper,
    "lower": lower,
    "split": split,
    "splitAfter": _split_after,
    "replace": lambda s, old, new, n=-1: s.replace(old, new, n),
    "repeat": _repeat,
    "join": lambda values, sep="": sep.join(values),
    "indexOf": lambda s, substring: _byte_index(s, s.find(substring)),
    "lastIndexOf": lambda s, substring: _byte_index(s, s.rfind(substring)),
    "hasPrefix": str.startswith,
    "hasSuffix": str.endswith,
    "max": lambda *v: max(_numbers(*v)),
    "min": lambda *v: min(_numbers(*v)),
    "mean": lambda *v: sum(_numbers(*v)) / max(1, len(_numbers(*v))),
    "median": _median,
    "toJSON": lambda v: dumps(v, ""),
    "fromJSON": _loads,
    "toBase64": lambda s: base64.b64encode(s.encode()).decode(),
    "fromBase64": _unbase64,
    "first": lambda v: as_indexable(v)[0] if v else None,
    "last": lambda v: as_indexable(v)[-1] if v else None,
    "get": _get,
    "take": _take,
    "keys": lambda v: sorted(v),
    "values": lambda v: [v[key] for key in sorted(v)],
    "toPairs": lambda v: [[key, v[key]] for key in sorted(v)],
    "fromPairs": lambda pairs: AnyKeyMap("interface {}", pairs),
    "reverse": lambda v: require_list(v)[::-1],
    "uniq": _unique,
    "concat": lambda first, *v: concat(first, *v),
    "flatten": _flatten,
    "sort": lambda v, order="asc": sorted(
        v, key=cmp_to_key(compare), reverse=_is_descending(order)
    ),
}


def _find(
    elements: list[Any], test: Callable[[Any, int], Any], from_end: bool = False
) -> tuple[int | None, Any]:
    order = range(len(elements) - 1, -1, -1) if from_end else range(len(elements))
    return next(
        ((i, elements[i]) for i in order if require_bool(test(elements[i], i))), (None, None)
    )


def _group(elements: list[Any], key_function: Callable[[Any, int], Any]) -> dict[str, list[Any]]:
    groups = AnyKeyMap("[]interface {}")
    for i, element in enumerate(elements):
        groups.setdefault(key_function(element, i), []).append(element)
    return groups


def _reduce(elements: list[Any], test: Callable[..., Any], *start: object) -> Any:
    remaining_elements = list(enumerate(elements))
    accumulator = start[0] if start else remaining_elements.pop(0)[1]
    for i, element in remaining_elements:
        accumulator = test(element, i, accumulator)
    return accumulator


def _sort_by(elements: list[Any], test: Callable[[Any, int], Any], order: str = "asc") -> list[Any]:
    keyed_elements = [(test(element, i), element) for i, element in enumerate(elements)]
    ordered_elements = sorted(
        keyed_elements,
        key=cmp_to_key(lambda a, b: compare(a[0], b[0])),
        reverse=_is_descending(order),
    )
    return [value for _, value in ordered_elements]


PREDICATES: dict[str, Callable[..., Any]] = {
    "all": lambda e, t: all(require_bool(t(x, i)) for i, x in enumerate(e)),
    "any": lambda e, t: any(require_bool(t(x, i)) for i, x in enumerate(e)),
    "none": lambda e, t: not any(require_bool(t(x, i)) for i, x in enumerate(e)),
    "one": lambda e, t: sum(require_bool(t(x, i)) for i, x in enumerate(e)) == 1,
    "filter": lambda e, t: [x for i, x in enumerate(e) if require_bool(t(x, i))],
    "map": lambda e, t: [t(x, i) for i, x in enumerate(e)],
    "count": lambda e, t: sum(require_bool(t(x, i)) for i, x in enumerate(e)),
    "sum": lambda e, t: sum(_numbers(*(t(x, i) for i, x in enumerate(e)))),
    "find": lambda e, t: _find(e, t)[1],
    "findIndex": lambda e, t: _find(e, t)[0],
    "findLast": lambda e, t: _find(e, t, True)[1],
    "findLastIndex": lambda e, t: _find(e, t, True)[0],
    "groupBy": _group,
    "sortBy": _sort_by,
    "reduce": _reduce,
}
