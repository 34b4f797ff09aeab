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
    """Yield the matches of a pattern. An empty match directly after another match is skipped, as in
    Go. Raises ValueError."""
    return _skip_adjacent_empty(_compile(pattern).finditer(text))


def compile_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that returns True if a text contains a match. Raises ValueError."""
    compiled = _compile(pattern)
    return lambda text: compiled.search(text) is not None


def _compile(pattern: str) -> Any:
    # imported here, because only expressions with patterns need it
    import re2

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
    previous_end = -1
    for match in matches:
        if match.end() != match.start() or match.start() != previous_end:
            yield match
        previous_end = match.end()


def has_match(pattern: str, text: str) -> bool:
    """Return True if the text contains a match. Raises ValueError."""
    return next(find_matches(pattern, text), None) is not None


def find_all(pattern: str, text: str, max_count: int = -1) -> list[str]:
    """Return the first `max_count` matches; a negative `max_count` means all."""
    matched_texts = [match.group() for match in find_matches(pattern, text)]
    if max_count < 0:
        return matched_texts
    return matched_texts[:max_count]


def replace_all(pattern: str, text: str, template: str) -> str:
    """Replace each match by `template`. In the template, $1, ${1} and ${name} stand for the text of
    a group, or for "" if the group does not exist."""
    text_parts = []
    previous_end = 0
    for match in find_matches(pattern, text):
        text_parts.append(text[previous_end : match.start()])
        text_parts.append(
            VARIABLE.sub(
                lambda group_reference, match=match: _group_text(match, group_reference), template
            )
        )
        previous_end = match.end()
    return "".join(text_parts) + text[previous_end:]


def _group_text(match: Any, group_reference: re.Match[str]) -> str:
    """Return the text that replaces a reference such as $1; $$ stands for $."""
    if group_reference[1]:
        return "$"
    group_name = group_reference[2] or group_reference[3]
    if group_name.isdecimal():
        group_index = int(group_name)
    else:
        group_index = match.re.groupindex.get(group_name, match.re.groups + 1)
    if group_index <= match.re.groups:
        return match.group(group_index) or ""
    return ""


def split(pattern: str, text: str, max_count: int = -1) -> list[str]:
    """Split a text at the matches into at most `max_count` parts. A negative `max_count` means no
    limit."""
    if not text or not max_count:
        if max_count:
            return [text]
        return []

    text_parts = []
    start_index = 0
    end_index = 0

    for match in find_matches(pattern, text):
        if 0 < max_count <= len(text_parts) + 1:
            break

        end_index = match.start()
        if match.end():  # an empty match at the start does not split the text
            text_parts.append(text[start_index:end_index])

        start_index = match.end()

    if end_index != len(text):
        return [*text_parts, text[start_index:]]

    return text_parts
