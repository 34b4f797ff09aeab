"""Count phrases that make prose hard to read, in docstrings, comments, messages, names of tests,
and pages.

python -m tests.english                           # a table by subpackage and page
python -m tests.english rekindle/cache            # every hit in some files
python -m tests.english --names rekindle/cache    # every name that does not say what its value is
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.syntax import list_nodes

ROOT = Path(__file__).parent.parent
CODE = ("argolocal", "rekindle", "steps", "pipelines", "template", "benchmarks", "tests")
# each phrase is good English if it is rare, but tiring if it is frequent
PATTERNS = {
    "what + verb as a noun": (
        r"what(?:ever)? (?!if\b|to\b|kind\b|happen|change|fail)(?:\w+)(?![^.]*\?)"
    ),
    "is no, has none": r"(?:is|are|was|were|has|have|had|takes?|gives?|gets?|makes?) (?:no|none)\b",
    "those of, one that": (
        r"(?:those (?:of|that|which|who)|that of|ones? (?:that|which|who|whose)|none (?:of|that))"
    ),
    "beside, anew": r"(?:beside|anew|meanwhile)",
    "is there, is away": (
        r"(?:(?:is|are|was|were) (?:there|away)(?! (?:a|an|any|no|is|are|was)\b)|any ?more)"
    ),
    "preposition + which": (
        r"(?:in|of|by|for|from|to|with|at|on|after|before|through|under|without) (?:which|whom)"
    ),
    "nobody, whoever": r"(?:nobody|whoever|whatever|whichever|somebody)",
    "come after, begin as": r"(?:c[ao]mes? after|be[gc][ioau]ns? as)",
    "goes on": (
        r"(?:go(?:es|ing)?|went|serves?|trains?) on(?!"
        r" (?:a|an|the|port|this|its|every|each|one|any)\b)"
    ),
    "so many, so long": r"so (?:many|much|long|few)",
    "told, handed on": r"(?:told|hand(?:s|ed)? on|take[ns]? (?:for|back)|took back)",
}
REGEX_BY_PATTERN = {
    name: re.compile(rf"\b{pattern}\b", re.IGNORECASE) for name, pattern in PATTERNS.items()
}
OPENINGS = re.compile(r"(?:What|Where|How|Who|Whether|Those|Which|Whatever|Whoever|Whose)\b")
# the module tokenize would find the same comments, but it would take as long as all other code of
# this module
STRING_OR_COMMENT = re.compile(
    r"""(?s)(?P<quote>\"{3}|'{3})(?:\\.|.)*?(?P=quote)|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?P<comment>#[^\n]*)"""
)
VAGUE_NAMES = set(
    [
        "known",
        "at",
        "part",
        "why",
        "place",
        "left",
        "before",
        "ours",
        "own",
        "given",
        "made",
        "wanted",
        "theirs",
        "taken",
    ]
) | {"former", "told", "said"}


class Text(NamedTuple):
    """A piece of prose in a file. `kind`: docstring, comment, message, test or page."""

    path: str
    line: int
    kind: str
    text: str

    def hits(self) -> Iterator[tuple[str, str]]:
        flat = " ".join(self.text.split())
        for name, pattern in REGEX_BY_PATTERN.items():
            for hit in pattern.finditer(flat):
                yield name, flat[max(0, hit.start() - 40) : hit.end() + 40]

    @property
    def words(self) -> int:
        return len(re.findall(r"[A-Za-z][A-Za-z'-]*", self.text))


