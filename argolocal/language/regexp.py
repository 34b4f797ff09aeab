"""Go's regular expressions, by the RE2 library: its syntax, in time linear in the text, and Go's templates.

A pattern that Go refuses (a look-around, a backreference) raises ValueError. Source: Go's regexp.
"""

import re
from collections.abc import Iterator
from typing import Any

VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)\})")


def found(pattern: str, text: str) -> Iterator[Any]:
    """Non-overlapping matches; an empty match adjacent to another is skipped."""
    import re2  # only who uses an expression with a pattern needs the library

    options = re2.Options()
    options.log_errors = False
    try:
        matches = re2.compile(pattern, options).finditer(text)
    except re2.error as error:
        reason = error.args[0]
        raise ValueError(f"error parsing regexp: {reason.decode() if isinstance(reason, bytes) else reason}") from None
    return _apart(matches)


def _apart(matches: Iterator[Any]) -> Iterator[Any]:
    end = -1
    for match in matches:
        if match.end() != match.start() or match.start() != end:
            yield match
        end = match.end()


def matches(pattern: str, text: str) -> bool:
    return next(found(pattern, text), None) is not None


def find_all(pattern: str, text: str, most: int = -1) -> list[str]:
    """The first `most` matches, or all if negative."""
    every = [match.group() for match in found(pattern, text)]
    return every if most < 0 else every[:most]


def replace_all(pattern: str, text: str, template: str) -> str:
    """Replace each match by `template`, with $1, ${1} and ${name} for groups ($1W is the unknown group "1W": empty)."""
    parts, end = [], 0
    for match in found(pattern, text):
        parts += [text[end : match.start()], VARIABLE.sub(lambda name, match=match: _group(match, name), template)]
        end = match.end()
    return "".join(parts) + text[end:]


def _group(match: Any, name: re.Match[str]) -> str:
    if name[1]:
        return "$"
    word = name[2] or name[3]
    index = int(word) if word.isdecimal() else match.re.groupindex.get(word, match.re.groups + 1)
    return (match.group(index) or "") if index <= match.re.groups else ""


def split(pattern: str, text: str, most: int = -1) -> list[str]:
    """The texts between matches, at most `most` unless negative."""
    if not text or not most:
        return [text] if most else []
    parts, start, end = [], 0, 0
    for match in found(pattern, text):
        if 0 < most <= len(parts) + 1:
            break
        end = match.start()
        if match.end():  # an empty match in front of the text parts nothing
            parts.append(text[start:end])
        start = match.end()
    return [*parts, text[start:]] if end != len(text) else parts
