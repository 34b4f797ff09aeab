"""Errors that users see. A message names the wrong value, the rule, and the way out.

`exit_code` is the exit code of the process: a code of sysexits.h if a retry cannot help.
"""

import sys
from contextlib import suppress


class ArgolocalError(Exception):
    """An error that a user can act on; anything else is a bug and keeps its traceback."""

    exit_code = 1


class ConfigError(ArgolocalError):
    """A setting, a flag or a manifest is wrong: a retry cannot help (EX_CONFIG)."""

    exit_code = 78


class NodeError(Exception):
    """Fails a node of a workflow, not the run. The message is Argo's."""


class StorageError(ArgolocalError):
    """The object store is unavailable, refuses a request, or holds unexpected data."""


class NotFound(StorageError):
    """The object does not exist."""


class Conflict(StorageError):
    """A conditional write failed: another process wrote first."""


def say(text: str) -> None:
    """Write a line to stderr. Errors are ignored: a full disk must not end the run."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def did_you_mean(word: str, choices: list[str] | set[str]) -> str:
    """Return ' Did you mean "x"?' for the closest of `choices`, or ''."""
    from difflib import get_close_matches  # imported here to keep `--help` fast

    matches = get_close_matches(word, sorted(choices), n=1, cutoff=0.5) if len(word) < 100 else []
    return f' Did you mean "{matches[0]}"?' if matches else ""
