"""Errors that users see. Each message of an error names the wrong value, the rule and the remedy.

The process exits with the error's `exit_code`. If a retry cannot help, the exit code is one of
`exit_codes.PERMANENT_ERRORS`.
"""

import os
import sys
from contextlib import suppress

from argolocal.common import exit_codes
from argolocal.common.wording import escape_to_one_line


class ArgolocalError(Exception):
    """An error that a user can act on; any other exception is a bug, and its traceback is
    printed.

    The arguments of the exception are the lines of its message: one line, or one line per mistake.
    A line break inside an argument of the exception belongs to a value that the message quotes, so
    the line break is escaped.
    """

    exit_code = 1

    @property
    def lines(self) -> list[str]:
        return [escape_to_one_line(str(line)) for line in self.args]

    def __str__(self) -> str:
        return "\n".join(self.lines)


class ConfigError(ArgolocalError):
    """A setting, a flag or a manifest is wrong: a retry cannot help."""

    exit_code = exit_codes.INVALID_CONFIG


class NodeError(Exception):
    """An error that fails one node of a workflow, not the run. The text of a NodeError equals
    Argo's message."""


class StorageError(ArgolocalError):
    """The object store is unavailable, refuses a request, or contains unexpected data."""


class InvalidDocument(StorageError):
    """A document on disk or in the object store is malformed: a retry cannot help."""

    exit_code = exit_codes.INVALID_DATA


class NotFound(StorageError):
    """The object is not in the object store."""


class Conflict(StorageError):
    """A conditional write failed: another process has changed the object."""


# exceptions that data with an unexpected form cause where their form is not checked
FORM_ERRORS = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
# exceptions of files that another program has changed
DAMAGE_ERRORS = (ArgolocalError, OSError, *FORM_ERRORS)


def describe(error: BaseException) -> str:
    """Return a message for an exception of any class. If the exception is a bug of this program,
    the description ends with the file and line that raised it."""
    if isinstance(error, ArgolocalError | NodeError) or (type(error) is ValueError and str(error)):
        return str(error)

    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return f"{error.strerror}: {error.filename}"
        return error.strerror

    traceback_entry = error.__traceback__
    location = ""
    while traceback_entry:
        location = (
            f" ({os.path.basename(traceback_entry.tb_frame.f_code.co_filename)}, line"
            f" {traceback_entry.tb_lineno})"
        )
        traceback_entry = traceback_entry.tb_next

    return f"{type(error).__name__}: {error}{location}"


def write_stderr(*lines: str) -> None:
    """Write lines to stderr, with control characters escaped.

    Write errors are ignored, because a full disk must not end the run.
    """
    with suppress(OSError, ValueError):
        sys.stderr.writelines(f"{escape_to_one_line(line)}\n" for line in lines)
        sys.stderr.flush()


def suggest_similar(word: str, choices: list[str] | set[str]) -> str:
    """Return ' Did you mean "x"?' for the most similar of `choices`; '' if none is similar."""
    # imported here to keep `--help` fast
    from difflib import get_close_matches

    if len(word) < 100:
        similar_words = get_close_matches(word, sorted(choices), n=1, cutoff=0.5)
    else:
        similar_words = []
    if similar_words:
        return f' Did you mean "{similar_words[0]}"?'
    return ""
