"""Make random mutations of bytes and values, which a seed determines."""

import random
from typing import Any

PIECES = [
    *(
        b"",
        b"\0",
        b"\xff" * 8,
        b"\n",
        b"\r\n\r\n",
        b"-1",
        b"0",
        b"99999999999999999999",
        b"1e999",
        b"NaN",
        b"../../x",
    ),
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
    *(
        None,
        True,
        0,
        -1,
        10**30,
        0.5,
        1e308,
        "",
        "x",
        "{{",
        "{{=1/0}}",
        "\0",
        "\x1b[2J",
        "a" * 300,
        "../x",
        [],
        {},
    ),
    *(
        [None],
        {"": ""},
        {"x": 1},
        ["x"],
        [[[[]]]],
        {"name": None},
        "9999999999h",
        "1e400",
        "\ud83d\ude00",
    ),
]


def mutate_bytes(data: bytes, rng: random.Random, other_cases: list[bytes]) -> bytes:
    """Return `data` with a few random changes: other bytes, inserted PIECES, cuts, repetitions, and
    excerpts of `other_cases`."""
    for _ in range(1 + int(rng.expovariate(0.6))):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + int(rng.expovariate(0.02)))

        match rng.randrange(7):
            case 0:
                data = data[:start] + bytes([rng.randrange(256)]) + data[start + 1 :]
            case 1:
                data = data[:start] + rng.choice(PIECES) + data[start:]
            case 2:
                data = data[:start] + rng.choice(PIECES) + data[end:]
            case 3:
                data = data[:start] + data[end:]
            case 4:
                data = data[:end] + data[start:end] * rng.randrange(4) + data[end:]
            case 5:
                other = rng.choice(other_cases)
                data = data[:start] + other[rng.randrange(len(other) + 1) :]
            case 6:
                data = data[:start]

    return data


def change(value: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value with one element replaced, removed, duplicated or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(12):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {(key + "x" if name == key else name): item for name, item in value.items()}
            case 2:
                return value | {rng.choice(list(value)): value[key]}

        return value | {key: change(value[key], rng)}

    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:index] + value[index + 1 :]
            case 1:
                return [*value, value[index]]

        return [*value[:index], change(value[index], rng), *value[index + 1 :]]

    if isinstance(value, str) and value and rng.random() < 0.5:
        return mutate_bytes(value.encode(errors="replace"), rng, [b"{{=x}}"]).decode(
            errors="replace"
        )

    return rng.choice(VALUES)
