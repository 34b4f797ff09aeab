"""YAML and JSON that would take too much time or memory is rejected quickly, with one sentence."""

import re
import resource
import subprocess
import sys
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.language.yaml_text import MAX_VALUES, parse, parse_one

REKINDLE = str(Path(sys.executable).with_name("rekindle"))


def make_alias_chain(start: str, form: str) -> str:
    """Return YAML with anchors, each of which repeats the previous anchor nine times."""
    lines = [
        f"a{number}: &a{number} {form.format(', '.join([f'*a{number - 1}'] * 9))}"
        for number in range(1, 12)
    ]
    return "\n".join([f"a0: &a0 {start}", *lines])


BOMBS = {
    "merge keys": (
        make_alias_chain("{x: 1}", "{{<<: [{}]}}"),
        "200,000 values with all its aliases",
    ),
    "a key of aliases": ("a: &a [x]\n? *a\n: 1\n", "a key is a list or a mapping"),
    "aliases": (make_alias_chain("[x]", "[{}]"), "200,000 values with all its aliases"),
    "aliases of a long text": (
        make_alias_chain("x" * 100_000, "[{}]"),
        "10,000,000 characters with all its aliases",
    ),
    "an alias of itself": ("a: &a {<<: *a}\n", "*a contains itself"),
    "lists": ("[" * 100_000, "more than 100 levels deep"),
    "mappings": ("{a: " * 100_000, "more than 100 levels deep"),
    "list items": ("- " * 100_000, "more than 100 levels deep"),
    "JSON objects": ('{"a": ' * 100_000, "more than 100 levels deep"),
    "JSON lists": ('{"a": ' + "[" * 500 + "]" * 500 + "}", "more than 100 levels deep"),
    "keys of keys": ("? " * 100_000, "a key is a list or a mapping"),
    "hex digits": ("name: 0x" + "f" * 10**6, "a number has 1,000,002 characters"),
    "digits": ("name: " + "9" * 10**6, "a number has 1,000,000 characters"),
    "JSON digits": ('{"name": ' + "9" * 10**6 + "}", "a number has 1,000,000 characters"),
    "base 60": ("name: !!int 1" + ":1" * 500_000, "a number has 1,000,001 characters"),
    "base 60 elsewhere": ("name: 1" + ":1" * 500_000, "a number has 1,000,001 characters"),
    "not a number": ("name: !!int ''", "a number is expected (line 1, column 7)"),
    "not a time": ("name: !!timestamp x", "the tag 'tag:yaml.org,2002:timestamp'"),
    "documents": ("--- a\n" * 300_000, "more than 1,000 documents"),
    "values": ("[" + "[]," * 10**6 + "]", f"{MAX_VALUES:,} values"),
    "a long key": ("? " + "k" * 10**6 + "\n: 1\n", "a key has 1,000,000 characters"),
    "a long text": ("a: " + "k" * 10**7, "more than 10,000,000 characters"),
    "directives": (
        "".join(islice((f"%TAG !a{n}! tag:x\n" for n in count()), 10**5)) + "--- {}\n",
        "begin with %",
    ),
    "a control character": (
        "a: b\nname: \a",
        r"the character '\x07' is not allowed: remove it (line 2, column 7)",
    ),
    "a key twice": (
        '{"a": 1, "a": 2}',
        'the key "a" is duplicated: remove one (line 1, column 10)',
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_a_yaml_bomb_is_rejected_in_one_line_with_the_limit_and_position(name: str):
    text, words = BOMBS[name]
    with pytest.raises(ConfigError) as caught:
        parse(text, "a.yaml")
    message = str(caught.value)
    assert message.startswith("a.yaml ")
    assert words in message
    assert "\n" not in message
    assert len(message) < 300
    assert "line " in message or name in ("a long text", "directives")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("command", "name"),
    [
        *[
            ("config", "merge keys"),
            ("lint", "lists"),
            ("render", "hex digits"),
            ("run", "documents"),
        ],
        *[("lint --manifest", "base 60"), ("run --manifest", "directives")],
    ],
)
def test_a_yaml_bomb_does_not_hang_or_crash_a_command(tmp_path: Path, command: str, name: str):
    text, words = BOMBS[name]
    (tmp_path / "a.yaml").write_text(text)
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (20, 20))  # noqa: E731

    result = subprocess.run(
        [REKINDLE, *command.split(), "a.yaml"],
        cwd=tmp_path,
        preexec_fn=limit,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 2, result.stderr[-2000:]
    assert words in result.stderr, result.stderr[-2000:]
    assert result.stderr.count("\n") == 1, result.stderr[-2000:]


@pytest.mark.parametrize(
    "text, value",
    [
        ("a: [1, 0x1f, 017, 0b11, 1e3, .5, y]", [1, 31, 15, 3, 1000.0, 0.5, True]),
        ("a: [1:30, 2020-01-01, '', ~]", ["1:30", "2020-01-01", "", None]),
        ("a: " + "9" * 100, int("9" * 100)),
        ("a: '" + "9" * 1000 + "'", "9" * 1000),
        ("a: " + "7e" * 64, "7e" * 64),
        ("a: =", "="),
        ("b: &b {x: 1, z: 2}\na: {<<: *b, x: 3}", {"x": 3, "z": 2}),
        ("a: {c: &c {<<: {x: 1}, x: 2}, <<: *c}", {"c": {"x": 2}, "x": 2}),
        ("a: " + "[" * 90 + "]" * 90, None),
        ('{"a": "\\ud83d\\ude00\\/"}', "😀/"),
    ],
)
def test_ordinary_texts_are_parsed(text: str, value: Any):
    document = parse_one(text, "a.yaml")
    assert value is None or document["a"] == value


def test_parse_one_rejects_two_documents():
    with pytest.raises(ConfigError, match=r"a\.yaml has 2 documents: it must have one"):
        parse_one("a: 1\n---\nb: 1\n", "a.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spec:\n  items: [1, .nan]", "a.yaml: spec.items[1] is nan: it must be a finite number."),
        ("spec: {limit: -.inf}", "a.yaml: spec.limit is -inf: it must be a finite number."),
        ('{"spec": {"limit": 1e999}}', "spec.limit is inf: it must be a finite number"),
    ],
)
def test_a_number_that_json_does_not_have_is_refused_by_its_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(text, "a.yaml")
