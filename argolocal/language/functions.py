"""The builtin functions and the predicates of expr-lang. The functions that Argo adds are in
sprig.py.

A workflow that calls any other function is rejected before the run (preflight.py). Source:
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


class _MemoryBudget(threading.local):
    remaining = MEMORY_BUDGET


MEMORY = _MemoryBudget()


def reserve_memory(element_count: int) -> None:
    """Subtract `element_count` elements or bytes from the memory budget of the running evaluation
    of an expression. Raises ExprError if the memory budget is exceeded."""
    MEMORY.remaining -= element_count
    if MEMORY.remaining <= 0:
        raise ExprError("memory budget exceeded")


def make_range(start: int, stop: int, step: int = 1) -> list[int]:
    """Return list(range(start, stop, step)). Raises ExprError if the list would exceed the memory
    budget."""
    numbers = range(start, stop, step) if step else range(0)
    if numbers:
        reserve_memory((numbers[-1] - numbers[0]) // step + 1)
    return list(numbers)


def remainder(left_operand: int, right_operand: int) -> int:
    """Return the remainder of a division with the sign of `left_operand`, as in Go. Raises
    ZeroDivisionError."""
    return abs(left_operand) % abs(right_operand) * (1 if left_operand >= 0 else -1)


def upper(text: str) -> str:
    """Convert each code point to upper case, as Go does: ß stays ß."""
    return "".join(
        upper_character if len(upper_character := character.upper()) == 1 else character
        for character in text
    )


def lower(text: str) -> str:
    """Convert each code point to lower case, as Go does: İ becomes i."""
    return "".join(character.lower()[0] for character in text)


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
    """Return the bytes of a string, because an index of a Go string counts bytes. Return any other
    value unchanged."""
    if isinstance(value, str):
        return value.encode()
    return value


def is_number(value: object) -> TypeGuard[Numeric]:
    """Return True if the value is a number in Go, where a bool is not a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def equal(left_operand: object, right_operand: object) -> bool:
    """Apply expr-lang's ==, which compares numbers by value, and other values by type and value."""
    if is_nil(left_operand) and is_nil(right_operand):
        return True
    if is_number(left_operand) and is_number(right_operand):
        return left_operand == right_operand
    if isinstance(left_operand, list) and isinstance(right_operand, list):
        return len(left_operand) == len(right_operand) and all(
            map(equal, left_operand, right_operand)
        )
    return type(left_operand) is type(right_operand) and left_operand == right_operand


def compare(left_operand: object, right_operand: object) -> int:
    """Return -1, 0 or 1 for two numbers or two strings. Raises ExprError."""
    if (is_number(left_operand) and is_number(right_operand)) or (
        isinstance(left_operand, str) and isinstance(right_operand, str)
    ):
        return (left_operand > right_operand) - (left_operand < right_operand)  # pyright: ignore[reportOperatorIssue]
    raise ExprError(f"cannot compare {left_operand!r} and {right_operand!r}")


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
        # reported by the ExprError below
        pass
    raise ExprError(f"invalid argument for float: {format_v(value)!r}")


def jsonpath(text: str, path: str) -> Any:
    """Return the values at `path` in a JSON text (json_path.py). Raises ExprError."""
    try:
        return json_path.select_values(_parse_json_as_go(text), path)
    except ValueError as error:
        raise ExprError(str(error)) from None


def _parse_json_as_go(text: str) -> Any:
    # Go parses all numbers of JSON into floats, unless the caller declares another type
    return parse_json(text, convert_int=float)


def slice_bytes(text: str, start: int | None, end: int | None) -> str:
    """Return text[start:end], where `start` and `end` count bytes, as in Go."""
    return text.encode()[start:end].decode(errors="replace")


def split(text: str, separator: str, max_parts: int = -1) -> list[str]:
    """Split a text as Go's SplitN does. A negative `max_parts` means no limit, and the separator ""
    splits between all characters."""
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


def _repeat(text: str, repeat_count: int) -> str:
    if repeat_count < 0:
        raise ExprError(f"expected positive integer, got {repeat_count}")
    reserve_memory(len(text.encode()) * repeat_count)
    return text * repeat_count


def _byte_index(text: str, index: int) -> int:
    """Return the index in bytes of a character's index; -1 stays -1."""
    if index > 0:
        return len(text[:index].encode())
    return index


