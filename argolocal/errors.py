"""The errors a user can meet. A message says what is wrong (the value), the rule, and the way out.

`exit_code` is what the process ends with. Codes follow sysexits.h where a retry cannot cure the cause.
"""

import sys
from contextlib import suppress


class ArgolocalError(Exception):
    """An error that a user can act on; anything else is a bug and keeps its traceback."""

    exit_code = 1


class ConfigError(ArgolocalError):
    """A setting, a flag or a manifest is wrong: running again cannot help (EX_CONFIG)."""

    exit_code = 78


class NodeError(Exception):
    """A node of a workflow fails by this, not the run; the message is Argo's."""


class StorageError(ArgolocalError):
    """The object store is unavailable, refuses a request, or holds unexpected data."""


class NotFound(StorageError):
    """There is no such object."""


class Conflict(StorageError):
    """A conditional write failed: another process wrote first."""


def say(text: str) -> None:
    """Write one line to stderr and flush it; a full disk loses the line, not the run."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def did_you_mean(word: str, known: list[str] | set[str]) -> str:
    """' Did you mean "x"?' for the nearest of `known`, else ''."""
    from difflib import get_close_matches  # `rekindle --help` does without

    near = get_close_matches(word, sorted(known), n=1, cutoff=0.5) if len(word) < 100 else []
    return f' Did you mean "{near[0]}"?' if near else ""
