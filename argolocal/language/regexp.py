"""Match Go's regular expressions in linear time with the RE2 library, and apply Go's replacement
templates.

As in Go, a pattern with a look-around or backreference is an error (ValueError). Source: Go's
regexp.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)\})")


def find_matches(pattern: str, text: str) -> Iterator[Any]:
    """Yield the matches, but skip an empty match directly after another match."""
    return _skip_adjacent_empty(_compile(pattern).finditer(text))


def compile_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that returns True if a text contains a match. Raises ValueError."""
    compiled = _compile(pattern)
    return lambda text: compiled.search(text) is not None


def _compile(pattern: str) -> Any:
    import re2  # imported here, because only expressions with patterns need it

    options = re2.Options()
    options.log_errors = False

    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        raise ValueError(
            f"error parsing regexp: {reason.decode() if isinstance(reason, bytes) else reason}"
        ) from None


def _skip_adjacent_empty(matches: Iterator[Any]) -> Iterator[Any]:
    end = -1
    for match in matches:
        if match.end() != match.start() or match.start() != end:
            yield match
        end = match.end()


def matches(pattern: str, text: str) -> bool:
    return next(find_matches(pattern, text), None) is not None


def find_all(pattern: str, text: str, max_count: int = -1) -> list[str]:
    """Return the first `max_count` matches; a negative `max_count` means all."""
    texts = [match.group() for match in find_matches(pattern, text)]
    if max_count < 0:
        return texts
    return texts[:max_count]


def replace_all(pattern: str, text: str, template: str) -> str:
    """Replace each match by `template`, in which $1, ${1} and ${name} refer to groups. A reference
    to an unknown group becomes ""."""
    parts = []
    end = 0
    for match in find_matches(pattern, text):
        parts.append(text[end : match.start()])
        parts.append(VARIABLE.sub(lambda name, match=match: _group(match, name), template))
        end = match.end()
    return "".join(parts) + text[end:]


def _group(match: Any, name: re.Match[str]) -> str:
    if name[1]:
        return "$"
    word = name[2] or name[3]
    if word.isdecimal():
        index = int(word)
    else:
        index = match.re.groupindex.get(word, match.re.groups + 1)
    if index <= match.re.groups:
        return match.group(index) or ""
    return ""


def split(pattern: str, text: str, max_count: int = -1) -> list[str]:
    """Split a text at the matches into at most `max_count` parts. A negative `max_count` means no
    limit."""
    if not text or not max_count:
        if max_count:
            return [text]
        return []

    parts = []
    start = 0
    end = 0

    for match in find_matches(pattern, text):
        if 0 < max_count <= len(parts) + 1:
            break

        end = match.start()
        if match.end():  # an empty match at the start does not split the text
            parts.append(text[start:end])

        start = match.end()

    if end != len(text):
        return [*parts, text[start:]]

    return parts
