"""Fuzz the parsers of names from outside: each parser accepts a value, or raises InvalidName, but
never accepts a dangerous value."""

import random
import re
from collections.abc import Callable
from pathlib import Path

from rekindle import names
from rekindle.mlflow_api import format_condition
from rekindle.release.retention.ownership import RunMark

SEEDS = [
    "demo-x7k2p",
    "releases/fraud/0123456789ab",
    "fraud-1/prepare",
    "o'brien",
    'a"b',
    "0" * 64,
    "1",
    "..",
    "a\\",
]
PIECES = [
    "../",
    "..",
    ".",
    "/",
    "//",
    "\x00",
    "\n",
    "\x1b[31m",
    "\u202e",
    "%2e",
    "'",
    '"',
    "\\",
    "ä",
    "-",
    " ",
    "A",
    "9",
]
KINDS = [
    names.RunName,
    names.ObjectName,
    names.PathName,
    names.ModelName,
    names.Version,
    names.TaskName,
    names.ArtifactKey,
    names.TaskReference,
    names.ObjectId,
    names.Digest,
]


def names_from_outside(_folder: Path) -> Callable[[random.Random], None]:
    """Return a case that parses a random text as each kind of name, and as the mark of a run in the
    object store."""

    def case(chance: random.Random) -> None:
        text = chance.choice(SEEDS)
        for _ in range(chance.randrange(4)):
            insert_position = chance.randrange(len(text) + 1)
            text = text[:insert_position] + chance.choice(PIECES) + text[insert_position:]

        for kind in KINDS:
            name = kind.parse_or_none(text)
            if name is not None:
                assert kind(text) == name == text
                assert not re.search("[\x00-\x1f\x7f-\x9f\u202e]", text), (kind, text)
                assert ".." not in text.split("/"), (kind, text)
                assert not text.startswith("/"), (kind, text)
                assert Path("/home/runs", text).resolve().is_relative_to("/home/runs"), (kind, text)

        assert "\x1b" not in names.format_untrusted(text)
        assert "\n" not in names.format_untrusted(text)
        value = format_condition("name", text).partition(" ")[2].partition(" ")[2]
        assert value[0] == value[-1], value
        assert value[0] not in value[1:-1], value
        run = names.RunName("payments")
        mark = RunMark(store="s", pipeline="p", number=1, tasks=["train"])
        assert not mark.owns(run, text)
        assert not mark.owns(run, f"payments/{text}")

    return case
