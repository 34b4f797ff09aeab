"""Make stdin, stdout and stderr usable even if the caller closed them, escape control characters,
and handle write errors.

    prepare()                   # call before any output
    ignore_stdout_errors()      # from now on, a failed write does not end the program
"""

import errno
import io
import os
import sys
from typing import Any, TextIO

from argolocal.common.wording import EscapedStream
from argolocal.errors import ArgolocalError


class UnwritableStdout(ArgolocalError):
    """A write to stdout has failed."""


class OutputDescriptor(io.FileIO):
    """A file descriptor for output. Only the first failed write to this descriptor raises an error.
    After a failed write, all output goes to /dev/null, also the output at exit."""

    def __init__(self, descriptor_number: int, ignore_errors: bool) -> None:
        super().__init__(descriptor_number, "wb", closefd=False)
        self.ignore_errors = ignore_errors

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _open_devnull(self.fileno())
            if self.ignore_errors:
                return memoryview(data).nbytes
            # A program that reads the pipe, such as `head`, may exit early. An early exit of the
            # program that reads the pipe is not an error of the command.
            if error.errno == errno.EPIPE:
                raise
            raise UnwritableStdout(
                f"stdout cannot be written ({error.strerror}): redirect it to a file or terminal"
                " that can be written."
            ) from error


def prepare() -> None:
    """Open /dev/null for each closed stream, because the next file that is opened would otherwise
    become this stream.

    After this call, stdout and stderr escape control characters, and characters that their encoding
    cannot represent.
    """
    for descriptor_number in range(3):
        try:
            os.fstat(descriptor_number)
        except OSError:
            _open_devnull(descriptor_number)

    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _open_stream(1, sys.stdout, ignore_errors=False)
    sys.stderr = _open_stream(2, sys.stderr, ignore_errors=True)


def ignore_stdout_errors() -> None:
    """Ignore all later errors of writes to stdout."""
    raw_stream = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw_stream, OutputDescriptor):
        raw_stream.ignore_errors = True


def _open_stream(descriptor_number: int, old_stream: TextIO | None, ignore_errors: bool) -> TextIO:
    stream_options: dict[str, Any] = {"line_buffering": descriptor_number == 2}
    if isinstance(old_stream, io.TextIOWrapper):
        stream_options = {
            attribute_name: getattr(old_stream, attribute_name)
            for attribute_name in ("encoding", "line_buffering", "write_through")
        }
    return EscapedStream(
        io.BufferedWriter(OutputDescriptor(descriptor_number, ignore_errors)),
        errors="backslashreplace",
        **stream_options,
    )


def _open_devnull(descriptor_number: int) -> None:
    devnull_descriptor = os.open(os.devnull, os.O_RDWR)
    if devnull_descriptor != descriptor_number:
        os.dup2(devnull_descriptor, descriptor_number)
        os.close(devnull_descriptor)
    os.set_inheritable(descriptor_number, True)
