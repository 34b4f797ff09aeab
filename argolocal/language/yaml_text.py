"""Parse untrusted YAML and JSON. A text that exceeds a size limit is rejected before Python objects
are created from it.

    documents = parse(path.read_text(), str(path))

Where PyYAML differs from Kubernetes' Go library, YAML is parsed as in Go: `y` and `n` are booleans,
1e3 is a number, and keys, dates and 1:30 are strings. As in kubectl, a JSON text is parsed as JSON
rather than YAML, because some escapes of JSON are invalid in YAML. The limits are checked while the
parser emits events, in linear time. An alias or merge key counts as if its target were repeated in
its place. Sources: goyaml's decode.go; libyaml's scanner.c."""

import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from argolocal.common.files import read_input
from argolocal.common.json_text import describe_not_finite, to_json
from argolocal.errors import ConfigError
from argolocal.language.gofmt import to_argo_string

MAX_CHARACTER_BYTES = 4  # maximum number of bytes of a character in UTF-8
MAX_CHARACTERS = 10_000_000  # for comparison: Argo's largest CRD has 3.2 million characters
MAX_DOCUMENTS = 1_000
# for comparison: Argo's largest CRD has 123,000 values, nested up to 37 levels deep
MAX_VALUES = 200_000
MAX_DEPTH = 100
MAX_DIGITS = 100  # maximum number of characters of a number, including its sign, point and exponent
MAX_KEY_LENGTH = 1_024  # YAML's limit for the length of a key that does not start with "? "
# a higher limit would be slow, because libyaml compares each directive with all previous ones
MAX_DIRECTIVES = 10

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TAG_PREFIX = "tag:yaml.org,2002:"
INTEGER = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]*|[1-9][0-9_]*)$")
FLOAT = re.compile(
    r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
SHORT_BOOLEAN = re.compile(r"[yYnN]$")
# scalars that other YAML 1.1 parsers, such as Kubernetes' client, read as numbers
BASE_60 = re.compile(r"[-+]?\.?[0-9][0-9_:.]*$")
NUMBER_START_CHARACTERS = list("-+0123456789.")
TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[-+.\w]+|[][{}:]', re.DOTALL)  # a token of JSON
DIRECTIVE = re.compile("^%|[\r\n\x85\u2028\u2029]%")
DUPLICATE_KEY = 'the key "{}" is duplicated: remove one'


class Loader(SafeLoader):
    """Loads YAML 1.1 as goyaml does. Only YAML tags for JSON's types are allowed."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.removeprefix(TAG_PREFIX) not in ("timestamp", "value", "int", "float")
        ]
        for first, resolvers in SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: SafeLoader.yaml_constructors[tag]
        for tag in (f"{TAG_PREFIX}null", f"{TAG_PREFIX}str", f"{TAG_PREFIX}seq", None)
    }


def _mapping(loader: Any, node: Any) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise ConstructorError(None, None, "a mapping is expected", node.start_mark)
    loader.flatten_mapping(node)
    return {
        (
            key
            if isinstance(key := loader.construct_object(name, deep=True), str)
            else to_argo_string(key)
        ): loader.construct_object(value, deep=True)
        for name, value in node.value
    }


def _number(loader: Any, node: Any) -> Any:
    if node.tag.endswith("int"):
        construct = loader.construct_yaml_int
    else:
        construct = loader.construct_yaml_float
    try:
        return construct(node)
    except (ValueError, LookupError):
        raise ConstructorError(None, None, "a number is expected", node.start_mark) from None


Loader.add_constructor(f"{TAG_PREFIX}map", _mapping)
Loader.add_constructor(f"{TAG_PREFIX}int", _number)
Loader.add_constructor(f"{TAG_PREFIX}float", _number)
Loader.add_constructor(
    f"{TAG_PREFIX}bool",
    lambda loader, node: loader.construct_scalar(node).lower() in ("y", "yes", "true", "on"),
)
Loader.add_implicit_resolver(f"{TAG_PREFIX}bool", SHORT_BOOLEAN, list("yYnN"))
Loader.add_implicit_resolver(f"{TAG_PREFIX}int", INTEGER, NUMBER_START_CHARACTERS)
Loader.add_implicit_resolver(f"{TAG_PREFIX}float", FLOAT, NUMBER_START_CHARACTERS)


def read_text(file: Path) -> str:
    """Return at most MAX_CHARACTERS + 1 characters of a file or a pipe. Raises OSError,
    UnicodeDecodeError."""
    data = read_input(file, MAX_CHARACTERS * MAX_CHARACTER_BYTES)
    return io.TextIOWrapper(io.BytesIO(data), "utf-8").read(MAX_CHARACTERS + 1)


def parse(text: str, source: str = "the manifest") -> list[Any]:
    """Return the non-empty documents of a YAML or JSON text. Raises ConfigError with a one-line
    message."""
    try:
        documents = [document for document in _read(text) if document is not None]
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {_describe(error, text)}") from None
    except _LimitExceeded as error:
        raise ConfigError(f"{source} is rejected: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from None

    # reject .nan and .inf, which YAML allows, because the documents are later converted to JSON
    for document in documents:
        problem = describe_not_finite(document)
        if problem:
            raise ConfigError(f"{source}: {problem}.")

    return documents


def parse_one(text: str, source: str) -> Any:
    """Return the only document of a text, or None for an empty text. Raises ConfigError."""
    documents = parse(text, source)
    if len(documents) > 1:
        raise ConfigError(f"{source} has {len(documents)} documents: it must have one.")
    if documents:
        return documents[0]
    return None


def _read(text: str) -> list[Any]:
    if len(text) > MAX_CHARACTERS:
        raise _LimitExceeded(f"it has more than {MAX_CHARACTERS:,} characters: split it.")

    if text.lstrip().startswith("{"):
        try:
            document = json.loads(
                text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant
            )
        except json.JSONDecodeError:
            pass  # a text that is not valid JSON may still be YAML
        except (ValueError, RecursionError):
            _check_json(text)
            raise
        else:
            _check_json(text)
            to_json(document, ensure_ascii=False).encode()  # raises ValueError for a lone surrogate
            return [document]

    directives = len(DIRECTIVE.findall(text))
    if directives > MAX_DIRECTIVES:
        raise _LimitExceeded(
            f"it has {directives:,} lines that begin with %: at most {MAX_DIRECTIVES} are allowed."
        )

    bounds = _LimitChecker()
    for event in yaml.parse(text, SafeLoader):
        bounds.add(event)

    return list(yaml.load_all(text, Loader))


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        duplicate_key = next(
            key for key, count in Counter(key for key, _ in pairs).items() if count > 1
        )
        raise ValueError(DUPLICATE_KEY.format(duplicate_key))
    return mapping


def _reject_constant(word: str) -> Any:
    raise json.JSONDecodeError("not a JSON number", word, 0)


def _describe(error: yaml.YAMLError, text: str) -> str:
    """Return one line that names the problem and the position of a YAML error."""
    problem = str(error)
    mark = None

    if isinstance(error, yaml.MarkedYAMLError):
        problem = ", ".join(filter(None, (error.context, error.problem)))
        mark = error.problem_mark or error.context_mark
    elif isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)

        return (
            f"the character {chr(error.character)!r} is not allowed: remove it (line {line}, column"
            f" {column})"
        )

    problem = " ".join(problem.split())[:300]
    if mark:
        return f"{problem} ({_format_mark(mark)})"

    return problem


def _format_mark(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


class _LimitExceeded(Exception):
    """A text exceeds a limit."""


@dataclass
class _Collection:
    """A list or mapping whose end has not been read yet."""

    is_mapping: bool
    anchor: str | None = None
    # number of values in the text before this list or mapping, including the values that aliases
    # refer to
    values: int = 0
    characters: int = 0
    children: int = 0
    keys: set[str] = field(default_factory=set)


class _LimitChecker:
    """Counts the values of a text before objects are created from them, and rejects a text with too
    many values."""

    def __init__(self) -> None:
        self.documents = 0
        self.values = 0
        self.characters = 0
        self.open_collections: list[_Collection] = []
        # anchor → (number of values, number of characters, text of a scalar)
        self.anchors: dict[str, tuple[int, int, str | None]] = {}

    def add(self, event: object) -> None:
        """Add the values of a parser event to the counts. Raises _LimitExceeded, and
        ConstructorError for YAML that Go rejects."""
        match event:
            case yaml.DocumentStartEvent():
                self.documents += 1
                self.anchors.clear()
                if self.documents > MAX_DOCUMENTS:
                    self._reject(event, f"it has more than {MAX_DOCUMENTS:,} documents: split it")
            case yaml.ScalarEvent():
                self._add_scalar(event)
            case yaml.AliasEvent():
                self._add_alias(event)
            case yaml.CollectionStartEvent():
                self._check_key(event, None)
                self._count(event, 1, 0)
                counts = self.values, self.characters
                self.open_collections.append(
                    _Collection(isinstance(event, yaml.MappingStartEvent), event.anchor, *counts)
                )

                if len(self.open_collections) > MAX_DEPTH:
                    self._reject(
                        event,
                        f"its lists and mappings are more than {MAX_DEPTH} levels deep: flatten"
                        " them",
                    )
            case yaml.CollectionEndEvent() if self.open_collections:
                closed_item = self.open_collections.pop()
                if closed_item.anchor:
                    size = (
                        self.values - closed_item.values + 1,
                        self.characters - closed_item.characters,
                    )
                    self.anchors[closed_item.anchor] = *size, None

    def _add_scalar(self, event: Any) -> None:
        text = event.value
        length = len(event.value)
        if length > MAX_DIGITS and _is_number(event):
            self._reject(
                event,
                f"a number has {length:,} characters: at most {MAX_DIGITS} are allowed; quote a"
                " text",
            )
        self._check_key(event, text)
        self._count(event, 1, length)
        if event.anchor:
            self.anchors[event.anchor] = 1, length, text

    def _add_alias(self, event: Any) -> None:
        if any(collection.anchor == event.anchor for collection in self.open_collections):
            raise ConstructorError(None, None, f"*{event.anchor} contains itself", event.start_mark)
        values, characters, text = self.anchors.get(event.anchor, (1, 0, ""))
        self._check_key(event, text)
        self._count(event, values, characters)

    def _check_key(self, event: Any, text: str | None) -> None:
        """If the next value is a key of a mapping, check it. Raises an error for a key that is not
        a scalar, is too long, or is a duplicate."""
        if not self.open_collections:
            return

        parent = self.open_collections[-1]
        parent.children += 1
        if not parent.is_mapping or parent.children % 2 == 0:
            return

        if text is None:
            raise ConstructorError(
                None, None, "a key is a list or a mapping: it must be a text", event.start_mark
            )

        if len(text) > MAX_KEY_LENGTH:
            self._reject(
                event, f"a key has {len(text):,} characters: at most {MAX_KEY_LENGTH:,} are allowed"
            )

        if text in parent.keys and text != "<<":
            raise ConstructorError(None, None, DUPLICATE_KEY.format(text), event.start_mark)

        parent.keys.add(text)

    def _count(self, event: object, values: int, characters: int) -> None:
        self.values += values
        self.characters += characters
        for total, limit, unit in (
            (self.values, MAX_VALUES, "values"),
            (self.characters, MAX_CHARACTERS, "characters"),
        ):
            if total > limit:
                self._reject(
                    event,
                    f"it has more than {limit:,} {unit} with all its aliases: use fewer of them",
                )

    def _reject(self, event: Any, problem: str) -> None:
        raise _LimitExceeded(f"{problem} ({_format_mark(event.start_mark)}).")


def _is_number(event: Any) -> bool:
    """Return True if a scalar is read as a number, because of its tag or its text."""
    if event.tag:
        return event.tag in (f"{TAG_PREFIX}int", f"{TAG_PREFIX}float")
    return event.implicit[0] and any(
        pattern.match(event.value) for pattern in (INTEGER, FLOAT, BASE_60)
    )


def _check_json(text: str) -> None:
    """Raise _LimitExceeded if a JSON text exceeds a limit, such as MAX_DEPTH."""
    bounds = _LimitChecker()
    mark = _Mark(text)
    for event in _events(text, mark):
        bounds.add(event)


@dataclass
class _Mark:
    """A position in a JSON text. Its line and column are computed only if an error message needs
    them."""

    text: str
    position: int = 0

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.position)

    @property
    def column(self) -> int:
        return self.position - self.text.rfind("\n", 0, self.position) - 1


def _events(text: str, mark: _Mark) -> Iterator[Any]:
    """Yield the YAML parser events of a JSON text, up to its first syntax error."""
    for token in TOKEN.finditer(text):
        mark.position = token.start()
        word = token[0]
        if word in "[{":
            if word == "{":
                start = yaml.MappingStartEvent
            else:
                start = yaml.SequenceStartEvent

            yield start(None, None, True, mark)
        elif word in "]}":
            yield yaml.MappingEndEvent()
        elif word != ":":
            is_plain = word[0] != '"'
            yield yaml.ScalarEvent(
                None, None, (is_plain, True), word if is_plain else word[1:-1], mark
            )
