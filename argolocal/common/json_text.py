"""Write and read JSON that has the same value in every parser.

    to_json(value)       # raises ValueError that names the location of a NaN or infinity
    loads(data)          # parses JSON from outside; raises ValueError that names the violated rule
    read_object(path)    # the JSON object in a file; raises InvalidDocument that names the file

Python's module `json` accepts NaN, infinity and duplicate keys.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from argolocal.common.checked_names import format_untrusted
from argolocal.common.files import read_regular_file
from argolocal.common.wording import shorten
from argolocal.errors import InvalidDocument

# path to a value: the keys and indices that lead to it from the outermost value
ValuePath = tuple[str | int, ...]
MAX_BYTES = 256 << 20
# maximum number of digits of an integer
MAX_DIGITS = 100
# maximum depth of nested lists and objects
MAX_DEPTH = 100


def to_json(
    value: object,
    *,
    indent: int | None = None,
    sort_keys: bool = False,
    separators: tuple[str, str] | None = None,
    ensure_ascii: bool = True,
    default: Callable[[Any], object] | None = None,
) -> str:
    """Format a value as JSON. Raises TypeError, and ValueError that names the location of a NaN or
    infinity."""
    try:
        return json.dumps(
            value,
            indent=indent,
            sort_keys=sort_keys,
            separators=separators,
            ensure_ascii=ensure_ascii,
            default=default,
            allow_nan=False,
        )
    except ValueError as error:
        raise ValueError(describe_non_finite(value) or str(error)) from error


def replace_nan(value: Any) -> Any:
    """Return a copy of a JSON value with each NaN and infinity replaced by None."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    if isinstance(value, dict):
        return {key: replace_nan(child_value) for key, child_value in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nan(child_value) for child_value in value]
    return value


def describe_non_finite(value: object) -> str:
    """Return the value and location of the first NaN or infinity in a JSON value; "" if all numbers
    are finite."""
    try:
        for number_path, number in find_numbers(value):
            if isinstance(number, float) and not math.isfinite(number):
                return (
                    f"{format_path(number_path) or 'the value'} is {number}: it must be a finite"
                    " number"
                )
    except RecursionError:  # a RecursionError means that the value contains itself
        pass
    return ""


def find_numbers(value: object, path: ValuePath = ()) -> Iterator[tuple[ValuePath, int | float]]:
    """Yield (path, number) for all numbers in a JSON value."""
    if isinstance(value, (int, float)):
        yield path, value
    elif isinstance(value, dict):
        for key, child_value in value.items():
            yield from find_numbers(child_value, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, child_value in enumerate(value):
            yield from find_numbers(child_value, (*path, index))


def format_path(path: ValuePath) -> str:
    """Format a location in a JSON value, such as `instances[3].amount`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return shorten(text.removeprefix("."))


def loads(json_document: bytes | str) -> Any:
    """Parse a JSON text. Raises ValueError for a text that other parsers may reject or read
    differently: duplicate keys, lone surrogates, deep nesting, long integers, NaN and infinity."""
    text = json_document.decode() if isinstance(json_document, bytes) else json_document

    try:
        parsed_value = json.loads(
            text,
            object_pairs_hook=_reject_duplicate_keys,
            parse_int=_parse_integer,
            parse_float=_parse_float,
            parse_constant=_parse_float,
        )
    except RecursionError:
        raise ValueError(f"it has more than {MAX_DEPTH} nested values") from None

    _reject_unsafe_values(parsed_value)
    return parsed_value


def loads_finite(json_document: bytes | str) -> Any:
    """Parse a JSON text that `to_json` has written. Raises ValueError for invalid JSON, NaN and
    infinity. `loads_finite` is much faster than `loads`, and also accepts lone surrogates."""
    if isinstance(json_document, bytes):
        json_document = json_document.decode(errors="surrogatepass")
    return FINITE_DECODER.decode(json_document)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError if the file cannot be read, and
    InvalidDocument if its content is not a JSON object."""
    try:
        json_object = loads(read_regular_file(path, MAX_BYTES))
        if not isinstance(json_object, dict):
            raise ValueError(f"it is a {type(json_object).__name__}, and must be an object")
    except ValueError as error:
        raise make_malformed_error(path, error) from None
    return json_object


def make_malformed_error(path: Path, error: Exception) -> InvalidDocument:
    """Return the exception to raise for a file whose content is invalid. `error`: the exception
    that states why the content is invalid."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else error
    return InvalidDocument(f"{path} is malformed ({reason}): restore the file, or remove it.")


def _reject_duplicate_keys(key_value_pairs: list[tuple[str, object]]) -> dict[str, object]:
    object_fields = dict(key_value_pairs)
    if len(object_fields) < len(key_value_pairs):
        key_counts = Counter(key for key, _ in key_value_pairs)
        repeated_key = next(key for key, count in key_counts.items() if count > 1)
        raise ValueError(f"the key {format_untrusted(repeated_key)} occurs twice")
    return object_fields


def _parse_integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text):,} digits, and at most {MAX_DIGITS} are read")
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{format_untrusted(text)} is not a finite number")
    return number


FINITE_DECODER = json.JSONDecoder(parse_float=_parse_float, parse_constant=_parse_float)


def _reject_unsafe_values(value: object) -> None:
    """Raise ValueError for deep nesting and for lone surrogates."""
    unchecked_values = [(value, 1)]
    while unchecked_values:
        checked_value, depth = unchecked_values.pop()
        if isinstance(checked_value, str):
            # raises ValueError for a lone surrogate
            checked_value.encode()
        elif isinstance(checked_value, list | dict):
            if depth > MAX_DEPTH:
                raise ValueError(f"it has more than {MAX_DEPTH} nested values")

            if isinstance(checked_value, list):
                children = checked_value
            else:
                children = [*checked_value.keys(), *checked_value.values()]

            # numbers are not checked one by one, since a list may have millions of them
            unchecked_values += [
                (child, depth + 1) for child in children if isinstance(child, str | list | dict)
            ]
