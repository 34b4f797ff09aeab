"""Format text for a terminal: escape control characters in strings and streams, shorten messages,
and format durations."""

import io
import re
from typing import Any, TextIO

MAX_MESSAGE_LENGTH = 3000
COLOR_CODE = re.compile("\x1b\\[[0-9;]*m")
# Characters that control a terminal, end a line, hide text or change its direction, and characters
# without a glyph (Unicode's Default_Ignorable_Code_Point). Tab, newline, the joiners U+200C and
# U+200D and the selectors U+FE0E and U+FE0F are excluded, since words and emoji contain them.
CONTROL_CHARACTER = re.compile(
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
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def escape_control_chars(text: str) -> str:
    """Remove colours and escape control characters, so that a pod's output cannot control the
    terminal."""
    return CONTROL_CHARACTER.sub(_escape_character, COLOR_CODE.sub("", text))


def escape_to_one_line(text: str) -> str:
    """Return the text with escaped control characters, line breaks and tabs, so that a value in a
    message cannot look like another message."""
    return escape_control_chars(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape_character(character_match: re.Match[str]) -> str:
    code_point = ord(character_match[0])
    if code_point < 0x10000:
        return f"\\u{code_point:04x}"
    return f"\\U{code_point:08x}"


def shorten(text: str) -> str:
    """Return the text with escaped control characters, cut to MAX_MESSAGE_LENGTH characters, since
    a message may quote a value of any length."""
    excess_length = len(text) - MAX_MESSAGE_LENGTH
    if excess_length <= 0:
        return escape_control_chars(text)
    return (
        f"{escape_control_chars(text[:MAX_MESSAGE_LENGTH])}... ({excess_length:,} characters more)"
    )


def truncate(text: str, max_length: int = 60) -> str:
    """Return `text`, or its beginning and "..." if it has more than `max_length` characters."""
    if len(text) <= max_length:
        return text
    return f"{text[: max_length - 3]}..."


def join_first_names(names: list[str], max_names: int, separator: str = ", ") -> str:
    """Return the names as a text. Of more than `max_names` names, return the first names and the
    number of the others."""
    text = separator.join(names[:max_names])
    if len(names) <= max_names:
        return text
    return f"{text} and {len(names) - max_names} more"


class EscapedStream(io.TextIOWrapper):
    """A text stream that removes colours and escapes control characters. All commands print to such
    streams."""

    def write(self, text: str, /) -> int:
        super().write(escape_control_chars(text))
        return len(text)


class _RawStream:
    """Writes to an `EscapedStream` without escaping."""

    def __init__(self, stream: EscapedStream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_raw_stream(stream: TextIO) -> TextIO:
    """Return a stream that keeps colours and cursor moves. The caller must apply
    `escape_control_chars` to untrusted text."""
    return _RawStream(stream) if isinstance(stream, EscapedStream) else stream  # type: ignore[return-value]
