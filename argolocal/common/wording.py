"""Format texts for a terminal: escape control characters, also in streams, shorten messages, and
write durations in words."""

import io
import re
from typing import Any, TextIO

MAX_MESSAGE_LENGTH = 3000
COLOR = re.compile("\x1b\\[[0-9;]*m")
# Characters that control a terminal, end a line, hide text or change its direction, and characters
# without a glyph (Unicode's Default_Ignorable_Code_Point). Tab, newline, the joiners U+200C and
# U+200D and the selectors U+FE0E and U+FE0F are excluded, since words and emoji contain them.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def format_duration(seconds: float | None) -> str:
    """Format a duration as `0.06 s`, `41 s`, `2 min 05 s` or `3 h 20 min`; "" for None."""
    if seconds is None:
        return ""
    if seconds < 59.5:
        if seconds < 10:
            return f"{seconds:.2g} s"
        return f"{seconds:.0f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def visible(text: str) -> str:
    """Remove colours and escape control characters, so that a pod's output cannot control the
    terminal."""
    return CONTROL.sub(_escape, COLOR.sub("", text))


def one_line(text: str) -> str:
    """Return `visible(text)` with escaped line breaks and tabs, so that a value in a message cannot
    look like another message."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(character: re.Match[str]) -> str:
    number = ord(character[0])
    if number < 0x10000:
        return f"\\u{number:04x}"
    return f"\\U{number:08x}"


def shorten(text: str) -> str:
    """Return `visible(text)` cut to MAX_MESSAGE_LENGTH characters, since a message may quote a
    value of any length."""
    excess = len(text) - MAX_MESSAGE_LENGTH
    if excess <= 0:
        return visible(text)
    return f"{visible(text[:MAX_MESSAGE_LENGTH])}... ({excess:,} characters more)"


def cut(text: str, length: int = 60) -> str:
    """Return `text`; if it has more than `length` characters, its beginning and "..."."""
    if len(text) <= length:
        return text
    return f"{text[: length - 3]}..."


def first_names(names: list[str], limit: int, separator: str = ", ") -> str:
    """Return the names as a text. Of more than `limit` names, return the first names and the number
    of the others."""
    text = separator.join(names[:limit])
    if len(names) <= limit:
        return text
    return f"{text} and {len(names) - limit} more"


class EscapedStream(io.TextIOWrapper):
    """A text stream that removes colours and escapes control characters. All commands print to such
    streams."""

    def write(self, text: str, /) -> int:
        super().write(visible(text))
        return len(text)


class _RawStream:
    """Writes to an `EscapedStream` without escaping."""

    def __init__(self, stream: EscapedStream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def without_escapes(stream: TextIO) -> TextIO:
    """Return a stream that keeps colours and cursor moves. The caller must apply `visible` to
    untrusted text."""
    return _RawStream(stream) if isinstance(stream, EscapedStream) else stream  # type: ignore[return-value]
