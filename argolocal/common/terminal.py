"""Text streams that show control characters, so that texts of others cannot control the
terminal."""

import io
from typing import Any, TextIO

from argolocal.common.wording import visible


class EscapedStream(io.TextIOWrapper):
    """A text stream that removes colours and escapes control characters: every command prints to
    such streams."""

    def write(self, text: str, /) -> int:
        super().write(visible(text))
        return len(text)


class _ControlStream:
    """An `EscapedStream` without the escapes."""

    def __init__(self, stream: EscapedStream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def with_controls(stream: Any) -> TextIO:
    """Return a stream for our own colours and cursor moves; the caller applies `visible` to texts
    of others."""
    return _ControlStream(stream) if isinstance(stream, EscapedStream) else stream  # type: ignore[return-value]
