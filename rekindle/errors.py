"""The errors a user can meet. A message says what is wrong (the value), the rule, and the way out.

`exit_code` is what the process ends with. Codes follow sysexits.h where
a retry cannot cure the cause (78 EX_CONFIG, 65 EX_DATAERR, 70 EX_SOFTWARE): a retry strategy tells them apart.
"""

import re
import sys
from contextlib import suppress
from dataclasses import dataclass

# the second form has a slash in its password, the third no scheme: not URLs, but still secrets
USER = re.compile(r"(?<=://)([^\s/?#]*@|[^\s/?#@:]+:(?!\d+([/?#\s]|$))\S*@)|^[^\s/:@]+:(?!//)\S*@")


class RekindleError(Exception):
    """An error that a user can act on; anything else is a bug and keeps its traceback."""

    exit_code = 1


class ConfigError(RekindleError):
    """A setting, a flag or a manifest is wrong: running again cannot help."""

    exit_code = 78


class DataError(RekindleError):
    """The input data breaks its contract: running again cannot help."""

    exit_code = 65


class CodeError(RekindleError):
    """A user's code raised an exception that it would raise again: FILE:LINE and the text (EX_SOFTWARE)."""

    exit_code = 70


class GivenUp(RekindleError):
    """The coordinator aborted the run with `exit_code`; the process that raises this is not the cause."""


class StorageError(RekindleError):
    """The object store is unavailable, refuses a request, or holds unexpected data."""


class TrackingError(RekindleError):
    """MLflow is unavailable or refuses a request."""


class Conflict(StorageError):
    """A conditional write failed: another process wrote first."""


@dataclass(frozen=True)
class Check:
    """One thing that a doctor examined, and the remedy if it is not ok; one that is not `required` only warns."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = True

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "FAIL" if self.required else "warn"
        return f"{mark} {self.name}: {self.found}" + ("" if self.ok else f"\n     {self.remedy}")


def say(text: str) -> None:
    """Write one line to stderr and flush it; a full disk loses the line, not the run."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def without_user(text: str) -> str:
    """The text without the user and password of its URLs, since messages end up in logs."""
    return USER.sub("", text)


def innermost(error: BaseException) -> BaseException:
    """What an error comes from, below all that were raised on the way."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return error


def rule(message: str) -> str:
    """A validator's message as the end of a sentence."""
    message = message.removeprefix("Value error, ")
    return message if message.endswith((".", "?")) else message + "."


def did_you_mean(word: str, known: list[str] | set[str]) -> str:
    """' Did you mean "x"?' for the nearest of `known`, else ''."""
    from difflib import get_close_matches  # `rekindle --help` does without

    near = get_close_matches(word, sorted(known), n=1, cutoff=0.5) if len(word) < 100 else []
    return f' Did you mean "{near[0]}"?' if near else ""
