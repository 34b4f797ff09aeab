"""Fuzz the parsers of YAML, JSON and expressions with short texts that take long to parse: such a
text must be rejected with one short error."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from argolocal.language import expr
from argolocal.language.functions import ExprError
from argolocal.language.govaluate import WhenError, should_execute
from argolocal.language.yaml_text import parse
from argolocal.manifest.read import parse_objects
from argolocal.validate import lint
from rekindle.errors import ConfigError
from tests.fuzz.mutation import mutate_bytes

Case = Callable[[random.Random], None]
OPENING_TEXTS = ["[", "{a: ", '{"a":', "- ", "? ", "[{b: ", "- - ? ", "&a [", "!!map {x: "]
DIGITS = ["9", "f", "1", "7", ":1", "_", "9.", "e1"]
START_TEXTS = [
    "",
    "-",
    "0x",
    "0b",
    "0o",
    "0",
    "1",
    ".",
    "1e",
    "!!int 1",
    "!!float 1",
    "!!timestamp 2020-01-01T00:00:00.",
]
LINES = [
    "---\n",
    "--- a\n",
    "%TAG !a{0}! tag:x\n",
    "&a{0} b: *a{0}\n",
    "a{0}: !x{0} y\n",
    "#\n",
    "- |\n",
    "<<: {{a{0}: 1}}\n",
]
EXPRESSIONS = [
    "(",
    "!",
    "-",
    "a.",
    "1+",
    "[",
    "{{",
    "{{=",
    "a?.",
    "9",
    "'",
    "\\",
    "a ",
    "1 << ",
    "0x",
    "not ",
    "? ",
    "b://",
]


def make_aliases(rng: random.Random) -> str:
    """Return YAML anchors, each of which refers to the previous anchor several times."""
    count = rng.randrange(2, 12)
    form = rng.choice(["{{<<: [{0}]}}", "[{0}]", "{{x: [{0}]}}", "{{? [{0}] : 1}}", "{{<<: {1}}}"])
    lines = [f"a0: &a0 {rng.choice(['{x: 1}', '[1]', 'x' * rng.randrange(100_000)])}"]
    for number in range(1, rng.randrange(2, 14)):
        above = f"*a{number - 1 if rng.random() < 0.95 else rng.randrange(number + 2)}"
        lines.append(f"a{number}: &a{number} {form.format(', '.join([above] * count), above)}")
    return "\n".join([*lines, ""])


def make_expensive_text(rng: random.Random) -> str:
    """Return a text with many levels, digits, documents, aliases, characters or keys."""
    repetitions = int(10 ** rng.uniform(0, 5.3))

    match rng.randrange(7):
        case 0:
            return rng.choice(["", "a: ", "a: &a\n  "]) + rng.choice(OPENING_TEXTS) * repetitions
        case 1:
            return f"name: {rng.choice(START_TEXTS)}{rng.choice(DIGITS) * repetitions}\n"
        case 2:
            line = rng.choice(LINES)
            return "".join(line.format(number) for number in range(repetitions // len(line)))
        case 3:
            return make_aliases(rng)
        case 4:
            return (
                json.dumps({"name": "x"})[:-1]
                + ', "a": '
                + rng.choice([*"[9-", '{"a":', '"\\', "[1,"]) * repetitions
            )
        case 5:
            return f"? {'k' * repetitions}\n: 1\n"

    return (
        "a: "
        + "[" * (level_count := min(repetitions, 150))
        + "]" * level_count
        + f"\nb: {'x' * repetitions}\n"
    )


def yaml_texts(folder: Path) -> Case:
    """Parse and lint texts of configs and manifests."""
    texts = [
        b"a: &a {x: 1}\nb: {<<: *a, y: [0x1f, 1e3, .inf, y, ~, '']}\n",
        b"--- |\n  a\n--- >\n  b\n...\n",
        b'{"a": [1, "\\u00e9"]}',
    ]

    def case(rng: random.Random) -> None:
        text = make_expensive_text(rng)
        if rng.random() < 0.3:
            text = mutate_bytes(rng.choice([text[:5000].encode(), *texts]), rng, texts).decode(
                errors="replace"
            )

        with suppress(ConfigError):
            try:
                json.dumps(parse(text, "a file"))
                for manifest in parse_objects(text):
                    lint(manifest)
            except ConfigError as error:
                assert len(str(error)) < 1000, error
                assert "\n" not in str(error), error
                raise

    return case


def expressions(folder: Path) -> Case:
    """Evaluate tags, expressions and conditions of a manifest."""

    def case(rng: random.Random) -> None:
        pieces = [
            rng.choice(EXPRESSIONS) * int(10 ** rng.uniform(0, 4.5))
            for _ in range(rng.randrange(1, 4))
        ]
        source = "".join(pieces) + rng.choice(["", "1", "}}", "1)", " == 1", ")" * len(pieces[0])])

        container = {
            "image": "x",
            "args": [source, f"{{{{={source}}}}}", f"--{source}"],
            "env": [{"name": "A", "value": source}],
        }

        patch: Any = {"podSpecPatch": source} if rng.random() < 0.3 else {}
        step = {"name": "a", "template": "b", "when": source, "withParam": source}
        templates = [
            {"name": "b", "container": container, **patch},
            {"name": "a", "steps": [[step]]},
        ]

        lint(
            {
                "apiVersion": "argoproj.io/v1alpha1",
                "kind": "Workflow",
                "metadata": {"generateName": "a-"},
                "spec": {"entrypoint": "a", "templates": templates},
            }
        )

        with suppress(WhenError):
            should_execute(source)

        with suppress(ExprError):
            expr.find_calls(source)

        with suppress(ExprError):
            expr.evaluate(source, {"a": {"b": 1}})

    return case