def list_tracked_files(*paths: str) -> list[str]:
    """Return the files of the project that git tracks or would track, optionally only `paths`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *paths]
    file_names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return sorted({name for name in file_names if name and (ROOT / name).is_file()})


def read_texts(path: str) -> Iterator[Text]:
    """Yield the prose of one file, which contains Python, YAML or Markdown."""
    source = (ROOT / path).read_text()
    if path.endswith(".md"):
        yield from _read_page(path, source)
    elif path.endswith(".py"):
        yield from _read_python(path, source)
    else:
        for number, line in enumerate(source.split("\n"), 1):
            comment = re.search(r"(?:^|\s)# ?(.*)", line)
            if comment:
                yield Text(path, number, "comment", comment[1])


def _read_page(path: str, source: str) -> Iterator[Text]:
    in_code = False
    for number, line in enumerate(source.split("\n"), 1):
        in_code ^= line.startswith("```")
        if not in_code and not line.startswith("```"):
            yield Text(path, number, "page", re.sub(r"`[^`]*`|\]\([^)]*\)", " CODE ", line))


def _read_python(path: str, source: str) -> Iterator[Text]:
    docstrings: set[int] = set()

    if path.startswith("tests/"):
        # no other code reads the syntax trees of tests, so they are not cached
        nodes = list(ast.walk(ast.parse(source)))
    else:
        nodes = list_nodes(ROOT / path)

    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                docstrings.add(id(node.body[0].value))  # pyright: ignore[reportAttributeAccessIssue]
                yield Text(path, node.body[0].lineno, "docstring", text)

            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield Text(path, node.lineno, "test", node.name.replace("_", " "))

    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            string_parts = [
                str(part.value) if isinstance(part, ast.Constant) else "VALUE"
                for part in node.values
            ]
            docstrings.update(id(part) for part in node.values)
            yield from _make_message_text(path, node.lineno, "".join(string_parts))

    for node in nodes:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield from _make_message_text(path, node.lineno, node.value)

    for token in STRING_OR_COMMENT.finditer(source):
        if token["comment"]:
            yield Text(
                path,
                source.count("\n", 0, token.start()) + 1,
                "comment",
                token["comment"].lstrip("# "),
            )


def _make_message_text(path: str, line: int, text: str) -> Iterator[Text]:
    if (
        len(re.findall(r"[A-Za-z]{2,}\b", text)) >= 3
        and " " in text
        and not path.startswith("tests/")
    ):
        yield Text(path, line, "message", text)


def subpackage_of(path: str) -> str:
    """Return the subpackage, folder of tests, or page that a file belongs to."""
    parts = path.split("/")
    if path.endswith(".md"):
        return path
    return "/".join(parts[: 2 if len(parts) > 2 else 1])


@cache
def read_prose(*paths: str) -> list[Text]:
    """Return all prose of the project, or of some of its files and folders."""
    if paths:
        files = list_tracked_files(*paths)
    else:
        files = [*list_tracked_files(*CODE, "configs"), *list_tracked_files("*.md")]
    suffixes = (".py", ".md", ".yaml")
    return [
        text for path in sorted(set(files)) if path.endswith(suffixes) for text in read_texts(path)
    ]


def find_names(*paths: str) -> Iterator[tuple[str, int, str]]:
    """Yield the file, the line and the name of each variable or parameter with a vague name."""
    for path in list_tracked_files(*paths):
        if path.endswith(".py"):
            for node in list_nodes(ROOT / path):
                if isinstance(node, ast.arg) and node.arg in VAGUE_NAMES:
                    yield path, node.lineno, node.arg
                elif (
                    isinstance(node, ast.Name)
                    and isinstance(node.ctx, ast.Store)
                    and node.id in VAGUE_NAMES
                ):
                    yield path, node.lineno, node.id
                elif isinstance(node, ast.FunctionDef) and node.name.strip("_") in VAGUE_NAMES:
                    yield path, node.lineno, node.name


def find_question_openings() -> list[str]:
    """Return FILE:LINE of each docstring that begins with a question word."""
    docstrings = [text for text in read_prose() if text.kind == "docstring"]
    return [f"{text.path}:{text.line}" for text in docstrings if OPENINGS.match(text.text)]


def count_hits() -> dict[str, tuple[int, int]]:
    """Return the numbers of hits and of words of each subpackage and page."""
    hits = Counter[str]()
    words = Counter[str]()
    for text in read_prose():
        hits[subpackage_of(text.path)] += len(list(text.hits()))
        words[subpackage_of(text.path)] += text.words
    return {name: (hits[name], count) for name, count in words.items() if count}


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--names"]:
        for path, line, name in find_names(*(arguments[1:] or CODE[:-2])):
            print(f"{path}:{line}: {name}")
    elif arguments:
        for text in read_prose(*arguments):
            for name, words in text.hits():
                print(f"{text.path}:{text.line}: {text.kind}: {name}: {words}")

            if text.kind == "docstring" and OPENINGS.match(text.text):
                print(f"{text.path}:{text.line}: opening: {text.text.splitlines()[0]}")
    else:
        for name, (hits, words) in sorted(
            count_hits().items(), key=lambda row: -row[1][0] / row[1][1]
        ):
            print(f"{1000 * hits / words:6.1f}  {hits:5} of {words:6} words  {name}")

        vague = len(list(find_names(*CODE[:-2])))
        print(
            f"{len(find_question_openings())} docstrings begin with a question word, {vague} names are vague"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
