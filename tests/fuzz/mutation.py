"""Bytes and values that nobody would send by accident, from a seeded chance."""

import random
from typing import Any

PIECES = [
    *(b"", b"\0", b"\xff" * 8, b"\n", b"\r\n\r\n", b"-1", b"0", b"99999999999999999999", b"1e999", b"NaN", b"../../x"),
    *(
        b"{{",
        b"}}",
        b"%00",
        b"%2e%2e",
        b"\x1b[2J",
        b"\xe2\x80\xae",
        b"\xed\xa0\x80",
        b"[" * 300,
        b"A" * 3000,
        b'"',
        b"\\",
    ),
]
VALUES: list[Any] = [
    *(None, True, 0, -1, 10**30, 0.5, 1e308, "", "x", "{{", "{{=1/0}}", "\0", "\x1b[2J", "a" * 300, "../x", [], {}),
    *([None], {"": ""}, {"x": 1}, ["x"], [[[[]]]], {"name": None}, "9999999999h", "1e400", "\ud83d\ude00"),
]  # fmt: skip


def mutated(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """`data` after a few changes: bytes, pieces, cuts, repetitions, parts of others."""
    for _ in range(1 + int(chance.expovariate(0.6))):
        at = chance.randrange(len(data) + 1)
        to = min(len(data), at + int(chance.expovariate(0.02)))
        match chance.randrange(7):
            case 0:
                data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + chance.choice(PIECES) + data[at:]
            case 2:
                data = data[:at] + chance.choice(PIECES) + data[to:]
            case 3:
                data = data[:at] + data[to:]
            case 4:
                data = data[:to] + data[at:to] * chance.randrange(4) + data[to:]
            case 5:
                other = chance.choice(others)
                data = data[:at] + other[chance.randrange(len(other) + 1) :]
            case 6:
                data = data[:at]
    return data


def changed(value: Any, chance: random.Random) -> Any:
    """A JSON value with one part replaced, removed, doubled or renamed. The argument stays as it is."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        match chance.randrange(12):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return {(key + "x" if name == key else name): part for name, part in value.items()}
            case 2:
                return value | {chance.choice(list(value)): value[key]}
        return value | {key: changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        match chance.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
        return [*value[:at], changed(value[at], chance), *value[at + 1 :]]
    if isinstance(value, str) and value and chance.random() < 0.5:
        return mutated(value.encode(errors="replace"), chance, [b"{{=x}}"]).decode(errors="replace")
    return chance.choice(VALUES)
