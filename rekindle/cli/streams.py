"""stdin, stdout and stderr of a command: there even if the caller closed them, and writable as far as it matters.

prepare()       # first of all
steady()        # stdout is but a display: what runs goes on without it
"""

import errno
import io
import os
import sys
from typing import Any, TextIO

from rekindle.errors import RekindleError


class Unwritable(RekindleError):
    """Nobody gets what a command has to say."""


class Descriptor(io.FileIO):
    """A descriptor that fails once at most: what comes after that goes nowhere, also when the interpreter ends."""

    def __init__(self, number: int, steady: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self.steady = steady

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _open_nowhere(self.fileno())
            if self.steady:
                return memoryview(data).nbytes
            if error.errno == errno.EPIPE:  # a reader that has enough, such as `head`, is told nothing
                raise
            raise Unwritable(
                f"stdout cannot be written ({error.strerror}): send it to a file or terminal that can take it."
            ) from error


def prepare() -> None:
    """Opens what is closed, lest a file of ours becomes stdout, and lets no sign that it lacks stop a command."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _open_nowhere(number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _stream(1, sys.stdout, steady=False)
    sys.stderr = _stream(2, sys.stderr, steady=True)


def steady() -> None:
    """Lets stdout fail in silence from now on."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, Descriptor):
        raw.steady = True


def _stream(number: int, before: TextIO | None, steady: bool) -> TextIO:
    options: dict[str, Any] = {"line_buffering": number == 2}
    if isinstance(before, io.TextIOWrapper):
        options = {
            "encoding": before.encoding,
            "line_buffering": before.line_buffering,
            "write_through": before.write_through,
        }
    return io.TextIOWrapper(io.BufferedWriter(Descriptor(number, steady)), errors="backslashreplace", **options)


def _open_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
    os.set_inheritable(number, True)
