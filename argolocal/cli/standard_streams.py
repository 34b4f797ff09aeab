"""Make stdin, stdout and stderr usable even if the caller closed them, escape control characters,
and handle write errors.

    prepare()                   # before any output
    ignore_stdout_errors()      # a run continues if its output cannot be written
"""

import errno
import io
import os
import sys
from typing import Any, TextIO

from argolocal.common.wording import EscapedStream
from argolocal.errors import ArgolocalError


class Unwritable(ArgolocalError):
    """stdout cannot be written."""


class Descriptor(io.FileIO):
    """A file descriptor that raises an error only for the first failed write. After that, all
    output goes to /dev/null, even at exit."""

    def __init__(self, number: int, ignore_errors: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self.ignore_errors = ignore_errors

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _open_devnull(self.fileno())
            if self.ignore_errors:
                return memoryview(data).nbytes
            # the reader of the pipe, such as `head`, may exit early; this is not an error
            if error.errno == errno.EPIPE:
                raise
            raise Unwritable(
                f"stdout cannot be written ({error.strerror}): redirect it to a file or terminal"
                " that can be written."
            ) from error


def prepare() -> None:
    """Open /dev/null for closed streams, so that no other file becomes stdout.

    From then on, stdout and stderr escape control characters and characters that their encoding
    lacks.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _open_devnull(number)

    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _open_stream(1, sys.stdout, ignore_errors=False)
    sys.stderr = _open_stream(2, sys.stderr, ignore_errors=True)


def ignore_stdout_errors() -> None:
    """Ignore all later errors of writes to stdout."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, Descriptor):
        raw.ignore_errors = True


def _open_stream(number: int, old_stream: TextIO | None, ignore_errors: bool) -> TextIO:
    options: dict[str, Any] = {"line_buffering": number == 2}
    if isinstance(old_stream, io.TextIOWrapper):
        options = {
            key: getattr(old_stream, key) for key in ("encoding", "line_buffering", "write_through")
        }
    return EscapedStream(
        io.BufferedWriter(Descriptor(number, ignore_errors)), errors="backslashreplace", **options
    )


def _open_devnull(number: int) -> None:
    devnull = os.open(os.devnull, os.O_RDWR)
    if devnull != number:
        os.dup2(devnull, number)
        os.close(devnull)
    os.set_inheritable(number, True)
