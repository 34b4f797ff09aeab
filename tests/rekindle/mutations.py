"""Make wrong versions of a JSON document: each field with values of other types, without the field,
and texts that are not JSON objects."""

import json
from collections.abc import Iterator
from typing import Any

VALUES: list[Any] = [
    *(None, True, -1, 1.5, 10**30, "", "../..", "\x1b[31m\n", [], {}, ["x"], {"x": None}),
]
TEXTS = [
    *(b"", b"null", b"5", b"[]", b"{", b'"x"', b"\xff\xfe", b"\x1b[31m"),
    *(b"[" * 100_000, b'{"a":' * 10_000, b"9" * 5000),
    *(b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}', b'{"a": 1, "a": 2}', b"{}"),
]


def make_mutations(document: Any) -> Iterator[bytes]:
    """Yield the wrong versions of a document, as bytes."""
    yield from TEXTS
    for value in _change_value(document):
        yield json.dumps(value).encode()


def _change_value(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value in which one value is replaced or removed; in a list, only the
    first element."""
    yield from VALUES

    if isinstance(value, dict):
        for name, child in value.items():
            yield {other: item for other, item in value.items() if other != name}
            yield {
                (f"\x1b{name}" if other == name else other): item for other, item in value.items()
            }
            for changed_child in _change_value(child):
                yield {**value, name: changed_child}

    if isinstance(value, list) and value:
        for changed_child in _change_value(value[0]):
            yield [changed_child, *value[1:]]
