"""Text streams that escape control characters, so that untrusted text cannot control the
terminal."""

import io
from typing import Any, TextIO

from argolocal.common.wording import visible


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
    """Return a stream for our own colours and cursor moves. The caller applies `visible` to
    untrusted text."""
    return _RawStream(stream) if isinstance(stream, EscapedStream) else stream  # type: ignore[return-value]