def _unbase64(text: str) -> str:
    text = re.sub(r"[\r\n]", "", text)
    valid_prefix = re.match(r"(?:[\w+/]{4})*(?:[\w+/]{2}==|[\w+/]{3}=)?", text, re.A)
    if valid_prefix and valid_prefix.end() == len(text) and "_" not in text:
        return base64.b64decode(text).decode(errors="replace")
    prefix_end = valid_prefix.end() if valid_prefix else 0
    illegal_byte = re.search(r"[^A-Za-z0-9+/=]", text[prefix_end:])
    raise ExprError(
        "illegal base64 data at input byte"
        f" {prefix_end + (illegal_byte.start() if illegal_byte else 0)}"
    )


def _is_descending(sort_order: str) -> bool:
    if sort_order not in ("asc", "desc"):
        raise ExprError(f"invalid order {sort_order}, expected asc or desc")
    return sort_order == "desc"


def _flatten(values: list[Any]) -> list[Any]:
    return [
        nested_value
        for value in values
        for nested_value in (_flatten(value) if isinstance(value, list) else [value])
    ]


def _unique(values: list[Any]) -> list[Any]:
    return [
        value
        for index, value in enumerate(values)
        if not any(equal(value, earlier_value) for earlier_value in values[:index])
    ]


def _flatten_numbers(*values: object) -> list[Numeric]:
    numbers = _flatten(list(values))
    if not all(map(is_number, numbers)):
        raise ExprError(f"expected numbers, not {numbers!r}")
    return numbers


def _median(*values: object) -> float:
    ordered_numbers = sorted(_flatten_numbers(*values))
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


TYPE_NAMES = {str: "string", bool: "bool", int: "int", float: "float", type(None): "nil"}
TYPE_NAMES.update(dict.fromkeys((list, Nil), "array") | dict.fromkeys((dict, AnyKeyMap), "map"))
BUILTINS: dict[str, Callable[..., Any]] = {
    "len": _length,
    "type": lambda v: TYPE_NAMES.get(type(v), "unknown"),
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
    "max": lambda *v: max(_flatten_numbers(*v)),
    "min": lambda *v: min(_flatten_numbers(*v)),
    "mean": lambda *v: sum(_flatten_numbers(*v)) / max(1, len(_flatten_numbers(*v))),
    "median": _median,
    "toJSON": lambda v: dumps(v, ""),
    "fromJSON": _parse_json_as_go,
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
    elements: list[Any], predicate: Callable[[Any, int], Any], is_from_end: bool = False
) -> tuple[int | None, Any]:
    indexes = range(len(elements) - 1, -1, -1) if is_from_end else range(len(elements))
    return next(
        (
            (index, elements[index])
            for index in indexes
            if require_bool(predicate(elements[index], index))
        ),
        (None, None),
    )


def _group_by(elements: list[Any], key_function: Callable[[Any, int], Any]) -> dict[str, list[Any]]:
    groups = AnyKeyMap("[]interface {}")
    for index, element in enumerate(elements):
        groups.setdefault(key_function(element, index), []).append(element)
    return groups


def _reduce(elements: list[Any], predicate: Callable[..., Any], *initial_values: object) -> Any:
    remaining_elements = list(enumerate(elements))
    accumulator = initial_values[0] if initial_values else remaining_elements.pop(0)[1]
    for index, element in remaining_elements:
        accumulator = predicate(element, index, accumulator)
    return accumulator


def _sort_by(
    elements: list[Any], compute_key: Callable[[Any, int], Any], sort_order: str = "asc"
) -> list[Any]:
    keyed_elements = [
        (compute_key(element, index), element) for index, element in enumerate(elements)
    ]
    ordered_elements = sorted(
        keyed_elements,
        key=cmp_to_key(lambda first_pair, second_pair: compare(first_pair[0], second_pair[0])),
        reverse=_is_descending(sort_order),
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
    "sum": lambda e, t: sum(_flatten_numbers(*(t(x, i) for i, x in enumerate(e)))),
    "find": lambda e, t: _find(e, t)[1],
    "findIndex": lambda e, t: _find(e, t)[0],
    "findLast": lambda e, t: _find(e, t, True)[1],
    "findLastIndex": lambda e, t: _find(e, t, True)[0],
    "groupBy": _group_by,
    "sortBy": _sort_by,
    "reduce": _reduce,
}
