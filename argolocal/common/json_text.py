"""JSON that every parser reads: Python's own writer and parser accept NaN and infinity, which are not JSON."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from argolocal.common.wording import shorten

Path = tuple[str | int, ...]


def to_json(
    value: Any,
    *,
    indent: int | None = None,
    sort_keys: bool = False,
    separators: tuple[str, str] | None = None,
    ensure_ascii: bool = True,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """Format a value as JSON. Raises ValueError that locates a NaN or an infinity; TypeError for another type."""
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
        raise ValueError(describe_not_finite(value) or str(error)) from error


def without_nan(value: Any) -> Any:
    """Replace each NaN and infinity in a JSON value by None, which states that the number is unknown."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


def describe_not_finite(value: Any) -> str:
    """Name the first number in a JSON value that is NaN or infinite; "" if all numbers are finite."""
    try:
        for path, number in numbers(value):
            if isinstance(number, float) and not math.isfinite(number):
                return f"{format_path(path) or 'the value'} is {number}: it must be a finite number"
    except RecursionError:  # the value contains itself
        pass
    return ""


def numbers(value: Any, path: Path = ()) -> Iterator[tuple[Path, int | float]]:
    """Yield (path, number) for all numbers in a JSON value."""
    if isinstance(value, (int, float)):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from numbers(inner, (*path, index))


def format_path(path: Path) -> str:
    """Format a location in a JSON value: `instances[3].amount`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return shorten(text.removeprefix("."))
