"""JSON documents from outside, and the records that this program keeps as JSON files.

loads(data)                 # a JSON value; raises ValueError with the rule that the text violates
read_object(path)           # the JSON object in a file; raises InvalidDocument with the name of the file
"""

import json
import math
from pathlib import Path
from typing import Any

from argolocal.common.files import read_regular
from argolocal.common.names import show
from argolocal.errors import InvalidDocument

MAX_BYTES = 256 << 20
MAX_DIGITS = 100  # length of a whole number
MAX_DEPTH = 100  # number of nested lists and objects


def loads(data: bytes | str) -> Any:
    """Return the value of a JSON text, which each JSON parser reads alike. Raises ValueError.

    Duplicate keys, halves of surrogate pairs, deep nesting and numbers that are not finite are errors.
    """
    text = data.decode() if isinstance(data, bytes) else data
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except RecursionError:
        raise ValueError(f"it has more than {MAX_DEPTH} nested values") from None
    _check(value)
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError, InvalidDocument."""
    try:
        value = loads(read_regular(path, MAX_BYTES))
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}, and must be an object")
    except ValueError as error:
        raise malformed(path, error) from None
    return value


def malformed(path: Path, error: Exception) -> InvalidDocument:
    """Return the error for a file whose content has another structure than expected."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else error
    return InvalidDocument(f"{path} is malformed ({reason}): restore the file, or remove it.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {show(repeated)} occurs twice")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text):,} digits, and at most {MAX_DIGITS} are read")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{show(text)} is not a finite number")
    return number


def _check(value: Any) -> None:
    """Raise ValueError for deep nesting, and for texts that are not Unicode."""
    rest = [(value, 1)]
    while rest:
        item, depth = rest.pop()
        if isinstance(item, str):
            item.encode()
        elif isinstance(item, list | dict):
            if depth > MAX_DEPTH:
                raise ValueError(f"it has more than {MAX_DEPTH} nested values")
            children = item if isinstance(item, list) else [*item.keys(), *item.values()]
            rest += [(child, depth + 1) for child in children]
