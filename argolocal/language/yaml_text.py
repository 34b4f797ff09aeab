"""Parse untrusted YAML and JSON. A text that exceeds a size limit is rejected before Python objects
are created from it.

    documents = parse(path.read_text(), str(path))

Where PyYAML differs from Kubernetes' Go library, YAML is parsed as in Go: `y` and `n` are booleans,
1e3 is a number, and keys, dates and 1:30 are strings. As in kubectl, a JSON text is parsed as JSON
rather than YAML, because some escapes of JSON are invalid in YAML. The limits of a text's size are
checked in linear time, on the events of the YAML parser. An alias or merge key counts as as many
values as its target contains. Sources: goyaml's decode.go; libyaml's scanner.c."""

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

from argolocal.common.files import read_file_or_pipe
from argolocal.common.json_text import describe_non_finite, to_json
from argolocal.errors import ConfigError
from argolocal.language.gofmt import to_argo_string

# maximum number of bytes of a character in UTF-8
MAX_CHARACTER_BYTES = 4
# in comparison, Argo's largest CRD has 3.2 million characters
MAX_CHARACTERS = 10_000_000
MAX_DOCUMENTS = 1_000
# for comparison: Argo's largest CRD has 123,000 values, nested up to 37 levels deep
MAX_VALUES = 200_000
MAX_DEPTH = 100
# maximum number of characters of a number, including its sign, point and exponent
MAX_DIGITS = 100
# YAML's limit for the length of a key that does not start with "? "
MAX_KEY_LENGTH = 1_024
# libyaml compares each directive with all previous ones, so many directives would take a long time
MAX_DIRECTIVES = 10

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TAG_PREFIX = "tag:yaml.org,2002:"
INTEGER = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]*|[1-9][0-9_]*)$")
FLOAT = re.compile(
    r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
SHORT_BOOLEAN_PATTERN = re.compile(r"[yYnN]$")
# numbers in base 60, such as 1:30, which other YAML 1.1 parsers read as numbers
BASE_60 = re.compile(r"[-+]?\.?[0-9][0-9_:.]*$")
NUMBER_START_CHARACTERS = list("-+0123456789.")
# a token of JSON
TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[-+.\w]+|[][{}:]', re.DOTALL)
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


def _construct_mapping(loader: Any, node: Any) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise ConstructorError(None, None, "a mapping is expected", node.start_mark)
    loader.flatten_mapping(node)
    return {
        (
            key
            if isinstance(key := loader.construct_object(key_node, deep=True), str)
            else to_argo_string(key)
        ): loader.construct_object(value_node, deep=True)
        for key_node, value_node in node.value
    }


def _construct_number(loader: Any, node: Any) -> Any:
    if node.tag.endswith("int"):
        construct_number = loader.construct_yaml_int
    else:
        construct_number = loader.construct_yaml_float
    try:
        return construct_number(node)
    except (ValueError, LookupError):
        raise ConstructorError(None, None, "a number is expected", node.start_mark) from None


Loader.add_constructor(f"{TAG_PREFIX}map", _construct_mapping)
Loader.add_constructor(f"{TAG_PREFIX}int", _construct_number)
Loader.add_constructor(f"{TAG_PREFIX}float", _construct_number)
Loader.add_constructor(
    f"{TAG_PREFIX}bool",
    lambda loader, node: loader.construct_scalar(node).lower() in ("y", "yes", "true", "on"),
)
Loader.add_implicit_resolver(f"{TAG_PREFIX}bool", SHORT_BOOLEAN_PATTERN, list("yYnN"))
Loader.add_implicit_resolver(f"{TAG_PREFIX}int", INTEGER, NUMBER_START_CHARACTERS)
Loader.add_implicit_resolver(f"{TAG_PREFIX}float", FLOAT, NUMBER_START_CHARACTERS)


def read_text(file: Path) -> str:
    """Return at most MAX_CHARACTERS + 1 characters of a file or a pipe. Raises OSError, and
    UnicodeDecodeError for a text that is not UTF-8."""
    file_bytes = read_file_or_pipe(file, MAX_CHARACTERS * MAX_CHARACTER_BYTES)
    return io.TextIOWrapper(io.BytesIO(file_bytes), "utf-8").read(MAX_CHARACTERS + 1)


def parse(text: str, source_name: str = "the manifest") -> list[Any]:
    """Return the non-empty documents of a YAML or JSON text. Raises ConfigError, with a one-line
    message, for an invalid text."""
    try:
        documents = [document for document in _read_documents(text) if document is not None]
    except yaml.YAMLError as error:
        raise ConfigError(f"{source_name} is not YAML: {_describe(error, text)}") from None
    except _LimitExceeded as error:
        raise ConfigError(f"{source_name} is rejected: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{source_name} is not YAML: {error}") from None

    # reject .nan and .inf, which YAML allows, because the documents are later converted to JSON
    for document in documents:
        problem = describe_non_finite(document)
        if problem:
            raise ConfigError(f"{source_name}: {problem}.")

    return documents


def parse_one(text: str, source_name: str) -> Any:
    """Return the only document of a text, or None for an empty text. Raises ConfigError."""
    documents = parse(text, source_name)
    if len(documents) > 1:
        raise ConfigError(f"{source_name} has {len(documents)} documents: it must have one.")
    if documents:
        return documents[0]
    return None


def _read_documents(text: str) -> list[Any]:
    """Return all documents of a text. Raises _LimitExceeded for a text that is too large, and
    yaml.YAMLError or ValueError for an invalid text."""
    if len(text) > MAX_CHARACTERS:
        raise _LimitExceeded(f"it has more than {MAX_CHARACTERS:,} characters: split it.")

    if text.lstrip().startswith("{"):
        try:
            document = json.loads(
                text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant
            )
        except json.JSONDecodeError:
            # a text that is not valid JSON may still be YAML
            pass
        except (ValueError, RecursionError):
            _check_json(text)
            raise
        else:
            _check_json(text)
            # raises ValueError for a lone surrogate
            to_json(document, ensure_ascii=False).encode()
            return [document]

    directive_count = len(DIRECTIVE.findall(text))
    if directive_count > MAX_DIRECTIVES:
        raise _LimitExceeded(
            f"it has {directive_count:,} lines that begin with %: at most {MAX_DIRECTIVES} are"
            " allowed."
        )

    limit_checker = _LimitChecker()
    for event in yaml.parse(text, SafeLoader):
        limit_checker.add(event)

    return list(yaml.load_all(text, Loader))


def _reject_duplicate_keys(key_value_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(key_value_pairs)
    if len(mapping) < len(key_value_pairs):
        duplicate_key = next(
            key for key, count in Counter(key for key, _ in key_value_pairs).items() if count > 1
        )
        raise ValueError(DUPLICATE_KEY.format(duplicate_key))
    return mapping


def _reject_constant(constant: str) -> Any:
    raise json.JSONDecodeError("not a JSON number", constant, 0)


def _describe(error: yaml.YAMLError, text: str) -> str:
    """Return one line that names the problem and the position of a YAML error."""
    problem_text = str(error)
    error_position = None

    if isinstance(error, yaml.MarkedYAMLError):
        problem_text = ", ".join(filter(None, (error.context, error.problem)))
        error_position = error.problem_mark or error.context_mark
    elif isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)

        return (
            f"the character {chr(error.character)!r} is not allowed: remove it (line {line}, column"
            f" {column})"
        )

    problem_text = " ".join(problem_text.split())[:300]
    if error_position:
        return f"{problem_text} ({_format_position(error_position)})"

    return problem_text


def _format_position(error_position: Any) -> str:
    return f"line {error_position.line + 1}, column {error_position.column + 1}"


class _LimitExceeded(Exception):
    """A text exceeds a limit."""


@dataclass
class _OpenCollection:
    """A list or mapping whose end has not been read yet."""

    is_mapping: bool
    anchor: str | None = None
    # counts of the _LimitChecker when this list or mapping began
    previous_values: int = 0
    previous_characters: int = 0
    # number of children read so far; a key and its value are two children
    child_count: int = 0
    keys: set[str] = field(default_factory=set)


class _LimitChecker:
    """Counts the documents, values and characters of a text before objects are created from it, and
    rejects a text with too many of them."""

    def __init__(self) -> None:
        self.document_count = 0
        self.value_count = 0
        self.character_count = 0
        self.open_collections: list[_OpenCollection] = []
        # anchor → (number of values, number of characters, text of a scalar)
        self.anchors: dict[str, tuple[int, int, str | None]] = {}

    def add(self, event: object) -> None:
        """Add the values of a parser event to the counts. Raises _LimitExceeded, and
        ConstructorError for YAML that Go rejects."""
        match event:
            case yaml.DocumentStartEvent():
                self.document_count += 1
                self.anchors.clear()
                if self.document_count > MAX_DOCUMENTS:
                    self._reject(event, f"it has more than {MAX_DOCUMENTS:,} documents: split it")
            case yaml.ScalarEvent():
                self._add_scalar(event)
            case yaml.AliasEvent():
                self._add_alias(event)
            case yaml.CollectionStartEvent():
                self._check_key(event, None)
                self._count(event, 1, 0)
                value_counts = self.value_count, self.character_count
                self.open_collections.append(
                    _OpenCollection(
                        isinstance(event, yaml.MappingStartEvent), event.anchor, *value_counts
                    )
                )

                if len(self.open_collections) > MAX_DEPTH:
                    self._reject(
                        event,
                        f"its lists and mappings are more than {MAX_DEPTH} levels deep: flatten"
                        " them",
                    )
            case yaml.CollectionEndEvent() if self.open_collections:
                closed_collection = self.open_collections.pop()
                if closed_collection.anchor:
                    collection_size = (
                        self.value_count - closed_collection.previous_values + 1,
                        self.character_count - closed_collection.previous_characters,
                    )
                    self.anchors[closed_collection.anchor] = *collection_size, None

    def _add_scalar(self, event: Any) -> None:
        text = event.value
        text_length = len(event.value)
        if text_length > MAX_DIGITS and _is_number(event):
            self._reject(
                event,
                f"a number has {text_length:,} characters: at most {MAX_DIGITS} are allowed; quote"
                " a text",
            )
        self._check_key(event, text)
        self._count(event, 1, text_length)
        if event.anchor:
            self.anchors[event.anchor] = 1, text_length, text

    def _add_alias(self, event: Any) -> None:
        """Count an alias as often as the values that it refers to."""
        if any(collection.anchor == event.anchor for collection in self.open_collections):
            raise ConstructorError(None, None, f"*{event.anchor} contains itself", event.start_mark)
        value_count, character_count, anchor_text = self.anchors.get(event.anchor, (1, 0, ""))
        self._check_key(event, anchor_text)
        self._count(event, value_count, character_count)

    def _check_key(self, event: Any, key_text: str | None) -> None:
        """Count a child of the innermost open list or mapping. If the child is a key, check its
        `text`, which is None for a list or mapping. Raises an error for a key that is not a scalar,
        is too long, or is a duplicate."""
        if not self.open_collections:
            return

        parent_collection = self.open_collections[-1]
        parent_collection.child_count += 1
        if not parent_collection.is_mapping or parent_collection.child_count % 2 == 0:
            return

        if key_text is None:
            raise ConstructorError(
                None, None, "a key is a list or a mapping: it must be a text", event.start_mark
            )

        if len(key_text) > MAX_KEY_LENGTH:
            self._reject(
                event,
                f"a key has {len(key_text):,} characters: at most {MAX_KEY_LENGTH:,} are allowed",
            )

        if key_text in parent_collection.keys and key_text != "<<":
            raise ConstructorError(None, None, DUPLICATE_KEY.format(key_text), event.start_mark)

        parent_collection.keys.add(key_text)

    def _count(self, event: object, value_count: int, character_count: int) -> None:
        """Add values and characters to the counts. Raises _LimitExceeded."""
        self.value_count += value_count
        self.character_count += character_count
        for total_count, max_count, unit_name in (
            (self.value_count, MAX_VALUES, "values"),
            (self.character_count, MAX_CHARACTERS, "characters"),
        ):
            if total_count > max_count:
                self._reject(
                    event,
                    f"it has more than {max_count:,} {unit_name} with all its aliases: use fewer"
                    " of them",
                )

    def _reject(self, event: Any, problem: str) -> None:
        raise _LimitExceeded(f"{problem} ({_format_position(event.start_mark)}).")


def _is_number(event: Any) -> bool:
    """Return True if a scalar is read as a number, because of its tag or its text."""
    if event.tag:
        return event.tag in (f"{TAG_PREFIX}int", f"{TAG_PREFIX}float")
    return event.implicit[0] and any(
        number_pattern.match(event.value) for number_pattern in (INTEGER, FLOAT, BASE_60)
    )


def _check_json(text: str) -> None:
    """Raise _LimitExceeded if a JSON text exceeds a limit, such as MAX_DEPTH."""
    limit_checker = _LimitChecker()
    text_position = _TextPosition(text)
    for event in _json_events(text, text_position):
        limit_checker.add(event)


@dataclass
class _TextPosition:
    """A position in a JSON text. The line and column of a position are computed only when an error
    message needs them, because this takes time."""

    text: str
    position: int = 0

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.position)

    @property
    def column(self) -> int:
        return self.position - self.text.rfind("\n", 0, self.position) - 1


def _json_events(text: str, text_position: _TextPosition) -> Iterator[Any]:
    """Yield the YAML parser events of a JSON text, up to its first syntax error."""
    for token in TOKEN.finditer(text):
        text_position.position = token.start()
        token_text = token[0]
        if token_text in "[{":
            if token_text == "{":
                start_event = yaml.MappingStartEvent
            else:
                start_event = yaml.SequenceStartEvent

            yield start_event(None, None, True, text_position)
        elif token_text in "]}":
            yield yaml.MappingEndEvent()
        elif token_text != ":":
            is_plain = token_text[0] != '"'
            yield yaml.ScalarEvent(
                None,
                None,
                (is_plain, True),
                token_text if is_plain else token_text[1:-1],
                text_position,
            )
